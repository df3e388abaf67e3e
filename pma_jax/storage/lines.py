"""A text file to which complete lines are appended, on a disk or in a bucket, such as the metrics of a run."""

import os
import time

from etils import epath

from pma_jax.storage.paths import exists, is_bucket, name_file

MIN_REWRITE_INTERVAL_SECONDS = 30.0  # minimum time between rewrites of an object in a bucket


class LineFile:
    """A text file to which lines are appended.

    On a disk, each call of `write_lines` writes to the file immediately. Objects in a bucket cannot be appended to, so
    lines are buffered: `write_lines` rewrites the object at most once per `MIN_REWRITE_INTERVAL_SECONDS`, and `sync`
    and `close` rewrite it if lines are buffered.

    Args:
        path: The file. Existing content is kept.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._file = None if is_bucket(path) else path.open("a")
        self._chunks = [path.read_text()] if self._file is None and exists(path) else []
        self._is_dirty, self._last_write_time = False, time.monotonic()

    def write_lines(self, text: str) -> None:
        """Append text that consists of complete lines; it must end with a newline."""
        if self._file is not None:
            with name_file(self._path):
                self._file.write(text)
                self._file.flush()
            return
        self._chunks.append(text)
        self._is_dirty = True
        if time.monotonic() - self._last_write_time >= MIN_REWRITE_INTERVAL_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make all lines durable: flush the file to the disk (fsync), or rewrite the object if lines are buffered."""
        if self._file is not None:
            with name_file(self._path):
                os.fsync(self._file.fileno())
        elif self._is_dirty:
            self._chunks = ["".join(self._chunks)]
            self._path.write_text(self._chunks[0])
            self._is_dirty, self._last_write_time = False, time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        self.sync()
        if self._file is not None:
            with name_file(self._path):  # closing writes again what could not be written
                self._file.close()
