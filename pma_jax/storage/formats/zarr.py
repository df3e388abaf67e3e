"""Read the metadata of zarr arrays as Orbax stores them: zarr 2 or 3, in plain files or in an OCDBT database.

In all four layouts, an uncompressed chunk of complete rows is a contiguous part of a leaf, which is read as a byte
range of a file. If such chunks are zstd frames, they can also be decoded sequentially. tensorstore reads all others.
"""

import math
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError, error_line
from pma_jax.runtime.failures import as_read_error, is_damage
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, LeafInfo, are_sizes
from pma_jax.storage.formats.zstd import ZstdFrames
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.storage.paths import file_sizes, is_bucket

# Arrays with more chunks are read by tensorstore, which needs no list of chunks.
_MAX_CHUNKS = 2**16
# Untrusted metadata may claim any shape; no leaf of a real model is larger.
_MAX_ARRAY_BYTES = 2**44
_MAX_METADATA_BYTES = 2**20
# The index of a shard with one chunk: its offset, its length (8 bytes each) and the checksum of both (4 bytes).
_SHARD_INDEX_BYTES = 20


@dataclass(frozen=True)
class Store:
    """Storage of the arrays of one tree: a directory, or an OCDBT database.

    Attributes:
        directory: The tree's directory.
        is_ocdbt: Whether an OCDBT database holds the arrays, instead of one directory per array.
        values: Key (a relative path, or a key of the database) -> byte range or inline value. Values whose file is
            missing or too short are absent.
        fills_missing: Whether an absent chunk is read as zeros; otherwise it means that the checkpoint is corrupt.
    """

    directory: Path
    is_ocdbt: bool
    values: Mapping[str, ByteRange | bytes]
    fills_missing: bool

    def array_names(self) -> list[str]:
        """List the names of the arrays: each directory or key prefix that has zarr metadata."""
        return sorted({key.rsplit("/", 1)[0] for key in self.values if key.endswith(("/.zarray", "/zarr.json"))})

    def read_metadata(self, key: str) -> bytes | None:
        """Read a value of less than 1 MiB; None if it is absent or larger."""
        value = self.values.get(key)
        if not isinstance(value, ByteRange):
            return value
        if value.nbytes >= _MAX_METADATA_BYTES:
            return None
        with value.path.open("rb") as file:
            file.seek(value.offset)
            return file.read(value.nbytes)


