"""Atomic writes: a file or directory appears with its complete content, or not at all.

On a disk, content is written under a temporary name in the same directory, flushed (fsync), and renamed into place;
then the directory is flushed, so that the rename survives a power failure. An object in a bucket is written directly,
because object stores write each object atomically.
"""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from pma_jax.runtime import signals
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import is_bucket, name_file, raise_unless_absent

_FSYNC_THREADS = 16
_TEMPORARY_SUFFIX = ".writing"


def write_text(path: Any, text: str) -> None:
    """Write a small file (pathlib or epath) as UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Any, data: bytes) -> None:
    """Write a small file (pathlib or epath). Concurrent writers do not disturb each other: the last one wins.

    The temporary files of writers of this file that were killed are removed.
    """
    if is_bucket(path):
        path.write_bytes(data)
        return
    target = Path(path)
    for other in match_files(target.parent, f".{glob.escape(target.name)}.*{_TEMPORARY_SUFFIX}"):
        if _is_abandoned(other):
            other.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}{_TEMPORARY_SUFFIX}")
    try:
        # The lock tells other writers that this one is alive. Another one may remove the file before it is locked.
        while not temporary.exists():
            with name_file(target), temporary.open("wb") as file:
                _lock(file, fcntl.LOCK_EX)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if temporary.exists():
                    temporary.replace(target)
                    break
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(target.parent)


def _lock(file: IO[bytes], operation: int) -> bool:
    """Lock a file; return False if another process holds the lock, or on a file system without locks."""
    try:
        fcntl.flock(file, operation)
    except OSError:
        return False
    return True


def _is_abandoned(temporary: Path) -> bool:
    """Return whether the writer of a temporary file has ended, so that nobody holds its lock."""
    try:
        with temporary.open("rb") as file:
            return _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False


def publish_directory(temporary: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Flush a complete directory on a disk and rename it to `target`; raises OSError if `target` is not empty."""
    fsync_tree(Path(temporary))
    Path(temporary).rename(target)
    fsync_parents(Path(target))


@contextlib.contextmanager
def remove_if_stopped(directory: Path) -> Iterator[None]:
    """Remove a working directory if a signal ends the process within the block (see `signals.before_end`)."""

    def remove() -> None:
        # Another name first: from then on, the main thread, which goes on, cannot publish it.
        renamed = directory.with_name(f"{directory.stem}.{os.urandom(4).hex()}{directory.suffix}")
        directory.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)

    with signals.before_end(remove):
        yield


def fsync_tree(directory: Path) -> None:
    """Flush `directory`, everything below it, and its parent directory to the disk."""
    walk = os.walk(directory, onerror=raise_unless_absent)
    paths = [path for root, _, files in walk for path in [Path(root), *(Path(root, f) for f in files)]]
    # An Orbax checkpoint is hundreds of small files; file systems batch flushes that are requested concurrently.
    with ThreadPoolExecutor(_FSYNC_THREADS) as pool:
        for _ in pool.map(fsync_path, paths):
            pass
    fsync_path(directory.parent)


def fsync_parents(path: Path) -> None:
    """Flush all directories above `path`, so that their names are durable if they were just created.

    A directory that this user may not read, or on a read-only file system, was not just created.
    """
    for parent in path.absolute().parents:
        try:
            fsync_path(parent)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL):
                raise


def fsync_path(path: os.PathLike[str]) -> None:
    """Flush the file or directory at `path` itself (a file's bytes, or the names in a directory) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with name_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
