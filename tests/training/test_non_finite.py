import numpy as np
import pytest
import tiny

from pma_jax.runs import states
from pma_jax.runs.directory import Run, open_run
from pma_jax.runs.states import Progress
from pma_jax.storage.paths import absolute_path
from pma_jax.training import loop, periodic_actions
from pma_jax.training.loop import train


def test_diverging_run_stops_at_the_step_and_saves_no_state_of_it(workspace, tmp_path):
    config = tiny.config(workspace, schedule__peak_rate=1e30)
    with pytest.raises(ValueError, match=r"^step \d+ \([0-9,]+ tokens\): .*is (nan|inf)") as refused:
        train(config, tmp_path / "run")
    assert "leaves of the parameters are not finite: " in str(refused.value) and "\n" not in str(refused.value)
    run = open_run(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for s in run.snapshots for leaf in tiny.named(tiny.read(s)).values())
    assert "NaN" not in (run.path / "metrics.jsonl").read_text()
    # The same command reaches the same step and reports it again.
    with pytest.raises(ValueError, match=r"is (nan|inf)"):
        train(config, tmp_path / "run")


def test_non_finite_gradients_are_detected_before_the_next_snapshot_is_saved(workspace, tmp_path, monkeypatch):
    steps = loop.make_train_step

    def poisoned(*arguments):
        step = steps(*arguments)

        def poisoned_step(state, batch, rate):
            state, metrics = step(state, batch, rate)
            return state, metrics | ({"gradient_norm": np.float32("inf")} if int(state.step) == 8 else {})

        return poisoned_step

    monkeypatch.setattr(loop, "make_train_step", poisoned)
    with pytest.raises(ValueError, match=r"step 8 \(2,048 tokens\): gradient_norm is inf") as refused:
        train(tiny.config(workspace), tmp_path / "run")
    assert "leaves" not in str(refused.value), "the parameters themselves are finite"
    run = open_run(tmp_path / "run")
    assert [s.step for s in run.snapshots] == [4] and run.states == []
    monkeypatch.undo()
    assert [s.step for s in train(tiny.config(workspace), run.path).snapshots] == tiny.SNAPSHOTS


def test_non_finite_loss_is_not_recorded_with_a_snapshot():
    periodic_actions.check_loss_is_finite(1.0, "point", Progress(4, 1024))
    with pytest.raises(ValueError, match=r"step 4 \(1,024 tokens\): the held-out loss of the point snapshot is inf"):
        periodic_actions.check_loss_is_finite(float("inf"), "point", Progress(4, 1024))


def test_state_with_non_finite_weights_is_not_saved(finished, tmp_path):
    params = {"w": np.array([1.0, np.nan], np.float32)}
    with Run(absolute_path(tmp_path), finished.config).writer("states") as writer:
        state = type("State", (), {"params": params})()
        with pytest.raises(ValueError, match=r"step 3 \(768 tokens\): 1 leaves contain NaN or infinity; .*: w"):
            states.save_state(writer, state, Progress(3, 768, 24))
