"""Local paths and addresses in buckets (gs://bucket/name) behind one interface, that of pathlib.

Buckets are accessed through etils.epath, the path layer of Orbax, over fsspec. Neither is imported for local paths,
so that a merge starts quickly. Objects are written atomically and cannot be changed or renamed; directories are only
prefixes of names.
"""

import functools
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pma_jax.config.errors import UserError


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a bucket address, such as gs://bucket/name; hf:// (Hugging Face hub) is not."""
    text = str(path)
    return "://" in text and not text.startswith("hf://")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path` for a local path, or an object with the same interface for a bucket address.

    Raises:
        UserError: See `check_supported`.
    """
    if not is_bucket(path):
        return Path(path)
    check_supported(path)
    return _bucket_path_class()(str(path))


def absolute_path(path: str | os.PathLike[str]) -> Any:
    """Return an absolute `etils.epath.Path`, as Orbax requires, with `~` expanded; bucket addresses are not changed.

    Raises:
        UserError: See `check_supported`.
    """
    from etils import epath

    check_supported(path)
    return epath.Path(path) if is_bucket(path) else epath.Path(path).expanduser().resolve()


def check_supported(path: str | os.PathLike[str]) -> None:
    """Raise UserError if the path is a bucket address of an unsupported scheme, or its libraries are not installed.

    The bucket is not accessed.
    """
    if not is_bucket(path):
        return
    text = str(path)
    scheme = text.partition("://")[0]
    if scheme != "gs":
        raise UserError(f"{text}: {scheme}:// is not supported; paths are local or begin with gs://")
    try:
        file_system(text)
        from google.cloud import storage  # noqa: F401  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise UserError(f"{text}: buckets need additional libraries: pip install 'pma-jax[gcs]' ({error})") from None


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within it."""
    import fsspec

    return fsspec.core.url_to_fs(address)


def list_objects(address: str) -> list[Path]:
    """List the objects of a bucket, sorted by name.

    If the address has wildcards (*, ?, **), return the matches, else all objects below the address.
    """
    system, key = file_system(address)
    keys = system.glob(key) if glob.has_magic(address) else system.find(key)
    return [as_path(f"{address.partition('://')[0]}://{name}") for name in sorted(keys)]


def file_sizes(directory: Path) -> dict[Path, int]:
    """Map every file below a directory, or every object below a prefix, to its size in bytes."""
    if not is_bucket(directory):
        return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    system, key = file_system(str(directory))
    return {as_path(f"gs://{name}"): status["size"] for name, status in system.find(key, detail=True).items()}


class RangeReader:
    """Reader of byte ranges of an object; fetches at least `READ_AHEAD_BYTES`, because most reads are sequential."""

    READ_AHEAD_BYTES = 8 * 2**20

    def __init__(self, path: Path):
        self._system, self._key = file_system(str(path))
        self._buffer_offset, self._buffer = 0, b""

    def read_into(self, into: memoryview, offset: int) -> int:
        """Read up to `len(into)` bytes at `offset` into `into`, and return their number.

        The number may be smaller before the end of the object; it is 0 at the end.
        """
        skip = offset - self._buffer_offset
        if not 0 <= skip < len(self._buffer):
            end = offset + max(len(into), self.READ_AHEAD_BYTES)
            self._buffer_offset, self._buffer, skip = offset, self._system.cat_file(self._key, offset, end), 0
        part = self._buffer[skip : skip + len(into)]
        into[: len(part)] = part
        return len(part)


@functools.cache
def _bucket_path_class() -> Any:
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
            assert pattern == "*", 'rglob in a bucket supports only "*"'
            return iter(list_objects(str(self)))

    return BucketPath
