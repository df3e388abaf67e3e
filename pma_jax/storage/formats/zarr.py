"""Arrays as Orbax stores them (zarr 2 or 3, in files or in an OCDBT database): shape, dtype, and where the bytes lie.

Uncompressed chunks of whole rows are plain runs of bytes, whichever of the four layouts holds them: those are read like
any file. What is compressed, or cut across rows, tensorstore decodes.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, LeafInfo, are_sizes
from pma_jax.storage.formats.zstd import ZstdFrames, is_available
from pma_jax.storage.json_files import parse_json
from pma_jax.storage.paths import is_bucket

# More chunks than this in one array are read through tensorstore, which does not list them.
_MOST_CHUNKS = 2**16
# A header may claim any shape; no leaf of a real model is larger.
_MOST_BYTES = 2**44
# The index of a shard of one chunk: its offset, its length (8 bytes each) and the checksum of both.
_INDEX_BYTES = 20
_V2_DTYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}


@dataclass(frozen=True)
class Store:
    """Where the arrays of a tree are kept.

    Attributes:
        directory: the tree's directory.
        is_ocdbt: in an OCDBT database rather than in files.
        values: key -> (its place, None) or (None, its inline value), for an OCDBT database; empty for files.
        fills_missing: an absent chunk means zeros; otherwise it means damage.
        sizes: what is known of the sizes of objects in a bucket.
    """

    directory: Path
    is_ocdbt: bool
    values: Mapping[str, tuple[ByteRange | None, bytes | None]]
    fills_missing: bool
    sizes: dict[Path, int | None] = field(default_factory=dict)

    def _size(self, path: Path) -> int | None:
        """The size of a file in bytes, None if there is none; asked once of a bucket, as each answer takes a while."""
        if not is_bucket(path):
            return path.stat().st_size if path.is_file() else None
        if path not in self.sizes:
            self.sizes[path] = path.stat().st_size if path.is_file() else None
        return self.sizes[path]

    def array_names(self) -> list[str]:
        """The names under which arrays are kept: those of their metadata, without its file name."""
        if self.is_ocdbt:
            names = list(self.values)
        else:
            found = itertools.chain(self.directory.glob("*/.zarray"), self.directory.glob("*/zarr.json"))
            names = [path.relative_to(self.directory).as_posix() for path in found]
        return sorted({name.rsplit("/", 1)[0] for name in names if name.endswith(("/.zarray", "/zarr.json"))})

    def text(self, key: str) -> bytes | None:
        """A small value, or None if there is none."""
        if not self.is_ocdbt:
            path = self.directory / key
            size = self._size(path)
            return path.read_bytes() if size is not None and size < 2**20 else None
        place, inline = self.values.get(key, (None, None))
        if place is None:
            return inline
        if place.nbytes >= 2**20 or self._size(place.path) is None:
            return None
        with place.path.open("rb") as file:
            file.seek(place.offset)
            return file.read(place.nbytes)

    def place(self, key: str) -> ByteRange | None:
        """Where a chunk lies, or None if it is absent, inline or shorter in the file than it should be."""
        if self.is_ocdbt:
            place = self.values.get(key, (None, None))[0]
            size = None if place is None else self._size(place.path)
            is_there = place is not None and size is not None and size >= place.offset + place.nbytes
            return place if is_there else None
        path = self.directory / key
        size = self._size(path)
        return None if size is None else ByteRange(path, 0, size)


@dataclass(frozen=True)
class Array:
    """One stored array.

    Attributes:
        leaf: shape, dtype and the elements of one row of chunks.
        byte_ranges: its bytes in order, if they lie plainly in files; else None.
        zstd_frames: its bytes in order as zstd frames, if they are, and if those can be decoded here; else None.
        spec: how tensorstore opens it.
    """

    leaf: LeafInfo
    byte_ranges: tuple[ByteRange, ...] | None
    zstd_frames: ZstdFrames | None
    spec: Mapping[str, Any]


def read_array(store: Store, name: str) -> Array:
    """Reads one array's metadata.

    Raises:
        ValueError: the array is missing, or its metadata is not what zarr allows; one line.
    """
    what = f"{store.directory}: {name[:80]!r}"
    driver, parse, text = "zarr", _parse_v2, store.text(f"{name}/.zarray")
    if text is None:
        driver, parse, text = "zarr3", _parse_v3, store.text(f"{name}/zarr.json")
    if text is None:
        raise ValueError(f"{what}: its array is missing; the checkpoint is not complete, fetch or save it again")
    metadata = parse_json(text, what)
    try:
        shape, chunk, dtype, coding, prefix, separator = parse(metadata)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{what}: its zarr metadata is damaged or unknown: {_line(error)}") from None
    chunk_elements = chunk[0] * math.prod(shape[1:]) if shape else 1
    leaf = LeafInfo(shape, dtype, max(1, chunk_elements))
    if leaf.nbytes > _MOST_BYTES:
        raise ValueError(f"{what}: claims the shape {str(list(shape))[:80]}; no array is that large, it is damaged")
    spec = {"driver": driver, "kvstore": _kvstore(store, name), "metadata": metadata, "assume_metadata": True}
    # An array that was cut off must not be read as zeros.
    spec["fill_missing_data_reads"] = store.fills_missing
    chunks = _chunks(store, name, leaf, chunk, (prefix, separator), coding) if coding.codec != "other" else None
    if chunks is None or coding.codec == "plain":
        return Array(leaf if chunks is None else LeafInfo(shape, dtype), chunks, None, spec)
    frames = ZstdFrames(chunks, LeafInfo(chunk, dtype).nbytes) if is_available() and leaf.elements else None
    return Array(leaf, None, frames, spec)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


@dataclass(frozen=True)
class _Coding:
    """How a chunk is stored: "plain", "zstd" or "other"; and whether as the only one of a shard, before its index."""

    codec: str
    is_shard: bool = False


_Parsed = tuple[tuple[int, ...], tuple[int, ...], str, _Coding, str, str]


def _parse_v2(metadata: Any) -> _Parsed:
    """(shape, chunk shape, dtype, coding, prefix of chunk keys, separator) of a .zarray."""
    code = metadata["dtype"]
    is_little = code[0] in "<|" or code in ITEM_BYTES
    dtype = code if code in ITEM_BYTES else _V2_DTYPES.get(code[1:])
    if not is_little or dtype is None:
        raise ValueError(f"its dtype {str(code)[:40]!r} is not supported")
    shape, chunk = _shapes(metadata["shape"], metadata["chunks"])
    compressor = metadata.get("compressor")
    codec = "plain" if compressor is None else "zstd" if compressor.get("id") == "zstd" else "other"
    if metadata.get("filters") or metadata.get("order") != "C":
        codec = "other"
    return shape, chunk, dtype, _Coding(codec), "", metadata.get("dimension_separator", ".")


def _parse_v3(metadata: Any) -> _Parsed:
    """The same of a zarr.json."""
    dtype = metadata["data_type"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"its dtype {str(dtype)[:40]!r} is not supported")
    shape, chunk = _shapes(metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"])
    codecs = metadata["codecs"]
    # Orbax wraps every chunk into a shard of one: its bytes come first, the index of the shard after them.
    is_shard = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if is_shard:
        inner = codecs[0]["configuration"]
        is_single = inner["chunk_shape"] == list(chunk) and inner.get("index_location", "end") == "end"
        has_checksum = [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
        codecs = inner["codecs"] if is_single and has_checksum else []
    codec = {("bytes",): "plain", ("bytes", "zstd"): "zstd"}.get(tuple(codec["name"] for codec in codecs), "other")
    if codec != "other" and ITEM_BYTES[dtype] > 1 and codecs[0].get("configuration", {}).get("endian") != "little":
        codec = "other"
    encoding = metadata["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    return shape, chunk, dtype, _Coding(codec, is_shard), "c" if is_default else "", separator


def _shapes(shape: Any, chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not are_sizes(shape) or not are_sizes(chunk) or len(shape) != len(chunk) or 0 in chunk or len(shape) > 32:
        raise ValueError(f"shape {str(shape)[:40]} and chunks {str(chunk)[:40]}")
    return tuple(shape), tuple(chunk)


def _chunks(
    store: Store, name: str, leaf: LeafInfo, chunk: tuple[int, ...], naming: tuple[str, str], coding: _Coding
) -> tuple[ByteRange, ...] | None:
    """Where each chunk lies; None if one is not whole rows, or not there as a run of bytes.

    Plain chunks are as long as what they hold of the leaf, compressed ones as long as they are stored.
    """
    prefix, separator = naming
    if not leaf.elements:
        return ()
    rows = leaf.shape[0] if leaf.shape else 1
    count = -(-rows // chunk[0]) if leaf.shape else 1
    if chunk[1:] != leaf.shape[1:] or count > _MOST_CHUNKS:
        return None
    chunk_nbytes = LeafInfo(chunk, leaf.dtype).nbytes
    found = []
    for number in range(count):
        indices = [str(number), *["0"] * (len(leaf.shape) - 1)] if leaf.shape else []
        key = separator.join([prefix, *indices] if prefix else indices) or "0"
        place = store.place(f"{name}/{key}")
        length = None if place is None else _inner_nbytes(place) if coding.is_shard else place.nbytes
        if place is None or length is None:
            return None
        if coding.codec == "plain":
            if length != chunk_nbytes:
                return None
            length = min(chunk_nbytes, leaf.nbytes - number * chunk_nbytes)
        found.append(ByteRange(place.path, place.offset, length))
    return tuple(found)


def _inner_nbytes(shard: ByteRange) -> int | None:
    """The length of a shard's only chunk, if its index says that it comes first and the index right after it."""
    if shard.nbytes < _INDEX_BYTES:
        return None
    with shard.path.open("rb") as file:
        file.seek(shard.offset + shard.nbytes - _INDEX_BYTES)
        index = file.read(16)
    offset, length = (int.from_bytes(part, "little") for part in (index[:8], index[8:]))
    return length if (offset, length) == (0, shard.nbytes - _INDEX_BYTES) else None


