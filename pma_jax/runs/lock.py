"""The lock of a run directory: only one process trains in it, and a second one gets an error that names the first.

The lock is the kernel's (`flock` on RUN/lock), so it ends with its holder, however that ends, and does not depend on
process IDs, which are reused. The file names the holder: host, process ID, start time. The lock works on local file
systems, and on shared ones with locks across hosts (NFS; Lustre and GPFS if mounted so). Object stores (gs://) and some
file systems have no locks; there, training with only one process is the user's responsibility.
"""

import contextlib
import datetime
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from etils import epath

from pma_jax.storage import locks

FILE_NAME = "lock"


@contextlib.contextmanager
def hold(folder: epath.Path, waits: bool = False) -> Iterator[str | None]:
    """Hold the lock of the run directory `folder`, which is created.

    Args:
        folder: the run directory.
        waits: wait while another process holds the lock.

    Yields:
        A note for the user, or None.

    Raises:
        ValueError: another process holds the lock (the message names it), and `waits` is False.
    """
    if "://" in str(folder):
        yield None
        return

    def when_held(file: IO[str]) -> None:
        if not waits:
            holder = _holder(file) or "another process"
            raise ValueError(
                f"{folder} is being trained by {holder}: wait until it ends, stop it, or choose another --workdir"
            ) from None

    with locks.locked(Path(folder) / FILE_NAME, when_held) as (file, is_locked):
        note, previous = None, _holder(file)
        if not is_locked:
            note = f"{folder}: this file system has no locks: make sure that no second process trains here"
        elif previous:
            note = f"taking over from {previous}, which ended without releasing {folder}"
        file.seek(0)
        file.truncate()
        file.write(json.dumps(_this_process()))
        file.flush()
        try:
            yield note
        finally:
            file.seek(0)
            file.truncate()


def _this_process() -> dict[str, object]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": now.isoformat(timespec="seconds"),
        "command": " ".join(sys.argv)[:200],
    }


def _holder(file: IO[str]) -> str | None:
    file.seek(0)
    try:
        holder = json.loads(file.read(10_000))
        return f"process {holder['process']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return None
