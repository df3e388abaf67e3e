"""Decode leaves that are stored as zstd frames block by block, into a buffer that the caller reuses.

tensorstore instead decodes a complete chunk, which Orbax makes as large as the array, into newly allocated memory. The
page faults cost as much as the decoding, and the chunks of one leaf from all checkpoints together may exceed memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import DamageError
from pma_jax.storage.formats.source import ByteRange
from pma_jax.storage.paths import RangeReader, is_bucket, name_file

# A frame may request a window of any size; zstd's levels up to 19 use at most 8 MiB.
_MAX_WINDOW_BYTES = 2**25
# The last bytes of a frame are decoded together with its end.
_TAIL_BYTES = 2**12
# Memory of a decoder in addition to its window, and the window of level 3, which Orbax uses.
_DECODER_BYTES, _DEFAULT_WINDOW_BYTES = 5 * 2**17, 2**21
_HEADER_BYTES = 18


@dataclass(frozen=True)
class ZstdFrames:
    """A leaf's bytes as consecutive zstd frames.

    Attributes:
        byte_ranges: For each frame, its range.
        chunk_nbytes: Decoded size of each frame in bytes; the last frame may be padded beyond the end of the leaf.
        nbytes: Decoded size of the leaf in bytes.
    """

    byte_ranges: tuple[ByteRange, ...]
    chunk_nbytes: int
    nbytes: int


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a leaf that are not complete rows.

    Attributes:
        chunk: Shape of a chunk; chunks are padded beyond the end of the leaf.
        byte_ranges: For each chunk, in C order of its index, where it is stored.
        is_raw: Whether chunks are stored as their bytes; else each is a zstd frame.
    """

    chunk: tuple[int, ...]
    byte_ranges: tuple[ByteRange, ...]
    is_raw: bool


def decoder_bytes(frame: ByteRange) -> int:
    """Return the memory that decoding a frame takes; that of Orbax's default level if its header cannot be read."""
    import zstandard  # pyrefly: ignore

    try:
        with frame.path.open("rb", buffering=_HEADER_BYTES if is_bucket(frame.path) else 0) as file:
            file.seek(frame.offset)
            window_bytes = zstandard.get_frame_parameters(file.read(_HEADER_BYTES)).window_size
    except (OSError, zstandard.ZstdError):  # the merge reports it
        window_bytes = _DEFAULT_WINDOW_BYTES
    return _DECODER_BYTES + min(window_bytes, _MAX_WINDOW_BYTES)


class _BoundedReader:
    """Reads at most `nbytes` bytes of a file."""

    def __init__(self, file: Any, path: Path, nbytes: int):
        self._file, self._path = file, path
        self._remaining_bytes = nbytes

    def read(self, nbytes: int) -> bytes:
        with name_file(self._path):
            data = self._file.read(min(nbytes, self._remaining_bytes))
        self._remaining_bytes -= len(data)
        return data


def fetch_bytes(chunk: ByteRange) -> int:
    """Return how many bytes of a chunk in a bucket to fetch at once: equal parts, so that none goes on behind it."""
    parts = max(1, -(-chunk.nbytes // RangeReader.READ_AHEAD_BYTES))
    return max(2, -(-chunk.nbytes // parts))


class ZstdReader:
    """Sequential decoder of one leaf; call `close` after use."""

    def __init__(self, frames: ZstdFrames):
        self._frames = frames
        self._next_frame = 0
        self._remaining_bytes = 0  # of the current frame
        self._unread_bytes = frames.nbytes  # of the leaf
        self._file: Any = None
        self._stream: Any = None

    def read(self, into: np.ndarray) -> None:
        """Fill a uint8 array with the leaf's next bytes.

        Raises:
            DamageError: A frame is corrupt, too short or too long.
        """
        filled = 0
        while filled < len(into):
            if not self._remaining_bytes:
                self._open_next()
            part = into[filled : filled + self._remaining_bytes]
            self._read_in_frame(part)
            filled, self._unread_bytes = filled + len(part), self._unread_bytes - len(part)
        if not self._unread_bytes:
            padding = np.empty(min(self._remaining_bytes, 2**16), np.uint8)
            while self._remaining_bytes:
                self._read_in_frame(padding[: self._remaining_bytes])

    def _read_in_frame(self, into: np.ndarray) -> None:
        """Fill `into` from the current frame; if it is the frame's last part, check that the frame ends there.

        The end of a frame also verifies its checksum, if it has one.
        """
        is_last = len(into) == self._remaining_bytes
        tail_bytes = min(len(into), _TAIL_BYTES) if is_last else 0
        body = into[: len(into) - tail_bytes]
        if self._decode(body) < len(body):
            raise DamageError(f"{self._file.name}: a compressed chunk is too short; the file is corrupt")
        if is_last:
            # With space for one more byte, the decoder goes on to the end of the frame, and beyond its expected length.
            tail = np.empty(tail_bytes + 1, np.uint8)
            count = self._decode(tail)
            if count != tail_bytes or self._has_more():
                problem = "short" if count < tail_bytes else "long"
                raise DamageError(f"{self._file.name}: a compressed chunk is too {problem}; the file is corrupt")
            into[len(body) :] = tail[:-1]
        self._remaining_bytes -= len(into)

    def _decode(self, into: np.ndarray) -> int:
        """Decode bytes until `into` is full or the frame ends, and return their number."""
        import zstandard  # pyrefly: ignore

        try:
            # Decodes to the end of the frame only; another call would go on behind it.
            return self._stream.readinto(into.data) if len(into) else 0
        except zstandard.ZstdError as error:
            raise DamageError(f"{self._file.name}: a compressed chunk is corrupt: {str(error)[:100]}") from None

    def _has_more(self) -> bool:
        """Return whether the range goes on behind the frame, which has been decoded completely."""
        import zstandard  # pyrefly: ignore

        try:
            return self._stream.readinto(bytearray(1)) > 0
        except zstandard.ZstdError:
            return True

    def _open_next(self) -> None:
        import zstandard  # pyrefly: ignore

        self.close()
        frame = self._frames.byte_ranges[self._next_frame]
        try:
            self._file = frame.path.open("rb", buffering=fetch_bytes(frame) if is_bucket(frame.path) else 0)
        except FileNotFoundError:
            raise DamageError(f"{frame.path}: no such file; was it deleted or moved while it was in use?") from None
        self._file.seek(frame.offset)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        source: Any = _BoundedReader(self._file, frame.path, frame.nbytes)
        self._stream = decompressor.stream_reader(source, read_size=2**17, closefd=False)
        self._next_frame, self._remaining_bytes = self._next_frame + 1, self._frames.chunk_nbytes

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
