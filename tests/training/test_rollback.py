"""Rollback after a spike: a tiny run whose rate ramp makes it diverge, killed at every point of a rollback."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pma_jax.config.errors import DivergenceError
from pma_jax.data import batches, shards
from pma_jax.merging.api import average
from pma_jax.model.decoder import graph_definition
from pma_jax.runs import states
from pma_jax.runs.directory import is_run, newest_snapshot, open_run, read_metric_records
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import loop, rollback, spikes
from pma_jax.training.loop import train
from pma_jax.training.schedule import learning_rate
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step

STEP = tiny.BATCH_TOKENS
# The ramp would end at 600 times the rate of the tiny run; the loss jumps around step 40. After the rollback the rate
# rises so slowly that the rest of the run is stable.
KEYS = {
    "training__total_tokens": 64 * STEP,
    "schedule__peak_rate": 6.0,
    "schedule__warmup_tokens": 100 * STEP,
    "spikes__window_tokens": 16 * STEP,
    "spikes__patience_tokens": 6 * STEP,
    "spikes__confirm_steps": 3,
    "spikes__loss_z": 3.0,
    "spikes__minimum_rise_nats": 0.3,
    "spikes__attempts": 2,
    "spikes__warmup_tokens": 800 * STEP,
    "preview__windows": (2,),
}


def config(workspace, **changes):
    return tiny.config(workspace, **(KEYS | changes))


@pytest.fixture(scope="module")
def recovered(workspace):
    """Train the run that spikes and rolls back, to its horizon. Read-only."""
    return train(config(workspace), workspace / "recovered")


def event_of(run):
    (event,) = rollback.events(run)
    return event


def losses(records):
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def set_aside_records(run, number=1):
    return read_metric_records(run.path / "spikes" / str(number) / "metrics.jsonl")


def records_until_rollback(run):
    """Return the records of a run as they were before its only rollback: those kept, then those set aside."""
    event = event_of(run)
    kept = [r for r in run.metrics if r["tokens"] <= event["tokens"] and r["kind"] != "recovery"]
    return kept + set_aside_records(run)


def assert_same_run(actual, expected):
    """Assert that all numbers, snapshots, states and events of two runs are bitwise equal."""
    assert tiny.numbers(actual) == tiny.numbers(expected)
    assert rollback.events(actual) == rollback.events(expected)
    for kind in expected.config.checkpoint.kinds:
        for a, e in zip(actual.of_kind(kind), expected.of_kind(kind), strict=True):
            assert (a.step, a.tokens, a.loss) == (e.step, e.tokens, e.loss)
            tiny.assert_equal(tiny.read(a), tiny.read(e))
    assert [s.step for s in actual.states] == [s.step for s in expected.states]
    abstract = abstract_state(expected.config, make_mesh(expected.config.mesh))
    tiny.assert_equal(
        states.restore_state(actual.states[-1], abstract), states.restore_state(expected.states[-1], abstract)
    )


# --- Rollback ---------------------------------------------------------------------------------------------------------


def test_run_rolls_back_to_the_merge_from_before_the_spike_and_recovers(recovered):
    event = event_of(recovered)
    spike = event["spike"]
    assert spike["verdict"] == "irrecoverable" and spike["loss"] > spike["median_loss"] + 0.3
    before = [s for s in recovered.snapshots if s.tokens < spike["onset_tokens"]]
    assert [m["step"] for m in event["merged"]] == [s.step for s in before[-3:]]
    assert event["coefficients"] == [1 / 3] * 3
    assert (event["tokens"], event["step"]) == (before[-1].tokens, before[-1].step)
    assert event["tokens"] < spike["onset_tokens"] <= spike["tokens"]
    trained = losses(recovered.metrics)
    assert sorted(trained) == list(range(1, 65)), "one record per step, no duplicates"
    last = [trained[step] for step in range(60, 65)]
    assert np.median(last) < spike["median_loss"], "below the loss before the spike"
    assert [s.step for s in recovered.snapshots] == list(range(4, 65, 4))
    assert [r for r in recovered.metrics if r["kind"] == "recovery"] == [{"kind": "recovery"} | event]


def test_snapshots_after_the_spike_are_set_aside_and_never_merged(recovered):
    event, folder = event_of(recovered), recovered.path / "spikes" / "1"
    doomed = losses(set_aside_records(recovered))
    assert sorted(doomed) == list(range(event["step"] + 1, event["spike"]["step"] + 1))
    assert doomed[event["spike"]["step"]] == event["spike"]["loss"]
    verdicts = [r["verdict"] for r in set_aside_records(recovered) if r["kind"] == "spike"]
    assert verdicts.count("irrecoverable") == 1 and verdicts[-1] == "irrecoverable"
    moved = [read_snapshot(p) for p in sorted((folder / "snapshots").iterdir())]
    assert [s.step for s in moved] == event["aside"]["snapshots"] != []
    for snapshot in moved:
        kept = next(s for s in recovered.snapshots if s.step == snapshot.step)
        assert kept.loss != snapshot.loss
    assert newest_snapshot(recovered.path).path.parent.name == "snapshots"


@pytest.mark.slow
def test_restarted_state_is_the_mean_with_a_fresh_optimizer_and_the_earlier_window(workspace, recovered):
    run = train(
        config(workspace, checkpoint__keep_states=9, checkpoint__state_interval_tokens=4 * STEP),
        run_at(recovered, "all"),
    )
    event = event_of(run)
    restarted = next(s for s in run.states if s.step == event["step"])
    assert (restarted.tokens, restarted.progress.position) == (event["tokens"], 8 * event["step"])
    abstract = abstract_state(run.config, make_mesh(run.config.mesh))
    state = states.restore_state(restarted, abstract)
    merged = [tiny.named(tiny.read(s)) for s in run.snapshots if s.step in [m["step"] for m in event["merged"]]]
    for name, leaf in tiny.named(state.params).items():
        np.testing.assert_allclose(
            leaf, np.mean([m[name] for m in merged], axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7
        )
    assert all(not leaf.any() for leaf in tiny.named(state.optimizer).values())
    assert state.step == event["step"] and state.detector.onset == 0
    losses_before = np.asarray(state.detector.recent_losses)
    seen = losses(run.metrics) | losses(set_aside_records(run))
    calm = [
        seen[step] for step in range(event["spike"]["onset_step"] - 30, event["spike"]["onset_step"] + 2) if step > 0
    ]
    assert set(losses_before.tolist()) <= set(np.float32(calm).tolist())


def run_at(recovered, name):
    return Path(recovered.path).parent / name


def test_rate_warms_up_again(recovered):
    event, schedule = event_of(recovered), recovered.config.schedule
    for record in recovered.metrics:
        if record["kind"] == "train":
            rate = learning_rate(schedule, recovered.config.training.total_tokens, record["tokens"])
            since = record["tokens"] - event["tokens"]
            share = since / (800 * STEP) if since > 0 else 1
            assert record["learning_rate"] == pytest.approx(rate * share)


def test_steps_after_rollback_are_those_of_the_restarted_state(recovered):
    """Compare the loop's numbers with the same steps computed outside it."""
    event, run = event_of(recovered), recovered.config
    with jax.set_mesh(make_mesh(run.mesh)):
        state = restart_by_hand(recovered, event)
        step = make_train_step(run, graph_definition(run.model))
        stream = batches.train_batches(
            shards.prepare_tokens(run.data), run.training, consumed_sequences=8 * event["step"]
        )
        for record in [r for r in recovered.metrics if r["kind"] == "train" and r["step"] > event["step"]][:6]:
            state, metrics = step(state, put_batch(make_mesh(run.mesh), next(stream)), record["learning_rate"])
            assert record["loss"] == float(metrics["loss"])


