"""Arrays that are damaged, unusual or not supported: each merge must be right, or be refused with a true reason."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import tensorstore as ts
from merge_command import WEIGHTS, check_leaf, merge
from orbax.checkpoint import v1 as ocp
from orbax_writers import STORAGES, WRITERS

_RIGHT = ""  # in place of the expected message: the merge must succeed and be right


_SHARD_INDEX = "Error decoding shard index"
_SHORT = {"raw files": _SHARD_INDEX, "files": _SHARD_INDEX, "files zarr2": "chunk is too short"}
_LONG = _SHORT | {"files zarr2": "chunk is too long"}


class Damage(NamedTuple):
    """A cell: change the newest of three checkpoints, or all of them, and merge.

    Attributes:
        name: What is done.
        storage: A key of `STORAGES`, for Orbax v1; or None if `change` writes the arrays.
        change: Takes the directory of a checkpoint and its number, 0 to 2.
        reason: Text of the message that refuses the merge; `_RIGHT` if it must be right.
    """

    name: str
    storage: str | None
    change: Callable[[Path, int], None]
    reason: str


def _trees() -> list[dict[str, Any]]:
    generators = [np.random.default_rng(seed) for seed in range(len(WEIGHTS))]
    return [
        {
            "w": jnp.asarray(rng.standard_normal((48, 32)), jnp.float32),
            "b": jnp.asarray(rng.standard_normal(6), jnp.float32),
        }
        for rng in generators
    ]


def _run(damage: Damage, package: Path, root: Path) -> str:
    paths = []
    for number, tree in enumerate(_trees()):
        path = root / f"{number + 1}000"
        if damage.storage is not None:
            WRITERS["v0 pytree" if "older Orbax" in damage.name else "v1 save"].save(
                path, tree, STORAGES[damage.storage]
            )
        damage.change(path, number)
        paths.append(path)
    result = merge(package, paths, root / "out")
    text = result.text.strip()
    if damage.reason == _RIGHT:
        assert result.status == 0, f"refused: {text[-300:]}"
        got = _read_arrays(root / "out")
        inputs = [_read_arrays(path) for path in paths]
        assert got.keys() == inputs[0].keys(), f"has {sorted(got)} instead of {sorted(inputs[0])}"
        for name, value in got.items():
            check_leaf(name, value, [arrays[name] for arrays in inputs], WEIGHTS)
        return "right"
    assert result.status == 1, f"status {result.status} instead of 1; {text[-300:]}"
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "Traceback" not in text, f"not one line: {text[-300:]}"
    assert damage.reason in errors[0], f"the reason is {errors[0]!r}"
    assert not (root / "out").exists() and not list(root.glob(".out*")), "something was written"
    return "refused"


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a tree: with Orbax where it can be, else (a tree without `_METADATA`) with tensorstore."""
    if (path / "orbax.checkpoint").exists() or (path / "_METADATA").exists():
        tree = ocp.load(str(path)) if (path / "orbax.checkpoint").exists() else v0.PyTreeCheckpointer().restore(path)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {".".join(str(getattr(key, "key", key)) for key in keys): np.asarray(leaf) for keys, leaf in leaves}
    drivers = {".zarray": "zarr", "zarr.json": "zarr3"}
    return {
        file.parent.name: ts.open({"driver": drivers[file.name], "kvstore": f"file://{file.parent}/"})
        .result()
        .read()
        .result()
        for file in path.glob("*/*")
        if file.name in drivers
    }


def _array(path: Path) -> Path:
    """Return the directory of the array w."""
    return _tree(path) / "w"


def _tree(path: Path) -> Path:
    return path / "state" if (path / "state").exists() else path


def _metadata_file(path: Path) -> Path:
    return next(_array(path) / name for name in (".zarray", "zarr.json") if (_array(path) / name).exists())


def _newest(change: Callable[[Path], None]) -> Callable[[Path, int], None]:
    """Return a change of the newest checkpoint alone."""
    return lambda path, number: change(path) if number == len(WEIGHTS) - 1 else None


def _set(**fields: Any) -> Callable[[Path, int], None]:
    """Return a change that sets fields of the array's metadata in every checkpoint."""

    def change(path: Path, _: int) -> None:
        file = _metadata_file(path)
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _chunks(path: Path) -> list[Path]:
    return sorted(
        file for file in _array(path).rglob("*") if file.is_file() and file.name not in (".zarray", "zarr.json")
    )


