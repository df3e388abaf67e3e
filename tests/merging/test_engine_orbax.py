"""Merge Orbax checkpoints of every layout that Orbax writes, and read the result back with Orbax."""

import json
import shutil
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as v0
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp

from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.verify import verify
from pma_jax.storage.formats import zarr
from pma_jax.storage.formats.open import open_source, read_leaf

ROW = np.array([0.2, 0.3, 0.5])


def tree(seed, dtype=jnp.bfloat16, place=lambda x: x):
    rng = np.random.default_rng(seed)
    params = {
        "emb": rng.standard_normal((64, 48)),
        "layers": [{"w": rng.standard_normal((16, 24))}, {"w": rng.standard_normal((16, 24))}],
        "scale": rng.standard_normal(()),
    }
    params = jax.tree.map(lambda x: place(jnp.asarray(x, dtype)), params)
    return params | {"steps": place(jnp.arange(4, dtype=jnp.int32))}


def save_v1(path, params, ocdbt=True, zarr3=True, compression=True, chunk=None, **metadata):
    context = ocp.Context()
    context.array.saving.use_ocdbt = ocdbt
    context.array.saving.use_zarr3 = zarr3
    context.array.saving.use_compression = compression
    context.array.saving.storage_options.chunk_byte_size = chunk
    with context:
        ocp.save(path, params, custom_metadata=metadata)


def save_v0(path, params, **options):
    state = {"params": params, "opt_state": {"mu": jnp.ones((64, 48))}, "step": jnp.int32(7)}
    v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)).save(path, state)


def save_items(path, params):
    ocp.save_checkpointables(path, {"params": params, "opt": {"mu": jnp.ones(3)}}, custom_metadata={"tokens": 12})


LAYOUTS = {
    "v1": save_v1,
    "v1 raw": lambda path, params: save_v1(path, params, compression=False),
    "v1 raw files": lambda path, params: save_v1(path, params, compression=False, ocdbt=False),
    "v1 zarr2 files": lambda path, params: save_v1(path, params, ocdbt=False, zarr3=False),
    "v1 zarr2 raw": lambda path, params: save_v1(path, params, zarr3=False, compression=False),
    "v1 chunks": lambda path, params: save_v1(path, params, chunk=512),
    "v1 raw chunks": lambda path, params: save_v1(path, params, chunk=512, compression=False),
    "v0": save_v0,
    "v0 zarr3": lambda path, params: save_v0(path, params, use_zarr3=True),
    "v0 files": lambda path, params: save_v0(path, params, use_ocdbt=False),
    "items": save_items,
}


