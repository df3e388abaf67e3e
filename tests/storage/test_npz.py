"""Tests of .npz files: NumPy writes the inputs and reads the outputs."""

import zipfile

import numpy as np
import pytest
from orbax.checkpoint import v1

from pma_jax.config.errors import DamageError, UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.from_storage import plan_merge
from pma_jax.merging.gather import open_checkpoints
from pma_jax.storage.formats.open import open_source, read_leaf

DTYPES = (np.float32, np.float64, np.float16, np.int32, np.bool_, np.complex64)


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {
        "params/Dense_0/kernel": rng.normal(size=(5, 7)).astype(np.float32),
        "params/Dense_0/bias": rng.normal(size=7),
        "params/scale": np.float32(rng.normal()),
        "params/none": np.zeros((0, 3), np.float32),
        "params/index": np.arange(3),
        "opt/mu": rng.normal(size=7),
        "step": np.int64(100 * seed),
    }


def test_leaves_and_step_are_numpys_and_the_training_state_is_left_out(tmp_path):
    np.savez(tmp_path / "model.npz", **arrays(2))
    source = open_source(tmp_path / "model.npz")
    assert source.step == 200 and "subtree 'params' (of params, opt, step)" in source.notes[0]
    expected = {name: x for name, x in arrays(2).items() if name.startswith("params/")}
    assert list(source.leaves) == list(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(read_leaf(source, name), x)
    both = open_source(tmp_path / "model.npz", ["params/Dense_0", "opt"])
    assert list(both.leaves) == ["params/Dense_0/kernel", "params/Dense_0/bias", "opt/mu"]


@pytest.mark.parametrize("is_directory", [False, True])
def test_merge_is_that_of_numpy_and_opens_in_numpy(tmp_path, is_directory):
    paths = [
        tmp_path / f"step_{seed}" / "weights.npz" if is_directory else tmp_path / f"{seed}.npz" for seed in (1, 2, 3)
    ]
    for seed, path in enumerate(paths, start=1):
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **arrays(seed))
    series = open_checkpoints([path.parent for path in paths] if is_directory else paths)
    made, _ = plan_merge(series, ["weights:0.5,0.3,0.2"])
    merge(made, [tmp_path / "out"])
    name = "weights.npz" if is_directory else "model.npz"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([name, "provenance.json"])
    with np.load(tmp_path / "out" / name) as merged:
        assert list(merged) == [name for name in arrays(1) if name.startswith("params/")]
        for leaf, x in merged.items():
            inputs = [arrays(seed)[leaf] for seed in (1, 2, 3)]
            assert x.dtype == inputs[0].dtype and x.shape == inputs[0].shape
            if x.dtype.kind == "f":
                exact = sum(w * np.float64(v) for w, v in zip((0.5, 0.3, 0.2), inputs, strict=True))
                np.testing.assert_allclose(x, exact, rtol=1e-6 if x.dtype == np.float32 else 1e-14, atol=1e-7)
            else:
                np.testing.assert_array_equal(x, inputs[0])
    source = open_source(tmp_path / "out")
    assert source.format == "npz" and source.leaves.keys() == made.leaves.keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 1, 5)], ids=str)
def test_any_array_of_numpys_goes_in_and_out(tmp_path, dtype, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    np.savez(tmp_path / "0.npz", w=x)
    merge(plan([open_source(tmp_path / "0.npz")], [1.0]), [tmp_path / "out"])
    with np.load(tmp_path / "out" / "0.npz") as merged:
        assert merged["w"].dtype == dtype
        np.testing.assert_array_equal(merged["w"], x)


def test_other_formats_can_be_written_from_it(tmp_path):
    np.savez(tmp_path / "0.npz", **{"a.b": np.float32([1, 2]), "a.c": np.float32([[3]])})
    for format in ("safetensors", "orbax"):
        merge(plan([open_source(tmp_path / "0.npz")], [1.0], format=format), [tmp_path / format])
        np.testing.assert_array_equal(read_leaf(open_source(tmp_path / format), "a.b"), [1, 2])


def save_compressed(path):
    np.savez_compressed(path, w=np.ones(3))


def save_objects(path):
    np.savez(path, w=np.array([{}], dtype=object))


def save_big_endian(path):
    np.savez(path, w=np.ones(3, ">f4"))


def save_transposed(path):
    np.savez(path, w=np.ones((3, 2)).T)


def save_text(path):
    np.savez(path, w=np.ones(3))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")


def save_state(path):
    np.savez(path, w=np.ones(3), step=np.int64(3))


REFUSED = {
    save_compressed: "is compressed or encrypted",
    save_objects: r"has the dtype '\|O'",
    save_big_endian: "has the dtype '>f4'",
    save_transposed: "is in Fortran order",
    save_text: "'notes.txt' is not an array that numpy.savez wrote",
    save_state: "name the subtree, one of w, step",
}


@pytest.mark.parametrize("save", REFUSED, ids=lambda save: save.__name__)
def test_what_cannot_be_read_in_place_is_refused_in_one_line(tmp_path, save):
    save(tmp_path / "0.npz")
    with pytest.raises(UserError, match=REFUSED[save]) as refusal:
        open_source(tmp_path / "0.npz")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("save", [save_compressed, save_objects, save_big_endian, save_transposed])
def test_what_is_not_merged_need_not_be_readable(tmp_path, save):
    save(tmp_path / "part.npz")
    with zipfile.ZipFile(tmp_path / "part.npz") as part, zipfile.ZipFile(tmp_path / "0.npz", "w") as archive:
        member = part.infolist()[0]
        archive.writestr("opt/0.npy", part.read(member), compress_type=member.compress_type)
        with archive.open("params/w.npy", "w") as file:
            np.save(file, np.ones(3))
    assert list(open_source(tmp_path / "0.npz").leaves) == ["params/w"]
    with pytest.raises(UserError, match=REFUSED[save]):
        open_source(tmp_path / "0.npz", ["params", "opt"])


def test_every_damaged_byte_is_refused_or_harmless(tmp_path):
    path = tmp_path / "0.npz"
    np.savez(path, w=np.arange(4, dtype=np.float32), b=np.ones(2))
    intact = path.read_bytes()
    refused = 0
    for at in range(0, len(intact), 3):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 0x55]) + intact[at + 1 :])
        try:
            source = open_source(path)
        except UserError:
            refused += 1
        else:  # a field that no reader uses, such as a date or a name
            values = [read_leaf(source, name) for name in source.leaves]
            np.testing.assert_array_equal(values[0], np.arange(4))
    assert refused > 100
    for length in range(0, len(intact), 40):
        path.write_bytes(intact[:length])
        with pytest.raises(DamageError, match=r"0.npz"):
            open_source(path)


def test_a_file_beside_an_orbax_checkpoint_is_not_the_checkpoint(tmp_path):
    v1.save(tmp_path / "0", {"w": np.ones(3, np.float32)})
    np.savez(tmp_path / "0" / "metrics.npz", loss=np.ones(2))
    assert open_source(tmp_path / "0").format == "orbax"


def test_several_files_in_a_directory_are_named_one_by_one(tmp_path):
    for step in (1, 2):
        np.savez(tmp_path / f"step_{step}.npz", w=np.full(3, step))
    with pytest.raises(UserError, match=r"one of several \.npz files"):
        open_checkpoints([tmp_path])
    series = open_checkpoints([tmp_path / "step_2.npz", tmp_path / "step_1.npz"])
    assert [source.step for source in series.sources] == [1, 2]
