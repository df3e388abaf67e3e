"""Retention and gaps: what a killed run needs to resume is kept, and no merge has a gap."""

import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from etils import epath

from pma_jax import cli
from pma_jax.config import resolve
from pma_jax.evaluation.sweep import Cell, sweep
from pma_jax.evaluation.watch import watch
from pma_jax.merging.preview import Window
from pma_jax.runs import retention, snapshots, steps
from pma_jax.runs.directory import open_run
from pma_jax.runs.states import STATES
from pma_jax.training import rollback
from pma_jax.training.loop import train
from pma_jax.training.periodic_actions import PeriodicActions

B = tiny.BATCH_TOKENS
# A snapshot every 2 steps, of which the newest 2 and every 4th are kept; a state every 8 steps, of which one is kept.
KEEP = {
    "checkpoint__kinds": ("point", "block_mean"),
    "checkpoint__block_every_steps": 1,
    "checkpoint__interval_tokens": 2 * B,
    "checkpoint__window": 2,
    "checkpoint__keep_windows": 1,
    "checkpoint__archive_interval_tokens": 8 * B,
    "checkpoint__keep_states": 1,
    "preview__windows": (2, 3),
}


@pytest.fixture(scope="module")
def uninterrupted(workspace):
    return train(tiny.config(workspace, **KEEP), workspace / "retention")


class Killed(BaseException):
    """Ends a run after a save, as a kill does once the writers have published everything."""


def train_and_kill(config, path, step, monkeypatch):
    save = PeriodicActions.save_if_due

    def save_and_die(self, state, progress, stopping):
        state = save(self, state, progress, stopping)
        if progress.step == step:
            raise Killed
        return state

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PeriodicActions, "save_if_due", save_and_die)
        train(config, path)


def folders(run):
    return {
        name: [int(p.name) for p in steps.numbered(run.path / name)] for name in ("snapshots", "block_means", STATES)
    }


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, *(pytest.param(step, marks=pytest.mark.long) for step in (14, 22))])
def test_killed_run_resumes_with_the_same_previews_and_files(uninterrupted, tmp_path, monkeypatch, step):
    train_and_kill(uninterrupted.config, tmp_path / "run", step, monkeypatch)
    train_and_kill(uninterrupted.config, tmp_path / "run", min(step + 5, 23), monkeypatch)
    run = train(uninterrupted.config, tmp_path / "run")
    assert tiny.numbers(run) == tiny.numbers(uninterrupted)
    assert (
        folders(run)
        == folders(uninterrupted)
        == {
            "snapshots": [8, 16, 22, 24],
            "block_means": [8, 16, 22, 24],
            STATES: [24],
        }
    )
    for name in folders(run)["snapshots"]:
        for kind in ("snapshots", "block_means"):
            digests = [snapshots.restore.read_digests(one.path / kind / str(name)) for one in (run, uninterrupted)]
            assert digests[0] == digests[1] != {}


def test_every_kept_step_is_one_that_the_estimate_counts(workspace):
    """A simulation of the run: publish each step, apply retention, and count; a state is published one mark late."""
    for keys in ({}, {"preview__windows": (5,)}, {"checkpoint__archive_interval_tokens": 0}, {"preview__windows": ()}):
        config = tiny.config(workspace, **KEEP | {"training__total_tokens": 60 * B} | keys)
        ends = range(B, 61 * B, B)
        saved, states = ([t for t in ends if due(t)] for due in (config.is_snapshot_due, config.is_state_due))
        most, published = 0, []
        for tokens in saved:
            published.append(tokens)
            resume_points = ([0] + [t for t in states if t <= tokens])[-2:]
            kept = retention.tokens_to_keep(config, "snapshots", published, tokens, resume_points)
            published = sorted(kept)
            most = max(most, len(kept))
            for point in [tokens, *resume_points]:
                needed = [t for t in saved if t <= point][-config.snapshots_to_resume :]
                assert config.is_run_complete(tokens) or not config.snapshots_to_resume or set(needed) <= kept
        assert most == retention.peak_snapshots(config, saved, states)


def test_what_a_rollback_needs_is_kept_while_a_spike_is_open(workspace):
    keys = {
        "spikes__attempts": 2,
        "spikes__snapshots": 3,
        "spikes__patience_tokens": 2 * B,
        "spikes__optimizer": "restore",
    }
    keys |= {"checkpoint__keep_windows": 4, "checkpoint__archive_interval_tokens": 0, "spikes__window_tokens": 16 * B}
    config = tiny.config(workspace, **KEEP | keys)
    published, late = [2 * B * k for k in range(1, 51)], 100 * B
    kept = retention.tokens_to_keep(config, "snapshots", published, late, [late], onset_tokens=31 * B)
    assert kept >= {24 * B, 26 * B, 28 * B, 30 * B} and 22 * B not in kept, "three, and one for a retry"
    assert retention.tokens_to_keep(config, STATES, published, late, [], onset_tokens=30 * B) == {28 * B, late}
    config = resolve(config, ["spikes.optimizer=reset"])
    assert retention.tokens_to_keep(config, STATES, published, late, [], onset_tokens=30 * B) == {late}


def test_retention_keeps_steps_that_a_resumed_run_has_not_reached(workspace):
    config = tiny.config(workspace, **KEEP)
    published = [2 * B, 4 * B, 6 * B, 8 * B, 16 * B, 18 * B]
    kept = retention.tokens_to_keep(config, "snapshots", published, 10 * B, [8 * B])
    assert kept == {4 * B, 6 * B, 8 * B, 16 * B, 18 * B}
    assert retention.tokens_to_keep(config, STATES, [8 * B, 16 * B], 10 * B, []) == {8 * B, 16 * B}
    assert retention.tokens_to_keep(config, STATES, [8 * B, 16 * B], 16 * B, []) == {16 * B}