def _drop_chunk(path: Path) -> None:
    _chunks(path)[-1].unlink()


def _lengthen_chunk(path: Path) -> None:
    chunk = _chunks(path)[0]
    chunk.write_bytes(chunk.read_bytes() + b"\0" * 64)


def _shorten_chunk(path: Path) -> None:
    chunk = _chunks(path)[0]
    chunk.write_bytes(chunk.read_bytes()[:-7])


def _set_tree(path: Path, **fields: Any) -> None:
    file = _tree(path) / "_METADATA"
    metadata = {key: value for key, value in (json.loads(file.read_text()) | fields).items() if value != "absent"}
    file.write_text(json.dumps(metadata))


def _drop_chunk_of_old_orbax(path: Path) -> None:
    _set_tree(path, store_array_data_equal_to_fill_value="absent")
    _drop_chunk(path)


def _drop_chunk_without_metadata(path: Path, number: int) -> None:
    """Leave only the arrays of the tree, as T5X wrote them, and drop a chunk of the newest."""
    (path / "state").rename(path.parent / "arrays")
    shutil.rmtree(path)
    (path.parent / "arrays").rename(path)
    for file in [file for file in path.iterdir() if file.is_file()]:
        file.unlink()
    shutil.rmtree(path / "array_metadatas", ignore_errors=True)
    if number == len(WEIGHTS) - 1:
        _drop_chunk(path)


def _delete_key(path: Path) -> None:
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{_tree(path)}/"}).result()
    keys = [key for key in database.list().result() if key.startswith(b"w/") and b"zar" not in key]
    database.delete_range(ts.KvStore.KeyRange(keys[-1], keys[-1] + b"\0")).result()


def _delete_key_of_old_orbax(path: Path) -> None:
    _set_tree(path, store_array_data_equal_to_fill_value="absent")
    _delete_key(path)


def _data_files(path: Path) -> list[Path]:
    files = [file for file in path.rglob("d/*") if file.is_file()]
    return sorted(files, key=lambda file: file.stat().st_size)