def _kvstore(store: Store, name: str) -> dict[str, Any]:
    if store.is_ocdbt:
        return {"driver": "ocdbt", "base": _url(store.directory), "path": f"{name}/"}
    if is_bucket(store.directory):
        bucket, _, below = str(store.directory).partition("://")[2].partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{below}/{name}/"}
    return {"driver": "file", "path": f"{store.directory}/{name}/"}


def _url(directory: Path) -> str:
    return f"{directory}/" if is_bucket(directory) else f"file://{directory}/"


def open_store(directory: Path, fills_missing: bool) -> Store:
    """Finds out how a tree's arrays are kept, and where an OCDBT database has its values.

    Raises:
        ValueError: the database is damaged, or points outside its directory.
    """
    if not (directory / "manifest.ocdbt").is_file():
        return Store(directory, False, {}, fills_missing)
    import tensorstore as ts

    values: dict[str, tuple[ByteRange | None, bytes | None]] = {}
    try:
        base = ts.KvStore.open(_url(directory)).result()
        versions = ts.ocdbt.dump(base).result()["versions"]
        nodes = [versions[-1]["root"]["location"]] if versions else []
        while nodes:
            for entry in ts.ocdbt.dump(base, nodes.pop()).result()["entries"]:
                if "location" in entry:
                    nodes.append(entry["location"])
                else:
                    values[_decoded(entry["key"])] = _value(directory, entry)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{directory}: its database cannot be read: {_line(error)}; fetch it again") from None
    return Store(directory, True, values, fills_missing)


def _decoded(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def _value(directory: Path, entry: Mapping[str, Any]) -> tuple[ByteRange | None, bytes | None]:
    if "inline_value" in entry:
        return None, entry["inline_value"]
    # value:<directory below the base>:<file>:<offset>:<length>
    _, below, file, offset, length = str(entry["indirect_value"]).replace("value::", "value:/:").split(":")
    path = directory / below.lstrip("/") / file
    if ".." in Path(below, file).parts or file.startswith("/"):
        raise ValueError(f"a value lies outside, in {str(path)[:80]}")
    return ByteRange(path, int(offset), int(length)), None
