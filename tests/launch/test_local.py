"""The local engine with processes that need no JAX: order, shares, failures, signals, locks, and what is recorded."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from etils import epath

from pma_jax.config.errors import UserError
from pma_jax.launch import local, shares
from pma_jax.launch.job import LOCK_FILE, Job, Step, read_record, steps_left
from pma_jax.launch.local import run_jobs
from pma_jax.runs import lock

# Runs a job of each script for each directory, 2 at a time. A script has its directory as its argument.
ENGINE = """
import json, sys
from etils import epath
from pma_jax.cli.command import signals
from pma_jax.launch.job import Job, Step
from pma_jax.launch.local import run_jobs
signals.end_process_on_signals(lambda: "too early")
script, *folders = sys.argv[1:]
jobs = [Job(f, (Step("train", (sys.executable, "-c", script, f)),), epath.Path(f)) for f in folders]
try:
    print(json.dumps(run_jobs(jobs, 2, lambda line: print(line, file=sys.stderr, flush=True))))
except KeyboardInterrupt as stopped:
    print(stopped, flush=True)
    sys.exit(stopped.status)
"""
# Says that it has started, and saves a state when it is stopped.
STOPPABLE = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stop(*_):
    time.sleep(0.3)
    (folder / "state").write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / "started").write_text("")
time.sleep(60)
"""


def job(folder, *scripts, name="job"):
    folder = epath.Path(folder)
    steps = [Step(f"step {n}", (sys.executable, "-c", s, str(folder))) for n, s in enumerate(scripts)]
    return Job(name, tuple(steps), folder)


def run(jobs, parallel=1):
    lines = []
    return run_jobs(jobs, parallel, lines.append), lines


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def engine(script, *folders):
    return subprocess.Popen(
        tiny.python(ENGINE, script, *folders), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_steps_run_in_order_and_only_once(tmp_path):
    append = "import sys; open(sys.argv[1] + '/order', 'a').write('{}'); print('said {}')"
    both = job(tmp_path / "run", append.format("a", "a"), append.format("b", "b"))
    assert run([both])[0] == {} and (tmp_path / "run" / "order").read_text() == "ab"
    assert read_record(both.directory)["done"] == ["step 0", "step 1"] and not steps_left(both)
    assert run([both])[1] == ["[1 of 1] job: is done"] and (tmp_path / "run" / "order").read_text() == "ab"
    log = (tmp_path / "run" / "job.log").read_text()
    assert log.index("said a") < log.index("said b") and log.count("$ ") == 2
    third = job(tmp_path / "run", *["raise SystemExit(1)"] * 2, append.format("c", "c"))
    assert run([third])[0] == {} and (tmp_path / "run" / "order").read_text() == "abc"


def test_failed_job_is_named_recorded_and_does_not_stop_others(tmp_path):
    fails = job(tmp_path / "a", "import sys; print('error: no text'); print('later'); sys.exit(1)", "", name="a")
    works = job(tmp_path / "b", "", name="b")
    failed, lines = run([fails, works])
    assert (
        failed == {"a": {"step": "step 0", "status": 1, "line": "error: no text"}}
        and "[1 of 2] a: failed with status 1: error: no text" in lines
    )
    assert read_record(fails.directory)["failed"] == {"step": "step 0", "status": 1, "line": "error: no text"}
    assert read_record(works.directory)["done"] == ["step 0"]
    assert [step.text for step in steps_left(fails)] == ["step 0", "step 1"]
    mended = job(tmp_path / "a", "", "", name="a")
    assert run([mended])[0] == {} and read_record(mended.directory)["failed"] is None


@pytest.mark.parametrize("how", ["sys.exit(75)", "os.kill(os.getpid(), 9)", "sys.exit(143)"])
def test_failure_that_may_pass_is_tried_again_a_few_times(tmp_path, monkeypatch, how):
    monkeypatch.setattr(local, "_RETRY_SECONDS", 0.01)
    count = f"import os, sys; open(sys.argv[1] + '/tries', 'a').write('x'); {how}"
    failed, _ = run([job(tmp_path / "run", count)])
    assert list(failed) == ["job"] and (tmp_path / "run" / "tries").read_text() == "x" * (1 + local.MAX_RETRIES)
    once = f"import os, sys; p = sys.argv[1] + '/once'; os.path.exists(p) or (open(p, 'w'), {how})"
    assert run([job(tmp_path / "again", once)])[0] == {}


@pytest.mark.skipif(len(shares.available_cores()) < 2, reason="needs two cores")
def test_jobs_have_cores_of_their_own_and_no_more_run_than_asked(tmp_path):
    script = """
import json, os, sys, time
start = time.monotonic()
time.sleep(0.3)
json.dump([start, time.monotonic(), sorted(os.sched_getaffinity(0))], open(sys.argv[1] + "/seen", "w"))
"""
    jobs = [job(tmp_path / str(n), script, name=str(n)) for n in range(5)]
    assert run(jobs, parallel=2)[0] == {}
    seen = [json.loads((tmp_path / str(n) / "seen").read_text()) for n in range(5)]
    overlapping = [(a, b) for a in seen for b in seen if a is not b and a[0] < b[1] and b[0] < a[1]]
    assert overlapping and all(not set(a[2]) & set(b[2]) for a, b in overlapping)
    assert all(sum(a[0] <= b[0] < a[1] for a in seen) <= 2 for b in seen)
    assert {core for a in seen for core in a[2]} == set(shares.available_cores())


def test_more_jobs_at_a_time_than_cores_are_refused():
    with pytest.raises(UserError, match=r"need a core each: give 1 to \d+"):
        shares.divide(len(shares.available_cores()) + 1)


def test_visible_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert shares.visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert shares.visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-abc"}, tmp_path) == ["3", "GPU-abc"]
    assert shares.visible_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) is None
    assert shares.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) is None
    assert shares.visible_gpus({}, tmp_path / "nothing") is None


