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


def test_the_second_process_is_refused_and_told_who_the_first_is(tmp_path):
    folder = epath.Path(tmp_path / "run")
    with holder(folder) as first:
        who = rf"process {first.pid} on {re.escape(socket.gethostname())} \(since 20\d\d-[0-9T:+-]*\)"
        with pytest.raises(ValueError, match=f"is being trained by {who}: wait until it ends"), lock.hold(folder):
            pass
        first.send_signal(signal.SIGKILL)
    # The holder is dead: its lock is taken over, and that is told.
    with lock.hold(folder) as note:
        assert re.match(rf"taking over from {who}", note)
    with lock.hold(folder) as note:
        assert note is None, "given back in good order"


def test_one_who_waits_gets_the_lock_when_it_is_free(tmp_path):
    folder = epath.Path(tmp_path / "run")
    with holder(folder, seconds=0.5) as first, lock.hold(folder, waits=True) as note:
        assert first.wait(timeout=240) == 0 and note is None


def test_a_process_that_got_the_dead_ones_number_is_not_taken_for_it(tmp_path):
    # Our own process lives, and the text says that it holds the lock; the kernel knows better.
    left = {"host": socket.gethostname(), "process": os.getpid(), "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / lock.FILE_NAME).write_text(json.dumps(left))
    with lock.hold(epath.Path(tmp_path)) as note:
        assert f"process {os.getpid()}" in note


def test_one_process_excludes_itself_too(tmp_path):
    folder = epath.Path(tmp_path)
    refused = pytest.raises(ValueError, match=f"process {os.getpid()} on")
    with lock.hold(folder), refused, lock.hold(folder):
        pass


@pytest.mark.slow
def test_many_at_once_one_wins(tmp_path):
    racing = [
        subprocess.Popen(tiny.python(HOLDS, tmp_path, 8), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=240) for process in racing]
    assert sum(out == "held\n" for out, _ in ended) == 1
    assert sum("is being trained by" in err for _, err in ended) == 3


def test_what_is_no_lock_file_of_ours_does_no_harm(tmp_path):
    (tmp_path / lock.FILE_NAME).write_bytes(b"\xff\0 what is this")
    with lock.hold(epath.Path(tmp_path)) as note:
        assert note is None


def test_a_run_that_is_trained_is_neither_trained_nor_forked_into(finished, tmp_path):
    with holder(tmp_path / "run") as first:
        with pytest.raises(ValueError, match="is being trained by process"):
            train(finished.config, tmp_path / "run")
        with pytest.raises(ValueError, match="is being trained by process"):
            fork(finished, 4096, finished.config, tmp_path / "run")
        assert [p.name for p in (tmp_path / "run").iterdir()] == [lock.FILE_NAME]
        first.kill()
    assert fork(finished, 4096, finished.config, tmp_path / "run").path == open_run(tmp_path / "run").path