@dataclass(frozen=True)
class ArrayLayout:
    """The layout of one stored array: its shape and dtype, and where its chunks are stored.

    Attributes:
        leaf: Shape and dtype. `chunk_elements` is the number of elements in all chunks at one index of the first
            axis, unless `byte_ranges` is set.
        byte_ranges: Where the array's bytes are, in order, if it is stored as uncompressed rows; else None.
        zstd_frames: Where the array's zstd frames are, in order, if it is stored as compressed rows; else None.
        spec: tensorstore spec of the array.
    """

    leaf: LeafInfo
    byte_ranges: tuple[ByteRange, ...] | None
    zstd_frames: ZstdFrames | None
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class _Encoding:
    """How an array is divided into chunks, and how a chunk is stored.

    Attributes:
        shape: The array's shape.
        chunk: The shape of one chunk.
        dtype: A key of `ITEM_BYTES`.
        codec: "raw", "zstd" or "other".
        is_shard: Whether each chunk is stored in a shard of its own, followed by the shard's index.
        prefix: First part of a chunk's key; "" for none.
        separator: Text between the parts of a chunk's key.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    codec: str
    is_shard: bool
    prefix: str
    separator: str

    def chunk_key(self, row: int) -> str:
        """Return the key of chunk number `row` along the first axis, and 0 along the others."""
        indexes = [str(row), *["0"] * (len(self.shape) - 1)] if self.shape else []
        return self.separator.join([self.prefix, *indexes] if self.prefix else indexes) or "0"


def read_array_layout(store: Store, name: str) -> ArrayLayout:
    """Read the zarr metadata of an array and locate its chunks; its values are not read.

    Raises:
        UserError: The array is missing, or its metadata is invalid.
    """
    what = f"{store.directory}: {name[:80]!r}"
    driver, parse, text = "zarr", _parse_v2, store.read_metadata(f"{name}/.zarray")
    if text is None:
        driver, parse, text = "zarr3", _parse_v3, store.read_metadata(f"{name}/zarr.json")
    if text is None:
        raise UserError(f"{what}: its array is missing; the checkpoint is not complete, fetch or save it again")
    metadata = parse_untrusted_json(text, what)
    try:
        encoding = parse(metadata)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(f"{what}: its zarr metadata is corrupt or unsupported: {error_line(error)[:120]}") from None
    shape, chunk, dtype = encoding.shape, encoding.chunk, encoding.dtype
    leaf = LeafInfo(shape, dtype, max(1, chunk[0] * math.prod(shape[1:])) if shape else 1)
    if leaf.nbytes > _MAX_ARRAY_BYTES:
        raise UserError(f"{what}: claims the shape {str(list(shape))[:80]}; no array is that large, it is corrupt")
    spec = {
        "driver": driver,
        "kvstore": {"driver": "ocdbt", "base": _url(store.directory), "path": f"{name}/"}
        if store.is_ocdbt
        else _url(store.directory / name),
        "metadata": metadata,
        "assume_metadata": True,
        # Otherwise a missing chunk is an error: tensorstore would return the fill value for it.
        "fill_missing_data_reads": store.fills_missing,
    }
    chunks = _chunk_ranges(store, name, leaf, encoding)
    if chunks is None:
        return ArrayLayout(leaf, None, None, spec)
    if encoding.codec == "raw":
        return ArrayLayout(LeafInfo(shape, dtype), chunks, None, spec)
    frames = ZstdFrames(chunks, LeafInfo(chunk, dtype).nbytes) if leaf.elements else None
    return ArrayLayout(leaf, None, frames, spec)


def _parse_v2(metadata: Any) -> _Encoding:
    """Parse the content of a .zarray file (zarr 2)."""
    code = metadata["dtype"]
    dtype = np.dtype(code).name if re.fullmatch(r"[<|][a-z]\d", code) else code
    compressor = metadata.get("compressor")
    codec = "raw" if compressor is None else "zstd" if compressor.get("id") == "zstd" else "other"
    if metadata.get("filters") or metadata.get("order") != "C":
        codec = "other"
    shape, chunk = _check_array(metadata["shape"], metadata["chunks"], dtype)
    return _Encoding(shape, chunk, dtype, codec, False, "", metadata.get("dimension_separator", "."))


def _parse_v3(metadata: Any) -> _Encoding:
    """Parse the content of a zarr.json file (zarr 3)."""
    dtype = metadata["data_type"]
    shape, chunk = _check_array(metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"], dtype)
    codecs = metadata["codecs"]
    # Orbax stores each chunk in a shard of its own: the chunk's bytes, then the index of the shard.
    is_shard = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if is_shard:
        inner = codecs[0]["configuration"]
        is_single = inner["chunk_shape"] == list(chunk) and inner.get("index_location", "end") == "end"
        has_checksum = [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
        codecs = inner["codecs"] if is_single and has_checksum else []
    codec = {("bytes",): "raw", ("bytes", "zstd"): "zstd"}.get(tuple(codec["name"] for codec in codecs), "other")
    if codec != "other" and ITEM_BYTES[dtype] > 1 and codecs[0].get("configuration", {}).get("endian") != "little":
        codec = "other"
    keys = metadata["chunk_key_encoding"]
    is_default = keys["name"] == "default"
    separator = keys.get("configuration", {}).get("separator", "/" if is_default else ".")
    return _Encoding(shape, chunk, dtype, codec, is_shard, "c" if is_default else "", separator)


def _check_array(shape: Any, chunk: Any, dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if dtype not in ITEM_BYTES:
        raise UserError(f"its dtype {str(dtype)[:40]!r} is not supported")
    if not are_sizes(shape) or not are_sizes(chunk) or len(shape) != len(chunk) or 0 in chunk or len(shape) > 32:
        raise UserError(
            f"the shape {str(shape)[:40]} and the chunk shape {str(chunk)[:40]} are invalid or differ in rank"
        )
    return tuple(shape), tuple(chunk)


def _chunk_ranges(store: Store, name: str, leaf: LeafInfo, encoding: _Encoding) -> tuple[ByteRange, ...] | None:
    """Return the byte range of each chunk, in order; None if tensorstore must read the array.

    The range of an uncompressed chunk excludes the padding after the end of the leaf.
    """
    if encoding.codec == "other":
        return None
    if not leaf.elements:
        return ()
    chunk = encoding.chunk
    count = -(-leaf.shape[0] // chunk[0]) if leaf.shape else 1
    if chunk[1:] != leaf.shape[1:] or count > _MAX_CHUNKS:
        return None
    chunk_nbytes = LeafInfo(chunk, leaf.dtype).nbytes
    ranges = []
    for row in range(count):
        stored = store.values.get(f"{name}/{encoding.chunk_key(row)}")
        if not isinstance(stored, ByteRange):
            return None
        length = _length_in_shard(stored) if encoding.is_shard else stored.nbytes
        if length is None:
            return None
        if encoding.codec == "raw":
            if length != chunk_nbytes:
                return None
            length = min(chunk_nbytes, leaf.nbytes - row * chunk_nbytes)
        ranges.append(ByteRange(stored.path, stored.offset, length))
    return tuple(ranges)


def _length_in_shard(shard: ByteRange) -> int | None:
    """Return the length of a shard's only chunk; None if the shard is not the chunk followed by its index."""
    if shard.nbytes < _SHARD_INDEX_BYTES:
        return None
    with shard.path.open("rb") as file:
        file.seek(shard.offset + shard.nbytes - _SHARD_INDEX_BYTES)
        index = file.read(16)
    offset, length = (int.from_bytes(part, "little") for part in (index[:8], index[8:]))
    return length if (offset, length) == (0, shard.nbytes - _SHARD_INDEX_BYTES) else None