def _cut_data_file(path: Path) -> None:
    file = _data_files(path)[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _cut_data_file_of_old_orbax(path: Path) -> None:
    _set_tree(path, store_array_data_equal_to_fill_value="absent")
    _cut_data_file(path)


def _set_type(value_type: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = _tree(path) / "_METADATA"
        metadata = json.loads(file.read_text())
        metadata["tree_metadata"]["('b',)"]["value_metadata"]["value_type"] = value_type
        file.write_text(json.dumps(metadata))

    return change


def _write(**spec: Any) -> Callable[[Path, int], None]:
    """Return a function that writes w with tensorstore, as another program might, beside a plain array b."""

    def change(path: Path, number: int) -> None:
        values = _trees()[number]
        path.mkdir()
        for name, value in values.items():
            own = spec if name == "w" else {"driver": spec["driver"]}
            array = ts.open(
                {"kvstore": f"file://{path / name}/", **own},
                create=True,
                dtype=own.get("dtype", "float32"),
                shape=value.shape,
            ).result()
            array.write(np.asarray(value)).result()

    return change


def _write_zeros(path: Path, number: int) -> None:
    """Write w with tensorstore's defaults, which leave out chunks of zeros, so that a chunk is absent."""
    path.mkdir()
    for name, value in _trees()[number].items():
        value = np.asarray(value).copy()
        if name == "w" and number == len(WEIGHTS) - 1:
            value[:24] = 0
        chunks = [24, *value.shape[1:]] if name == "w" else list(value.shape)
        spec = {
            "driver": "zarr",
            "kvstore": f"file://{path / name}/",
            "metadata": {"chunks": chunks, "dtype": "<f4", "fill_value": 0.0},
        }
        ts.open(spec, create=True, dtype="float32", shape=value.shape).result().write(value).result()


def _shards(chunk: list[int], inner: list[Any], **configuration: Any) -> dict[str, Any]:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    fields = {"chunk_shape": chunk, "codecs": inner, "index_codecs": index} | configuration
    return {"name": "sharding_indexed", "configuration": fields}


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def _grid(chunk: list[int]) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": chunk}}


def save_tree(path: Path, tree: Any) -> None:
    """Save a tree with Orbax v1."""
    ocp.save(str(path), tree)


def _other_leaf(make: Callable[[int], Any]) -> Callable[[Path, int], None]:
    """Return a function that saves a tree with a leaf that is made from the checkpoint's number."""
    return lambda path, number: save_tree(path, {"w": jnp.ones(3) * number, "other": make(number)})


def _missing_data() -> Iterator[Damage]:
    for storage in ("raw files zarr2", "raw files", "files zarr2", "files"):
        yield Damage("a chunk is missing", storage, _newest(_drop_chunk), "chunks are missing")
        yield Damage(
            "a chunk is missing, by an older Orbax", storage, _newest(_drop_chunk_of_old_orbax), "chunks are missing"
        )
        yield Damage("a chunk is missing, no _METADATA", storage, _drop_chunk_without_metadata, "chunks are missing")
        short, long = _SHORT.get(storage, "instead of"), _LONG.get(storage, "instead of")
        yield Damage("a chunk is too short", storage, _newest(_shorten_chunk), short)
        yield Damage("a chunk is too long", storage, _newest(_lengthen_chunk), long)
        yield Damage(
            "the metadata are missing", storage, _newest(lambda path: _metadata_file(path).unlink()), "is missing"
        )
    for storage in ("default", "raw", "zarr2"):
        yield Damage("a key is deleted", storage, _newest(_delete_key), "chunks are missing")
        yield Damage("a key is deleted, by an older Orbax", storage, _newest(_delete_key_of_old_orbax), _RIGHT)
        yield Damage("a data file is cut", storage, _newest(_cut_data_file), "cut short")
        yield Damage(
            "a data file is cut, by an older Orbax", storage, _newest(_cut_data_file_of_old_orbax), "cut short"
        )


def _strange_metadata() -> Iterator[Damage]:
    v2, v3 = "raw files zarr2", "raw files"
    yield Damage("separator _", v2, _set(dimension_separator="_"), "dimension_separator '_'")
    yield Damage("separator 3", v2, _set(dimension_separator=3), "dimension_separator 3")
    yield Damage("compressor", v2, _set(compressor={"id": "lzma"}), "compressor 'lzma'")
    yield Damage("filters", v2, _set(filters=[{"id": "delta", "dtype": "<f4"}]), "filters")
    yield Damage("zarr_format 9", v2, _set(zarr_format=9), "zarr_format 9")
    yield Damage("order", v2, _set(order="K"), "order 'K'")
    yield Damage("dtype complex", v2, _set(dtype="<c24"), "dtype '<c24'")
    yield Damage("dtype structured", v2, _set(dtype=[["a", "<f4"]]), "dtype [['a', '<f4']]")
    yield Damage("dtype text", v2, _set(dtype="<U5"), "dtype '<U5'")
    yield Damage("dtype time", v2, _set(dtype="<M8"), "dtype '<M8'")
    yield Damage("negative shape", v2, _set(shape=[-48, 32]), "shape [-48, 32]")
    yield Damage("chunks of another rank", v2, _set(chunks=[48]), "chunk shape [48]")
    yield Damage("chunks of zero", v2, _set(chunks=[0, 32]), "chunk shape [0, 32]")
    yield Damage("a larger shape", v2, _set(shape=[96, 32]), "chunks are missing")
    yield Damage("a smaller chunk", v2, _set(chunks=[24, 32]), "instead of")
    yield Damage(
        "separator",
        v3,
        _set(chunk_key_encoding={"name": "default", "configuration": {"separator": "-"}}),
        "separator '-'",
    )
    yield Damage("chunk keys", v3, _set(chunk_key_encoding={"name": "suffix"}), "chunk_key_encoding 'suffix'")
    yield Damage(
        "chunk grid", v3, _set(chunk_grid={"name": "rectangular", "configuration": {}}), "chunk_grid 'rectangular'"
    )
    yield Damage("codec", v3, _set(codecs=[_BYTES, {"name": "lzma"}]), "codec 'lzma'")
    yield Damage("node type", v3, _set(node_type="group"), "node_type 'group'")
    yield Damage("data type", v3, _set(data_type={"name": "datetime"}), "dtype {'name': 'datetime'}")
    yield Damage("data type uint4", v3, _set(data_type="uint4"), "dtype 'uint4'")
    yield Damage("storage transformers", v3, _set(storage_transformers=[{"name": "x"}]), "storage_transformers")
    yield Damage(
        "a type of leaf that is not Orbax's", "default", _newest(_set_type("my.module.Leaf")), "'my.module.Leaf'"
    )
    yield Damage("a leaf becomes None", "default", _newest(_set_type("None")), "b is missing")


def _layouts_of_zarr2() -> Iterator[Damage]:
    for name, metadata in {
        "blosc": {"compressor": {"id": "blosc"}},
        "zlib": {"compressor": {"id": "zlib", "level": 1}},
        "bz2": {"compressor": {"id": "bz2", "level": 1}},
        "no compressor": {"compressor": None},
        "order F": {"compressor": None, "order": "F"},
        "big-endian": {"compressor": None, "dtype": ">f4"},
        "separator /": {"compressor": None, "dimension_separator": "/"},
        "chunks of columns": {"compressor": None, "chunks": [48, 12]},
        "chunks in both": {"compressor": {"id": "zstd", "level": 1}, "chunks": [20, 12]},
        "rows with padding": {"compressor": None, "chunks": [20, 32]},
        "compressed rows with padding": {"compressor": {"id": "zstd", "level": 1}, "chunks": [20, 32]},
        "fill value 7": {"compressor": None, "dtype": "<f4", "fill_value": 7.0},
    }.items():
        yield Damage(f"zarr2, {name}", None, _write(driver="zarr", metadata=metadata), _RIGHT)


def _layouts_of_zarr3() -> Iterator[Damage]:
    gzip = {"name": "gzip", "configuration": {"level": 1}}
    blosc = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}}
    zstd = {"name": "zstd", "configuration": {"level": 1}}
    order = {"name": "transpose", "configuration": {"order": [1, 0]}}
    big = {"name": "bytes", "configuration": {"endian": "big"}}
    for name, metadata in {
        "gzip": {"codecs": [_BYTES, gzip]},
        "blosc": {"codecs": [_BYTES, blosc]},
        "big-endian": {"codecs": [big]},
        "transposed": {"codecs": [order, _BYTES]},
        "checksum": {"codecs": [_BYTES, {"name": "crc32c"}]},
        "zstd and checksum": {"codecs": [_BYTES, zstd, {"name": "crc32c"}]},
        "shards of several chunks": {"codecs": [_shards([12, 32], [_BYTES])]},
        "shards of tiles": {"codecs": [_shards([12, 16], [_BYTES, zstd])]},
        "shards with the index first": {"codecs": [_shards([48, 32], [_BYTES], index_location="start")]},
        "keys of zarr2": {"codecs": [_BYTES], "chunk_key_encoding": {"name": "v2"}},
        "separator .": {
            "codecs": [_BYTES],
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        },
        "chunks of columns": {"codecs": [_BYTES], "chunk_grid": _grid([48, 12])},
        "rows with padding": {"codecs": [_BYTES], "chunk_grid": _grid([20, 32])},
    }.items():
        yield Damage(f"zarr3, {name}", None, _write(driver="zarr3", metadata=metadata), _RIGHT)


