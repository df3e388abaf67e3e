"""Plan uncompressed zarr 2 arrays in plain files, in which each byte has a known offset.

Because no database must be kept consistent, threads, processes and a resumed merge can write them in any order.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.digests import SEGMENT_ELEMENTS
from pma_jax.storage.formats.source import ML_DTYPES, ByteRange, LeafInfo

# Small enough that a host which restores its shard reads few other bytes; large enough for the disk's full rate.
CHUNK_BYTES = 64 * 2**20


class RawArray(NamedTuple):
    """The files of one array.

    Attributes:
        metadata: Path of its `.zarray` file, and the content.
        chunk: The shape of a chunk.
        byte_ranges: Where its elements are written, in order.
        sizes: Path -> size in bytes of each chunk's file; the last may be padded.
    """

    metadata: tuple[str, bytes]
    chunk: tuple[int, ...]
    byte_ranges: tuple[ByteRange, ...]
    sizes: dict[str, int]


def plan_array(directory: str, leaf: LeafInfo, separator: str = ".", writers: int = 1) -> RawArray:
    """Plan the files of an array.

    Args:
        directory: The array's directory.
        leaf: Its shape and dtype.
        separator: Text between the indexes in the names of its chunks.
        writers: Number of processes that write it, each of them complete chunks.
    """
    chunk = _chunk_shape(leaf) if writers == 1 else _shared_chunk_shape(leaf, writers)
    ranges = tuple(_chunk_ranges(directory, leaf, chunk, separator))
    metadata = {
        "zarr_format": 2,
        "shape": list(leaf.shape),
        "chunks": list(chunk),
        "dtype": _zarr_dtype(leaf.dtype),
        "compressor": None,
        "dimension_separator": separator,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    sizes = {str(part.path): LeafInfo(chunk, leaf.dtype).nbytes for part in ranges}
    return RawArray((f"{directory}/.zarray", json_bytes(metadata)), chunk, ranges, sizes)


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def check_name(name: str) -> None:
    """Check that a leaf's name can be a path.

    Raises:
        UserError: It cannot.
    """
    parts = name.split("/")
    if "\0" in name or any(part in {"", ".", ".."} or len(part.encode()) > 240 for part in parts):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a directory; write it as safetensors (--format safetensors)"
        )


def check_paths(paths: Sequence[str]) -> None:
    """Check that no file is also a directory: a leaf's name may contain a slash, and continue another leaf's name.

    Raises:
        UserError: One is.
    """
    folders = {str(parent) for path in paths for parent in Path(path).parents}
    if clash := next((path for path in paths if path in folders), None):
        raise UserError(
            f"{clash[:80]!r} would be a file and a directory; write the leaves as safetensors (--format safetensors)"
        )


def _chunk_shape(leaf: LeafInfo) -> tuple[int, ...]:
    """Return the shape of a chunk of complete rows of the leading axis, so that it is a contiguous part of the leaf."""
    if not leaf.shape or not leaf.elements:
        return tuple(max(1, size) for size in leaf.shape)
    rows = leaf.shape[0]
    count = min(rows, max(1, -(-leaf.nbytes // CHUNK_BYTES)))
    # A number of chunks that divides the rows avoids padding. If there is none near `count` (the rows may be prime), a
    # padded last chunk costs less than one file per row.
    exact = next((parts for parts in range(count, min(rows, 4 * count) + 1) if rows % parts == 0), count)
    return (-(-rows // exact), *leaf.shape[1:])


def _shared_chunk_shape(leaf: LeafInfo, writers: int) -> tuple[int, ...]:
    """Return a chunk such that a leaf has one for each writer, if these can be complete segments of its digest.

    Then no process needs another's values to hash its own. Otherwise one process writes the leaf.
    """
    chunk = _chunk_shape(leaf)
    row_elements = math.prod(leaf.shape[1:])
    if not leaf.shape or not leaf.elements or leaf.elements < 2 * SEGMENT_ELEMENTS:
        return chunk
    step = SEGMENT_ELEMENTS // math.gcd(row_elements, SEGMENT_ELEMENTS)
    steps = -(-leaf.shape[0] // step)
    count = max(writers, -(-leaf.nbytes // CHUNK_BYTES))
    return (step * max(1, steps // count), *leaf.shape[1:]) if steps > 1 else chunk


def _zarr_dtype(dtype: str) -> str:
    """Return zarr 2's code of a dtype. Those that NumPy lacks (bfloat16) have their name, as in tensorstore."""
    return dtype if dtype in ML_DTYPES else np.dtype(dtype).str


def _chunk_ranges(folder: str, leaf: LeafInfo, chunk: tuple[int, ...], separator: str) -> list[ByteRange]:
    if not leaf.elements:
        return []
    if not leaf.shape:
        return [ByteRange(Path(folder, "0"), 0, leaf.nbytes)]
    chunk_nbytes = LeafInfo(chunk, leaf.dtype).nbytes
    tail = f"{separator}0" * (len(leaf.shape) - 1)
    return [
        ByteRange(Path(folder, f"{number}{tail}"), 0, min(chunk_nbytes, leaf.nbytes - start))
        for number, start in enumerate(range(0, leaf.nbytes, chunk_nbytes))
    ]
