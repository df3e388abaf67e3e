"""The kernel's lock on a file: it ends with the process that holds it, however that ends."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, refusal: Callable[[IO[str]], str] | None) -> Iterator[tuple[IO[str], bool]]:
    """Hold the lock on `path`, which is made with its folder; yields the open file, and False where there are no locks.

    Without a `refusal`, waits until it is free. Whoever ends may remove the file: the lock is ours if the file that we
    locked is still the one at `path`.

    Raises:
        ValueError: another process holds it; says `refusal` of the open file.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+", errors="replace")
        except FileNotFoundError:
            continue  # somebody removed the folder in between
        with file:
            is_locked = _lock(file, refusal)
            if is_locked and not _is_still(file, path):
                continue
            yield file, is_locked
            return


def _lock(file: IO[str], refusal: Callable[[IO[str]], str] | None) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
    except BlockingIOError:
        assert refusal
        raise ValueError(refusal(file)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_still(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
