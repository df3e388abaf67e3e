"""A text file to which complete lines are appended, on a disk or in a bucket: metrics and previews."""

import os
import time

from etils import epath

from pma_jax.storage.paths import is_bucket

REWRITE_INTERVAL_SECONDS = 30.0  # minimum time between rewrites of an object in a bucket


class LineFile:
    """A text file to which lines are appended.

    On a disk, each line is written immediately. An object in a bucket cannot be appended to: `write_lines` rewrites it
    at most once per `REWRITE_INTERVAL_SECONDS`, and `sync` and `close` rewrite it if lines are unwritten.

    Args:
        path: The file. Existing content is kept.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._file = None if is_bucket(path) else path.open("a")
        self._lines = [path.read_text()] if self._file is None and path.exists() else []
        self._is_dirty, self._last_write_time = False, time.monotonic()

    def write_lines(self, lines: str) -> None:
        """Append text that consists of complete lines; it must end with a newline."""
        if self._file is not None:
            self._file.write(lines)
            self._file.flush()
            return
        self._lines.append(lines)
        self._is_dirty = True
        if time.monotonic() - self._last_write_time >= REWRITE_INTERVAL_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Write all lines to durable storage, so that other processes can read them."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        elif self._is_dirty:
            self._lines = ["".join(self._lines)]
            self._path.write_text(self._lines[0])
            self._is_dirty, self._last_write_time = False, time.monotonic()

    def close(self) -> None:
        """Write all remaining lines and close the file."""
        self.sync()
        if self._file is not None:
            self._file.close()
