"""Read the metadata of zarr arrays as Orbax stores them: zarr 2 or 3, in plain files or in an OCDBT database.

In all four layouts, an uncompressed chunk of complete rows is a contiguous part of a leaf, which is read as a byte
range of a file. If such chunks are zstd frames, they can also be decoded sequentially. tensorstore reads all others.
"""

import itertools
import math
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.runtime.failures import as_read_error, is_damage
from pma_jax.storage.formats import zarr_metadata
from pma_jax.storage.formats.source import ByteRange, LeafInfo
from pma_jax.storage.formats.zarr_metadata import Encoding
from pma_jax.storage.formats.zstd import ChunkGrid, ZstdFrames
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.storage.paths import file_sizes, is_bucket, is_utf8, name_file

# Arrays with more chunks are read by tensorstore, which needs no list of chunks.
_MAX_CHUNKS = 2**16
# Untrusted metadata may claim any shape; no leaf of a real model is larger.
_MAX_ARRAY_BYTES = 2**44
_MAX_METADATA_BYTES = 2**20
# The index of a shard with one chunk: its offset, its length (8 bytes each) and the checksum of both (4 bytes).
_SHARD_INDEX_BYTES = 20
# A chunk's key, as zarr 2 ("name/0.1", "name/0/1") and zarr 3 ("name/c/0/1", "name/c") write it, with the array's name.
_CHUNK_KEY = re.compile(r"(.+?)(?:/c(?:/\d+)*|(?:/\d+(?:\.\d+)*)+)")