def _differences_of_leaves() -> Iterator[Damage]:
    yield Damage("chunks of zeros are left out, no _METADATA", None, _write_zeros, "leaves out chunks")
    yield Damage("int4 differs", None, _other_leaf(lambda n: jnp.full(4, n, jnp.int4)), "int4")
    yield Damage("complex differs", None, _other_leaf(lambda n: jnp.full(4, n, jnp.complex64)), "complex64")
    yield Damage("integers differ", None, _other_leaf(lambda n: jnp.full(4, n)), "int")
    yield Damage("random keys differ", None, _other_leaf(jax.random.key), "other")
    yield Damage(
        "algorithms differ",
        None,
        _other_leaf(lambda n: jax.random.key(0, impl=["rbg", "unsafe_rbg"][n % 2])),
        "random key",
    )
    yield Damage("strings differ", None, _other_leaf(lambda n: f"run {n}"), "'run 1'")
    yield Damage("empty nodes differ", None, _other_leaf(lambda n: [None, {}, []][n]), "empty Dict")
    yield Damage("Python integers differ", None, _other_leaf(lambda n: n), "other")
    yield Damage("a single array", None, lambda path, number: save_tree(path, jnp.ones(3) * number), "single array")


_GROUPS = (_missing_data, _strange_metadata, _layouts_of_zarr2, _layouts_of_zarr3, _differences_of_leaves)


def damage_cells() -> list[tuple[str, Callable[[Path, Path], str]]]:
    """List (name, function of the package and an empty directory that returns the verdict)."""
    return [
        (
            f"{damage.storage or 'tensorstore'} | {damage.name}",
            lambda package, root, damage=damage: _run(damage, package, root),
        )
        for list_damages in _GROUPS
        for damage in list_damages()
    ]