def test_gpus_are_divided(monkeypatch):
    monkeypatch.setattr(shares, "visible_gpus", lambda: ["4", "5", "6"])
    monkeypatch.setattr(shares, "available_cores", lambda: list(range(8)))
    assert shares.divide(2) == [shares.Share((0, 1, 2, 3), ("4",)), shares.Share((4, 5, 6, 7), ("5", "6"))]
    with pytest.raises(UserError, match="need a GPU each: give 1 to 3"):
        shares.divide(4)
    process = local.start_process(
        Step("print", (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")),
        shares.Share(tuple(os.sched_getaffinity(0)), ("5", "6")),
        subprocess.PIPE,
    )
    assert process.communicate(timeout=60)[0] == b"5,6\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_all_jobs_with_their_states_saved(tmp_path, number, status):
    folders = [tmp_path / name for name in "abc"]
    process = engine(STOPPABLE, *folders)
    wait_for(lambda: all((folder / "started").exists() for folder in folders[:2]))
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status and "0 of 3 jobs are done, and the states of the others are saved" in out
    assert [(folder / "state").exists() for folder in folders] == [True, True, False]


def test_jobs_of_a_killed_engine_save_their_states_and_end(tmp_path):
    process = engine(STOPPABLE, tmp_path / "a")
    wait_for((tmp_path / "a" / "started").exists)
    process.kill()
    process.wait()
    wait_for((tmp_path / "a" / "state").exists)
    assert lock.holder_of(epath.Path(tmp_path / "a"), LOCK_FILE) is None


@pytest.mark.parametrize("file_name", [lock.FILE_NAME, LOCK_FILE])
def test_job_that_another_process_works_on_is_seen_and_taken_over_if_it_is_not_done(tmp_path, monkeypatch, file_name):
    monkeypatch.setattr(local, "_HELD_SECONDS", 0.1)
    waits = """
import sys, time
from etils import epath
from pma_jax.runs import lock
with lock.hold(epath.Path(sys.argv[1]), file_name=sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    held, free = (job(tmp_path / name, "", name=name) for name in ("held", "free"))
    with subprocess.Popen(tiny.python(waits, held.directory, file_name), **pipes) as other:
        assert other.stdout.readline() == "held\n"
        lines = []

        def say(line):
            lines.append(line)
            if "free: done" in line:
                assert read_record(held.directory)["done"] == []
                other.stdin.close()

        assert run_jobs([held, free], 1, say) == {}
    assert any(f"held: is not started, because process {other.pid} on" in line for line in lines)
    assert read_record(held.directory)["done"] == ["step 0"]


def test_step_whose_run_another_process_locks_first_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_HELD_SECONDS", 0.1)
    # The first try finds the lock held, as `pma train` does; its holder ends a little later.
    script = f"""
import subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if not (folder / "first").exists():
    (folder / "first").touch()
    hold = ("import fcntl, sys, time; f = open(sys.argv[1] + '/lock', 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
            "print('held', flush=True); time.sleep(1)")
    other = subprocess.Popen([{sys.executable!r}, "-c", hold, str(folder)], stdout=subprocess.PIPE)
    other.stdout.readline()
    sys.exit("error: in use")
"""
    failed, lines = run([job(tmp_path / "run", script)])
    assert failed == {} and any("is not trained here, because another process trains it" in line for line in lines)


def test_jobs_without_a_directory_write_to_the_output_of_the_engine(tmp_path, capfd):
    jobs = [Job("a", (Step("a", (sys.executable, "-c", "print('seen')")),))]
    assert run(jobs)[0] == {} and run(jobs)[0] == {}
    assert capfd.readouterr().out == "seen\nseen\n" and not list(Path(tmp_path).iterdir())


def test_progress_counts_the_jobs_that_were_not_done_before(tmp_path):
    before, works, fails = (job(tmp_path / n, script, name=n) for n, script in (("a", ""), ("b", ""), ("c", "1/0")))
    assert run([before])[0] == {}
    seen = []
    assert set(run_jobs([before, works, fails], 1, lambda _: None, progress=lambda *now: seen.append(now))) == {"c"}
    assert seen == [(0, 2), (1, 2), (2, 2)]
