"""A grid of real runs that is killed: the launcher and one run, by SIGKILL. The same command finishes it."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny

from pma_jax.runs import steps
from pma_jax.runs.directory import open_run
from pma_jax.training.loop import train

STATE_STEPS, STEPS = 50, 300
SIZES = {
    "training__total_tokens": STEPS * tiny.BATCH_TOKENS,
    "checkpoint__state_interval_tokens": STATE_STEPS * tiny.BATCH_TOKENS,
    "checkpoint__interval_tokens": STATE_STEPS // 2 * tiny.BATCH_TOKENS,
}


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return found


def digests(run):
    """Return the digests of all arrays of the run, by the path of their step."""
    folders = [folder for name in ("snapshots", "states") for folder in steps.published_steps(run.path / name)]
    return {f"{p.parent.name}/{p.name}": steps.read_metadata(p, ())["leaves"] for p in folders}


@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.long)])
def test_killed_grid_trains_what_undisturbed_runs_train_and_little_of_it_twice(tmp_path, workspace, count):
    config = tiny.write_config(tmp_path / "config.py", workspace, **SIZES)
    seeds, root = ",".join(map(str, range(count))), tmp_path / "root"
    words = ["--config", config, "--root", root, "--vary", f"training.seed={seeds}"]
    command = tiny.command("grid", *words, "--parallel", str(min(2, len(os.sched_getaffinity(0)))))

    def states():
        return [p for p in root.glob("*/states/*") if (p / steps.COMMIT_MARKER).exists()]

    def in_training():
        """Return the process of a run that has just published a state and its snapshot, and is not at its end."""
        for path in states():
            run = path.parent.parent
            is_resumable = (run / "snapshots" / path.name / steps.COMMIT_MARKER).exists()
            holder = (run / "lock").read_text()
            if (
                holder
                and is_resumable
                and int(path.name) < STEPS
                and not (run / "states" / str(int(path.name) + STATE_STEPS)).exists()
            ):
                return json.loads(holder)["process"]
        return None

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as grid:
        os.kill(wait_for(in_training, grid), signal.SIGKILL)
        saved = len(states())
        wait_for(lambda: len(states()) > saved + 1 and in_training(), grid)
        grid.kill()
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == count

    sessions = 0
    for seed in range(count):
        run = open_run(root / f"training.seed={seed}")
        undisturbed = train(tiny.config(workspace, **SIZES, training__seed=seed), tmp_path / f"seed-{seed}")
        assert digests(run) == digests(undisturbed) and f"states/{STEPS}" in digests(run)
        assert tiny.numbers(run) == tiny.numbers(undisturbed)
        log = Path(run.path / "job.log").read_text()
        trained = len(re.findall(r"^[\d.]+M tokens  loss .* tokens/s$", log, re.M))
        again = len(re.findall(", resuming at ", log))
        # States are saved while training goes on, and each save waits for the one before it. So a kill costs the steps
        # since the newest published state: an interval, and those trained during a save, at most an interval more.
        assert STEPS <= trained <= STEPS + again * 2 * STATE_STEPS
        sessions += again
    assert sessions >= 2, "one run was killed, and at least one was stopped with the launcher"
