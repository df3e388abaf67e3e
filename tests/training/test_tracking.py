"""Runs in experiment trackers, each with its own library: trackio's database is read back, wandb's offline file too."""

import collections
import importlib.util
import json
import os
import sqlite3
import subprocess

import pytest
import tiny

from pma_jax import config
from pma_jax.config.errors import UserError
from pma_jax.runs.directory import open_run
from pma_jax.training.loop import train
from pma_jax.training.metrics import MetricsLog

CODE = "import sys; from pma_jax import config; from pma_jax.training.loop import train; \
train(config.from_json(open(sys.argv[1]).read()), sys.argv[2])"


def train_tracked(made, folder, **environment):
    """Train in a new process, as trackers read their environment once."""
    (folder / "config.json").write_text(config.to_json(made))
    command = tiny.python(CODE, folder / "config.json", folder / "run")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    return open_run(folder / "run")


def interrupt(run, step):
    """Remove what a run that was killed after `step` had not saved; its metrics are ahead of that."""
    for saved in run.snapshots + run.states:
        if saved.step > step:
            saved.path.rmtree()


def read_database(folder):
    """Return the scalars of each run in trackio's database: {run: [(tokens, tag, value)]}."""
    [database] = folder.glob("tests*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    runs = collections.defaultdict(list)
    for name, step, metrics in rows:
        runs[name] += [(step, tag, value) for tag, value in json.loads(metrics).items()]
    return runs


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the extra trackio")
def test_trackio_has_each_record_once_also_of_a_resumed_run(workspace, tmp_path):
    made = tiny.config(workspace, tracking__name="trackio", tracking__project="tests")
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    interrupt(train_tracked(made, tmp_path, **environment), 8)
    run = train_tracked(made, tmp_path, **environment)
    [(name, scalars)] = read_database(tmp_path / "trackio").items()
    assert name.startswith("run-")
    expected = sorted((r["tokens"], "train/loss", r["loss"]) for r in run.metrics if r["kind"] == "train")
    assert sorted(row for row in scalars if row[1] == "train/loss") == expected
    previews = sorted((r["tokens"], f"preview/{r['recipe']}", r["loss"]) for r in run.metrics if r["kind"] == "preview")
    assert sorted(row for row in scalars if row[1].startswith("preview/")) == previews


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the extra trackio")
def test_tracker_that_is_added_later_has_the_whole_run(workspace, tmp_path):
    interrupt(train_tracked(tiny.config(workspace), tmp_path), 8)
    made = tiny.config(workspace, tracking__name="trackio", tracking__project="tests")
    run = train_tracked(made, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    [scalars] = read_database(tmp_path / "trackio").values()
    expected = sorted((r["tokens"], r["loss"]) for r in run.metrics if r["kind"] == "train")
    assert sorted((tokens, value) for tokens, tag, value in scalars if tag == "train/loss") == expected


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra wandb")
def test_wandb_writes_the_run_offline(workspace, tmp_path):
    made = tiny.config(workspace, tracking__name="wandb", tracking__project="tests")
    run = train_tracked(made, tmp_path, WANDB_MODE="offline")
    identity = json.loads((run.path / "tracking.json").read_text())["wandb"]
    [stored] = (run.path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    assert stored.read_bytes().count(b"train/loss") >= len(tiny.SNAPSHOTS)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_that_is_not_installed_is_one_line_before_the_run_is_created(workspace, tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip("it is installed")
    with pytest.raises(UserError, match=rf"tracking.name={name} needs .* pip install 'pma-jax\[{name}\]'"):
        train(tiny.config(workspace, tracking__name=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_process_0_tracks(finished, workspace, tmp_path):
    run = tiny.dataclasses.replace(finished, config=tiny.config(workspace, tracking__name="trackio"))
    with MetricsLog(run, tiny.HORIZON, is_writer=False) as log:
        log.write({"kind": "train", "tokens": tiny.HORIZON, "loss": 1.0, "tokens_per_second": 1.0})
    assert not (run.path / "tracking.json").exists()
