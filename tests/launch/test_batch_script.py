"""`pma launch --engine slurm`: the batch script, run as SLURM runs it, with real processes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import tiny

from pma_jax.cli import main
from pma_jax.launch.batch_script import BatchSetting, make_script
from pma_jax.runs.directory import open_run

LAUNCH = ["launch", "--engine", "slurm", "--slurm", "time=240"]
TRAIN = ["--", "train", "--config", "dense_1b", "--workdir", "/shared/runs/dense_1b"]


def script(arguments: list[str], capsys) -> str:
    """Return the script that is printed for the words of `pma launch`."""
    capsys.readouterr()
    at = arguments.index("--")
    assert main([*arguments[:at], "--dry-run", *arguments[at:]]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def options(text: str) -> dict[str, str]:
    """Return the options of sbatch in a script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def test_nodes_tasks_and_options(capsys):
    text = script([*LAUNCH, "--gpus", "16", "--slurm", "cpus_per_task=8", "--slurm", "partition=gpu", *TRAIN], capsys)
    name = options(text)["job-name"]
    assert name.startswith("pma-train-dense-1b-")
    assert options(text) == {
        "job-name": name, "nodes": "2", "gpus-per-node": "8", "ntasks-per-node": "8", "signal": "TERM@300",
        "output": "%x-%j.log", "open-mode": "append", "time": "240", "cpus-per-task": "8", "partition": "gpu",
        "requeue": "",
    }  # fmt: skip
    command = shlex.join([sys.executable, "-m", "pma_jax.cli", *TRAIN[1:], "--distributed"])
    assert f" pma \\\n    {command}\n" in text and "-lt 50 ]]" in text
    text = script([*LAUNCH, "--gpus", "8", "--nodes", "2", "--max-restarts", "3", *TRAIN], capsys)
    assert (options(text)["gpus-per-node"], options(text)["ntasks-per-node"]) == ("4", "4") and "-lt 3 ]]" in text
    text = script([*LAUNCH, "--nodes", "1", "--name", "small", "--", "report", "runs/x"], capsys)
    assert options(text)["ntasks-per-node"] == "1" and "gpus" not in text and "--distributed" not in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([*LAUNCH, *TRAIN], 2, "one of the arguments --gpus --nodes is required"),
        ([*LAUNCH, "--gpus", "8", "--image", "x", *TRAIN], 2, "--image is for --engine gke"),
        ([*LAUNCH, "--gpus", "8", "--spot", *TRAIN], 2, "--spot is for --engine gke"),
        (["launch", "--engine", "gke", "--gpus", "8", "--image", "x", "--nodes", "1", *TRAIN], 2,
         "--nodes is for --engine slurm"),
        ([*LAUNCH[:3], "--gpus", "8", *TRAIN], 1, "needs a time limit in minutes: --slurm time=240"),
        ([*LAUNCH, "--gpus", "8", "--nodes", "3", *TRAIN], 1, "--gpus 8 is not a multiple of --nodes 3"),
        ([*LAUNCH, "--gpus", "2", "--nodes", "4", *TRAIN], 1, "--gpus 2 is not a multiple of --nodes 4"),
        ([*LAUNCH, "--gpus", "8", "--slurm", "time=9", *TRAIN], 1, "--slurm time is given twice"),
        ([*LAUNCH, "--gpus", "8", "--slurm", "nodes=9", *TRAIN], 1, "--slurm nodes: the script sets it"),
        ([*LAUNCH, "--gpus", "8", "--slurm", "account=a b", *TRAIN], 1, "--slurm account='a b' is not"),
        ([*LAUNCH, "--gpus", "8", "--slurm", "partition", *TRAIN], 2, "'partition' is not KEY=VALUE"),
        ([*LAUNCH, "--gpus", "8", "--name", "Big_Run", *TRAIN], 1, "the name 'Big_Run' is not one"),
        ([*LAUNCH, "--nodes", "2", "--", "report", "runs/x"], 1, "`pma report` runs in one process"),
        ([*LAUNCH, "--nodes", "2", "--", "train", "--config", "demo", "--workdir", "/tmp/run"], 1,
         "/tmp/run is on the disk of one node"),
        ([*LAUNCH, "--nodes", "2", *TRAIN], 1, "squeue is not found"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, status, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert captured.out == ""


def write_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_job_is_submitted_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_program(tmp_path, "squeue", f"cat {tmp_path}/queue 2> {os.devnull} || true")
    write_program(tmp_path, "sbatch", f"cat > {tmp_path}/script; echo 7 | tee {tmp_path}/queue")
    arguments = [*LAUNCH, "--gpus", "16", *TRAIN]
    expected = script(arguments, capsys)
    assert main(arguments) == 0 and (tmp_path / "script").read_text() == expected
    assert "submitted job 7 with the name pma-train-dense-1b-" in capsys.readouterr().out
    assert main(arguments) == 1 and "job 7 has the name pma-train-dense-1b-" in capsys.readouterr().err
    (tmp_path / "queue").unlink()
    write_program(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert main(arguments) == 1
    assert capsys.readouterr().err == "error: SLURM refused the job: sbatch: error: invalid partition\n"


# What SLURM does for the script, as sbatch(1), srun(1) and scontrol(1) say: srun starts the tasks with these variables,
# passes SIGTERM to every process of them, and returns their highest status.
SRUN = """
import os, pathlib, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith(("--kill-on-bad-exit=", "--wait="))]
variables = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
tasks = [
    subprocess.Popen(words, env=os.environ | variables | {"SLURM_PROCID": i, "SLURM_LOCALID": i}, process_group=0)
    for i in "01"
]
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks])
pathlib.Path("srun.pid").write_text(str(os.getpid()))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def start_batch(folder: Path, text: str, restarts: int = 0) -> subprocess.Popen:
    """Start a batch script as SLURM does, with `requeued` in `folder` as the queue of jobs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, program in {
        "srun": f'exec {sys.executable} {folder}/srun.py "$@"',
        "squeue": "echo RUNNING",
        "scontrol": f'echo "$@" >> {folder}/requeued',
    }.items():
        write_program(programs, name, program)
    (folder / "srun.py").write_text(SRUN)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SLURM_JOB_ID": str(processes.free_port()),  # JAX takes the coordinator's port from it
        "SLURM_RESTART_COUNT": str(restarts),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": processes.xla_flags(2),
    }
    with (folder / "log").open("a") as log:
        return subprocess.Popen(["bash", "-c", text], env=environment, stdout=log, stderr=log, cwd=folder)


@pytest.mark.parametrize(
    ("statuses", "status", "is_requeued"),
    [((0, 0), 0, False), ((1, 75), 1, False), ((75, 2), 2, False), ((75, 137), 137, True), ((143, 143), 143, True)],
)
def test_batch_script_follows_the_exit_statuses(tmp_path, statuses, status, is_requeued):
    command = ["sh", "-c", f"[ $SLURM_PROCID = 0 ] && exit {statuses[0]}; exit {statuses[1]}"]
    text = make_script(BatchSetting("name", 1, 2, {"time": "5"}, max_restarts=50), command)
    assert start_batch(tmp_path, text).wait(60) == status
    assert (tmp_path / "requeued").exists() == is_requeued
    if is_requeued:
        (tmp_path / "requeued").unlink()
        assert start_batch(tmp_path, text, restarts=50).wait(60) == status
        assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_batch_script_trains_saves_a_state_on_a_signal_and_resumes(tmp_path, capsys):
    config, tokens = tiny.write_config(tmp_path / "config.py", tmp_path, training__total_tokens=10**6), [0]
    words = ["--", "train", "--config", config, "--workdir", str(tmp_path / "run")]
    text = script([*LAUNCH, "--gpus", "2", "--nodes", "1", *words], capsys)
    for restarts in (0, 1):
        job = start_batch(tmp_path, text, restarts)
        begun, end = len((tmp_path / "log").read_text()), time.monotonic() + 120
        while "loss" not in (tmp_path / "log").read_text()[begun:]:
            assert time.monotonic() < end and job.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
        assert job.wait(120) == 143, (tmp_path / "log").read_text()
        tokens.append(open_run(tmp_path / "run").states[-1].tokens)
        assert len((tmp_path / "requeued").read_text().splitlines()) == restarts + 1
    assert 0 < tokens[1] < tokens[2] < 10**6
    assert f"resuming at {tokens[1]:,} of" in (tmp_path / "log").read_text()
