"""The lock of a run directory: only one process trains in it, and a second one gets an error that names the first.

The lock is a kernel lock (`flock` on RUN/lock): the kernel releases it when the process exits, even after a crash. It
does not rely on process IDs, which can be reused. The file names the holder: host, process ID, start time. The lock
works on local file systems, and on shared ones with cluster-wide flock (NFS; Lustre and GPFS if mounted with flock
enabled). Object stores (gs://) and some file systems have no locks; there, the user must make sure that only one
process trains in a run directory.
"""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypedDict

from etils import epath

from pma_jax.config.errors import UserError
from pma_jax.runtime import signals
from pma_jax.storage import locks
from pma_jax.storage.json_files import parse_json
from pma_jax.storage.paths import name_file

FILE_NAME = "lock"
_PROBE_SECONDS = 0.2  # longer than `holder_of` holds a lock


class _Holder(TypedDict):
    """Contents of the lock file."""

    host: str
    process: int
    since: str


class InUseError(UserError):
    """Another process holds the lock."""


@contextlib.contextmanager
def hold(run_dir: epath.Path, wait: bool = False, file_name: str = FILE_NAME) -> Iterator[str | None]:
    """Hold the lock of a run directory, and create the directory if it does not exist. A bucket is not locked.

    Args:
        run_dir: The run directory.
        wait: Wait while another process holds the lock.
        file_name: The file in the directory that is locked.

    Yields:
        A warning for the user (the file system has no locks, or the last holder did not release the lock), or None.

    Raises:
        InUseError: Another process holds the lock (the message names it), and `wait` is False.
    """
    if "://" in str(run_dir):
        yield None
        return

    def on_contention(file: IO[str]) -> None:
        if not wait and not _lock_after_probe(file):
            holder = _holder(file) or "another process"
            raise InUseError(
                f"{run_dir} is in use by {holder}: wait until that process ends, stop it, or choose another --workdir"
            ) from None

    with locks.locked(Path(run_dir) / file_name, on_contention) as (file, is_locked):
        note, previous = None, _holder(file)
        if not is_locked:
            note = f"{run_dir}: this file system has no locks: make sure that no second process trains here"
        elif previous:
            note = f"taking the lock of {run_dir}, which its previous holder, {previous}, did not release"
        with name_file(Path(run_dir) / file_name):
            file.seek(0)
            file.truncate()
            file.write(json.dumps(_this_process()))
            file.flush()
        try:
            with signals.before_end(lambda: os.ftruncate(file.fileno(), 0)):
                yield note
        finally:
            with contextlib.suppress(OSError):  # else the next process logs that this one did not release the lock
                file.seek(0)
                file.truncate()


def holder_of(run_dir: epath.Path, file_name: str = FILE_NAME) -> str | None:
    """Name the process that holds a lock now; None if none does, in a bucket, and on a file system without locks."""
    if "://" in str(run_dir):
        return None
    try:
        with (Path(run_dir) / file_name).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(file) or "another process"
            except OSError:
                return None
    except FileNotFoundError:
        return None
    return None


def _lock_after_probe(file: IO[str]) -> bool:
    """Try again to lock a file, which `holder_of` of another process may have locked for a moment."""
    time.sleep(_PROBE_SECONDS)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _this_process() -> dict[str, object]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": now.isoformat(timespec="seconds"),
        "command": " ".join(sys.argv)[:200],
    }


def _holder(file: IO[Any]) -> str | None:
    file.seek(0)
    try:
        text = file.read(10_000)
        holder = parse_json(text if isinstance(text, bytes) else text.encode(), FILE_NAME, _Holder)
    except (UserError, UnicodeEncodeError):
        return None
    return f"process {holder['process']} on {holder['host']} (since {holder['since']})"
