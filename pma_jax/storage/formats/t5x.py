"""Read and write checkpoints of T5X.

`checkpoint_1000/checkpoint` is a msgpack file {"version": 3, "optimizer": {"target": …, "state": …}} whose leaves are
tensorstore specs of zarr arrays beside it (`target.encoder.….kernel/`), or, for leaves that T5X does not partition, the
arrays themselves in Flax's encoding, which are read and written in place there. None and {} are leaves too: T5X's
restore expects them (google-research/t5x at cc342d4, t5x/checkpoints.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_tree import TREE_FILE
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import ITEM_BYTES, PACKED_BITS, ByteRange, CheckpointSource, LeafInfo, are_sizes
from pma_jax.storage.formats.subtree import choose_subtrees, is_below, split_subtrees
from pma_jax.storage.formats.zarr import open_store, read_array_layout
from pma_jax.storage.formats.zarr_read import absent_chunks_notes, source_fields
from pma_jax.storage.formats.zarr_write import check_paths, plan_array
from pma_jax.storage.json_files import MAX_JSON_BYTES
from pma_jax.storage.paths import name_file, read_file

_FILE = "checkpoint"
_VERSION_KEY, _TREE_KEY, _STEP = "version", "optimizer", "state/step"
_NDARRAY, _SCALAR = 1, 3  # Flax's msgpack extension types of NumPy arrays and scalars
_CHUNKED_KEY = "__msgpack_chunked_array__"


class _Inline(NamedTuple):
    """An array in the msgpack file."""

    leaf: LeafInfo
    data: bytes


def is_t5x(path: Path) -> bool:
    """Return whether a directory holds T5X's msgpack file, which begins with one of its two keys."""
    file = path / _FILE
    if not file.is_file() or (path / TREE_FILE).exists():
        return False
    with name_file(file), file.open("rb") as data:
        return data.read(10).startswith((b"\x82\xa7version", b"\x82\xa9optimize"))


