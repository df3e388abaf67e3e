"""The SLURM engine with submitit's own local and debug executors, and with programs named as SLURM's that record."""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import tiny
from etils import epath

from pma_jax.cli import main
from pma_jax.launch import slurm
from pma_jax.launch.job import LOCK_FILE, Job, Step, read_record
from pma_jax.storage.paths import as_path

submitit = pytest.importorskip("submitit")

# Prints the id of a new array and keeps the file that it was given; `queue` holds what squeue prints.
PROGRAMS = {
    "sbatch": 'cp "$1" "$FAKE/sbatch-$(ls "$FAKE" | grep -c sbatch-)"\necho "Submitted batch job 4242"\n',
    "squeue": 'echo "$@" > "$FAKE/squeue-arguments"\ncat "$FAKE/queue"\n',
    "srun": "exit 1\n",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return the folder of what the programs record; they come first in PATH."""
    folder, programs = tmp_path / "fake", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755 | stat.S_IXUSR)
    (folder / "queue").write_text("")
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def pma(tmp_path, workspace, capfd):
    """Return a function that calls `pma grid --engine slurm` on tiny runs of three seeds."""
    config = tiny.write_config(tmp_path / "config.py", workspace)

    def call(*arguments):
        words = ["grid", "--config", config, "--root", str(tmp_path / "root"), "--vary", "training.seed=0,1,2"]
        return main([*words, "--engine", "slurm", *arguments]), *capfd.readouterr()

    return call


def job(folder, *scripts):
    steps = tuple(Step(f"step {n}", (sys.executable, "-c", s, str(folder))) for n, s in enumerate(scripts))
    return Job(Path(folder).name, steps, epath.Path(folder))


def test_runs_are_submitted_as_one_array_and_not_twice(pma, cluster, tmp_path):
    settings = [f"--slurm={x}" for x in ("time=90", "partition=Gpu", "account=lab", "gpus_per_node=1", "qos=low")]
    status, out, error = pma("--parallel", "2", *settings)
    assert status == 0 and "submitted 3 of 3 runs as 4242" in error and out.count("not started") == 3
    lines = (cluster / "sbatch-0").read_text().splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert options >= {"--array=0-2%2", "--time=90", "--partition=Gpu", "--account=lab", "--gpus-per-node=1"}
    assert options >= {"--qos=low", "--requeue", "--signal=USR2@120", "--open-mode=append"}
    assert any(option.startswith("--job-name=pma-root-") for option in options)
    assert lines[-1].startswith("srun ") and lines[-1].endswith(f"submitit.core._submit {tmp_path / 'root' / 'slurm'}")
    for number in range(3):
        run = epath.Path(tmp_path / "root" / f"training.seed={number}")
        assert read_record(run)["submitted"] == f"4242_{number}"

    (cluster / "queue").write_text("4242_0\n4242_2\n17\n")
    status, out, error = pma(*settings)
    assert "submitted 1 of 3 runs as 4242" in error and out.count(" queued ") == 2
    assert "--array=" not in (cluster / "sbatch-1").read_text(), "one run is a job of its own"
    assert "--me" in (cluster / "squeue-arguments").read_text()
    (cluster / "queue").write_text("4242_0\n4242\n4242_2\n")
    status, out, error = pma(*settings)
    assert "submitted 0 of 3 runs" in error and not (cluster / "sbatch-2").exists()
    rows = json.loads(pma("--status", "--json")[1])
    assert [row["state"] for row in rows] == ["queued"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--engine slurm needs a time limit in minutes: --slurm time=240"),
        (["--slurm", "time=9", "--slurm", "queue=a"], "--slurm: Unavailable parameter(s): ['queue']"),
        (["--slurm", "time=9", "--root", "gs://bucket/grid"], "is given twice"),
    ],
)
def test_wrong_settings_are_one_line(pma, cluster, arguments, message):
    status, _, error = pma(*arguments)
    assert status > 0 and message in error and error.count("\n") == 1
    assert not (cluster / "sbatch-0").exists()


def test_no_cluster_is_one_line(pma, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert pma("--slurm", "time=9")[2] == (
        "error: srun is not found: --engine slurm submits from a machine of a SLURM cluster\n"
    )
    assert "squeue is not found" in pma("--status")[2]


def test_array_that_slurm_refuses_is_one_line(pma, cluster, tmp_path):
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    status, _, error = pma("--slurm", "time=9")
    assert status == 1 and error.splitlines()[-1] == "error: SLURM refused the array: invalid partition"


def test_tasks_run_their_jobs(tmp_path):
    executor = submitit.LocalExecutor(folder=tmp_path / "slurm")
    executor.update_parameters(timeout_min=5)
    works = job(tmp_path / "works", "print('said')", "")
    fails = job(tmp_path / "fails", "raise SystemExit('error: no text')")
    ids = slurm.submit([works, fails], executor)
    tasks = [submitit.LocalJob(tmp_path / "slurm", job_id=name, tasks=[0]) for name in ids]
    deadline = time.monotonic() + 120
    while not all(task.paths.result_pickle.exists() for task in tasks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tasks[0].exception() is None and "error: no text" in str(tasks[1].exception())
    assert read_record(works.directory) | {"failed": None} == {
        "done": ["step 0", "step 1"],
        "failed": None,
        "submitted": ids[0],
    }
    assert read_record(fails.directory)["failed"]["line"] == "error: no text"
    assert "said" in as_path(works.directory / "job.log").read_text()


def test_interrupted_task_saves_its_state_is_queued_again_and_resumes(tmp_path):
    script = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if (folder / "state").exists():
    (folder / "resumed").write_text("")
    sys.exit()
def stop(*_):
    (folder / "state").write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / "started").write_text("")
time.sleep(120)
"""
    executor = submitit.LocalExecutor(folder=tmp_path / "slurm")
    executor.update_parameters(timeout_min=5, signal_delay_s=60)
    interrupted = job(tmp_path / "run", script)
    task = executor.submit(slurm.SlurmTask(interrupted))
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # As SLURM does. `task._interrupt()` of submitit 1.5.3 signals its controller instead, which that ends.
    os.kill(json.loads((tmp_path / "run" / LOCK_FILE).read_text())["process"], signal.SIGUSR2)
    while not task.paths.result_pickle.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert task.exception() is None and (tmp_path / "run" / "resumed").exists()
    assert read_record(interrupted.directory)["done"] == ["step 0"]


def test_debug_executor_runs_a_job_in_this_process(tmp_path):
    executor = submitit.DebugExecutor(folder=tmp_path / "slurm")
    alone = job(tmp_path / "run", "")
    task = executor.submit(slurm.SlurmTask(alone))
    task.results()
    assert read_record(alone.directory)["done"] == ["step 0"]
