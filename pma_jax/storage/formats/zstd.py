"""Leaves that are stored as zstd frames, decoded block by block into a buffer that is used again.

tensorstore decodes a chunk, which Orbax makes as large as the array, into fresh memory: its page faults cost as much as
the decoding, and a leaf of every checkpoint at once does not fit. Used where the zstandard package is installed.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

from pma_jax.storage.formats.source import ByteRange

# A frame may ask for any window; zstd's levels up to 19 ask for 8 MiB at most.
_LARGEST_WINDOW_BYTES = 2**25
# What one decoder takes for frames as Orbax writes them (levels 1 and 3).
DECODER_BYTES = 5 * 2**19


@dataclass(frozen=True)
class ZstdFrames:
    """A leaf's bytes as zstd frames, in order.

    Attributes:
        byte_ranges: where each frame lies; more bytes may follow it there.
        chunk_nbytes: what each frame decodes to; the last may be padded beyond the leaf.
    """

    byte_ranges: tuple[ByteRange, ...]
    chunk_nbytes: int


def is_available() -> bool:
    """Whether frames can be decoded here."""
    return importlib.util.find_spec("zstandard") is not None


class ZstdReader:
    """Reads a leaf from its first byte to its last; to be closed."""

    def __init__(self, frames: ZstdFrames):
        self._frames = frames
        self._next = 0
        self._left = 0
        self._file: Any = None
        self._stream: Any = None

    def read(self, into: np.ndarray) -> None:
        """Fills a uint8 array with the leaf's next bytes.

        Raises:
            ValueError: a frame is damaged or too short.
        """
        import zstandard  # pyrefly: ignore

        filled = 0
        while filled < len(into):
            if not self._left:
                self._open()
            wanted = min(len(into) - filled, self._left)
            try:
                got = self._stream.readinto(into[filled : filled + wanted].data)
            except zstandard.ZstdError as error:
                raise ValueError(f"{self._file.name}: a compressed chunk is damaged: {str(error)[:100]}") from None
            if not got:
                raise ValueError(f"{self._file.name}: a compressed chunk is too short; the file is damaged")
            filled, self._left = filled + got, self._left - got

    def _open(self) -> None:
        import zstandard  # pyrefly: ignore

        self.close()
        byte_range = self._frames.byte_ranges[self._next]
        try:
            self._file = byte_range.path.open("rb", buffering=0)
        except FileNotFoundError:
            raise ValueError(f"{byte_range.path}: disappeared while it was needed") from None
        self._file.seek(byte_range.offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(self._file, read_size=2**17, closefd=False)
        self._next, self._left = self._next + 1, self._frames.chunk_nbytes

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