@dataclass(frozen=True)
class Store:
    """Storage of the arrays of one tree: a directory, or an OCDBT database.

    Attributes:
        directory: The tree's directory.
        is_ocdbt: Whether an OCDBT database holds the arrays, instead of one directory per array.
        values: Key (a relative path, or a key of the database) -> byte range or inline value. Values whose file is
            missing or too short are absent.
        damaged: Keys of the database whose file is missing or too short.
        stores_all_chunks: Whether the writer stores chunks that equal the fill value; None if it is not known.
    """

    directory: Path
    is_ocdbt: bool
    values: Mapping[str, ByteRange | bytes]
    damaged: frozenset[str]
    stores_all_chunks: bool | None

    @property
    def fills_absent(self) -> bool:
        """Whether an absent chunk is read as the fill value; otherwise the checkpoint is not complete.

        A database is committed as a whole, so that its writer left out what it does not have. A directory from which a
        file is missing may be an incomplete copy.
        """
        return self.is_ocdbt and not self.stores_all_chunks

    def array_names(self) -> list[str]:
        """List the names of the arrays: each directory or key prefix that has zarr metadata."""
        return sorted({key.rsplit("/", 1)[0] for key in self.values if key.endswith(("/.zarray", "/zarr.json"))})

    def names_without_metadata(self) -> list[str]:
        """List the names of the arrays that have chunks and no zarr metadata, which are lost from `array_names`."""
        known = set(self.array_names())
        matches = [match for key in self.values if (match := _CHUNK_KEY.fullmatch(key))]
        lost = (
            match for match in matches if not any(str(parent) in known for parent in PurePosixPath(match[0]).parents)
        )
        return sorted({match[1] for match in lost})

    def read_metadata(self, key: str) -> bytes | None:
        """Read a value of less than 1 MiB; None if it is absent or larger."""
        value = self.values.get(key)
        if not isinstance(value, ByteRange):
            return value
        if value.nbytes >= _MAX_METADATA_BYTES:
            return None
        with name_file(value.path), value.path.open("rb", buffering=max(2, value.nbytes)) as file:
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
        grid: Where its chunks are, if they are not rows but can be decoded without tensorstore; else None.
        spec: tensorstore spec of the array.
        absent_chunks: Number of chunks that are read as the fill value, because the writer leaves such chunks out.
    """

    leaf: LeafInfo
    byte_ranges: tuple[ByteRange, ...] | None
    zstd_frames: ZstdFrames | None
    grid: ChunkGrid | None
    spec: Mapping[str, Any]
    absent_chunks: int


def read_array_layout(store: Store, name: str) -> ArrayLayout:
    """Read the zarr metadata of an array and locate its chunks; its values are not read.

    Raises:
        DamageError: The array or one of its chunks is missing, or its metadata is corrupt.
        UserError: Its metadata is not supported, or its name is not UTF-8.
    """
    what = f"{store.directory}: {name[:80]!r}"
    if not is_utf8(name):
        raise UserError(f"{what}: its name is not UTF-8 text, as the JSON files are that list it: rename it")
    driver, parse, text = "zarr", zarr_metadata.parse_v2, store.read_metadata(f"{name}/.zarray")
    if text is None:
        driver, parse, text = "zarr3", zarr_metadata.parse_v3, store.read_metadata(f"{name}/zarr.json")
    if text is None:
        raise DamageError(f"{what}: its array is missing; the checkpoint is not complete, fetch or save it again")
    metadata = parse_untrusted_json(text, what)
    try:
        encoding = parse(metadata)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DamageError(f"{what}: its zarr metadata is corrupt: {error_line(error)[:120]}") from None
    shape, chunk, dtype = encoding.shape, encoding.chunk, encoding.dtype
    leaf = LeafInfo(shape, dtype, max(1, chunk[0] * math.prod(shape[1:])) if shape else 1)
    if leaf.nbytes > _MAX_ARRAY_BYTES:
        raise UserError(f"{what}: claims the shape {str(list(shape))[:80]}; no array is that large, it is corrupt")
    absent_chunks = _check_chunks(store, what, name, encoding)
    spec = {
        "driver": driver,
        "kvstore": {"driver": "ocdbt", "base": _url(store.directory), "path": f"{name}/"}
        if store.is_ocdbt
        else _url(store.directory / name),
        "metadata": metadata,
        "assume_metadata": True,
        # Otherwise a missing chunk is an error: tensorstore would return the fill value for it.
        "fill_missing_data_reads": store.fills_absent,
    }
    chunks = _chunk_ranges(store, what, name, leaf, encoding)
    if chunks is None:
        return ArrayLayout(leaf, None, None, _chunk_grid(store, name, leaf, encoding), spec, absent_chunks)
    if encoding.codec == "raw":
        return ArrayLayout(LeafInfo(shape, dtype), chunks, None, None, spec, absent_chunks)
    frames = ZstdFrames(chunks, LeafInfo(chunk, dtype).nbytes, leaf.nbytes) if leaf.elements else None
    return ArrayLayout(leaf, None, frames, None, spec, absent_chunks)


def _check_chunks(store: Store, what: str, name: str, encoding: Encoding) -> int:
    """Check that the chunks of an array are stored, and return the number of those that are not but need not be.

    Raises:
        DamageError: A chunk is missing or has the wrong size.
    """
    counts = [-(-size // step) for size, step in zip(encoding.shape, encoding.chunk, strict=True)]
    count, absent, first_absent = math.prod(counts), 0, ""
    if count > _MAX_CHUNKS:
        return 0  # tensorstore refuses an absent chunk when it reads it
    chunk_nbytes = LeafInfo(encoding.chunk, encoding.dtype).nbytes
    is_fixed_size = encoding.codec == "raw" and not encoding.is_shard
    for indexes in itertools.product(*map(range, counts)):
        key = f"{name}/{encoding.chunk_key(indexes)}"
        value = store.values.get(key)
        if value is None:
            absent, first_absent = absent + 1, first_absent or key
        elif is_fixed_size:
            nbytes = value.nbytes if isinstance(value, ByteRange) else len(value)
            if nbytes != chunk_nbytes:
                raise DamageError(
                    f"{what}: its chunk {key} has {nbytes} bytes instead of {chunk_nbytes}; it is corrupt, fetch or "
                    "save it again"
                )
        if value is None and key in store.damaged:
            raise DamageError(
                f"{what}: the file that holds its chunk {key} is missing or cut short; fetch or save it again"
            )
    if absent and not store.fills_absent:
        hint = (
            ""
            if store.stores_all_chunks
            else "; or if its writer leaves out chunks that hold only the fill value, restore and save it with a "
            "current Orbax, which stores them"
        )
        raise DamageError(
            f"{what}: {absent} of its {count} chunks are missing, the first is {first_absent}; the checkpoint is not "
            f"complete, fetch or save it again{hint}"
        )
    return absent


def _chunk_ranges(
    store: Store, what: str, name: str, leaf: LeafInfo, encoding: Encoding
) -> tuple[ByteRange, ...] | None:
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
        key = f"{name}/{encoding.chunk_key((row, *[0] * (len(chunk) - 1)) if chunk else ())}"
        stored = store.values.get(key)
        if not isinstance(stored, ByteRange):
            return None
        length = _length_in_shard(stored) if encoding.is_shard else stored.nbytes
        if length is None:
            return None
        if encoding.codec == "raw":
            if length != chunk_nbytes:
                raise DamageError(
                    f"{what}: its chunk {key} has {length} bytes instead of {chunk_nbytes}; it is corrupt, fetch or "
                    "save it again"
                )
            length = min(chunk_nbytes, leaf.nbytes - row * chunk_nbytes)
        ranges.append(ByteRange(stored.path, stored.offset, length))
    return tuple(ranges)


def _chunk_grid(store: Store, name: str, leaf: LeafInfo, encoding: Encoding) -> ChunkGrid | None:
    """Locate all chunks of an array whose chunks are not complete rows; None if tensorstore must read it."""
    counts = [-(-size // step) for size, step in zip(leaf.shape, encoding.chunk, strict=True)]
    if encoding.codec == "other" or not counts or not leaf.elements or math.prod(counts) > _MAX_CHUNKS:
        return None
    ranges = []
    for indexes in itertools.product(*map(range, counts)):
        stored = store.values.get(f"{name}/{encoding.chunk_key(indexes)}")
        if not isinstance(stored, ByteRange):
            return None
        length = _length_in_shard(stored) if encoding.is_shard else stored.nbytes
        if length is None:
            return None
        ranges.append(ByteRange(stored.path, stored.offset, length))
    return ChunkGrid(tuple(encoding.chunk), tuple(ranges), encoding.codec == "raw")


def _length_in_shard(shard: ByteRange) -> int | None:
    """Return the length of a shard's only chunk; None if the shard is not the chunk followed by its index."""
    if shard.nbytes < _SHARD_INDEX_BYTES:
        return None
    with name_file(shard.path), shard.path.open("rb", buffering=_SHARD_INDEX_BYTES) as file:
        file.seek(shard.offset + shard.nbytes - _SHARD_INDEX_BYTES)
        index = file.read(16)
    offset, length = (int.from_bytes(part, "little") for part in (index[:8], index[8:]))
    return length if (offset, length) == (0, shard.nbytes - _SHARD_INDEX_BYTES) else None