def restart_by_hand(run, event):
    merged = [s for s in run.snapshots if s.step in [m["step"] for m in event["merged"]]]
    params = average(merged, np.full(len(merged), 1 / len(merged)), make_mesh(run.config.mesh))
    return dataclasses.replace(init_state_from_seed(run.config), params=params)


@pytest.mark.long
def test_data_is_skipped_where_configured(recovered, workspace, tmp_path):
    run = train(config(workspace, spikes__skip_data=True), tmp_path / "run")
    event = event_of(run)
    assert event["position_there"] == 8 * event["step"]
    assert event["position"] == 8 * event["spike"]["step"]
    ahead = event["spike"]["step"] - event["step"]
    assert run.states[-1].progress.position == 8 * (64 + ahead)
    assert losses(run.metrics)[event["step"]] == losses(recovered.metrics)[event["step"]]
    assert losses(run.metrics)[event["step"] + 1] != losses(recovered.metrics)[event["step"] + 1]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["keep", "restore"])
def test_optimizer_is_kept_or_restored(recovered, workspace, tmp_path, monkeypatch, optimizer):
    # States at every snapshot mark, because a state between marks is removed when the next is saved.
    keys = {
        "spikes__optimizer": optimizer,
        "checkpoint__keep_states": 99,
        "checkpoint__state_interval_tokens": 4 * STEP,
    }
    spiked = []

    def begin(run, spike, state, *others):
        spiked.append(jax.tree.map(jnp.copy, state.optimizer))
        rollback_begin(run, spike, state, *others)

    rollback_begin = rollback.begin
    monkeypatch.setattr(rollback, "begin", begin)
    run = train(config(workspace, **keys), tmp_path / "run")
    event = event_of(run)
    assert event["optimizer"] == optimizer
    abstract = abstract_state(run.config, make_mesh(run.config.mesh))
    restarted = states.restore_state(next(s for s in run.states if s.step == event["step"]), abstract)
    if optimizer == "keep":
        (expected,) = spiked
    else:
        marks = range(4, event["spike"]["onset_step"], 4)
        assert event["optimizer_step"] == min(marks, key=lambda step: abs(step - event["step"]))
        nearest = [s for s in [*set_aside_states(run), *run.states] if s.step == event["optimizer_step"]]
        expected = states.restore_state(nearest[0], abstract).optimizer
    tiny.assert_equal(restarted.optimizer, expected)


