"""Reading and writing runs of bytes that lie in one or several files, without copies and without mapping them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pma_jax.storage.formats.leaves import Extent
from pma_jax.storage.paths import RangeReader, is_bucket

File = int | RangeReader


@contextmanager
def opened(paths: Sequence[Path], flags: int) -> Iterator[Mapping[Path, File]]:
    """File descriptors of `paths` for the time of the block; few are open at once, however many files there are.

    An object in a bucket has a reader of ranges instead.

    Raises:
        ValueError: a file cannot be opened.
    """
    descriptors: dict[Path, File] = {}
    try:
        for path in paths:
            if path not in descriptors:
                descriptors[path] = RangeReader(path) if is_bucket(path) else os.open(path, flags | os.O_CLOEXEC)
        yield descriptors
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: disappeared while it was needed") from None
    finally:
        for descriptor in descriptors.values():
            if isinstance(descriptor, int):
                os.close(descriptor)


def pieces(extents: Sequence[Extent], start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
    """The parts of bytes [start, stop) of a leaf: (extent, offset in its file, length), in order."""
    begin = 0
    for extent in extents:
        end = begin + extent.nbytes
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield extent, extent.offset + low - begin, high - low
        begin = end


def read_run(descriptors: Mapping[Path, File], extents: Sequence[Extent], start: int, into: np.ndarray) -> None:
    """Reads bytes [start, start + len(into)) of a leaf into a uint8 array.

    Raises:
        ValueError: a file is shorter than its header said.
    """
    filled = 0
    for extent, offset, length in pieces(extents, start, start + len(into)):
        while length:
            part, file = into[filled : filled + length].data, descriptors[extent.path]
            got = os.preadv(file, [part], offset) if isinstance(file, int) else file.readinto(part, offset)
            if not got:
                raise ValueError(
                    f"{extent.path}: ends at byte {offset}, {length} bytes early; it changed or is cut short"
                )
            filled, offset, length = filled + got, offset + got, length - got
    assert filled == len(into), (filled, len(into))


def write_run(descriptors: Mapping[Path, File], extents: Sequence[Extent], start: int, data: np.ndarray) -> None:
    """Writes a uint8 array at bytes [start, start + len(data)) of a leaf."""
    written = 0
    for extent, offset, length in pieces(extents, start, start + len(data)):
        while length:
            file = descriptors[extent.path]
            assert isinstance(file, int), "a merge writes to a disk"
            put = os.pwrite(file, data[written : written + length].data, offset)
            written, offset, length = written + put, offset + put, length - put
    assert written == len(data), (written, len(data))


def prefetch(descriptors: Mapping[Path, File], extents: Sequence[Extent], start: int, stop: int) -> None:
    """Asks the system to read bytes [start, stop) of a leaf ahead; on a cold cache the disk works while we add."""
    if not hasattr(os, "posix_fadvise"):
        return
    for extent, offset, length in pieces(extents, start, stop):
        file = descriptors[extent.path]
        if isinstance(file, int):
            os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
