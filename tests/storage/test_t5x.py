"""Tests of T5X's checkpoints, written and restored with the calls of `t5x.checkpoints`: Flax's msgpack, tensorstore."""

import numpy as np
import pytest
import tensorstore as ts
from flax import serialization, traverse_util
from ml_dtypes import bfloat16
from trainer_trees import save_t5x as save
from trainer_trees import t5x_state as state

from pma_jax.config.errors import DamageError, UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.from_storage import plan_merge
from pma_jax.merging.gather import open_checkpoints
from pma_jax.storage.formats.open import open_source, read_leaf


def load(path):
    """Restore as `load_t5x_checkpoint` and `_read_ts` do."""
    contents = serialization.msgpack_restore((path / "checkpoint").read_bytes())
    assert contents["version"] == 3
    flat = traverse_util.flatten_dict(
        contents["optimizer"], sep="/", is_leaf=lambda _, value: isinstance(value, dict) and "driver" in value
    )
    loaded = {}
    for name, value in flat.items():
        if not isinstance(value, dict):
            loaded[name] = value
            continue
        spec = ts.Spec(value).to_json()
        del spec["metadata"]["chunks"], spec["metadata"]["compressor"]
        spec["kvstore"]["path"] = str(path / spec["kvstore"]["path"])
        loaded[name] = ts.open(spec, open=True).result().read().result()
    return loaded


def test_what_the_calls_of_t5x_save_they_load(tmp_path):
    for name, x in load(save(tmp_path, 1)).items():
        np.testing.assert_array_equal(x, state(1)[name])


def test_parameters_are_read_from_arrays_and_from_the_file(tmp_path):
    source = open_source(save(tmp_path, 2))
    assert source.format == "t5x" and source.step == 2000
    assert "subtree 'target' (of target, state)" in source.notes[0] or "(of state, target)" in source.notes[0]
    assert sorted(source.leaves) == sorted(name for name in state(2) if name.startswith("target"))
    for name in source.leaves:
        np.testing.assert_array_equal(read_leaf(source, name), state(2)[name])


@pytest.mark.parametrize("subtrees", [(), ("target/decoder", "state/param_states")], ids=str)
def test_merge_is_that_of_numpy_and_t5x_loads_it(tmp_path, subtrees):
    for seed in (1, 2, 3):
        save(tmp_path / "run", seed)
    series = open_checkpoints([tmp_path / "run"], subtrees=subtrees)
    assert [source.step for source in series.sources] == [1000, 2000, 3000]
    made, _ = plan_merge(series, ["weights:0.5,0.3,0.2"])
    merge(made, [tmp_path / "merged"])
    loaded = load(tmp_path / "merged")
    assert loaded.pop("state/step") == 3000
    wanted = [name for name in state(1) if name.startswith(subtrees or ("target",))]
    assert sorted(loaded) == sorted(wanted)
    for name, x in loaded.items():
        inputs = [state(seed)[name] for seed in (1, 2, 3)]
        exact = sum(w * np.float64(v) for w, v in zip((0.5, 0.3, 0.2), inputs, strict=True))
        assert x.dtype == inputs[0].dtype and x.shape == inputs[0].shape
        tolerance = 2**-8 if x.dtype == bfloat16 else 1e-6
        np.testing.assert_allclose(np.float64(x), exact, rtol=tolerance, atol=tolerance)
    again = open_source(tmp_path / "merged", subtrees)
    assert again.step == 3000
    for name in again.leaves:
        np.testing.assert_array_equal(read_leaf(again, name), loaded[name])


def test_values_that_are_no_arrays_are_refused_in_what_is_merged_only(tmp_path):
    leaves = state(1) | {"state/name": "adafactor", "state/nothing": None}
    assert len(open_source(save(tmp_path / "a", 1, leaves)).leaves) == 5
    path = save(tmp_path / "b", 1, state(1) | {"target/name": "encoder"})
    with pytest.raises(UserError, match="'target/name' is no array"):
        open_source(path)


def test_leaves_without_a_value_are_where_restore_expects_them(tmp_path):
    empty = {"state/param_states/embedding": None, "state/param_states/extra": {}, "flax_mutables": {}}
    for seed in (1, 2):
        save(tmp_path / "run", seed, state(seed) | empty)
    series = open_checkpoints([tmp_path / "run"], subtrees=["target", "state", "flax_mutables"])
    merge(plan_merge(series, ["sma"], integers="newest")[0], [tmp_path / "merged"])
    contents = [
        serialization.msgpack_restore((path / "checkpoint").read_bytes())["optimizer"]
        for path in (tmp_path / "merged", tmp_path / "run" / "checkpoint_2000")
    ]
    merged, newest = (traverse_util.flatten_dict(tree, sep="/", keep_empty_nodes=True) for tree in contents)
    assert {name: merged[name] for name in empty} == {name: newest[name] for name in empty}
    with pytest.raises(UserError, match="the subtree 'flax_mutables' holds no arrays; it has "):
        open_source(tmp_path / "run" / "checkpoint_1000", ["flax_mutables"])


def test_damage_is_refused_or_harmless(tmp_path):
    path = save(tmp_path, 1)
    file = path / "checkpoint"
    intact = file.read_bytes()
    offset = intact.index(state(1)["target/decoder/scale"].tobytes())
    for at in range(0, len(intact), 7):
        if not offset <= at < offset + 12:
            file.write_bytes(intact[:at] + bytes([intact[at] ^ 0x41]) + intact[at + 1 :])
            try:
                leaves = open_source(path).leaves
            except (UserError, OSError) as error:
                assert "\n" not in str(error)
            else:
                assert leaves
    for length in range(1, len(intact), 97):
        file.write_bytes(intact[:length])
        with pytest.raises(UserError):
            open_source(path)
    file.write_bytes(intact)
    (path / "target.decoder.kernel" / "1.0").unlink()
    with pytest.raises(DamageError, match="1 of its 2 chunks are missing"):
        open_source(path)
