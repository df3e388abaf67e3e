"""A text file to which complete lines are appended, on a disk or in a bucket: metrics and previews."""

import os
import time

from etils import epath

from pma_jax.storage.paths import is_bucket

BUCKET_SECONDS = 30.0  # minimum time between rewrites of an object


class LineFile:
    """Append lines to `path`, after its present contents.

    On a disk, each line is written at once. An object in a bucket cannot grow: it is rewritten with all lines when
    `BUCKET_SECONDS` have passed, and by `sync` and `close`.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._file = None if is_bucket(path) else path.open("a")
        self._lines = [path.read_text()] if self._file is None and path.exists() else []
        self._waiting, self._written = False, time.monotonic()

    def write(self, line: str) -> None:
        """Append one line, which must end with a line break."""
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
            return
        self._lines.append(line)
        self._waiting = True
        if time.monotonic() - self._written >= BUCKET_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make every line durable, and readable for others."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        elif self._waiting:
            self._lines = ["".join(self._lines)]
            self._path.write_text(self._lines[0])
            self._waiting, self._written = False, time.monotonic()

    def close(self) -> None:
        """Write all remaining lines and close the file."""
        self.sync()
        if self._file is not None:
            self._file.close()
