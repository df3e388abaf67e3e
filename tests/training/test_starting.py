import jax
import numpy as np
import pytest
import tiny

from pma_jax import checkpoint
from pma_jax.interop import hf
from pma_jax.training.loop import train


def test_a_run_begins_with_the_weights_of_a_model_that_came_in(finished, workspace, tmp_path):
    newest = finished.snapshots[-1]
    hf.export_snapshot(newest.path, tmp_path / "theirs")
    hf.import_model(tmp_path / "theirs", tmp_path / "imported")
    # A rate of nearly nothing: after the first steps the weights, and so the loss, are still those it began with.
    keys = {"schedule__peak_rate": 1e-12, "training__total_tokens": 1024, "preview__windows": ()}
    begun = tiny.config(workspace, training__start_from=str(tmp_path / "imported"), **keys)
    run = train(begun, tmp_path / "run")
    assert run.snapshots[0].loss == pytest.approx(newest.loss, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), tiny.read(run.snapshots[0]), tiny.read(newest)
    )
    # The same call finds its state, whatever has become of what it began with.
    (tmp_path / "imported").rename(tmp_path / "moved")
    assert [s.step for s in train(begun, tmp_path / "run").snapshots] == [4]


def test_it_goes_on_from_its_own_state_not_from_the_start_again(finished, workspace, tmp_path):
    whole = tiny.config(workspace, training__start_from=str(finished.path), preview__windows=())
    first = train(whole, tmp_path / "whole")
    # Killed after its first state: what is left is what a kill leaves.
    half = train(whole, tmp_path / "half")
    for folder, last in (("states", 8), ("snapshots", 8)):
        for path in (half.path / folder).iterdir():
            if path.name.isdigit() and int(path.name) > last:
                path.rmtree()
    again = train(whole, tmp_path / "half")
    tiny.assert_equal(tiny.read(again.snapshots[-1]), tiny.read(first.snapshots[-1]))


def test_another_model_is_refused_with_the_keys_to_give(finished, workspace, tmp_path):
    other = tiny.config(workspace, training__start_from=str(finished.path), model__hidden=64, model__remat="full")
    with pytest.raises(ValueError, match=r"is another model: give --config.model.hidden=32$"):
        train(other, tmp_path / "run")
    nothing = tiny.config(workspace, training__start_from=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="neither a run nor a snapshot"):
        train(nothing, tmp_path / "run")
    assert not checkpoint.is_run(tmp_path / "run")
