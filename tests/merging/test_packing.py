"""Small leaves that are merged together: values, checksums and messages are those of each leaf."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.engine.provenance import compute_leaf_digest, read
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.open import open_source

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float64)
SIZES = (0, 1, 3, 1000, 2**15, 2**15 + 1)  # up to the largest leaf of a pack, and beyond


def write(directory, seed, leaves, names):
    """Write leaves of given sizes and dtypes; the library stores them by dtype, and then in the order of `names`."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(size).astype(dtype) for name, (size, dtype) in leaves.items()}
    directory.mkdir()
    save_file({name: values[name] for name in names} | {"zz.counts": np.arange(3)}, directory / "model.safetensors")
    return directory


def plan_mean(paths, rows, **options):
    return plan([open_source(path) for path in paths], np.asarray(rows), **options)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES)), min_size=2, max_size=40),
    st.sampled_from([[[0.25, 0.75]], [[0.5, 0.5], [1.5, -0.5]]]),
    st.booleans(),
)
def test_merge_of_small_leaves_equals_float64(tmp_path_factory, drawn, rows, is_reversed):
    folder = tmp_path_factory.mktemp("packs")
    leaves = {f"leaf{n:02d}": leaf for n, leaf in enumerate(drawn)}
    names = list(leaves)
    paths = [write(folder / "a", 1, leaves, names), write(folder / "b", 2, leaves, names[:: -1 if is_reversed else 1])]
    outs = [folder / f"out{r}" for r in range(len(rows))]
    merge(plan_mean(paths, rows), outs)
    first, second = (load_file(path / "model.safetensors") for path in paths)
    for row, out in zip(rows, outs, strict=True):
        merged = load_file(out / "model.safetensors")
        assert merged.keys() == first.keys()
        for name, (size, dtype) in leaves.items():
            exact = row[0] * first[name].astype(np.float64) + row[1] * second[name].astype(np.float64)
            tolerance = float(ml_dtypes.finfo(dtype).eps) if size else 0
            np.testing.assert_allclose(merged[name].astype(np.float64), exact, rtol=tolerance, atol=4 * tolerance)
        assert verify(out, with_sources=True) == []
        made, source = read(out), open_source(out)
        assert made["leaves"] == {name: compute_leaf_digest(source, name) for name in source.leaves}
        for path, entry in zip(paths, made["sources"], strict=True):
            source = open_source(path)
            assert entry["leaves"] == {name: compute_leaf_digest(source, name) for name in source.leaves}


def test_many_small_leaves_are_few_units(tmp_path):
    leaves = {f"leaf{n:04d}": (100, np.float32) for n in range(3000)}
    paths = [write(tmp_path / str(k), k, leaves, leaves) for k in range(2)]
    made = plan_mean(paths, [0.5, 0.5])
    merge(made, [tmp_path / "out"])
    assert len(list(made.with_packs().units())) < 10 < 3000 < len(list(made.units()))
    assert verify(tmp_path / "out", with_sources=True) == []


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "keep"), (1e38, "float16")])
def test_a_value_that_is_not_finite_is_named_by_its_leaf(tmp_path, value, dtype):
    leaves = {f"leaf{n}": (100, np.float32) for n in range(5)}
    paths = [write(tmp_path / str(k), k, leaves, leaves) for k in range(2)]
    values = load_file(paths[1] / "model.safetensors")
    values["leaf3"][7] = value
    save_file(values, paths[1] / "model.safetensors")
    with pytest.raises(UserError, match=r"leaf3.* at element 7"):
        merge(plan_mean(paths, [0.5, 0.5], dtype=dtype), [tmp_path / "out"])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_damage_of_a_small_leaf_is_named(tmp_path):
    leaves = {f"leaf{n}": (100, np.float32) for n in range(5)}
    paths = [write(tmp_path / str(k), k, leaves, leaves) for k in range(2)]
    merge(plan_mean(paths, [0.5, 0.5]), [tmp_path / "first"])
    file = tmp_path / "first" / "model.safetensors"
    part = open_source(file.parent).byte_ranges["leaf2"][0]
    data = bytearray(file.read_bytes())
    data[part.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"is corrupt: 1 leaves .*leaf2"):
        merge(plan_mean([tmp_path / "first", paths[1]], [0.5, 0.5]), [tmp_path / "out"])
    assert json.loads((tmp_path / "first" / "provenance.json").read_text())["leaves"].keys() >= leaves.keys()
