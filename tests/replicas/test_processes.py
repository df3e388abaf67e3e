"""Workers in several processes: the numbers do not depend on them, and a job that loses one goes on with fewer."""

import signal
import time

import jax
import numpy as np
import processes
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runs.directory import open_run, read_metric_records
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage.paths import absolute_path

METHODS = {
    "periodic": {"replicas__interval_tokens": 5 * 256},
    "diloco": {"replicas__interval_tokens": 5 * 256},
    "streaming": {
        "replicas__interval_tokens": 4 * 256,
        "replicas__streaming_fragments": 2,
        "replicas__streaming_delay_tokens": 256,
        "replicas__streaming_dtype": "int8",
    },
    "sparta": {"replicas__sparta_share": 0.05},
    "noloco": {"replicas__interval_tokens": 5 * 256},
}
IN_CI = ("streaming",)  # a method takes minutes
TRAIN = """
import sys
from pathlib import Path
from pma_jax import config
from pma_jax.training.loop import train
train(config.from_json(Path(sys.argv[1]).read_text()), sys.argv[2])
"""


def read(snapshot):
    """Read a snapshot's parameters onto this process's devices, whatever the mesh of its run is."""
    abstract = abstract_params(snapshot.config.model, data_parallel_mesh())
    return jax.tree.map(np.asarray, snapshots.restore_params(snapshot, abstract))


def train_in(tmp_path, config, name, count, devices):
    file = tmp_path / f"{name}.json"
    file.write_text(configuration.to_json(config))
    processes.script(TRAIN, [file, tmp_path / name], count, devices).check(900)
    return open_run(tmp_path / name)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.long) for name in METHODS]
)
def test_one_process_equals_two_and_four(workspace, tmp_path, name):
    sizes = {"mesh__replica": 4, "mesh__data": 1} if name == "noloco" else {"mesh__replica": 2, "mesh__data": 2}
    keys = METHODS[name] | sizes | {"training__total_tokens": 12 * 256}
    config = tiny.config(workspace, replicas__method=name, replicas__count=4, **keys)
    one, two, four = (train_in(tmp_path, config, f"run{n}", n, 4 // n) for n in (1, 2, 4))
    for other in (two, four):
        assert [s.tokens for s in other.snapshots] == [s.tokens for s in one.snapshots]
        for ours, theirs in zip(other.snapshots, one.snapshots, strict=True):
            tiny.assert_close(read(ours), read(theirs), rtol=1e-4, atol=1e-5)
        losses = [[r["loss"] for r in run.metrics if r["kind"] == "train"] for run in (one, other)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_loses_a_slice_goes_on_with_one_worker_less(workspace, tmp_path):
    keys = {
        "replicas__method": "diloco",
        "replicas__interval_tokens": 4 * 384,
        "mesh__replica": -1,
        "mesh__data": 1,
        "training__batch_size_sequences": 12,
        "training__total_tokens": 200 * 384,
        "checkpoint__interval_tokens": 16 * 384,
        "checkpoint__state_interval_tokens": 4 * 384,
        "evaluation__batch_size_sequences": 12,
        "preview__windows": (),
    }
    file, run = tiny.write_config(tmp_path / "config.py", workspace, **keys), tmp_path / "run"
    command = ["train", "--config", file, "--workdir", run]
    job = processes.pma(command, 3, devices=1)
    end = time.monotonic() + 300
    while len(read_metric_records(absolute_path(run / "metrics.jsonl"))) < 30 and time.monotonic() < end:
        time.sleep(0.05)
    job.processes[2].kill()
    assert job.wait(300) == [75, 75, -signal.SIGKILL]
    assert "in 3 workers, training for" in job.error(0) + job.out(0)
    trained = open_run(run).newest_resumable_state.tokens
    resumed = processes.pma(command, 2, devices=1).check(900)
    said = resumed.error(0) + resumed.out(0)
    assert "the state was saved with 3 workers, and goes on with 2 workers" in said
    assert f"in 2 workers, resuming at {trained:,} of 76,800 tokens" in said
    losses = [r["loss"] for r in open_run(run).metrics if r["kind"] == "train"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) and open_run(run).snapshots[-1].tokens == 76_800
