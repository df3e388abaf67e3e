import dataclasses
import errno
import shutil
from pathlib import Path

import pytest
import tiny

from pma_jax.config import ModelConfig, resolve
from pma_jax.config.errors import UserError
from pma_jax.runs import snapshots, states
from pma_jax.runs.directory import open_run
from pma_jax.runs.states import Progress
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state

FORK = 16 * tiny.BATCH_TOKENS
ANNEAL = ["schedule.decay=linear", f"schedule.decay_start_tokens={FORK}"]


def state(run, step):
    (saved,) = [s for s in run.states if s.step == step]
    return states.restore_state(saved, abstract_state(run.config, make_mesh(run.config.mesh)))


@pytest.fixture(scope="module")
def annealed(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork") / "annealed"
    config = resolve(finished.config, ANNEAL)
    fork(finished, FORK, config, folder)
    return train(config, folder)


def test_fork_copies_parameters_moments_and_data_position(finished, tmp_path):
    forked = fork(finished, FORK, finished.config, tmp_path / "fork")
    assert forked.metadata["forked_from"] == {"path": str(finished.path), "tokens": FORK, "step": 16}
    assert [s.progress for s in forked.states] == [Progress(16, FORK, 16 * 8)]
    tiny.assert_equal(state(forked, 16), state(finished, 16))
    moments = tiny.named(state(forked, 16).optimizer)
    assert any(leaf.any() for name, leaf in moments.items() if "embedding" in name), "moments are not fresh zeros"


def test_fork_with_the_same_configuration_continues_like_its_parent(finished, tmp_path):
    run = fork(finished, FORK, finished.config, tmp_path / "fork")
    run = train(run.config, run.path)
    expected = [r for r in tiny.numbers(finished, FORK) if r["kind"] != "preview"]
    assert [r for r in tiny.numbers(run) if r["kind"] != "preview"] == expected
    tiny.assert_equal(state(run, 24), state(finished, 24))
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_annealed_fork_follows_its_schedule_on_the_parents_data(finished, annealed):
    steps = [r for r in annealed.metrics if r["kind"] == "train"]
    parent = [r for r in finished.metrics if r["kind"] == "train" and r["tokens"] > FORK]
    assert [r["step"] for r in steps] == list(range(17, 25))
    rates = [1e-2 * (1 - i / 8) for i in range(1, 9)]
    assert [r["learning_rate"] for r in steps] == pytest.approx(rates, abs=1e-15)
    # The first loss belongs to the parent's parameters on the parent's next batch; the rates differ only afterwards.
    assert steps[0]["loss"] == parent[0]["loss"]
    assert steps[2]["loss"] != parent[2]["loss"]


@pytest.mark.slow
def test_interrupted_fork_resumes_with_the_same_command(finished, annealed, tmp_path):
    copied = open_run(shutil.copytree(annealed.path, tmp_path / "run"))
    for saved in copied.snapshots + copied.states:
        if saved.step > 16:
            saved.path.rmtree()
    again = fork(finished, FORK, copied.config, copied.path)
    assert tiny.numbers(train(again.config, again.path)) == tiny.numbers(annealed)
    tiny.assert_equal(state(again, 24), state(annealed, 24))


def test_complete_fork_is_unchanged(finished, annealed):
    before = tiny.contents(Path(annealed.path))
    train(fork(finished, FORK, annealed.config, annealed.path).config, annealed.path)
    assert tiny.contents(Path(annealed.path)) == before


def test_parent_is_unchanged(finished, tmp_path):
    before = tiny.contents(Path(finished.path))
    fork(finished, FORK, finished.config, tmp_path / "fork")
    assert tiny.contents(Path(finished.path)) == before


def test_tokens_without_a_state_list_the_available_states(finished, tmp_path):
    for tokens in (FORK + 1, FORK - 256, 0, 10**9):
        with pytest.raises(ValueError, match=r"it has: 2,048, 4,096, 6,144.*keep_states_at_tokens"):
            fork(finished, tokens, finished.config, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


def test_state_of_the_step_that_reached_the_tokens_is_selected(finished, tmp_path):
    assert fork(finished, FORK - 255, finished.config, tmp_path / "fork").states[0].step == 16


def test_directory_with_another_run_is_refused(finished, annealed, tmp_path):
    before = tiny.contents(Path(annealed.path))
    with pytest.raises(ValueError, match="already holds a different run"):
        fork(finished, 2048, annealed.config, annealed.path)
    with pytest.raises(ValueError, match="already holds a different run"):
        fork(finished, FORK, finished.config, finished.path)
    assert tiny.contents(Path(annealed.path)) == before


def test_same_fork_with_another_configuration_is_refused(finished, annealed):
    other = resolve(finished.config, [*ANNEAL, "schedule.final_rate=1e-4"])
    fork(finished, FORK, other, annealed.path)
    with pytest.raises(ValueError, match=r"schedule\.final_rate: 0\.0 -> 0\.0001"):
        train(other, annealed.path)


def test_fork_past_its_horizon_is_refused(finished, tmp_path):
    with pytest.raises(ValueError, match=r"nothing is left to train at 6,144 of 6,144"):
        fork(finished, tiny.HORIZON, finished.config, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


def test_fork_of_another_model_is_refused_before_anything_is_written(finished, tmp_path):
    """Also if config.json lacks the model, so that it has the default one."""
    with pytest.raises(UserError, match=r"does not fit the configuration: \d+ leaves differ: .*48"):
        fork(finished, FORK, resolve(finished.config, ["model.hidden=48"]), tmp_path / "fork")
    with pytest.raises(UserError, match=r"does not fit the configuration: \d+ leaves differ: "):
        fork(finished, FORK, dataclasses.replace(finished.config, model=ModelConfig()), tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


def test_failed_copy_of_a_state_names_the_file_and_the_same_command_goes_on(finished, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOMEM, "injected")

    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"states/.*/"):
        patched.setattr(shutil, "_USE_CP_SENDFILE", False)
        patched.setattr(shutil, "copyfileobj", fail)  # a write of shutil names no file
        fork(finished, FORK, finished.config, tmp_path / "fork")
    assert fork(finished, FORK, finished.config, tmp_path / "fork").states[0].tokens == FORK


def test_fork_may_raise_the_horizon(finished, tmp_path):
    config = resolve(finished.config, [f"training.total_tokens={26 * 256}"])
    run = fork(finished, tiny.HORIZON, config, tmp_path / "fork")
    run = train(config, run.path)
    assert [s.step for s in run.snapshots] == [26]
    assert [r["step"] for r in run.metrics if r["kind"] == "train"] == [25, 26]


def test_incomplete_copy_is_made_again(finished, tmp_path):
    # As a kill leaves it: a partial copy, or a complete one without the run's configuration.
    half = tmp_path / "half" / "states" / ".16.copying"
    half.mkdir(parents=True)
    (half / "part").write_text("part")
    complete = tmp_path / "whole"
    fork(finished, FORK, finished.config, complete)
    (complete / "config.json").unlink()
    for folder in (half.parent.parent, complete):
        run = fork(finished, FORK, finished.config, folder)
        tiny.assert_equal(state(run, 16), state(finished, 16))


def test_overrides_are_validated(finished):
    with pytest.raises(ValueError, match=r"'schedule\.decay'"):
        resolve(finished.config, ["schedule.decai=linear"])
    assert resolve(finished.config, []) == finished.config


@pytest.mark.slow
def test_fork_with_other_weights_keeps_the_parents_optimizer_and_data(finished, annealed, tmp_path):
    weights = finished.snapshots[1]
    config = resolve(finished.config, ANNEAL)
    run = fork(finished, FORK, config, tmp_path / "fork", weights.path)
    assert run.metadata["forked_from"]["weights"] == str(weights.path)
    run = train(config, run.path)
    # The expected value: the parent's state with these parameters.
    by_hand = fork(finished, FORK, config, tmp_path / "hand")
    abstract = abstract_state(config, make_mesh(config.mesh))
    changed = dataclasses.replace(state(finished, 16), params=snapshots.restore_params(weights, abstract.params))
    shutil.rmtree(by_hand.path / "states" / "16")
    with by_hand.writer("states") as writer:
        states.save_state(writer, changed, Progress(16, FORK, 16 * 8))
    assert tiny.numbers(run) == tiny.numbers(train(config, by_hand.path))
    assert tiny.numbers(run)[0] != tiny.numbers(annealed)[0]
    tiny.assert_equal(state(run, 24), state(by_hand, 24))
    for saved in [*run.snapshots, *(s for s in run.states if s.step == 24)]:
        shutil.rmtree(saved.path)
    again = fork(finished, FORK, config, run.path, weights.path)
    tiny.assert_equal(state(train(config, again.path), 24), state(by_hand, 24))
    with pytest.raises(ValueError, match="already holds a different run"):
        fork(finished, FORK, config, run.path)


def test_weights_of_another_model_are_refused_before_writing(finished, tmp_path):
    config = resolve(finished.config, ["model.layers=1"])
    with pytest.raises(ValueError, match=r"weights: .* does not match the run's: pass --config.model.layers=2"):
        fork(finished, FORK, config, tmp_path / "fork", finished.snapshots[1].path)
    assert not (tmp_path / "fork").exists()