def _url(directory: Path) -> str:
    """Return the URL of a directory for tensorstore."""
    scheme, _, name = (str(directory) if is_bucket(directory) else f"file://{directory}").partition("://")
    return f"{scheme}://{urllib.parse.quote(name)}/"


def open_store(directory: Path, stores_all_chunks: bool | None) -> Store:
    """List the files of a tree's directory, or the values of its OCDBT database if there is one.

    Args:
        directory: The tree's directory.
        stores_all_chunks: Whether the writer stores chunks that equal the fill value; None if it is not known.

    Raises:
        DamageError: The database is corrupt.
        StorageError: It cannot be read.
        UserError: It refers to a file outside its directory.
    """
    sizes = file_sizes(directory)
    values: dict[str, ByteRange | bytes] = {}
    damaged: set[str] = set()
    if directory / "manifest.ocdbt" not in sizes:
        values |= {path.relative_to(directory).as_posix(): ByteRange(path, 0, size) for path, size in sizes.items()}
        return Store(directory, False, values, frozenset(), stores_all_chunks)
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
                    key = entry["key"].decode() if isinstance(entry["key"], bytes) else str(entry["key"])
                    value = _parse_value(directory, entry)
                    if isinstance(value, bytes) or value.offset + value.nbytes <= sizes.get(value.path, 0):
                        values[key] = value
                    else:
                        damaged.add(key)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        hint = "; fetch it again" if is_damage(error) else ""
        message = f"{directory}: its database cannot be read: {error_line(error)[:120]}{hint}"
        raise as_read_error(error, message) from error
    return Store(directory, True, values, frozenset(damaged), stores_all_chunks)


def _parse_value(directory: Path, entry: Mapping[str, Any]) -> ByteRange | bytes:
    if "inline_value" in entry:
        return entry["inline_value"]
    # The format is value:<subdirectory of the database>:<file>:<offset>:<length>.
    _, subdirectory, file, offset, length = str(entry["indirect_value"]).replace("value::", "value:/:").split(":")
    path = directory / subdirectory.lstrip("/") / file
    if ".." in Path(subdirectory, file).parts or file.startswith("/"):
        raise UserError(f"a value is stored outside the checkpoint, in {str(path)[:80]}")
    return ByteRange(path, int(offset), int(length))
