"""Merge with worker processes: the same bytes, the same errors, and no process left running."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

from pma_jax.merging.engine import schedule, workers
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import MergePlan, plan
from pma_jax.merging.verify import verify
from pma_jax.storage.formats.open import open_source
from pma_jax.storage.formats.source import LeafInfo

ROWS = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])


def leaves(seed, dtype=np.float32):
    """Return leaves of several units, and many small ones."""
    rng = np.random.default_rng(seed)
    large = {"large": rng.standard_normal(5_000_001, np.float32).astype(dtype)}
    return large | {f"leaf{n}": rng.standard_normal(1000, np.float32) for n in range(30)} | {"counts": np.arange(7)}


@pytest.fixture(params=["orbax", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16"))])
def sources(tmp_path, request):
    paths = [tmp_path / f"in{k}" for k in range(3)]
    for k, path in enumerate(paths):
        if request.param == "orbax":  # Compressed, so that a worker decodes.
            ocp.save(str(path), leaves(k))
        else:
            path.mkdir()
            save_file(
                leaves(k, ml_dtypes.bfloat16 if request.param == "bfloat16" else np.float32), path / "m.safetensors"
            )
    return [open_source(path) for path in paths]


def plan_with_workers(sources, rows, only=False):
    """Return a plan for two workers, which do all of the work if `only`."""
    made = plan(sources, rows)
    return dataclasses.replace(made, schedule=dataclasses.replace(made.schedule, processes=3, threads=0 if only else 1))


@pytest.mark.parametrize(
    "rows", [pytest.param(ROWS[0], marks=pytest.mark.slow), ROWS], ids=["one recipe", "two recipes"]
)
@pytest.mark.parametrize("only", [pytest.param(False, marks=pytest.mark.slow), True], ids=["and this process", "alone"])
def test_workers_merge_to_the_bytes_of_one_process(sources, tmp_path, rows, only):
    names = ["a", "b"][: np.atleast_2d(rows).shape[0]]
    merge(plan(sources, rows, cores=1), [tmp_path / "one" / name for name in names])
    merge(plan_with_workers(sources, rows, only), [tmp_path / "many" / name for name in names])
    assert tiny.contents(tmp_path / "many") == tiny.contents(tmp_path / "one")
    assert all(verify(str(tmp_path / "many" / name), with_sources=True) == [] for name in names)


def test_worker_count_is_bounded_by_bytes_to_read_and_memory(sources, monkeypatch):
    assert plan(sources, ROWS, cores=64).schedule.processes == 1
    each = sum(source.nbytes for source in sources) // 5 - 1000
    monkeypatch.setattr(schedule, "MIN_READ_BYTES_PER_PROCESS", each)
    made = plan(sources, ROWS[0], cores=64)
    assert (made.schedule.processes, made.schedule.threads) == (5, 1)
    assert plan(sources, ROWS[0], cores=2).schedule.processes == 2
    # An Orbax tree's smallest leaves are decoded by tensorstore, which takes more memory than a process.
    limit = plan(sources, ROWS[0], cores=1).schedule.memory_bytes
    few = plan(sources, ROWS[0], cores=64, memory_limit_bytes=limit)
    assert 1 <= few.schedule.processes < 5 and few.schedule.memory_bytes <= limit < made.schedule.memory_bytes
    assert few.digest == made.digest, "another number of processes resumes the same merge"


def poisoned(tmp_path):
    """Return sources of which one contains a NaN."""
    paths = [tmp_path / f"in{k}" for k in range(3)]
    for k, path in enumerate(paths):
        path.mkdir()
        changed = {"leaf13": np.full(1000, np.nan, np.float32)} if k == 1 else {}
        save_file(leaves(k) | changed, path / "m.safetensors")
    return [open_source(path) for path in paths]


def test_error_of_a_worker_is_raised_with_its_message(tmp_path):
    sources = poisoned(tmp_path)
    with pytest.raises(ValueError, match="in1: leaf13 has nan at element 0; only finite values merge"):
        merge(plan_with_workers(sources, ROWS[0], only=True), [tmp_path / "out"])
    assert {p.name for p in tmp_path.iterdir()} == {"in0", "in1", "in2"}


def test_killed_worker_fails_the_merge_and_completed_units_are_kept(sources, tmp_path, monkeypatch):
    started = []
    real = subprocess.Popen

    def remembered(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", remembered)
    made = plan_with_workers(sources, ROWS[0], only=True)
    with pytest.raises(ChildProcessError, match=r"status -9 \(killed: out of memory\?\); run the same command again"):
        merge(made, [tmp_path / "out"], progress=lambda done, total: [p.kill() for p in started])
    assert not (tmp_path / "out").exists() and all(p.returncode is not None for p in started)
    monkeypatch.undo()
    assert 0 < merge(made, [tmp_path / "out"])[1] < made.read_bytes
    assert verify(str(tmp_path / "out"), with_sources=True) == []


SLOW = """
import dataclasses, sys, time
import numpy as np
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import MergePlan, plan
from pma_jax.storage.formats.open import open_source
from pma_jax.storage.formats.source import LeafInfo
made = plan([open_source(path) for path in sys.argv[2:]], np.array([0.2, 0.3, 0.5]))
def wait(done, total):
    print(done, flush=True)
    time.sleep(60)
schedule = dataclasses.replace(made.schedule, threads=0, processes=3)
merge(dataclasses.replace(made, schedule=schedule), [sys.argv[1]], progress=wait)
"""


def test_shared_objects_are_pickled_by_one_thread(sources, tmp_path, monkeypatch):
    """Threads that pickle the same object crash Python 3.11 (experiments/fuzz/instance_dict_race.py)."""
    pickling = set()

    def state(self):
        pickling.add(threading.get_ident())
        return dict(vars(self))

    for kind in (LeafInfo, MergePlan):
        monkeypatch.setattr(kind, "__getstate__", state, raising=False)
    merge(plan_with_workers(sources, ROWS[0], only=True), [tmp_path / "out"])
    assert pickling == {threading.get_ident()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="who is whose child is read from Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_exit_with_the_merging_process(sources, tmp_path, number):
    command_line = tiny.python(SLOW, tmp_path / "out", *(source.path for source in sources))
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, env=tiny.environment())
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    running = [int(child) for task in children for child in task.read_text().split()]
    assert len(running) == 2
    process.send_signal(number)
    assert process.wait(30) == -number
    end = time.monotonic() + 120
    while (left := [p for p in running if is_running(p)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def is_running(process):
    """Return whether a process runs, rather than being a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_of_site_customisation_is_not_taken_for_an_answer(sources, tmp_path, monkeypatch, capfd):
    (tmp_path / "noisy").mkdir()
    (tmp_path / "noisy" / "sitecustomize.py").write_text("print('hello from an odd installation')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "noisy"), *sys.path])
    merge(plan_with_workers(sources, ROWS[0], only=True), [tmp_path / "out"])
    assert capfd.readouterr().out == ""
