import json
import shutil
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
import tiny
from etils import epath

from pma_jax.data import batches, shards
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.runs import snapshots, states, steps
from pma_jax.runs.directory import create_run, is_run, newest_snapshot, open_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import loop, resume
from pma_jax.training.loop import train
from pma_jax.training.schedule import learning_rate
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished run, which the test may change."""
    shutil.copytree(finished.path, tmp_path / "run")
    return open_run(tmp_path / "run")


def interrupt(run, step):
    """Remove what a run interrupted after `step` would not have published."""
    for saved in run.snapshots + run.states:
        if saved.step > step:
            saved.path.rmtree()


def newest(run):
    return tiny.named(states.restore_state(run.states[-1], abstract_state(run.config, make_mesh(run.config.mesh))))


def assert_same_run(actual, expected):
    """Assert that all numbers, snapshots and states of two runs are bitwise equal."""
    assert tiny.numbers(actual) == tiny.numbers(expected)
    assert [s.step for s in actual.states] == [s.step for s in expected.states]
    tiny.assert_equal(newest(actual), newest(expected))
    assert [(s.step, s.tokens, s.loss) for s in actual.snapshots] == [
        (s.step, s.tokens, s.loss) for s in expected.snapshots
    ]
    for a, e in zip(actual.snapshots, expected.snapshots, strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))


# --- What a run writes ------------------------------------------------------------------------------------------------


def test_snapshots_and_states_are_saved_at_their_token_marks(finished):
    assert [s.step for s in finished.snapshots] == tiny.SNAPSHOTS
    assert [s.tokens for s in finished.snapshots] == [256 * step for step in tiny.SNAPSHOTS]
    assert [s.step for s in finished.states] == tiny.STATES
    assert [s.progress.position for s in finished.states] == [8 * step for step in tiny.STATES]


def test_metrics_contain_every_step_evaluation_and_preview(finished):
    records = finished.metrics
    steps = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in steps] == list(range(1, 25))
    assert [r["tokens"] for r in steps] == [256 * i for i in range(1, 25)]
    schedule, total = finished.config.schedule, finished.config.training.total_tokens
    assert [r["learning_rate"] for r in steps] == [learning_rate(schedule, total, r["tokens"]) for r in steps]
    assert all(r["tokens_per_second"] > 0 and r["gradient_norm"] > 0 for r in steps)
    assert steps[0]["loss"] == pytest.approx(np.log(256), abs=0.7), (
        "an untrained model predicts the uniform distribution"
    )
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    evaluations = [(r["step"], r["loss"]) for r in records if r["kind"] == "evaluation"]
    assert evaluations == [(s.step, s.loss) for s in finished.snapshots]
    previews = [(r["step"], r["recipe"]) for r in records if r["kind"] == "preview"]
    assert previews == [(8, "sma:2")] + [(step, f"sma:{n}") for step in tiny.SNAPSHOTS[2:] for n in (2, 3)]


def test_run_records_its_configuration_and_versions(finished):
    tokens = shards.prepare_tokens(finished.config.data)
    assert finished.metadata["corpus"] == tokens.digest
    assert len(finished.metadata["evaluation"]) == 16
    assert finished.metadata["versions"]["jax"] == jax.__version__
    assert open_run(finished.path).config == finished.config
    assert list((finished.path / "tensorboard").iterdir())


def test_snapshots_hold_the_parameters_of_their_step_despite_donation(finished):
    config, tokens = finished.config, shards.prepare_tokens(finished.config.data)
    mesh, requested = make_mesh(config.mesh), {s.step: s for s in finished.snapshots}
    with jax.set_mesh(mesh):
        state, train_step = init_state_from_seed(config), make_train_step(config, graph_definition(config.model))
        stream = batches.train_batches(tokens, config.training, consumed_sequences=0)
        for step in range(1, 25):
            rate = learning_rate(config.schedule, config.training.total_tokens, step * config.batch_tokens)
            state, _ = train_step(state, put_batch(mesh, next(stream)), rate)
            if step in requested:
                # Fetched before the next step is dispatched, so nothing here is asynchronous.
                tiny.assert_equal(tiny.read(requested[step]), jax.tree.map(np.asarray, state.params))
    assert int(state.step) == 24
    tiny.assert_equal(newest(finished), state)


@pytest.mark.slow
def test_same_seed_gives_the_same_run(finished, workspace, tmp_path):
    assert_same_run(train(finished.config, tmp_path / "again"), finished)


@pytest.mark.slow
def test_another_seed_gives_another_run(finished, workspace, tmp_path):
    other = train(tiny.config(workspace, training__seed=1, training__total_tokens=1024), tmp_path / "other")
    first = [r["loss"] for r in finished.metrics[:4]]
    assert all(r["loss"] != loss for r, loss in zip(other.metrics, first, strict=False))


def test_complete_run_is_unchanged(copy):
    before = tiny.contents(Path(copy.path))
    assert train(copy.config, copy.path).snapshots == copy.snapshots
    assert tiny.contents(Path(copy.path)) == before


# --- Resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [9, *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 16, 23))])
def test_resume_is_bitwise_equal_to_uninterrupted_run(finished, copy, step):
    interrupt(copy, step)
    with (copy.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "tok')  # The line that the interruption truncated.
    assert_same_run(train(copy.config, copy.path), finished)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[11], [16], [3, 10, 8]], ids=str)
def test_killed_run_resumes_bitwise(finished, workspace, tmp_path, steps):
    # 11: between marks. 16: while the snapshot and the state of step 16 are written. The last: killed repeatedly.
    file = tiny.write_config(tmp_path / "config.py", workspace)
    arguments = ["train", "--config", file, "--workdir", tmp_path / "run"]
    for count in steps:
        processes.kill_after_steps(count, arguments)
    run = open_run(tmp_path / "run")
    assert not run.states or run.states[-1].step < 24
    assert_same_run(train(run.config, run.path), finished)
    left = [p.name for p in run.path.glob("s*/*") if not p.name.isdigit()]
    assert left == [], "no partial directory remains"


@pytest.mark.slow
def test_keyboard_interrupt_completes_pending_writes(finished, workspace, tmp_path, monkeypatch):
    place, calls = loop.put_batch, iter(range(100))

    def interrupted(mesh, batch):
        if next(calls) == 16:
            raise KeyboardInterrupt
        return place(mesh, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "put_batch", interrupted)
        train(finished.config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.snapshots[-1].step == run.states[-1].step == 16
    assert_same_run(train(run.config, run.path), finished)


@pytest.mark.slow
def test_state_published_before_its_snapshot_is_not_resumed(finished, copy):
    interrupt(copy, 16)
    next(s for s in copy.snapshots if s.step == 16).path.rmtree()
    assert copy.newest_resumable_state.step == 8
    assert_same_run(train(copy.config, copy.path), finished)


def test_records_are_flushed_before_a_state_is_saved(workspace, tmp_path, monkeypatch):
    save, seen = states.save_state, []

    def check(writer, state, progress):
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        seen.append((progress.step, [r["step"] for r in lines if r["kind"] == "train"]))
        assert open_run(tmp_path / "run").snapshots[-1].step == progress.step, "its snapshots are published"
        save(writer, state, progress)

    monkeypatch.setattr(states, "save_state", check)
    train(tiny.config(workspace, training__total_tokens=2048, checkpoint__state_interval_tokens=1024), tmp_path / "run")
    assert seen == [(4, [1, 2, 3, 4]), (8, list(range(1, 9)))]


def test_run_whose_snapshots_were_moved_away_resumes_from_its_newest_state(copy):
    interrupt(copy, 16)
    (copy.path / "snapshots").rmtree()
    train(copy.config, copy.path)
    assert [s.step for s in copy.snapshots] == [20, 24]


@pytest.mark.slow
@pytest.mark.mesh
def test_run_resumes_on_another_mesh(finished, copy, workspace):
    interrupt(copy, 16)
    moved = tiny.config(workspace, mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    run = train(moved, copy.path)
    assert tiny.numbers(run)[:20] == tiny.numbers(finished)[:20], "existing snapshots are kept"
    for a, e in zip(tiny.numbers(run, 4096), tiny.numbers(finished, 4096), strict=True):
        assert (a["kind"], a["tokens"]) == (e["kind"], e["tokens"])
        assert a["loss"] == pytest.approx(e["loss"], rel=1e-4)
    tiny.assert_close(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]), rtol=1e-2, atol=1e-3)


def test_another_configuration_is_refused_with_the_changed_keys(copy, workspace):
    before = tiny.contents(Path(copy.path))
    other = tiny.config(workspace, training__seed=1, optimizer__b2=0.99)
    with pytest.raises(ValueError, match="another configuration") as refused:
        train(other, copy.path)
    assert "training.seed: 0 -> 1" in str(refused.value)
    assert "optimizer.b2: 0.95 -> 0.99" in str(refused.value)
    assert tiny.contents(Path(copy.path)) == before


def test_changed_corpus_is_refused(tmp_path):
    config = tiny.config(tmp_path)
    tokens = shards.prepare_tokens(config.data)
    create_run(tmp_path / "run", config, resume.run_metadata(tokens, config))
    (tmp_path / "text" / "more.txt").write_text("one more document\n")
    with pytest.raises(ValueError, match="the corpus has changed"):
        train(config, tmp_path / "run")


def test_too_small_vocabulary_is_refused(workspace, tmp_path):
    with pytest.raises(ValueError, match=r"model\.vocabulary_size is 200"):
        train(tiny.config(workspace, model__vocabulary_size=200), tmp_path / "run")
    assert not is_run(tmp_path / "run")


# --- Retention --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retention_keeps_the_newest_windows_permanent_marks_and_named_states(finished, workspace, tmp_path):
    config = tiny.config(
        workspace,
        checkpoint__interval_tokens=512,
        checkpoint__window=2,
        checkpoint__keep_windows=2,
        checkpoint__archive_interval_tokens=2048,
        checkpoint__state_interval_tokens=1024,
        checkpoint__keep_states=2,
        checkpoint__keep_states_at_tokens=(1500, 2048),
        preview__windows=(),
    )
    run = train(config, tmp_path / "run")
    # Snapshots every 2 steps: the newest 2 * 2, and multiples of 2048 tokens. States every 4 steps: the newest 2, and
    # those of the steps that reached 1500 and 2048 tokens.
    assert [s.step for s in run.snapshots] == [8, 16, 18, 20, 22, 24]
    assert [s.step for s in run.states] == [6, 8, 20, 24]
    # Evaluation and retention do not change training.
    losses = [r["loss"] for r in finished.metrics if r["kind"] == "train"]
    assert [r["loss"] for r in run.metrics if r["kind"] == "train"] == losses
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_horizon_between_marks_ends_with_a_snapshot_and_a_state(workspace, tmp_path):
    run = train(tiny.config(workspace, training__total_tokens=1300), tmp_path / "run")
    assert [s.step for s in run.snapshots] == [4, 6]
    assert [s.step for s in run.states] == [6]
    assert run.states[0].tokens == 1536, "the step that reaches the horizon is complete"


@pytest.mark.long
@pytest.mark.mesh
def test_accumulation_trains_the_same_run(finished, workspace, tmp_path):
    config = tiny.config(workspace, training__accumulation_steps=2, mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    run = train(config, tmp_path / "run")
    for a, e in zip(tiny.numbers(run), tiny.numbers(finished), strict=True):
        assert a["loss"] == pytest.approx(e["loss"], rel=1e-4)


# --- Run directories --------------------------------------------------------------------------------------------------


def test_unpublished_step_is_ignored(copy):
    (copy.snapshots[-1].path / steps.COMMIT_MARKER).unlink()
    (copy.states[-1].path / steps.COMMIT_MARKER).unlink()
    assert [s.step for s in copy.snapshots] == tiny.SNAPSHOTS[:-1]
    assert [s.step for s in copy.states] == tiny.STATES[:-1]


def test_mismatched_snapshot_names_the_leaves(finished, workspace):
    wide = tiny.config(workspace, model__hidden=64, model__qk_norm=True)
    abstract = abstract_params(wide.model, make_mesh(wide.mesh))
    with pytest.raises(ValueError, match="5 leaves differ") as refused:
        snapshots.restore_params(finished.snapshots[0], abstract)
    assert "blocks/query_norm_H is missing" in str(refused.value)
    assert "blocks/gate_DxF has shape (2, 16, 32), not (2, 16, 64)" in str(refused.value)


@pytest.mark.parametrize("open_", [open_run, read_snapshot, newest_snapshot])
def test_path_that_is_neither_run_nor_snapshot_is_refused(tmp_path, open_):
    for path in (tmp_path, tmp_path / "nothing", epath.Path(tmp_path)):
        with pytest.raises(ValueError, match=str(path)):
            open_(path)


def test_paths_may_be_relative(finished, monkeypatch):
    monkeypatch.chdir(finished.path.parent)
    assert [s.step for s in open_run("finished").snapshots] == tiny.SNAPSHOTS
    assert read_snapshot("finished/snapshots/4").tokens == 1024
