"""Read zarr arrays of every layout: they are read right, or refused with what is wrong or not supported."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from orbax.checkpoint import v1 as ocp

from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.storage.formats.open import open_source, read_leaf

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
W = np.random.default_rng(0).standard_normal((48, 32)).astype(np.float32)
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}


def save(path, ocdbt=False, zarr3=False, compression=False):
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt, saving.use_zarr3, saving.use_compression = ocdbt, zarr3, compression
    with context:
        ocp.save(path, {"w": jnp.asarray(W), "b": jnp.zeros(6)})
    return path / "state"


def set_fields(path, **fields):
    """Set fields of a JSON file; remove those whose value is `...`."""
    merged = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))


def chunk_of(state):
    return next(
        path for path in (state / "w").rglob("*") if path.is_file() and path.name not in (".zarray", "zarr.json")
    )


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("compression", [False, True])
@pytest.mark.parametrize("flag", [True, False, ...])
def test_a_missing_chunk_of_files_is_refused(tmp_path, zarr3, compression, flag):
    state = save(tmp_path / "0", zarr3=zarr3, compression=compression)
    set_fields(state / "_METADATA", store_array_data_equal_to_fill_value=flag)
    assert read_leaf(open_source(tmp_path / "0"), "w").tobytes() == W.tobytes()
    chunk_of(state).unlink()
    with pytest.raises(ValueError, match="'w': 1 of its 1 chunks are missing, the first is w/"):
        open_source(tmp_path / "0")
    (state / "_METADATA").unlink()
    with pytest.raises(ValueError, match="_METADATA: is missing, although _sharding is there"):
        open_source(state)
    (state / "_sharding").unlink()
    shutil.rmtree(state / "array_metadatas")
    with pytest.raises(ValueError, match="if its writer leaves out chunks that hold only the fill value"):
        open_source(state)


def test_a_missing_key_of_a_database_is_refused_unless_its_writer_leaves_out_zeros(tmp_path):
    state = save(tmp_path / "0", ocdbt=True)
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{state}/"}).result()
    database.delete_range(ts.KvStore.KeyRange(b"w/0", b"w/1")).result()
    with pytest.raises(ValueError, match="'w': 1 of its 1 chunks are missing"):
        open_source(tmp_path / "0")
    set_fields(state / "_METADATA", store_array_data_equal_to_fill_value=...)
    source = open_source(tmp_path / "0")
    assert "1 chunks of w are not stored; they are read as the fill value" in source.notes[0]
    np.testing.assert_array_equal(read_leaf(source, "w"), np.zeros((48, 32)))


@pytest.mark.parametrize("flag", [True, ...])
@pytest.mark.parametrize("zarr3", [False, True])
def test_a_cut_file_of_a_database_is_never_read_as_zeros(tmp_path, zarr3, flag):
    state = save(tmp_path / "0", ocdbt=True, zarr3=zarr3)
    set_fields(state / "_METADATA", store_array_data_equal_to_fill_value=flag)
    data = max((path for path in state.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the file that holds its chunk w/.* is missing or cut short"):
        open_source(tmp_path / "0")


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("change", [lambda data: data + b"\0" * 8, lambda data: data[:-8]])
def test_an_uncompressed_chunk_of_the_wrong_size_is_refused(tmp_path, zarr3, change):
    chunk = chunk_of(save(tmp_path / "0", zarr3=zarr3))
    chunk.write_bytes(change(chunk.read_bytes()))
    with pytest.raises(ValueError, match=r"'w'.* bytes instead of 6144|w cannot be read: DATA_LOSS.*shard index"):
        read_leaf(open_source(tmp_path / "0"), "w")


@pytest.mark.parametrize("nbytes", [6140, 6148, 12288])
def test_a_compressed_chunk_of_the_wrong_size_is_refused(tmp_path, nbytes):
    chunk = chunk_of(save(tmp_path / "0", compression=True))
    chunk.write_bytes(zstandard.compress((W.tobytes() * 2)[:nbytes]))
    made = plan([open_source(tmp_path / "0")], [1.0])
    assert "w" in made.schedule.zstd_leaves
    with pytest.raises(ValueError, match=f"chunk is too {'short' if nbytes < 6144 else 'long'}"):
        merge(made, [tmp_path / "out"])
    assert not (tmp_path / "out").exists()


def test_bytes_behind_a_compressed_chunk_are_refused(tmp_path):
    chunk = chunk_of(save(tmp_path / "0", compression=True))
    chunk.write_bytes(chunk.read_bytes() + b"\0" * 8)
    with pytest.raises(ValueError, match="chunk is too long"):
        merge(plan([open_source(tmp_path / "0")], [1.0]), [tmp_path / "out"])


@pytest.mark.parametrize("nbytes", [20, 24, 28])
def test_the_padding_of_the_last_compressed_chunk_is_checked(tmp_path, nbytes):
    """Read a leaf of 5 elements in chunks of 3; the last chunk is one element longer than the leaf."""
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/0/w/", "metadata": {"chunks": [3]}}
    spec["metadata"]["compressor"] = {"id": "zstd", "level": 1}
    values = np.arange(1, 6, dtype=np.float32)
    ts.open(spec, create=True, dtype="float32", shape=[5]).result().write(values).result()
    frame = zstandard.compress(np.arange(4, 11, dtype=np.float32).tobytes()[: nbytes - 12])
    (tmp_path / "0" / "w" / "1").write_bytes(frame)
    made = plan([open_source(tmp_path / "0")], [1.0], format="safetensors")
    if nbytes != 24:
        with pytest.raises(ValueError, match=f"chunk is too {'short' if nbytes < 24 else 'long'}"):
            merge(made, [tmp_path / "out"])
    else:
        merge(made, [tmp_path / "out"])
        np.testing.assert_array_equal(read_leaf(open_source(tmp_path / "out"), "w"), values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimension_separator": "_"}, "dimension_separator '_' is not supported; supported: ., /"),
        ({"dimension_separator": 3}, "dimension_separator 3"),
        ({"compressor": {"id": "lzma"}}, "compressor 'lzma' is not supported"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"zarr_format": 9}, "zarr_format 9"),
        ({"order": "K"}, "order 'K'"),
        ({"dtype": "uint4"}, "dtype 'uint4' is not supported"),
        ({"dtype": "float4_e2m1fn"}, "dtype 'float4_e2m1fn' is not supported"),
        ({"dtype": [["a", "<f4"]]}, "dtype .* is not supported"),
        ({"dtype": "<M8"}, "dtype '<M8' is not supported"),
        ({"dtype": "<U5"}, "dtype '<U5' is not supported"),
        ({"shape": [-48, 32]}, r"shape \[-48, 32\]"),
        ({"chunks": [48]}, r"chunk shape \[48\]"),
        ({"chunks": [0, 32]}, r"chunk shape \[0, 32\]"),
        ({"shape": [96, 32]}, "1 of its 2 chunks are missing, the first is w/1.0"),
        ({"chunks": [24, 32]}, "instead of 3072"),
        ({"order": ...}, "corrupt: 'order'"),
    ],
)
def test_metadata_of_zarr_2_that_are_not_supported_are_named(tmp_path, fields, message):
    state = save(tmp_path / "0")
    set_fields(state / "w" / ".zarray", **fields)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "0")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}}, "separator '-'"),
        ({"chunk_key_encoding": {"name": "suffix"}}, "chunk_key_encoding 'suffix'"),
        ({"chunk_grid": {"name": "rectangular"}}, "chunk_grid 'rectangular' is not supported; supported: regular"),
        ({"codecs": [BYTES, {"name": "lzma"}]}, "codec 'lzma'"),
        ({"node_type": "group"}, "node_type 'group'"),
        ({"data_type": {"name": "datetime"}}, "dtype {'name': 'datetime'}"),
        ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
        ({"zarr_format": 4}, "zarr_format 4"),
    ],
)
def test_metadata_of_zarr_3_that_are_not_supported_are_named(tmp_path, fields, message):
    state = save(tmp_path / "0", zarr3=True)
    set_fields(state / "w" / "zarr.json", **fields)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "0")


def shards(chunk, codecs, **fields):
    index = [BYTES, {"name": "crc32c"}]
    return {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": chunk, "codecs": codecs, "index_codecs": index} | fields,
    }


@pytest.mark.parametrize(
    ("driver", "metadata"),
    [
        ("zarr", {"compressor": {"id": "blosc"}}),
        ("zarr", {"compressor": {"id": "gzip", "level": 1}}),
        ("zarr", {"compressor": None, "order": "F"}),
        ("zarr", {"compressor": None, "dtype": ">f4"}),
        ("zarr", {"compressor": None, "dimension_separator": "/", "chunks": [20, 12]}),
        ("zarr", {"compressor": None, "chunks": [20, 32]}),
        ("zarr", {"compressor": {"id": "zstd", "level": 1}, "chunks": [20, 32]}),
        ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}),
        ("zarr3", {"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES]}),
        ("zarr3", {"codecs": [BYTES, ZSTD, {"name": "crc32c"}]}),
        ("zarr3", {"codecs": [shards([12, 16], [BYTES, ZSTD])]}),
        ("zarr3", {"codecs": [shards([48, 32], [BYTES], index_location="start")]}),
        ("zarr3", {"codecs": [BYTES], "chunk_key_encoding": {"name": "v2"}}),
    ],
)
def test_layouts_of_other_programs_are_read_right(tmp_path, driver, metadata):
    spec = {"driver": driver, "kvstore": f"file://{tmp_path}/0/w/", "metadata": metadata}
    ts.open(spec, create=True, dtype="float32", shape=W.shape).result().write(W).result()
    source = open_source(tmp_path / "0")
    np.testing.assert_array_equal(read_leaf(source, "w"), W)
    merge(plan([source], [1.0]), [tmp_path / "out"])
    np.testing.assert_array_equal(read_leaf(open_source(tmp_path / "out"), "w"), W)


def test_a_missing_chunk_in_a_shard_is_refused(tmp_path):
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/0/w/",
        "metadata": {"codecs": [shards([12, 32], [BYTES])]},
    }
    array = ts.open(spec, create=True, dtype="float32", shape=W.shape).result()
    array[:12].write(W[:12]).result()
    with pytest.raises(ValueError, match="missing"):
        read_leaf(open_source(tmp_path / "0"), "w")


@pytest.mark.parametrize("dtype", ["int4", "complex64", "complex128", "float8_e4m3b11fnuz", "float8_e8m0fnu"])
def test_dtypes_that_are_not_averaged_pass_if_they_are_equal(tmp_path, dtype):
    values = np.arange(1, 5).astype(jnp.dtype(dtype))
    for k in range(3):
        ocp.save(tmp_path / str(k), {"w": jnp.ones(2) * k, "other": values if k < 2 else values[::-1].copy()})
    sources = [open_source(tmp_path / str(k)) for k in range(3)]
    merge(plan(sources[:2], [0.5, 0.5]), [tmp_path / "out"])
    got = ocp.load(tmp_path / "out")
    assert got["other"].dtype == dtype and got["other"].tobytes() == values.tobytes()
    with pytest.raises(ValueError, match=rf"other \({dtype}\)"):
        merge(plan(sources, np.ones(3) / 3), [tmp_path / "bad"])