@pytest.mark.slow
def test_states_from_before_a_spike_are_kept_for_the_optimizer(workspace, tmp_path):
    keys = {"checkpoint__keep_states": 1, "checkpoint__state_interval_tokens": 4 * STEP}
    run = train(config(workspace, spikes__optimizer="restore", **keys), tmp_path / "run")
    event = event_of(run)
    assert event["optimizer"] == "restore" and event["optimizer_step"] < event["spike"]["onset_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        # The average makes GPA more stable: its ramp is twice as steep, so that it diverges with every seed.
        {
            "optimizer__name": "gpa_adamw",
            "optimizer__gpa_half_life_tokens": 2 * STEP,
            "schedule__peak_rate": 12.0,
            "spikes__optimizer": "keep",
        },
        {"optimizer__bema_interval_tokens": 3 * STEP, "optimizer__bema_start_tokens": 20 * STEP},
    ],
    ids=["gpa", "bema"],
)
def test_averages_begin_again_with_the_merge(workspace, tmp_path, keys):
    keys |= {"checkpoint__keep_states": 99, "checkpoint__state_interval_tokens": 4 * STEP}
    run = train(config(workspace, **keys), tmp_path / "run")
    event, mesh = event_of(run), make_mesh(run.config.mesh)
    with jax.set_mesh(mesh):
        merge = restart_by_hand(run, event).params
    abstract = abstract_state(run.config, mesh)
    restarted, later = (
        states.restore_state(next(s for s in run.states if s.step == event["step"] + ahead), abstract)
        for ahead in (0, 4)
    )
    tiny.assert_equal(restarted.params, merge)
    if restarted.bema is None:
        tiny.assert_equal(restarted.optimizer.z, merge)
    else:
        assert (int(restarted.bema.mean.count), int(later.bema.mean.count)) == (0, 2)
        tiny.assert_equal(later.bema.origin, merge)
    assert run.snapshots[-1].loss < event["spike"]["median_loss"]


def set_aside_states(run):
    return dataclasses.replace(run, path=run.path / "spikes" / "1").states


# --- Reports and limits -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spike_with_zero_attempts_is_reported_and_training_continues(recovered, workspace, tmp_path):
    run = train(config(workspace, spikes__attempts=0), tmp_path / "run")
    # How many spikes recover before the irrecoverable one depends on the processor's rounding.
    actual, expected = (
        [r for r in records if r["kind"] == "spike"] for records in (run.metrics, records_until_rollback(recovered))
    )
    assert actual[: len(expected)] == expected and expected[-1] == event_of(recovered)["spike"]
    assert rollback.events(run) == [] and not (run.path / "spikes").exists()
    assert losses(run.metrics) | losses(set_aside_records(recovered)) == losses(run.metrics), (
        "identical up to the spike"
    )


