"""SIGTERM and SIGINT in real processes: at every moment from the first line of `main` on, 143 and 130."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

STATUSES = {signal.SIGTERM: 143, signal.SIGINT: 130}
NOTHING = "stopped: nothing was written\n"
TWICE = """
import time
from pma_jax.runtime import signals
with signals.record_signals() as request:
    request.start()
    print("ready", flush=True)
    time.sleep(60)
"""
# `main` with a verb that runs the second argument.
MAIN = """
import sys
code = sys.argv.pop(1)
from pma_jax.cli import command, verbs
from pma_jax.runtime import signals
verbs.inspect.__code__ = (lambda options: exec(code)).__code__
verbs.inspect.__globals__["code"] = code
status = command.main()
print("ended", flush=True)
import atexit, time
atexit.register(lambda: (print("leaving", flush=True), time.sleep(3)))
sys.exit(status)
"""


def start(code, *arguments, before=(), env=None):
    """Start Python with this code, and wait until it prints a line."""
    words = [*before, *tiny.python(code, *arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    return process, process.stdout.readline()


def start_verb(code):
    """Start `main` with a verb that runs `code`, and wait until that prints a line."""
    return start(MAIN, code, "inspect", "target")[0]


def end(process, number):
    """Send a signal and return the status and what stands on standard error."""
    process.send_signal(number)
    try:
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, error


def test_second_signal_ends_the_process_at_once():
    process, line = start(TWICE)
    assert line == "ready\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert end(process, signal.SIGINT) == (130, "stopped at once: published checkpoints are intact\n")


SLEEPS = "import time; print(1, flush=True); time.sleep(60)"
SWALLOWS = """
print(1, flush=True)
while True:
    try:
        1 / 0
    except BaseException:
        pass
"""
WAITS = """
import threading
lock = threading.Lock()
lock.acquire()
print(1, flush=True)
lock.acquire()
"""


@pytest.mark.parametrize("number", STATUSES)
@pytest.mark.parametrize("code", [SLEEPS, SWALLOWS, WAITS], ids=["sleeps", "swallows exceptions", "waits for a lock"])
def test_signal_ends_any_verb_with_one_line(code, number):
    assert end(start_verb(code), number) == (STATUSES[number], NOTHING)


def test_callbacks_run_before_a_signal_ends_the_process(tmp_path):
    work = tmp_path / "model.partial"
    work.mkdir()
    (work / "shard").write_text("half")
    code = f"""
import time
from pathlib import Path
from pma_jax.storage import atomic
with atomic.remove_if_stopped(Path({str(work)!r})):
    print(1, flush=True)
    while Path({str(work)!r}).exists(): time.sleep(0.0001)
    raise OSError("the consequence of the removal is not reported")
"""
    assert end(start_verb(code), signal.SIGTERM) == (143, NOTHING)
    assert list(tmp_path.iterdir()) == []


def test_signal_after_the_verb_has_ended_keeps_its_status():
    process = start_verb("print(1, flush=True)")
    assert process.stdout.readline() == "ended\n" and process.stdout.readline() == "leaving\n"
    assert end(process, signal.SIGTERM) == (0, "")


def test_ignored_signal_stays_ignored():
    process, _ = start(MAIN, SLEEPS, "inspect", "target", before=["sh", "-c", 'trap "" INT; exec "$@"', "sh"])
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert end(process, signal.SIGTERM) == (143, NOTHING)


@pytest.mark.slow
def test_forked_child_ends_alone():
    code = """
import os, signal, time
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"1")
    time.sleep(60)
    os._exit(0)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
print(1, flush=True)
time.sleep(0.3)
"""
    assert start_verb(code).wait(60) == 0


@pytest.mark.slow
def test_signal_at_each_moment_of_the_start(tmp_path):
    """From the first line of `main` to the end of the process, in the imports above all."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pma_jax.cli import main; print(1, flush=True); sys.exit(main())"
    )
    for number in STATUSES:
        for delay in (0.01, 0.03, 0.1, 0.2, 0.4):
            process, _ = start(code, "inspect", str(tmp_path / "absent"), env=tiny.environment())
            time.sleep(delay)
            status, error = end(process, number)
            assert (status, error) == (STATUSES[number], NOTHING) or status == 1, (delay, status, error)


def test_closed_output_is_not_an_error(finished):
    process = subprocess.Popen(
        tiny.command("inspect", finished.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tiny.environment()
    )
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_one_line(finished, unbuffered):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            tiny.command("inspect", finished.path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=tiny.environment() | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 28] No space left on device\n")