def test_window_starts_again_after_a_gap():
    window = Window(3, lambda older, newer: newer == older + 1)
    for tokens in (1, 2, 3, 5, 6):
        window.add(tokens, {"w": jnp.float32(tokens)})
    assert window.tokens == [5, 6]
    assert [text for text, _ in window.merges("sma", (1, 2, 3))] == ["sma:1", "sma:2"]


def test_snapshot_numbers_count_marks_and_the_horizon():
    config = resolve(
        {
            "training": {"sequence_length_tokens": 32, "batch_size_sequences": 8, "total_tokens": 6000},
            "checkpoint": {"interval_tokens": 700},
            "schedule": {"warmup_tokens": 100},
        }
    )
    saved = [t for t in range(256, 6145, 256) if config.is_snapshot_due(t)]
    assert [config.snapshot_number(t) for t in saved] == list(range(1, len(saved) + 1))
    assert all(snapshots.are_consecutive(config, a, b) for a, b in itertools.pairwise(saved))
    assert not any(snapshots.are_consecutive(config, a, b) for a, b in zip(saved, saved[2:], strict=False))


@pytest.fixture
def gap(finished, tmp_path):
    """Return a copy of the finished run without its snapshot at step 16."""
    run = open_run(shutil.copytree(finished.path, tmp_path / "gap"))
    shutil.rmtree(run.path / "snapshots" / "16")
    return run


def test_sweep_merges_no_window_with_a_gap(gap, finished):
    result = sweep(gap, ["sma"], [2, 3], [1, 2])
    assert {row["text"] for row in result["rows"]} == {"sma:2"}
    missing = "the merge needs a snapshot that is missing after 3,072 tokens"
    assert result["left_out"] == dict.fromkeys(("sma:3", "sma:2@2", "sma:3@2"), missing)
    # An interval passes over a gap that its merge does not need.
    assert Cell("sma", 2, 3).coefficients(gap.config, [s.tokens for s in gap.snapshots]).tolist() == [0, 0, 0.5, 0, 0.5]
    tokens = [s.tokens for s in finished.snapshots]
    assert "there are 6 snapshots, and the merge needs 7" in Cell("sma", 7).describe_missing(finished.config, tokens)


def test_watch_and_rollback_merge_no_window_with_a_gap(gap):
    shutil.rmtree(gap.path / "watch.jsonl", ignore_errors=True)
    list(watch(gap, windows=[2, 3], once=True))
    rows = [json.loads(line) for line in (gap.path / "watch.jsonl").read_text().splitlines()]
    assert [(r["step"], r["recipe"]) for r in rows] == [(8, "sma:2"), (12, "sma:2"), (12, "sma:3"), (24, "sma:2")]
    config = resolve(gap.config, ["spikes.attempts=2", "spikes.window_tokens=6144", "spikes.snapshots=3"])
    spike = {"onset_tokens": 24 * B + 1, "tokens": 24 * B + 2}
    _, merged = rollback._choose_snapshots(type(gap)(gap.path, config), spike, [])
    assert [s.step for s in merged] == [20, 24]


def test_resumed_run_leaves_out_previews_with_a_gap(gap, finished, capsys):
    for step in (20, 24):
        shutil.rmtree(gap.path / "snapshots" / str(step))
    shutil.rmtree(gap.path / "states" / "24")
    shutil.copytree(finished.path / "snapshots" / "20", gap.path / "snapshots" / "20")
    run = train(gap.config, gap.path)
    previews = [(r["step"], r["recipe"]) for r in run.metrics if r["kind"] == "preview"]
    assert previews == [(8, "sma:2"), (12, "sma:2"), (12, "sma:3"), (16, "sma:2"), (16, "sma:3"), (24, "sma:2")]
    assert "the snapshot at 4,096 tokens is missing" in capsys.readouterr().err


def test_merge_of_the_last_snapshots_refuses_a_gap(gap, tmp_path, capsys):
    command = ["merge", str(gap.path), "--out", str(tmp_path / "out"), "--dry-run"]
    assert cli.main([*command, "--last", "2"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--last", "4"]) == 1
    assert (
        "the last 4 snapshots of " in (error := capsys.readouterr().err)
        and "have a gap: 1 between 3,072 and 5,120 tokens are missing (removed by retention?): use --last 2" in error
    )
    assert cli.main([*command, "--tokens", "3072:"]) == cli.main([*command, "--last", "2", "--every", "3072"]) == 0


# --- Steps that are published already ---------------------------------------------------------------------------------


def save(writer, step, value):
    items = {"params": {"x": np.full(8, value, np.float32)}}
    writer.save(step, items, {"tokens": 10 * step, "leaves": {"x": str(value)}})


def test_step_that_is_published_is_kept_if_equal_and_replaced_if_not(tmp_path):
    folder = epath.Path(tmp_path / "snapshots")
    with steps.StepWriter(folder) as writer:
        for step in (1, 2, 3):
            save(writer, step, step)
    before = tiny.contents(folder)
    with steps.StepWriter(folder) as writer:
        save(writer, 2, 2)
        assert writer.pending is None and tiny.contents(folder) == before
        save(writer, 2, 7)
        writer.finish()
        assert steps.read_metadata(folder / "2", ())["leaves"] == {"x": "7"}
        writer.remove([3])
        save(writer, 3, 3)  # Orbax listed step 3 when the writer was opened
    assert [path.name for path in steps.published_steps(folder)] == ["1", "2", "3"]
