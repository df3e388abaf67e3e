"""Decode leaves that are stored as zstd frames block by block, into a buffer that the caller reuses.

tensorstore instead decodes a complete chunk, which Orbax makes as large as the array, into newly allocated memory. The
page faults cost as much as the decoding, and the chunks of one leaf from all checkpoints together may exceed memory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.source import ByteRange

# A frame may request a window of any size; zstd's levels up to 19 use at most 8 MiB.
_MAX_WINDOW_BYTES = 2**25
# Memory of one decoder for frames as Orbax writes them (levels 1 and 3).
DECODER_BYTES = 5 * 2**19


@dataclass(frozen=True)
class ZstdFrames:
    """A leaf's bytes as consecutive zstd frames.

    Attributes:
        byte_ranges: For each frame, a range that starts with it; other bytes may follow the frame in the range.
        chunk_nbytes: Decoded size of each frame in bytes; the last frame may be padded beyond the end of the leaf.
    """

    byte_ranges: tuple[ByteRange, ...]
    chunk_nbytes: int


class ZstdReader:
    """Sequential decoder of one leaf; call `close` after use."""

    def __init__(self, frames: ZstdFrames):
        self._frames = frames
        self._next_frame = 0
        self._remaining_bytes = 0  # of the current frame
        self._file: Any = None
        self._stream: Any = None

    def read(self, into: np.ndarray) -> None:
        """Fill a uint8 array with the leaf's next bytes.

        Raises:
            UserError: A frame is corrupt or too short.
        """
        import zstandard  # pyrefly: ignore

        filled = 0
        while filled < len(into):
            if not self._remaining_bytes:
                self._open_next()
            target = into[filled : filled + self._remaining_bytes].data
            try:
                count = self._stream.readinto(target)
            except zstandard.ZstdError as error:
                raise UserError(f"{self._file.name}: a compressed chunk is corrupt: {str(error)[:100]}") from None
            if not count:
                raise UserError(f"{self._file.name}: a compressed chunk is too short; the file is corrupt")
            filled, self._remaining_bytes = filled + count, self._remaining_bytes - count

    def _open_next(self) -> None:
        import zstandard  # pyrefly: ignore

        self.close()
        frame = self._frames.byte_ranges[self._next_frame]
        try:
            self._file = frame.path.open("rb", buffering=0)
        except FileNotFoundError:
            raise UserError(f"{frame.path}: no such file; was it deleted or moved while it was in use?") from None
        self._file.seek(frame.offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(self._file, read_size=2**17, closefd=False)
        self._next_frame, self._remaining_bytes = self._next_frame + 1, self._frames.chunk_nbytes

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
