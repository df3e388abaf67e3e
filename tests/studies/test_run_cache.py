"""The cache of runs: finished runs are reused, interrupted ones resumed, and concurrent callers share one run."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.evaluation.sweep import Cell
from pma_jax.runs.directory import is_run, open_run
from pma_jax.studies import run_cache

FORK = 16 * tiny.BATCH_TOKENS
ANNEAL = ["schedule.decay=linear", f"schedule.decay_start_tokens={FORK}"]


@pytest.fixture(scope="module")
def cache(workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    run_cache.get_or_train(folder, tiny.config(workspace))
    return folder


@pytest.fixture
def trained(monkeypatch):
    """Record the configurations that were trained rather than found finished."""
    trained_configs, train = [], run_cache.train

    def counted(config, folder):
        run = open_run(folder) if is_run(folder) else None
        if (
            run is None
            or run.newest_resumable_state is None
            or run.newest_resumable_state.tokens < config.training.total_tokens
        ):
            trained_configs.append(config)
        return train(config, folder)

    monkeypatch.setattr(run_cache, "train", counted)
    return trained_configs


def test_run_is_trained_once_and_equals_that_of_train(cache, finished, workspace, trained):
    run = run_cache.get_or_train(cache, tiny.config(workspace))
    assert trained == [] and run.path.parent.name == configuration.digest(run.config)
    assert tiny.numbers(run) == tiny.numbers(finished)
    assert run_cache.training_cost(run)["seconds"] > 0 and run_cache.training_cost(run)["tokens"] == tiny.HORIZON
    other = run_cache.get_or_train(cache, tiny.config(workspace, training__seed=1))
    assert len(trained) == 1 and other.path != run.path


def test_interrupted_run_is_resumed(cache, finished, workspace, tmp_path, trained):
    run = run_cache.get_or_train(cache, tiny.config(workspace))
    copied = shutil.copytree(run.path.parent, tmp_path / run.path.parent.name)
    for saved in (copied / "run" / "states").iterdir():
        if saved.name == "24":
            shutil.rmtree(saved)
    before = json.loads((copied / "trained.json").read_text())["seconds"]
    again = run_cache.get_or_train(tmp_path, tiny.config(workspace))
    assert len(trained) == 1 and tiny.numbers(again) == tiny.numbers(finished)
    assert run_cache.training_cost(again)["seconds"] > before, "the time of all sessions counts"


@pytest.mark.slow
def test_fork_is_keyed_by_parent_tokens_and_changes(cache, workspace, trained):
    source = run_cache.get_or_train(cache, tiny.config(workspace))
    fork = run_cache.get_or_fork(cache, source, FORK, ANNEAL)
    assert fork.metadata["forked_from"]["tokens"] == FORK and fork.config.schedule.decay == "linear"
    assert run_cache.training_cost(fork)["tokens"] == tiny.HORIZON - FORK
    assert run_cache.get_or_fork(cache, source, FORK, ANNEAL).path == fork.path and len(trained) == 1
    paths = {fork.path, run_cache.get_or_fork(cache, source, FORK // 2, ANNEAL).path}
    paths.add(run_cache.get_or_fork(cache, source, FORK, ["schedule.peak_rate=0.005"]).path)
    paths.add(run_cache.get_or_fork(cache, fork, tiny.HORIZON, ["training.total_tokens=6400"]).path)
    other = run_cache.get_or_train(cache, tiny.config(workspace, training__seed=1))
    paths.add(run_cache.get_or_fork(cache, other, FORK, ANNEAL).path)
    assert len(paths) == 5


@pytest.mark.slow
def test_cache_can_be_moved(cache, workspace, tmp_path, trained):
    source = run_cache.get_or_train(cache, tiny.config(workspace))
    fork = run_cache.get_or_fork(cache, source, FORK, ANNEAL)
    moved = shutil.copytree(cache, tmp_path / "moved")
    trained.clear()  # The first test that runs here has trained them.
    again = run_cache.get_or_fork(moved, run_cache.get_or_train(moved, tiny.config(workspace)), FORK, ANNEAL)
    assert again.path.parent.name == fork.path.parent.name and trained == []


@pytest.mark.slow
def test_cache_of_a_run_that_starts_from_its_merge_can_be_moved(cache, workspace, tmp_path, trained):
    def config_in(folder):
        source = run_cache.get_or_train(folder, tiny.config(workspace))
        merged = run_cache.get_or_merge(source, Cell("sma", 3), FORK)
        return tiny.config(workspace, training__start_from=str(merged.path))

    run = run_cache.get_or_train(cache, config_in(cache))
    assert run.config.training.start_from.startswith(str(cache))
    moved = shutil.copytree(cache, tmp_path / "moved")
    trained.clear()
    again = run_cache.get_or_train(moved, config_in(moved))
    assert again.path.parent.name == run.path.parent.name and trained == []
    outside = shutil.copytree(run.config.training.start_from, tmp_path / "elsewhere" / "merged")
    assert run_cache.find(cache, tiny.config(workspace, training__start_from=str(outside))) is None


@pytest.mark.slow
def test_fork_may_start_from_a_merge(cache, workspace, trained):
    source = run_cache.get_or_train(cache, tiny.config(workspace))
    merged = run_cache.get_or_merge(source, Cell("wma", 3), FORK)
    snapshots = [tiny.named(tiny.read(s)) for s in source.snapshots[1:4]]
    for name, leaf in tiny.named(tiny.read(merged)).items():
        expected = sum(w * s[name].astype(np.float64) for w, s in zip((1 / 6, 2 / 6, 3 / 6), snapshots, strict=True))
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert run_cache.get_or_merge(source, Cell("wma", 3), FORK).path == merged.path
    plain = run_cache.get_or_fork(cache, source, FORK, ANNEAL)
    fork = run_cache.get_or_fork(cache, source, FORK, ANNEAL, merged)
    assert fork.path != plain.path
    other = run_cache.get_or_merge(source, Cell("sma", 3), FORK)
    assert run_cache.get_or_fork(cache, source, FORK, ANNEAL, other).path not in (fork.path, plain.path)
    first = [next(r for r in run.metrics if r["kind"] == "train") for run in (fork, plain)]
    assert first[0]["tokens"] == first[1]["tokens"] and first[0]["loss"] != first[1]["loss"]


TRAINS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tiny
from pma_jax.studies import run_cache
print("asking", flush=True)
run = run_cache.get_or_train(sys.argv[2], tiny.config(Path(sys.argv[3]), training__seed=7))
print(run_cache.training_cost(run)["seconds"], flush=True)
"""


@pytest.mark.slow
def test_two_concurrent_processes_train_a_run_once(workspace, tmp_path):
    arguments = tiny.python(TRAINS, tiny.__file__.rpartition("/")[0], tmp_path, workspace)
    both = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=tiny.environment())
        for _ in range(2)
    ]
    output = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert len({out.split()[1] for out, _ in output}) == 1, "one of them trained, and both read its cost"
    started = sum(err.count("training for 6,144 tokens") for _, err in output)
    assert started == 1