def open_t5x(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open a checkpoint; leaves are named by their keys with "/" between them, as `target/decoder/…`.

    Raises:
        DamageError: It is corrupt or not complete.
        UserError: It is not supported, or the parameters cannot be located.
    """
    file = path / _FILE
    if file.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{file}: {file.stat().st_size:,} bytes is more than the limit of {MAX_JSON_BYTES:,}")
    data = read_file(file, MAX_JSON_BYTES)
    contents = _unpack(file, data)
    values = dict(_leaves_of(contents.get(_TREE_KEY)))
    paths = [name.split("/") for name, value in values.items() if _is_array(value)]
    if not paths:
        raise UserError(f"{file}: lists no arrays; it is empty, or parts of it are missing")
    empty = {name: value for name, value in values.items() if value in (None, {})}
    empty_paths = [name.split("/") for name in empty]
    prefixes, notes = choose_subtrees(path, paths, split_subtrees(subtrees), empty_paths)
    chosen = {name: value for name, value in values.items() if is_below(name.split("/"), prefixes)}
    constants = [name for name, value in chosen.items() if not _is_array(value) and name not in empty]
    if constants:
        raise UserError(f"{file}: {constants[0][:80]!r} is no array, and cannot be averaged; merge another subtree")
    store = open_store(path, stores_all_chunks=None)
    arrays = {
        name: read_array_layout(store, _directory_of(file, name, value))
        for name, value in chosen.items()
        if isinstance(value, dict) and value
    }
    inline = {name: value.leaf for name, value in chosen.items() if isinstance(value, _Inline)}
    offsets = _find_offsets(file, data, contents)
    fields = source_fields(arrays)
    fields["leaves"] |= inline
    fields["byte_ranges"] |= {name: (ByteRange(file, offsets[name], leaf.nbytes),) for name, leaf in inline.items()}
    progress = read_progress(path, step=_step_of(values.get(_STEP)))
    version = contents.get(_VERSION_KEY, 3)
    return CheckpointSource(
        format="t5x",
        path=path,
        origin=str(path),
        **fields,
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        metadata={_VERSION_KEY: version, "inline": inline, "empty": {n: x for n, x in empty.items() if n in chosen}},
        notes=(*notes, *absent_chunks_notes(path, arrays), *progress.notes),
    )


def t5x_layout(
    sources: Sequence[CheckpointSource], leaves: Mapping[str, LeafInfo], custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of a merged checkpoint. Leaves that are in the file of the newest source are there in the output.

    Raises:
        UserError: No source is T5X's, or a name cannot be one of a directory.
    """
    newest = next((source for source in reversed(sources) if source.format == "t5x"), None)
    if newest is None:
        raise UserError("the output is T5X's only if an input is")
    sizes: dict[str, int] = {}
    texts: dict[str, bytes] = {}
    byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
    values: dict[str, Any] = dict(newest.metadata["empty"])
    for name, leaf in leaves.items():
        values[name] = _Inline(leaf, bytes(leaf.nbytes))
        if name not in newest.metadata["inline"]:
            directory = name.replace("/", ".")
            array = plan_array(directory, leaf)
            texts |= dict([array.metadata])
            sizes |= array.sizes
            byte_ranges[name] = array.byte_ranges
            values[name] = _spec(directory, leaf, array.chunk)
    if sources[-1].step is not None:
        values.setdefault(_STEP, _Inline(LeafInfo((), "int32"), sources[-1].step.to_bytes(4, "little")))
    contents = {_VERSION_KEY: newest.metadata[_VERSION_KEY], _TREE_KEY: _nest(values)}
    header = _pack(contents)
    offsets = _find_offsets(Path(_FILE), header, contents)
    byte_ranges |= {
        name: (ByteRange(Path(_FILE), offsets[name], leaf.nbytes),) if leaf.elements else ()
        for name, leaf in leaves.items()
        if name in newest.metadata["inline"]
    }
    check_paths([*texts, *sizes, _FILE])
    # The file with leaves is created with placeholders for their bytes.
    return OutputLayout(texts, sizes | {_FILE: len(header)}, byte_ranges, headers={_FILE: header})


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries, given the value of each leaf by its keys joined by "/"."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        reduce(lambda place, key: place.setdefault(key, {}), parents, tree)[last] = value
    return tree


def _unpack(file: Path, data: bytes) -> dict[str, Any]:
    """Return the content of the msgpack file, with `_Inline` for arrays.

    Raises:
        DamageError: The file is corrupt.
        UserError: An array in it is not supported.
    """
    import msgpack

    def read_extension(code: int, packed: bytes) -> Any:
        if code not in (_NDARRAY, _SCALAR):
            raise UserError(f"{file}: has a value of type {code}, which is not read")
        shape, dtype, values = msgpack.unpackb(packed)
        dtype = dtype.decode() if isinstance(dtype, bytes) else dtype
        if dtype not in ITEM_BYTES or dtype in PACKED_BITS or not are_sizes(list(shape)):
            raise UserError(f"{file}: has an array of the dtype {str(dtype)[:40]!r}, which is not read")
        leaf = LeafInfo(tuple(shape), dtype)
        if leaf.nbytes != len(values):
            raise DamageError(f"{file}: has an array of {len(values)} bytes instead of {leaf.nbytes}; fetch it again")
        return _Inline(leaf, values)

    try:
        contents = msgpack.unpackb(data, strict_map_key=False, ext_hook=read_extension)
    except UserError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise DamageError(f"{file}: is not a msgpack file ({error_line(error)[:100]}); fetch it again") from None
    if not isinstance(contents, dict) or not isinstance(contents.get(_TREE_KEY), dict):
        raise DamageError(f"{file}: has no {_TREE_KEY!r}; it is not T5X's, or is corrupt")
    return contents


def _is_array(value: Any) -> bool:
    return isinstance(value, _Inline) or (isinstance(value, dict) and {"driver", "kvstore"} <= value.keys())


def _leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (keys joined by "/", value) of each leaf: an array, None, an empty dictionary or anything else."""
    if not isinstance(value, dict) or not value or _is_array(value):
        yield path, value
        return
    if _CHUNKED_KEY in value:
        raise UserError(f"{path}: is an array of more than 1 GiB in parts, which is not read; save it with tensorstore")
    for key, child in value.items():
        yield from _leaves_of(child, f"{path}/{key}" if path else str(key))


def _directory_of(file: Path, name: str, spec: Mapping[str, Any]) -> str:
    """Return the directory of an array, given its tensorstore spec."""
    kvstore = spec["kvstore"]
    stored = kvstore.get("path", spec.get("path")) if isinstance(kvstore, dict) else None
    parts = PurePosixPath(stored).parts if isinstance(stored, str) else ()
    if not parts or ".." in parts or parts[0] == "/":
        raise DamageError(f"{file}: the spec of {name[:80]!r} names no directory of the checkpoint: {str(stored)[:80]}")
    return "/".join(parts)


def _find_offsets(file: Path, data: bytes, contents: Mapping[str, Any]) -> dict[str, int]:
    """Return where the bytes of each array in the msgpack file `data` begin, by name, given its content."""
    import msgpack

    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    offsets: dict[str, int] = {}

    def walk(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            unpacker.skip()
            if isinstance(value, _Inline):
                # The bytes are the last part of the extension.
                offsets[path] = unpacker.tell() - len(value.data)
            return
        if unpacker.read_map_header() != len(value):
            raise DamageError(f"{file}: has a key twice; fetch it again")
        for key, child in value.items():
            unpacker.skip()
            walk(child, f"{path}/{key}" if path else str(key))

    walk(contents, "")
    return {name.partition("/")[2]: offset for name, offset in offsets.items()}


def _pack(contents: Mapping[str, Any]) -> bytes:
    """Return the msgpack file of a tree, in Flax's encoding of arrays."""
    import msgpack

    def pack_array(value: Any) -> Any:
        fields = (value.leaf.shape, value.leaf.dtype, value.data)
        return msgpack.ExtType(_NDARRAY, msgpack.packb(fields, use_bin_type=True))

    packed: Any = msgpack.packb(contents, default=pack_array, strict_types=True)
    return packed


def _spec(directory: str, leaf: LeafInfo, chunk: tuple[int, ...]) -> dict[str, Any]:
    """Return the tensorstore spec of an array in `directory`, with the keys that T5X expects."""
    metadata = {"shape": list(leaf.shape), "chunks": list(chunk), "compressor": None}
    kvstore = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "zarr", "dtype": leaf.dtype, "kvstore": kvstore, "metadata": metadata}


def _step_of(value: Any) -> int | None:
    """Return a step that is a number or an array of one integer in the file; None for anything else."""
    if isinstance(value, _Inline) and value.leaf.elements == 1 and value.leaf.is_integer:
        return int.from_bytes(value.data, "little")
    return value if type(value) is int else None
