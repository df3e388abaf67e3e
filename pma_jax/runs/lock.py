"""One process trains in a run directory: the second is refused, and told who the first is.

The lock is the kernel's (`flock` on RUN/lock), so it ends with its holder however that ends, and no other process that
happens to get its number is taken for it. The file says who holds it: host, process, since when. Where it holds: on
local file systems, and on shared ones whose locks reach over hosts (NFS, and Lustre or GPFS so mounted). Object stores
(gs://) and file systems without locks have none: there, that only one process trains is the user's to see to.
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
    """Hold the lock of the run directory `folder`, which is made; yields what the user should know, if anything.

    When another process has it, raises ValueError that names the holder, or with `waits` waits until it is free.
    """
    if "://" in str(folder):
        yield None
        return
    refusal = None if waits else lambda file: _refusal(folder, file)
    with locks.locked(Path(folder) / FILE_NAME, refusal) as (file, is_locked):
        note = None if is_locked else f"{folder}: this file system has no locks; see that no second process trains here"
        left = _holder(file)
        if left and is_locked:
            note = f"taking over from {left}, which ended without giving {folder} back"
        file.seek(0)
        file.truncate()
        file.write(json.dumps(_ourselves()))
        file.flush()
        try:
            yield note
        finally:
            file.seek(0)
            file.truncate()


def _refusal(folder: epath.Path, file: IO[str]) -> str:
    who = _holder(file) or "another process"
    return f"{folder} is being trained by {who}: wait until it ends, stop it, or choose another --workdir"


def _ourselves() -> dict[str, object]:
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
        who = json.loads(file.read(10_000))
        return f"process {who['process']} on {who['host']} (since {who['since']})"
    except (ValueError, KeyError, TypeError):
        return None
