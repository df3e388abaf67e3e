"""Paths of a disk and addresses in a bucket (gs://bucket/name), with one interface: that of pathlib.

What reaches a bucket is etils.epath, the path layer of Orbax, over fsspec. Neither is imported for a path of a disk: a
merge should start at once. An object appears whole and cannot be changed or renamed; directories are only names.
"""

import functools
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address such as gs://bucket/name (hf:// is not: it is the hub's)."""
    text = str(path)
    return "://" in text and not text.startswith("hf://")


def locate(path: str | os.PathLike[str]) -> Path:
    """The path as what reads it: pathlib's for a disk; for a bucket what can do the same.

    Raises:
        ValueError: a library that buckets need is not installed, or there is no such kind of address.
    """
    if not is_bucket(path):
        return Path(path)
    check_bucket(path)
    return _bucket_path()(str(path))


def absolute_path(path: str | os.PathLike[str]) -> Any:
    """Return an absolute `etils.epath.Path`, as Orbax wants it, with `~` expanded; bucket addresses stay as they are.

    Raises:
        ValueError: as `check_bucket`.
    """
    from etils import epath

    check_bucket(path)
    return epath.Path(path) if is_bucket(path) else epath.Path(path).expanduser().resolve()


def check_bucket(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, with what to install, when an address cannot be reached for want of a library."""
    if not is_bucket(path):
        return
    text = str(path)
    scheme = text.partition("://")[0]
    if scheme != "gs":
        raise ValueError(f"{text}: {scheme}:// is not supported; paths are local or begin with gs://")
    try:
        file_system(text)
        from google.cloud import storage  # noqa: F401  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ValueError(f"{text}: buckets need libraries of their own: pip install 'pma-jax[gcs]' ({error})") from None


def file_system(address: str) -> tuple[Any, str]:
    """(fsspec's file system, what it calls this address)."""
    import fsspec

    return fsspec.core.url_to_fs(address)


def find(pattern: str) -> list[Path]:
    """The objects that match an address with *, ? and **; all below it where it has none of them. Sorted by name."""
    system, key = file_system(pattern)
    keys = system.glob(key) if glob.has_magic(pattern) else system.find(key)
    return [locate(f"{pattern.partition('://')[0]}://{name}") for name in sorted(keys)]


class RangeReader:
    """Reads ranges of an object, `AHEAD_BYTES` at a time: what is asked for next is mostly what comes next."""

    AHEAD_BYTES = 8 * 2**20

    def __init__(self, path: Path):
        self._system, self._key = file_system(str(path))
        self._start, self._data = 0, b""

    def readinto(self, into: memoryview, offset: int) -> int:
        """Fill `into` with the bytes from `offset` on; returns how many there were, 0 at the end of the object."""
        skip = offset - self._start
        if not 0 <= skip < len(self._data):
            wanted = max(len(into), self.AHEAD_BYTES)
            self._start, self._data, skip = offset, self._system.cat_file(self._key, offset, offset + wanted), 0
        part = self._data[skip : skip + len(into)]
        into[: len(part)] = part
        return len(part)


@functools.cache
def _bucket_path() -> Any:
    from etils.epath.gpath import PosixGPath

    class BucketPath(PosixGPath):
        """An address in a bucket, with what pathlib.Path has besides."""

        def stat(self) -> Any:
            found = super().stat()
            return SimpleNamespace(st_size=found.length, st_mtime_ns=found.mtime * 10**9)

        def absolute(self) -> "BucketPath":
            return self

        def is_symlink(self) -> bool:
            return False

        def open(self, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
            del buffering
            return super().open(mode, **options)

        def rglob(self, pattern: str) -> Iterator[Any]:
            assert pattern == "*", "a bucket lists everything below a name at once, and nothing else"
            return iter(find(str(self)))

    return BucketPath