def _url(directory: Path) -> str:
    """Return the URL of a directory for tensorstore."""
    scheme, _, name = (str(directory) if is_bucket(directory) else f"file://{directory}").partition("://")
    return f"{scheme}://{urllib.parse.quote(name)}/"


def open_store(directory: Path, fills_missing: bool) -> Store:
    """List the files of a tree's directory, or the values of its OCDBT database if there is one.

    Args:
        directory: The tree's directory.
        fills_missing: Whether an absent chunk is read as zeros.

    Raises:
        DamageError: The database is corrupt.
        StorageError: It cannot be read.
        UserError: It refers to a file outside its directory.
    """
    sizes = file_sizes(directory)
    values: dict[str, ByteRange | bytes] = {}
    if directory / "manifest.ocdbt" not in sizes:
        values |= {path.relative_to(directory).as_posix(): ByteRange(path, 0, size) for path, size in sizes.items()}
        return Store(directory, False, values, fills_missing)
    import tensorstore as ts

    try:
        base = ts.KvStore.open(_url(directory)).result()
        versions = ts.ocdbt.dump(base).result()["versions"]
        nodes = [versions[-1]["root"]["location"]] if versions else []
        while nodes:
            for entry in ts.ocdbt.dump(base, nodes.pop()).result()["entries"]:
                if "location" in entry:
                    nodes.append(entry["location"])
                else:
                    key, value = entry["key"], _parse_value(directory, entry)
                    if isinstance(value, bytes) or value.offset + value.nbytes <= sizes.get(value.path, 0):
                        values[key.decode() if isinstance(key, bytes) else str(key)] = value
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        hint = "; fetch it again" if is_damage(error) else ""
        message = f"{directory}: its database cannot be read: {error_line(error)[:120]}{hint}"
        raise as_read_error(error, message) from error
    return Store(directory, True, values, fills_missing)


def _parse_value(directory: Path, entry: Mapping[str, Any]) -> ByteRange | bytes:
    if "inline_value" in entry:
        return entry["inline_value"]
    # The format is value:<subdirectory of the database>:<file>:<offset>:<length>.
    _, subdirectory, file, offset, length = str(entry["indirect_value"]).replace("value::", "value:/:").split(":")
    path = directory / subdirectory.lstrip("/") / file
    if ".." in Path(subdirectory, file).parts or file.startswith("/"):
        raise UserError(f"a value is stored outside the checkpoint, in {str(path)[:80]}")
    return ByteRange(path, int(offset), int(length))
