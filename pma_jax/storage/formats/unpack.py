"""Unpack a leaf whose chunks are not complete rows: decode it box by box, and write its bytes in C order to a file.

A range of rows of such a leaf (split along its second axis, for example) needs every chunk. Reading it row by row would
decode each chunk many times, or hold the complete leaf in memory; with its bytes in a file, it is read sequentially.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import DamageError
from pma_jax.storage.formats.byte_ranges import write_all
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource
from pma_jax.storage.formats.zarr_read import read_box
from pma_jax.storage.formats.zstd import ChunkGrid, ZstdFrames, ZstdReader, decoder_bytes, fetch_bytes
from pma_jax.storage.paths import RangeReader, is_bucket, name_file

# Adjacent chunks that are read at once, and the bytes of their lines that are held.
_GROUP_CHUNKS = 8
_BATCH_BYTES = 2**22


def chunk_shape(source: CheckpointSource, name: str) -> tuple[int, ...]:
    """Return the shape of the parts of a zarr array that are decoded at once."""
    metadata = source.tensorstore_specs[name]["metadata"]
    if "chunks" in metadata:
        return tuple(metadata["chunks"])
    codecs = metadata["codecs"]
    if codecs and codecs[0]["name"] == "sharding_indexed":
        return tuple(codecs[0]["configuration"]["chunk_shape"])
    return tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])


def box_shape(source: CheckpointSource, name: str, max_bytes: int) -> tuple[int, ...]:
    """Return the shape of the boxes in which a leaf is unpacked: several chunks, or one if it exceeds `max_bytes`."""
    leaf = source.leaves[name]
    box = [min(size, chunk) for size, chunk in zip(leaf.shape, chunk_shape(source, name), strict=True)]
    # Trailing axes first, so that long parts of the file are written at once.
    for axis in reversed(range(len(box))):
        fitting = max(1, max_bytes // (math.prod(box) * ITEM_BYTES[leaf.dtype]))
        box[axis] = min(leaf.shape[axis], box[axis] * min(fitting, -(-leaf.shape[axis] // box[axis])))
    return tuple(box)


def unpack_leaf(source: CheckpointSource, name: str, path: Path, max_bytes: int) -> None:
    """Write a leaf's little-endian bytes in C order to a new file.

    Args:
        source: The checkpoint.
        name: Name of the leaf; it has at least one axis and one element.
        path: The file to write.
        max_bytes: Largest box to decode at once, if a chunk is not larger.

    Raises:
        DamageError: The stored array is missing or corrupt.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        parts = _decode_grid if name in source.grids else _decode_boxes
        for start, data in parts(source, name, max_bytes):
            for offset, run in _contiguous_runs(data, start, source.leaves[name].shape):
                with name_file(path):
                    write_all(descriptor, run, offset * data.itemsize)
    finally:
        os.close(descriptor)


