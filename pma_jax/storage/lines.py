"""A text file that grows by whole lines, on a disk or in a bucket: metrics and previews."""

import time

from etils import epath

from pma_jax.storage.paths import is_bucket

BUCKET_SECONDS = 30.0  # between two writes of an object, which is written whole each time


class LineFile:
    """Appends lines to `path`; what is there already stays.

    On a disk each line is written at once. An object in a bucket cannot grow: it is written anew, with every line, when
    `BUCKET_SECONDS` have passed, and by `sync` and `close`.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._file = None if is_bucket(path) else path.open("a")
        self._lines = [path.read_text()] if self._file is None and path.exists() else []
        self._waiting, self._written = False, time.monotonic()

    def write(self, line: str) -> None:
        """Append one line, which ends with a line break."""
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
            return
        self._lines.append(line)
        self._waiting = True
        if time.monotonic() - self._written >= BUCKET_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Others can read every line now."""
        if self._waiting:
            self._lines = ["".join(self._lines)]
            self._path.write_text(self._lines[0])
            self._waiting, self._written = False, time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self.sync()
        if self._file is not None:
            self._file.close()
