import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess

import pytest
import tiny
from etils import epath

from pma_jax.runs import lock
from pma_jax.runs.directory import open_run
from pma_jax.storage import locks
from pma_jax.training.fork import fork
from pma_jax.training.loop import train

HOLDS = """
import sys, time
from etils import epath
from pma_jax.runs import lock
with lock.hold(epath.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(folder, seconds=60):
    process = subprocess.Popen(tiny.python(HOLDS, folder, seconds), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_second_process_is_refused_with_the_id_of_the_first(tmp_path):
    folder = epath.Path(tmp_path / "run")
    with holder(folder) as first:
        who = rf"process {first.pid} on {re.escape(socket.gethostname())} \(since 20\d\d-[0-9T:+-]*\)"
        with pytest.raises(ValueError, match=f"is in use by {who}: wait until that process ends"), lock.hold(folder):
            pass
        first.send_signal(signal.SIGKILL)
    # The holder is dead: the next process takes over its lock and reports it.
    with lock.hold(folder) as note:
        assert re.match(rf"taking the lock of .*, which its previous holder, {who}, did not release", note)
    with lock.hold(folder) as note:
        assert note is None, "the lock was released normally"


def test_waiting_process_gets_the_lock_when_it_is_released(tmp_path):
    folder = epath.Path(tmp_path / "run")
    with holder(folder, seconds=0.5) as first, lock.hold(folder, wait=True) as note:
        assert first.wait(timeout=240) == 0 and note is None


def test_reused_process_id_is_not_mistaken_for_the_dead_holder(tmp_path):
    # This process is alive, and the text names it as the holder; the kernel's lock decides.
    left = {"host": socket.gethostname(), "process": os.getpid(), "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / lock.FILE_NAME).write_text(json.dumps(left))
    with lock.hold(epath.Path(tmp_path)) as note:
        assert f"process {os.getpid()}" in note


def test_one_process_cannot_take_the_lock_twice(tmp_path):
    folder = epath.Path(tmp_path)
    refused = pytest.raises(ValueError, match=f"process {os.getpid()} on")
    with lock.hold(folder), refused, lock.hold(folder):
        pass


@pytest.mark.slow
def test_exactly_one_of_many_processes_gets_the_lock(tmp_path):
    racing = [
        subprocess.Popen(tiny.python(HOLDS, tmp_path, 8), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=240) for process in racing]
    assert sum(out == "held\n" for out, _ in ended) == 1
    assert sum("is in use by" in err for _, err in ended) == 3


def test_foreign_file_in_place_of_the_lock_is_harmless(tmp_path):
    (tmp_path / lock.FILE_NAME).write_bytes(b"\xff\0 what is this")
    with lock.hold(epath.Path(tmp_path)) as note:
        assert note is None


def test_run_in_training_is_neither_trained_nor_forked_into(finished, tmp_path):
    with holder(tmp_path / "run") as first:
        with pytest.raises(ValueError, match="is in use by process"):
            train(finished.config, tmp_path / "run")
        with pytest.raises(ValueError, match="is in use by process"):
            fork(finished, 4096, finished.config, tmp_path / "run")
        assert [p.name for p in (tmp_path / "run").iterdir()] == [lock.FILE_NAME]
        first.kill()
    assert fork(finished, 4096, finished.config, tmp_path / "run").path == open_run(tmp_path / "run").path


def test_lock_that_cannot_be_cleared_does_not_hide_the_error_of_the_run(tmp_path, monkeypatch):
    locked, failing = locks.locked, []

    class File:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def truncate(self):
            if failing:
                raise OSError(errno.EIO, "of the lock")
            self._file.truncate()

    @contextlib.contextmanager
    def locked_file(*arguments):
        with locked(*arguments) as (file, is_locked):
            yield File(file), is_locked

    monkeypatch.setattr(locks, "locked", locked_file)
    with pytest.raises(OSError, match="of the run"), lock.hold(tmp_path):
        failing.append(True)
        raise OSError(errno.EIO, "of the run")
