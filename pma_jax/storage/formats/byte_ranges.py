"""Read and write byte ranges that span one or several files, directly between files and NumPy buffers.

Files are not memory-mapped.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pma_jax.config.errors import DamageError
from pma_jax.storage.formats.source import ByteRange
from pma_jax.storage.paths import RangeReader, is_bucket, name_file, open_descriptor

OpenFile = int | RangeReader
_MIN_PREFETCHED_BYTES = 2**17  # the kernel reads this much ahead of sequential reads


class OpenFiles:
    """The open files of one thread. They stay open from one leaf to the next if both are stored in the same files.

    Only the files of one leaf at a time are open, so that they are few even if a checkpoint has many.

    Args:
        flags: Flags of `os.open`, such as `os.O_RDONLY`.
    """

    def __init__(self, flags: int):
        self._flags = flags
        self._files: dict[Path, OpenFile] = {}

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self.switch_to([])

    def switch_to(self, paths: Sequence[Path]) -> Mapping[Path, OpenFile]:
        """Open the files of a leaf, close the others, and return the descriptors.

        The value for an object in a bucket is a new `RangeReader` instead of a descriptor.

        Args:
            paths: The files; a path may occur several times.

        Raises:
            FileNotFoundError: A file does not exist.
            UserError: A file is not a regular file.
        """
        wanted = dict.fromkeys(paths)
        for path in self._files.keys() - wanted.keys():
            _close(self._files.pop(path))
        for path in wanted:
            if is_bucket(path):
                self._files[path] = RangeReader(path)
            elif path not in self._files:
                self._files[path] = open_descriptor(path, self._flags)
        return self._files


def _close(file: OpenFile) -> None:
    if isinstance(file, int):
        os.close(file)


@contextmanager
def open_files(paths: Sequence[Path], flags: int) -> Iterator[Mapping[Path, OpenFile]]:
    """Open the files of one leaf for the duration of the `with` block, as `OpenFiles.switch_to` does.

    Raises:
        DamageError: A file does not exist, or the `with` block raised FileNotFoundError.
        UserError: A file is not a regular file.
    """
    with refuse_missing_files(), OpenFiles(flags) as files:
        yield files.switch_to(paths)


@contextmanager
def refuse_missing_files() -> Iterator[None]:
    """Raise DamageError instead of a FileNotFoundError of the `with` block."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamageError(f"{error.filename}: no such file; was it deleted or moved while it was in use?") from None


def slice_ranges(ranges: Sequence[ByteRange], start: int, stop: int) -> Iterator[ByteRange]:
    """Yield bytes [start, stop) of the concatenation of `ranges`, as one range per file part, in order."""
    begin = 0
    for part in ranges:
        end = begin + part.nbytes
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield ByteRange(part.path, part.offset + low - begin, high - low)
        begin = end


def read_range(files: Mapping[Path, OpenFile], ranges: Sequence[ByteRange], start: int, into: np.ndarray) -> None:
    """Read bytes [start, start + len(into)) of the concatenated `ranges` into a uint8 array.

    Raises:
        DamageError: A file is shorter than its header states.
    """
    filled = 0
    for part in slice_ranges(ranges, start, start + len(into)):
        file, offset, remaining = files[part.path], part.offset, part.nbytes
        while remaining:
            target = into[filled : filled + remaining].data
            with name_file(part.path):
                count = os.preadv(file, [target], offset) if isinstance(file, int) else file.read_into(target, offset)
            if not count:
                raise DamageError(
                    f"{part.path}: ends at byte {offset}, {remaining} bytes early; it changed or is cut short"
                )
            filled, offset, remaining = filled + count, offset + count, remaining - count
    assert filled == len(into), (filled, len(into))


def write_range(files: Mapping[Path, OpenFile], ranges: Sequence[ByteRange], start: int, data: np.ndarray) -> None:
    """Write a uint8 array to bytes [start, start + len(data)) of the concatenated `ranges`."""
    written = 0
    for part in slice_ranges(ranges, start, start + len(data)):
        file = files[part.path]
        assert isinstance(file, int), "outputs are written to a local disk"
        with name_file(part.path):
            write_all(file, data[written : written + part.nbytes].data, part.offset)
        written += part.nbytes
    assert written == len(data), (written, len(data))


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset of a file; one `os.pwrite` may write less, as on a disk that becomes full."""
    written, view = 0, memoryview(data)
    while written < len(view):
        written += os.pwrite(file, view[written:], offset + written)


def prefetch(files: Mapping[Path, OpenFile], ranges: Sequence[ByteRange], start: int, stop: int) -> None:
    """Announce that bytes [start, stop) of the concatenated `ranges` will be read, in order.

    The kernel reads those of a disk into its page cache, so that reading overlaps with the summing of blocks; systems
    without `posix_fadvise` do not, and what is short is read ahead of anyway. Those of a bucket are fetched in large
    parts.
    """
    for part in slice_ranges(ranges, start, stop):
        file = files[part.path]
        if isinstance(file, RangeReader):
            file.expect(part.offset, part.offset + part.nbytes)
        elif part.nbytes >= _MIN_PREFETCHED_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, part.offset, part.nbytes, os.POSIX_FADV_WILLNEED)
