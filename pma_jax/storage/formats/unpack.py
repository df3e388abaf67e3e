"""Unpack a leaf whose chunks are not complete rows: decode it box by box, and write its bytes in C order to a file.

A range of rows of such a leaf (split along its second axis, for example) needs every chunk. Reading it row by row would
decode each chunk many times, or hold the complete leaf in memory; with its bytes in a file, it is read sequentially.
"""

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pma_jax.storage.formats.byte_ranges import write_all
from pma_jax.storage.formats.orbax_read import read_box
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.paths import name_file


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
    leaf, width = source.leaves[name], ITEM_BYTES[source.leaves[name].dtype]
    box = box_shape(source, name, max_bytes)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for start in itertools.product(*map(range, itertools.repeat(0), leaf.shape, box)):
            stop = tuple(min(s + b, size) for s, b, size in zip(start, box, leaf.shape, strict=True))
            data = read_box(source, name, tuple(map(slice, start, stop)))
            for offset, run in _contiguous_runs(data, start, leaf.shape):
                with name_file(path):
                    write_all(descriptor, run, offset * width)
    finally:
        os.close(descriptor)


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