@pytest.mark.long
def test_attempts_are_bounded_and_each_rolls_back_further(workspace, tmp_path):
    # No warm-up after the rollback: the rate makes the run diverge again.
    keys = config(workspace, spikes__warmup_tokens=0, training__total_tokens=96 * STEP)
    with pytest.raises(DivergenceError, match="after 2 rollbacks") as refused:
        train(keys, tmp_path / "run")
    assert "lower schedule.peak_rate" in str(refused.value)
    run = open_run(tmp_path / "run")
    first, second = rollback.events(run)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert second["tokens"] < second["spike"]["onset_tokens"] - 4 * STEP, (
        "the newest snapshot before the spike is excluded"
    )
    with pytest.raises(ValueError, match="after 2 rollbacks"):
        train(keys, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.mesh
def test_spike_before_the_first_snapshot_is_reported(workspace, tmp_path):
    keys = config(workspace, checkpoint__interval_tokens=40 * STEP)
    with pytest.raises(DivergenceError, match="no snapshot from before it"):
        train(keys, tmp_path / "run")


def test_recipe_that_does_not_fit_is_refused_before_training(workspace, tmp_path):
    with pytest.raises(ValueError, match="weights"):
        train(config(workspace, spikes__recipe="weights:0.5,0.5"), tmp_path / "run")
    assert not is_run(tmp_path / "run")


# --- Resuming ---------------------------------------------------------------------------------------------------------

KILLED = """
import itertools, os, signal, sys
from pma_jax import cli
from pma_jax.runs import states
from pma_jax.training import loop, rollback
module, name, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
home = {"states": states, "loop": loop, "rollback": rollback}[module]
real, calls = getattr(home, name), itertools.count(1)
def or_die(*args, **kwargs):
    if next(calls) > last:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(home, name, or_die)
sys.exit(cli.main(sys.argv[4:]))
"""
# Where the process dies: before and after a batch of the spike; before the merged state is made, the event is
# written, snapshots and states are moved, records are moved, the merged state is copied, and the event is marked done.
DEATHS = [
    ("loop", "put_batch", 43),
    ("rollback", "_merged_state", 0),
    ("rollback", "_write_event", 0),
    ("rollback", "_set_aside_steps", 0),
    ("rollback", "_set_aside_records", 0),
    ("states", "copy_state", 0),
    ("rollback", "_write_event", 1),
    ("loop", "put_batch", 52),
]
IN_CI = [("rollback", "_merged_state", 0), ("rollback", "_set_aside_steps", 0)]


@pytest.mark.parametrize(
    "death",
    [pytest.param(death, marks=pytest.mark.slow if death in IN_CI else pytest.mark.long) for death in DEATHS],
    ids=lambda death: f"{death[1]}-{death[2]}",
)
def test_kill_during_rollback_resumes_bitwise(recovered, workspace, tmp_path, death):
    file = tiny.write_config(tmp_path / "config.py", workspace, **KEYS)
    arguments = ["train", "--config", file, "--workdir", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, death), *arguments], capture_output=True, env=os.environ, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    run = train(recovered.config, tmp_path / "run")
    assert_same_run(run, recovered)
    assert [p.name for p in run.path.glob("spikes/1/*/*") if not p.name.isdigit()] == []


@pytest.mark.slow
def test_interrupted_moves_are_completed(recovered, workspace, tmp_path, monkeypatch):
    rename, moved = type(recovered.path).rename, []

    class Killed(BaseException):
        pass

    def one_then_die(path, target):
        if moved:
            raise Killed
        moved.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(type(recovered.path), "rename", one_then_die)
        train(recovered.config, tmp_path / "run")
    assert_same_run(train(recovered.config, tmp_path / "run"), recovered)


