"""Kernel locks on files, which end with the process that holds them, however it ends."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, when_held: Callable[[IO[str]], None] = lambda _: None) -> Iterator[tuple[IO[str], bool]]:
    """Hold the lock on `path`; the file and its directory are created.

    The holder may remove the file when it ends, so the lock counts only if `path` is still the file that was locked.

    Args:
        path: The lock file.
        when_held: Called with the open file if another process holds the lock: raises to refuse, or returns to wait.

    Yields:
        The open file, and whether it is locked: False on a file system without locks.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+", errors="replace")
        except FileNotFoundError:
            continue  # the directory was removed in between
        with file:
            is_locked = _lock(file, when_held)
            if is_locked and not _is_at(file, path):
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
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