def load(path, kind):
    """Load with Orbax, without giving the structure."""
    if kind.startswith("v0"):
        return v0.PyTreeCheckpointer().restore(path)["params"]
    return ocp.load_checkpointables(path)["params"] if kind == "items" else ocp.load(path)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("decoder", ["zstandard", "tensorstore"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_merges_and_opens_in_orbax(tmp_path, kind, decoder, monkeypatch):
    if decoder == "tensorstore":
        monkeypatch.setattr(zarr, "ZstdFrames", lambda *_: None)
    trees = [tree(seed) for seed in range(3)]
    for k, params in enumerate(trees):
        LAYOUTS[kind](tmp_path / str(k), params)
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    assert sources[2].step == 2
    made = plan(sources, ROW)
    # Uncompressed arrays are read without decoding, except values so small that a database stores them in its index.
    is_plain = bool({"emb", "params.emb"} & sources[0].byte_ranges.keys())
    is_streamed = bool({"emb", "params.emb"} & made.schedule.zstd_leaves)
    if "chunks" not in kind:
        assert (is_plain, is_streamed) == ("raw" in kind, "raw" not in kind and decoder == "zstandard")
    merge(made, [tmp_path / "out"])
    assert verify(tmp_path / "out", with_sources=True) == []
    merged = load(tmp_path / "out", kind)
    assert jax.tree.structure(merged) == jax.tree.structure(trees[0])
    for got, *inputs in zip(*(jax.tree.leaves(t) for t in [merged, *trees]), strict=True):
        if got.dtype == jnp.int32:
            np.testing.assert_array_equal(got, inputs[0])
            continue
        exact = sum(c * np.asarray(x, np.float64) for c, x in zip(ROW, inputs, strict=True))
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y")])
@pytest.mark.parametrize("compression", [True, False])
def test_checkpoints_saved_on_a_mesh(tmp_path, spec, compression):
    """Merge arrays chunked by rows, columns and both to safetensors and to Orbax; the numbers are the same."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, jax.P(*spec) if x.ndim == 2 else jax.P()))

    for k in range(3):
        save_v1(tmp_path / str(k), tree(k, jnp.float32, place), compression=compression, tokens=10 * k)
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    merge(plan(sources, ROW, format="safetensors"), [tmp_path / "files"])
    merge(plan(sources, ROW), [tmp_path / "arrays"])
    files, arrays = open_source(tmp_path / "files"), open_source(tmp_path / "arrays")
    assert files.tokens == arrays.tokens == 20
    for name in sources[0].leaves:
        values = [read_leaf(source, name) for source in (files, arrays)]
        np.testing.assert_array_equal(*values)
        if values[0].dtype == np.float32:
            exact = sum(c * read_leaf(source, name).astype(np.float64) for c, source in zip(ROW, sources, strict=True))
            np.testing.assert_allclose(values[0], exact, rtol=1e-6, atol=1e-7)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree(0, jnp.float32, place)
    )
    restored = ocp.load(tmp_path / "arrays", abstract)
    np.testing.assert_array_equal(restored["emb"], read_leaf(arrays, "emb"))


def test_formats_convert_in_both_directions(tmp_path):
    for k in range(3):
        save_v1(tmp_path / str(k), tree(k))
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    merge(plan(sources, [1.0, 0, 0], format="safetensors"), [tmp_path / "a"])
    merge(plan([open_source(tmp_path / "a")], [1.0], format="orbax"), [tmp_path / "b"])
    loaded = ocp.load(tmp_path / "b")
    assert set(loaded) == {"emb", "layers.0.w", "layers.1.w", "scale", "steps"}
    np.testing.assert_array_equal(np.asarray(loaded["emb"]), np.asarray(tree(0)["emb"]))
    made = plan([open_source(tmp_path / "a"), sources[0]], [0.5, 0.5])
    merge(made, [tmp_path / "c"])
    np.testing.assert_array_equal(read_leaf(open_source(tmp_path / "c"), "emb"), np.asarray(tree(0)["emb"]))


@pytest.mark.parametrize("kind", ["v1", "v1 zarr2 files"])
def test_names_that_an_address_would_escape(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(zarr, "ZstdFrames", lambda *_: None)
    LAYOUTS[kind](tmp_path / "a#b 100%20", {"w%41": tree(0)["emb"]})
    source = open_source(tmp_path / "a#b 100%20")
    np.testing.assert_array_equal(read_leaf(source, "w%41"), tree(0)["emb"])


@pytest.mark.slow
def test_database_with_several_levels(tmp_path):
    params = {f"leaf{n}": jnp.full((600,), n, jnp.float32) for n in range(1500)}
    save_v1(tmp_path / "0", params, compression=False)
    source = open_source(tmp_path / "0")
    assert len(source.byte_ranges) == 1500
    np.testing.assert_array_equal(read_leaf(source, "leaf1499"), np.full(600, 1499))


def test_regions_bound_the_memory(tmp_path, monkeypatch):
    """Decode a leaf of many chunks a few rows at a time; the result is the same."""
    from pma_jax.merging.engine import schedule

    monkeypatch.setattr(zarr, "ZstdFrames", lambda *_: None)
    for k in range(3):
        save_v1(tmp_path / str(k), {"w": tree(k)["emb"]}, chunk=512)
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    merge(plan(sources, ROW), [tmp_path / "a"])
    monkeypatch.setattr(schedule, "_REGION_BYTES", 1024)
    made = plan(sources, ROW)
    assert made.schedule.region_elements["w"] < sources[0].leaves["w"].elements
    merge(made, [tmp_path / "b"])
    for out in "ab":
        assert verify(tmp_path / out, with_sources=True) == []
    np.testing.assert_array_equal(*[read_leaf(open_source(tmp_path / out), "w") for out in "ab"])


def test_subtree_is_detected_and_reported_or_named(tmp_path):
    save_v0(tmp_path / "0", tree(0))
    source = open_source(tmp_path / "0")
    assert all(name.startswith("params.") for name in source.leaves)
    assert "subtree 'params' (of " in source.notes[0]
    named = open_source(tmp_path / "0", subtrees=["opt_state"])
    assert list(named.leaves) == ["opt_state.mu"] and not named.notes
    with pytest.raises(ValueError, match="no subtree 'nothing'; it has opt_state, params, step"):
        open_source(tmp_path / "0", subtrees=["nothing"])
    v0.PyTreeCheckpointer().save(tmp_path / "1", {"opt_state": jnp.ones(2), "theta": jnp.ones(3)})
    with pytest.raises(ValueError, match="name the subtree, one of opt_state, theta"):
        open_source(tmp_path / "1")
    assert list(open_source(tmp_path / "1", ["theta"]).leaves) == ["theta"]


def test_trees_without_metadata_are_read_from_their_arrays(tmp_path):
    """Read trees as early versions of Flax wrote them: `target` next to optimizer state, no `_METADATA`."""
    state = {"target": {"mlp": {"w": jnp.ones((3, 4))}}, "state": {"step": jnp.int32(3)}}
    v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)).save(tmp_path / "0", state)
    for file in ("_METADATA", "_sharding", "_CHECKPOINT_METADATA"):
        with (
            pytest.raises(ValueError, match="_METADATA: is missing, although") if file != "_METADATA" else nullcontext()
        ):
            open_source(tmp_path / "0")
        (tmp_path / "0" / file).unlink()
    shutil.rmtree(tmp_path / "0" / "array_metadatas")
    source = open_source(tmp_path / "0")
    assert list(source.leaves) == ["target.mlp.w"] and "'target'" in source.notes[0]
    merge(plan([source], [1.0]), [tmp_path / "out"])
    np.testing.assert_array_equal(
        v0.PyTreeCheckpointer().restore(tmp_path / "out")["target"]["mlp"]["w"], np.ones((3, 4))
    )
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "target.mlp.w"}}
    for bias, is_read in (("PLACEHOLDER://target.mlp.b", True), (msgpack.ExtType(1, b"123"), False)):
        tree = {"target": {"mlp": {"w": spec, "b": bias}}, "state": {"step": 7}}
        (tmp_path / "0" / "checkpoint").write_bytes(msgpack.packb(tree))
        with nullcontext() if is_read else pytest.raises(ValueError, match=r"values of 1 leaves \(target.mlp.b\)"):
            assert list(open_source(tmp_path / "0").leaves) == ["target.mlp.w"]
    (tmp_path / "0" / "checkpoint").write_bytes(b"\xc1")
    with pytest.raises(ValueError, match="is not a msgpack file"):
        open_source(tmp_path / "0")


def test_array_without_metadata_in_a_tree_without_metadata_is_not_left_out(tmp_path):
    state = {"target": {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, "state": {"v": jnp.ones(3)}}
    v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)).save(tmp_path / "0", state)
    for file in ("_METADATA", "_sharding", "_CHECKPOINT_METADATA", "state.v/.zarray"):
        (tmp_path / "0" / file).unlink()
    shutil.rmtree(tmp_path / "0" / "array_metadatas")
    # `state` is not read; without all of its arrays, it is not even known to be there.
    assert list(open_source(tmp_path / "0", ["target"]).leaves) == ["target.b", "target.w"]
    (tmp_path / "0" / "target.b" / ".zarray").unlink()
    with pytest.raises(ValueError, match=r"1 arrays have no metadata, such as 'target\.b'"):
        open_source(tmp_path / "0", ["target"])


def one_line(call):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000, str(error.value)


def read_all(path):
    source = open_source(path)
    for name in source.leaves:
        read_leaf(source, name)


def test_corrupt_frame_is_one_line_and_publishes_nothing(tmp_path):
    for k in range(2):
        save_v1(tmp_path / str(k), {"w": tree(k)["emb"]}, ocdbt=False)
    chunk = tmp_path / "1" / "state" / "w" / "c" / "0" / "0"
    text = bytearray(chunk.read_bytes())
    text[:4] = b"\0\0\0\0"
    chunk.write_bytes(text)
    made = plan([open_source(tmp_path / str(k)) for k in range(2)], [0.5, 0.5])
    with pytest.raises(ValueError, match="compressed chunk is corrupt"):
        merge(made, [tmp_path / "out"])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("kind", ["v1", "v1 zarr2 files", "v1 raw files", "v1 raw"])
def test_missing_files_are_one_line(tmp_path, kind):
    """Remove each file in turn: unneeded files may be missing, but nothing is read as zeros in their place."""
    LAYOUTS[kind](tmp_path / "good", tree(0))
    files = sorted(path.relative_to(tmp_path / "good") for path in (tmp_path / "good").rglob("*") if path.is_file())
    for file in files:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / file).unlink()
        try:
            read_all(tmp_path / "bad")
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            good, bad = open_source(tmp_path / "good"), open_source(tmp_path / "bad")
            assert good.leaves == bad.leaves, file
            for name in good.leaves:
                np.testing.assert_array_equal(read_leaf(good, name), read_leaf(bad, name), err_msg=str(file))


def test_swapped_files_are_detected(tmp_path):
    save_v1(tmp_path / "0", tree(0), ocdbt=False)
    leaf = tmp_path / "0" / "state" / "emb"
    shutil.rmtree(leaf)
    shutil.copytree(tmp_path / "0" / "state" / "layers.0.w", leaf)
    save_v1(tmp_path / "1", tree(1), ocdbt=False)
    one_line(lambda: plan([open_source(tmp_path / str(k)) for k in range(2)], [0.5, 0.5]))


def test_unfinished_and_multiple_checkpoints_are_reported(tmp_path):
    save_v1(tmp_path / "run" / "5", tree(0))
    one_line(lambda: open_source(tmp_path / "run"))
    (tmp_path / "run" / "5").rename(tmp_path / "5.orbax-checkpoint-tmp")
    one_line(lambda: open_source(tmp_path / "5.orbax-checkpoint-tmp"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    for kind in ("v1", "v1 raw files", "v1 zarr2 files"):
        LAYOUTS[kind](root / kind, {"a": jnp.ones((3, 4)), "b": jnp.zeros(5)})
    return root


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["v1", "v1 raw files", "v1 zarr2 files"]), byte=st.integers(0, 255))
def test_any_changed_byte_opens_or_is_one_line(good, tmp_path, data, kind, byte):
    bad = tmp_path / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good / kind, bad)
    files = sorted(path for path in bad.rglob("*") if path.is_file() and path.stat().st_size)
    file = data.draw(st.sampled_from(files))
    text = bytearray(file.read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = byte
    file.write_bytes(text)
    try:
        read_all(bad)
    except ValueError as error:
        assert "\n" not in str(error)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(
        ["shape", "chunk_grid", "data_type", "codecs", "chunk_key_encoding", "fill_value", "zarr_format"]
    ),
    value=st.recursive(
        st.none() | st.integers() | st.sampled_from([2**60, -1, "float64", "../x"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "configuration"]), inner),
    ),
)
@example(key="chunk_key_encoding", value={"name": -(2**63) - 1})
def test_any_array_metadata_opens_or_is_one_line(good, tmp_path, key, value):
    bad = tmp_path / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good / "v1 raw files", bad)
    file = bad / "state" / "a" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    try:
        read_all(bad)
    except ValueError as error:
        assert "\n" not in str(error)


def test_several_recipes_of_decoded_leaves(tmp_path):
    for k in range(3):
        save_v1(tmp_path / str(k), tree(k) | {"odd": jnp.full(7001, k + 1, jnp.bfloat16)})
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    rows = np.array([ROW, [0, 0.5, 0.5], [1.0, 0, 0]])
    outs = [tmp_path / f"out{r}" for r in range(3)]
    merge(plan(sources, rows, recipes=["a", "b", "c"]), outs)
    for row, out in zip(rows, outs, strict=True):
        merge(plan(sources, row), [tmp_path / "alone" / out.name])
        one, other = open_source(out), open_source(tmp_path / "alone" / out.name)
        for name in sources[0].leaves:
            values = [read_leaf(source, name).astype(np.float64) for source in (one, other)]
            # A matrix product may otherwise round the last bit of float32 differently.
            np.testing.assert_allclose(*values, rtol=2**-7, err_msg=name)