@pytest.mark.long
def test_state_saved_during_an_open_spike_resumes_to_the_same_event(recovered, workspace, tmp_path):
    shutil.copytree(recovered.path, tmp_path / "whole")
    keys = config(workspace, checkpoint__state_interval_tokens=STEP, checkpoint__keep_states=99)
    run = train(keys, tmp_path / "run")
    event = event_of(run)
    inside = [s for s in set_aside_states(run) if s.step == event["spike"]["onset_step"] + 2]
    assert inside, "a state within the open spike"
    again = tmp_path / "again"
    shutil.copytree(run.path, again)
    # The run as it was on disk at that state: no event declared.
    # The rollback left the snapshot at its step, and replaced the state at its step by that of the merged model.
    for name, last_kept in (("snapshots", event["step"]), ("states", event["step"] - 1)):
        for path in (again / name).iterdir():
            if int(path.name) > last_kept:
                shutil.rmtree(path)
        for path in (again / "spikes" / "1" / name).iterdir():
            if int(path.name) <= inside[0].step:
                shutil.move(str(path), again / name / path.name)
    kept = [r for r in records_until_rollback(run) if r["tokens"] <= inside[0].tokens]
    (again / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    shutil.rmtree(again / "spikes")
    assert_same_run(train(keys, again), run)


# --- Skipped updates --------------------------------------------------------------------------------------------------


def test_skipped_update_leaves_weights_and_optimizer_unchanged(workspace):
    keys = config(workspace, spikes__skip_gradient_z=6.0, optimizer__clip_norm=0.0)
    mesh = make_mesh(keys.mesh)
    with jax.set_mesh(mesh):
        state, step = init_state_from_seed(keys), make_train_step(keys, graph_definition(keys.model))
        stream = batches.train_batches(shards.prepare_tokens(keys.data), keys.training, consumed_sequences=0)
        for _ in range(20):
            state, metrics = step(state, put_batch(mesh, next(stream)), 1e-3)
            assert not metrics["spike"].skip
            # A head a thousand times larger makes the gradient an outlier.
            blown = jax.tree.map(lambda p: p, state.params)
        blown["unembedding_DxV"] = blown["unembedding_DxV"] * 1000
        expected = jax.tree.map(np.asarray, (blown, state.optimizer))
        state, metrics = step(dataclasses.replace(state, params=blown), put_batch(mesh, next(stream)), 1e-3)
        assert metrics["spike"].skip and metrics["spike"].total_skips == 1
        tiny.assert_equal((state.params, state.optimizer), expected)
        assert state.step == 21


@pytest.mark.slow
def test_run_with_skipped_updates_resumes_bitwise(workspace, tmp_path):
    keys = tiny.config(
        workspace,
        spikes__window_tokens=16 * STEP,
        spikes__skip_gradient_z=1.0,
        training__total_tokens=32 * STEP,
    )
    complete = train(keys, tmp_path / "whole")
    trained = [r for r in complete.metrics if r["kind"] == "train"]
    assert trained[-1]["skipped_updates"] > 0 and trained[15]["skipped_updates"] == 0
    shutil.copytree(complete.path, tmp_path / "cut")
    for saved in [*open_run(tmp_path / "cut").snapshots, *open_run(tmp_path / "cut").states]:
        if saved.step > 24:
            saved.path.rmtree()
    assert_same_run(train(keys, tmp_path / "cut"), complete)


def test_fork_starts_a_detector_where_its_parent_had_none_or_another(finished, workspace):
    abstract = abstract_state(config(workspace), make_mesh(config(workspace).mesh))
    state = states.restore_state(finished.states[-1], abstract)
    assert state.detector.recent_losses.shape == (16,) and state.detector.losses == 0
    without = tiny.config(workspace, spikes__detect=False)
    assert states.restore_state(finished.states[-1], abstract_state(without, make_mesh(without.mesh))).detector is None


@pytest.mark.slow
def test_detection_does_not_change_training(finished, workspace, tmp_path):
    run = train(tiny.config(workspace, spikes__detect=False), tmp_path / "run")
    for a, e in zip(tiny.numbers(run), tiny.numbers(finished), strict=True):
        assert a["loss"] == pytest.approx(e["loss"], rel=1e-5)


def test_loop_and_detector_use_the_same_codes():
    assert (spikes.CALM, spikes.OPEN, spikes.RECOVERED, spikes.IRRECOVERABLE) == (0, 1, 2, 3)
    assert loop.train is train
