"""Locks on files (`flock`), which the kernel releases when the process that holds them exits or is killed."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from pma_jax.storage.paths import open_descriptor

_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, when_held: Callable[[IO[str]], None] = lambda _: None) -> Iterator[tuple[IO[str], bool]]:
    """Hold an exclusive lock on the file `path` for the duration of the block; create the file and its directory.

    The previous holder may have deleted the file. If `path` is no longer the file that was locked, the new file at
    `path` is locked instead.

    Args:
        path: The lock file.
        when_held: Called with the open file if another process holds the lock. It may raise; if it returns, this
            process waits for the lock.

    Yields:
        The open file, and whether it is locked: False on a file system without locks.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.fdopen(open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", errors="replace")
        except FileNotFoundError:
            continue  # another process removed the directory after the mkdir
        with file:
            is_locked = _lock(file, when_held)
            if is_locked and not _is_same_file(file, path):
                continue
            yield file, is_locked
            return


def _lock(file: IO[str], when_held: Callable[[IO[str]], None]) -> bool:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_held(file)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        return False
    return True


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