def grid_bytes(source: CheckpointSource, name: str) -> int:
    """Return the memory that unpacking a leaf of `source.grids` takes: decoders, and a batch of lines with its copy."""
    grid, width = source.grids[name], ITEM_BYTES[source.leaves[name].dtype]
    group = min(_GROUP_CHUNKS, -(-source.leaves[name].shape[-1] // grid.chunk[-1]))
    chunk_bytes = math.prod(grid.chunk) * width
    decoder = 0 if grid.is_raw else min(decoder_bytes(grid.byte_ranges[0]), chunk_bytes)
    read_ahead = RangeReader.READ_AHEAD_BYTES if is_bucket(source.path) else 0
    return group * (decoder + read_ahead) + 2 * min(
        max(_BATCH_BYTES, group * grid.chunk[-1] * width), group * chunk_bytes
    )


def _decode_boxes(source: CheckpointSource, name: str, max_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield (start, values) of boxes that cover a leaf, decoded by tensorstore."""
    leaf, box = source.leaves[name], box_shape(source, name, max_bytes)
    for start in itertools.product(*map(range, itertools.repeat(0), leaf.shape, box)):
        stop = tuple(min(s + b, size) for s, b, size in zip(start, box, leaf.shape, strict=True))
        yield start, read_box(source, name, tuple(map(slice, start, stop)))


def _decode_grid(source: CheckpointSource, name: str, max_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield (start, values) of boxes that cover a leaf: lines of the last axis, from chunks that are read as streams.

    Adjacent chunks along the last axis are read together, so that longer parts of the file are written at once.
    """
    leaf, grid = source.leaves[name], source.grids[name]
    width, chunk, shape = ITEM_BYTES[leaf.dtype], grid.chunk, leaf.shape
    counts = [-(-size // step) for size, step in zip(shape, chunk, strict=True)]
    lines, line_bytes = math.prod(chunk[:-1]), chunk[-1] * width
    for number in range(0, math.prod(counts), counts[-1]):
        corner = [i * step for i, step in zip(np.unravel_index(number, counts), chunk, strict=True)]
        for first in range(0, counts[-1], _GROUP_CHUNKS):
            group = grid.byte_ranges[number + first : number + min(first + _GROUP_CHUNKS, counts[-1])]
            batch = max(1, min(lines, min(_BATCH_BYTES, max_bytes) // (len(group) * line_bytes)))
            column = first * chunk[-1]
            columns = min(len(group) * chunk[-1], shape[-1] - column)
            with contextlib.ExitStack() as stack:
                readers = [stack.enter_context(_open_chunk(grid, part, lines * line_bytes)) for part in group]
                for line in range(0, lines, batch):
                    count = min(batch, lines - line)
                    joined = np.empty((count, len(group), line_bytes), np.uint8)
                    part = np.empty(count * line_bytes, np.uint8)
                    for position, reader in enumerate(readers):
                        reader.read(part)
                        joined[:, position] = part.reshape(count, line_bytes)
                    values = joined.reshape(count, -1).view(f"u{width}")[:, :columns]
                    yield from _place_lines(values, line, corner, column, chunk, shape)


def _place_lines(
    values: np.ndarray, line: int, corner: list[int], column: int, chunk: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield (start, values) of consecutive lines of a chunk, as boxes in the leaf, without the padding."""
    done, rows = 0, chunk[-2] if len(chunk) > 1 else 1
    while done < len(values):
        row = (line + done) % rows
        count = min(rows - row, len(values) - done)
        outer = np.unravel_index((line + done) // rows, chunk[:-2]) if len(chunk) > 2 else ()
        start = [c + int(i) for c, i in zip(corner, (*outer, row)[: len(chunk) - 1], strict=False)]
        block = values[done : done + count]
        done += count
        if len(chunk) > 1:
            block = block[: max(0, shape[-2] - start[-1])]
        if len(block) and all(s < size for s, size in zip(start, shape, strict=False)):
            box = block.reshape((1,) * (len(shape) - 2) + block.shape) if len(shape) > 1 else block[0]
            yield (*start, column), np.ascontiguousarray(box)


def _open_chunk(grid: ChunkGrid, part: ByteRange, nbytes: int) -> contextlib.closing:
    return contextlib.closing(
        _RawReader(part, nbytes) if grid.is_raw else ZstdReader(ZstdFrames((part,), nbytes, nbytes))
    )


class _RawReader:
    """Sequential reader of an uncompressed chunk."""

    def __init__(self, part: ByteRange, nbytes: int):
        if part.nbytes != nbytes:
            raise DamageError(f"{part.path}: a chunk has {part.nbytes} bytes instead of {nbytes}; the file is corrupt")
        self._path = part.path
        try:
            self._file: Any = part.path.open("rb", buffering=fetch_bytes(part) if is_bucket(part.path) else -1)
        except FileNotFoundError:
            raise DamageError(f"{part.path}: no such file; was it deleted or moved while it was in use?") from None
        self._file.seek(part.offset)

    def read(self, into: np.ndarray) -> None:
        """Fill a uint8 array with the chunk's next bytes.

        Raises:
            DamageError: The file has been cut short.
        """
        with name_file(self._path):
            count = self._file.readinto(into.data)
        if count < len(into):
            raise DamageError(f"{self._path}: a chunk is too short; the file is corrupt")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _contiguous_runs(
    data: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in elements, bytes) of each part of a box that is contiguous in an array of the given shape."""
    axes = len(shape)
    while axes > 1 and data.shape[axes - 1] == shape[axes - 1]:
        axes -= 1  # the trailing axes are complete
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for index in np.ndindex(*data.shape[: axes - 1]):
        first = (*(s + i for s, i in zip(start, index, strict=False)), *start[axes - 1 :])
        yield (
            sum(f * stride for f, stride in zip(first, strides, strict=True)),
            data[index].reshape(-1).view(np.uint8).data,
        )
