"""Tests of the zarr trees of big_vision and levanter, which are written and restored with the calls of these trainers.

Both call `jax.experimental.array_serialization`: big_vision's `tssave` and `tsload`, levanter's
`tree_serialize_leaves_tensorstore` and `tree_deserialize_leaves_tensorstore` (before and with its database).
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental.array_serialization import serialization
from trainer_trees import save_big_vision, save_easydel, save_levanter, state

from pma_jax.config.errors import DamageError, UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.from_storage import plan_merge
from pma_jax.merging.gather import open_checkpoints
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.open import open_source, read_leaf


def restore(path, names, shapes=None):
    """Restore arrays with the calls of big_vision and of levanter before its database."""
    manager = serialization.GlobalAsyncCheckpointManager()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return manager.deserialize_with_paths([sharding] * len(names), [str(path / name) for name in names])


SAVE = {
    "easydel": save_easydel,
    "big_vision": save_big_vision,
    "levanter": lambda folder, seed: save_levanter(folder, seed, False),
    "levanter's database": lambda folder, seed: save_levanter(folder, seed, True),
}


@pytest.fixture(params=SAVE)
def trainer(request):
    return request.param


def parameters_of(trainer):
    return "params" if trainer == "big_vision" else "model"


def as_stored(trainer, name):
    return name.replace("/", "~") if trainer == "big_vision" else name


def test_parameters_and_step_are_read_and_the_optimizer_is_left_out(tmp_path, trainer):
    path = SAVE[trainer](tmp_path, 3)
    source = open_source(path)
    assert source.format == trainer.split("'")[0] and source.step == 300
    expected = {name: x for name, x in state(3, parameters_of(trainer)).items() if name.startswith(("params", "model"))}
    assert sorted(source.leaves) == sorted(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(read_leaf(source, name), x)
    assert any(f"subtree {parameters_of(trainer)!r} (of " in note for note in source.notes)
    # The database's zarr 3 leaves out chunks of zeros.
    assert any("bias are not stored" in note for note in source.notes) == ("database" in trainer)


def test_merge_is_that_of_numpy_and_the_trainer_restores_it(tmp_path, trainer):
    for seed in (1, 2, 3):
        SAVE[trainer](tmp_path / "run", seed)
    series = open_checkpoints([tmp_path / "run"])
    assert [source.step for source in series.sources] == [100, 200, 300]
    made, _ = plan_merge(series, ["weights:0.5,0.3,0.2"])
    merge(made, [tmp_path / "merged"])
    states = [state(seed, parameters_of(trainer)) for seed in (1, 2, 3)]
    names = [name for name in states[0] if name.startswith(("params", "model"))]
    restored = restore(tmp_path / "merged", [as_stored(trainer, name) for name in names])
    for name, x in zip(names, restored, strict=True):
        exact = sum(w * np.float64(s[name]) for w, s in zip((0.5, 0.3, 0.2), states, strict=True))
        assert x.dtype == states[0][name].dtype and x.shape == states[0][name].shape
        tolerance = 2**-8 if x.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.float64(x), exact, rtol=tolerance, atol=tolerance)
    if trainer != "big_vision":
        metadata = json.loads((tmp_path / "merged" / "metadata.json").read_text())
        assert metadata["step"] == 300 and metadata["is_temporary"] is False
    again = open_source(tmp_path / "merged")
    assert again.leaves.keys() == made.leaves.keys()
    np.testing.assert_array_equal(read_leaf(again, names[0]), restored[0])


def test_several_subtrees_are_written_where_they_were(tmp_path, trainer):
    path = SAVE[trainer](tmp_path, 1)
    optimizer = "tx" if trainer == "easydel" else "opt_state"
    series = open_checkpoints([path], subtrees=[f"{parameters_of(trainer)}/Dense_0", optimizer])
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged"])
    names = [f"{parameters_of(trainer)}/Dense_0/kernel", f"{optimizer}/0/mu"]
    restored = restore(tmp_path / "merged", [as_stored(trainer, name) for name in names])
    assert verify(tmp_path / "merged", with_sources=True) == []
    for name, x in zip(names, restored, strict=True):
        np.testing.assert_array_equal(x, state(1, parameters_of(trainer))[name.replace("tx", "opt_state")])


def test_temporary_directory_of_big_vision_is_left_out(tmp_path):
    save_big_vision(tmp_path, 1)
    save_big_vision(tmp_path, 2).rename(tmp_path / "checkpoint.bv-000000200-tmp")
    (tmp_path / "checkpoint.bv-LAST").write_text("000000100")
    series = open_checkpoints([tmp_path])
    assert [source.step for source in series.sources] == [100]
    assert any("checkpoint.bv-000000200-tmp (temporary" in note for note in series.notes)


def test_damage_is_refused_in_one_line(tmp_path, trainer):
    path = SAVE[trainer](tmp_path, 1)
    kernel = path / as_stored(trainer, f"{parameters_of(trainer)}/Dense_0/kernel")
    if "database" in trainer:
        for file in path.glob("**/d/*"):
            file.write_bytes(file.read_bytes()[:10])
    else:
        (kernel / ".zarray").write_text("{")
    with pytest.raises(UserError) as refusal:
        open_source(path)
    assert "\n" not in str(refusal.value)
    if "database" not in trainer:
        shutil.rmtree(path)
        SAVE[trainer](tmp_path, 1)
        next(file for file in kernel.iterdir() if file.name[0] == "0").unlink()
        with pytest.raises(DamageError, match="1 of its 1 chunks are missing"):
            open_source(path)


@pytest.mark.parametrize("trainer", ["big_vision", "levanter"], indirect=True)
@pytest.mark.parametrize("name", ["embedding", "temperature", "Dense_0/kernel"])
def test_array_that_lost_its_metadata_is_not_left_out(tmp_path, trainer, name):
    path = SAVE[trainer](tmp_path, 1)
    array = path / as_stored(trainer, f"{parameters_of(trainer)}/{name}")
    (path / as_stored(trainer, "opt/0/count") / ".zarray").unlink()
    assert f"{parameters_of(trainer)}/{name}" in open_source(path).leaves
    (array / ".zarray").unlink()
    with pytest.raises(DamageError, match=f"1 arrays have no metadata, such as '{array.relative_to(path)}'"):
        open_source(path)


def test_array_of_a_database_that_lost_its_metadata_is_not_left_out(tmp_path):
    for listed in (True, False):
        path = save_levanter(tmp_path / str(listed), 1, True, has_index=listed)
        database = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}).result()
        database.write("opt/0/count/zarr.json", None).result()
        assert "model/embedding" in open_source(path).leaves
        database.write("model/embedding/zarr.json", None).result()
        with pytest.raises(DamageError, match="1 arrays have no metadata, such as 'model/embedding'"):
            open_source(path)


def test_interrupted_checkpoint_of_levanter_is_left_out_of_its_series(tmp_path):
    for seed in (1, 2, 3):
        save_levanter(tmp_path, seed, True)
    (tmp_path / "step-300" / "metadata.json").unlink()
    series = open_checkpoints([tmp_path])
    assert [source.step for source in series.sources] == [100, 200]
    assert any("step-300 (incomplete: it has no metadata.json)" in note for note in series.notes)


def test_levanter_without_its_metadata_is_not_complete(tmp_path):
    for database in (False, True):
        path = save_levanter(tmp_path, 1, database)
        (path / "metadata.json").unlink()
        with pytest.raises(UserError, match=r"metadata\.json"):
            open_source(path)
        shutil.rmtree(path)
    path = save_levanter(tmp_path, 1, False)
    (path / "metadata.json").write_text('{"timestamp": "now"}')
    with pytest.raises(DamageError, match="has no step"):
        open_source(path)


def test_database_of_levanter_is_compared_with_its_list(tmp_path):
    file = save_levanter(tmp_path, 1, True) / "manifest.json"
    intact = file.read_text()
    assert json.loads(intact)["arrays"][0]["path"] == "model/Dense_0/kernel"
    for old, new, message in (
        ("[6, 4]", "[4, 6]", "is float32 of shape \\[6, 4\\], and manifest.json says float32 of shape \\[4, 6\\]"),
        ('"bfloat16"', '"float32"', "'model/embedding' is bfloat16 of shape"),
        ("model/embedding", "model/other", "'model/other': its array is missing"),
        ('"format_version": 1', '"format_version": 2', "has the format version 2; up to 1 is read, update pma_jax"),
        ('"format_version": 1', '"format_version": "1"', "it has no format_version or no list"),
        ('"arrays": [', '"arrays": 3, "others": [', "it has no format_version or no list"),
        ('"path": "model/embedding"', '"path": 3', "manifest.json: is corrupt"),
        ("model/embedding", "model/Dense_0/kernel", "lists 'model/Dense_0/kernel'"),
    ):
        assert old in intact
        file.write_text(intact.replace(old, new))
        with pytest.raises(UserError, match=message) as refusal:
            open_source(tmp_path / "step-100")
        assert "\n" not in str(refusal.value)
    # An array that the list has not is one of an earlier save into the same database, which levanter does not load.
    index = json.loads(intact)
    left_out = index["arrays"].pop(0)["path"]
    file.write_text(json.dumps(index))
    assert left_out not in open_source(tmp_path / "step-100").leaves


def test_levanters_database_without_a_list_is_that_with_it(tmp_path):
    opened = [open_source(save_levanter(tmp_path / str(listed), 1, True, has_index=listed)) for listed in (True, False)]
    assert opened[0].leaves == opened[1].leaves
    merge(plan_merge(open_checkpoints([tmp_path / "True"]), ["sma"])[0], [tmp_path / "merged"])
    # With a list, levanter would look for a database.
    assert not (tmp_path / "merged" / "manifest.json").exists()


def test_files_of_easydel_are_those_of_what_is_merged(tmp_path):
    for seed in (1, 2):
        save_easydel(tmp_path / "run", seed)
    series = open_checkpoints([tmp_path / "run"])
    assert set(series.stages) == {str(tmp_path / "run")}
    merge(plan_merge(series, ["sma"], dtype="bfloat16")[0], [tmp_path / "merged"])
    index = json.loads((tmp_path / "merged" / "tensorstore_index.json").read_text())
    assert index["format"] == "tensorstore" and list(index["prefixes"]) == ["model"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    paths = [str(tmp_path / "merged" / entry["path"]) for entry in index["prefixes"]["model"]]
    arrays = serialization.GlobalAsyncCheckpointManager().deserialize_with_paths([sharding] * len(paths), paths)
    for entry, x in zip(index["prefixes"]["model"], arrays, strict=True):
        assert (entry["shape"], entry["dtype"]) == (list(x.shape), str(x.dtype)) and x.dtype == jnp.bfloat16
    metadata = json.loads((tmp_path / "merged" / "metadata.json").read_text())
    assert metadata["step"] == 200 and not metadata["has_optimizer_state"]
    names = {path.name for path in (tmp_path / "merged").iterdir() if path.is_file()}
    own = {"tensorstore_index.json", "metadata.json", "model_structure.json", "checkpoint_metadata.json", "config.json"}
    assert names == own | {"provenance.json"}


def test_checksums_of_an_input_of_easydel_are_not_those_of_the_merge(tmp_path):
    for seed in (1, 2):
        save_easydel(tmp_path / "run", seed)
    made, _ = plan_merge(open_checkpoints([tmp_path / "run"]), ["sma"])
    merge(made, [tmp_path / "merged"])
    # eformer 0.0.99 compares them for some layouts.
    metadata = json.loads((tmp_path / "merged" / "checkpoint_metadata.json").read_text())
    assert metadata == {"version": "0.0.99.12", "checksum": {}, "array_metadata": {}, "custom_metadata": {}}
    assert verify(tmp_path / "merged", with_sources=True) == []


def test_step_of_easydel_without_metadata_is_in_the_name(tmp_path):
    for seed in (1, 2):
        (save_easydel(tmp_path, seed) / "metadata.json").unlink()
    series = open_checkpoints([tmp_path])
    assert [source.step for source in series.sources] == [100, 200]
    merge(plan_merge(series, ["sma"])[0], [tmp_path / "merged"])
    assert json.loads((tmp_path / "merged" / "metadata.json").read_text())["step"] == 200


def test_structure_of_easydel_is_left_out_where_a_part_is_written(tmp_path):
    path = save_easydel(tmp_path, 1)
    made, _ = plan_merge(open_checkpoints([path], subtrees=["model/Dense_0", "tx"]), ["sma"])
    merge(made, [tmp_path / "merged"])
    assert sorted(file.name for file in (tmp_path / "merged").glob("*_structure.json")) == ["tx_structure.json"]
    assert any("2 of the 4 arrays of model are written, without model_structure.json" in note for note in made.notes)
    assert not any("arrays of tx" in note for note in made.notes)


def test_index_of_easydel_that_does_not_fit_is_refused(tmp_path):
    path = save_easydel(tmp_path, 1)
    file = path / "tensorstore_index.json"
    intact = file.read_text()
    for old, new in (
        ("[6, 4]", "[4, 6]"),
        ('"float32"', '"float16"'),
        ("model/embedding", "../model/embedding"),
        ('"format": "tensorstore"', '"format": "other"'),
        ('"prefixes": {', '"prefixes": 3, "else": {'),
    ):
        assert old in intact
        file.write_text(intact.replace(old, new))
        with pytest.raises(UserError, match=r"tensorstore_index\.json") as refusal:
            open_source(path)
        assert "\n" not in str(refusal.value)


def test_index_of_easydel_without_prefixes(tmp_path):
    path = save_easydel(tmp_path, 1)
    index = json.loads((path / "tensorstore_index.json").read_text())
    index = {"format": "tensorstore", "version": "1.0.0", "arrays": index["prefixes"]["model"]}
    (path / "tensorstore_index.json").write_text(json.dumps(index))
    merge(plan_merge(open_checkpoints([path]), ["sma"])[0], [tmp_path / "merged"])
    assert json.loads((tmp_path / "merged" / "tensorstore_index.json").read_text()) == index
