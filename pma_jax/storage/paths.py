"""Paths on disks and addresses in buckets (gs://bucket/name) behind one interface, that of pathlib.

Buckets are accessed through etils.epath, the path layer of Orbax, over fsspec. Neither is imported for paths on a disk,
so that a merge starts quickly. Objects appear atomically and cannot be changed or renamed; directories are only name
prefixes.
"""

import functools
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Check for a bucket address such as gs://bucket/name; hf:// addresses belong to the Hugging Face hub."""
    text = str(path)
    return "://" in text and not text.startswith("hf://")


def locate(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path` for a disk, or an object with the same interface for a bucket.

    Raises:
        ValueError: As `check_bucket`.
    """
    if not is_bucket(path):
        return Path(path)
    check_bucket(path)
    return _bucket_path()(str(path))


def absolute_path(path: str | os.PathLike[str]) -> Any:
    """Return an absolute `etils.epath.Path`, as Orbax wants it, with `~` expanded; bucket addresses stay as they are.

    Raises:
        ValueError: As `check_bucket`.
    """
    from etils import epath

    check_bucket(path)
    return epath.Path(path) if is_bucket(path) else epath.Path(path).expanduser().resolve()


def check_bucket(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a bucket address is not supported, or a library for it is not installed."""
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
        raise ValueError(f"{text}: buckets need additional libraries: pip install 'pma-jax[gcs]' ({error})") from None


def file_system(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the address's key in it."""
    import fsspec

    return fsspec.core.url_to_fs(address)


def find(pattern: str) -> list[Path]:
    """List objects by name: those that match an address with *, ? or **, or all below an address without them."""
    system, key = file_system(pattern)
    keys = system.glob(key) if glob.has_magic(pattern) else system.find(key)
    return [locate(f"{pattern.partition('://')[0]}://{name}") for name in sorted(keys)]


def file_sizes(directory: Path) -> dict[Path, int]:
    """Map every file below a directory, or every object below a prefix, to its size in bytes."""
    if not is_bucket(directory):
        return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    system, key = file_system(str(directory))
    return {locate(f"gs://{name}"): status["size"] for name, status in system.find(key, detail=True).items()}


class RangeReader:
    """Read byte ranges of an object, at least `AHEAD_BYTES` at a time, because most reads are sequential."""

    AHEAD_BYTES = 8 * 2**20

    def __init__(self, path: Path):
        self._system, self._key = file_system(str(path))
        self._start, self._data = 0, b""

    def readinto(self, into: memoryview, offset: int) -> int:
        """Fill `into` with the bytes from `offset` on; return their number, 0 at the end of the object."""
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
        """An address in a bucket, with the methods of pathlib.Path that etils lacks."""

        def stat(self) -> Any:
            status = super().stat()
            return SimpleNamespace(st_size=status.length, st_mtime_ns=status.mtime * 10**9)

        def absolute(self) -> "BucketPath":
            return self

        def is_symlink(self) -> bool:
            return False

        def open(self, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
            del buffering
            return super().open(mode, **options)

        def rglob(self, pattern: str) -> Iterator[Any]:
            assert pattern == "*", "a bucket lists everything below a prefix"
            return iter(find(str(self)))

    return BucketPath
