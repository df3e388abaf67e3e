import hf_models
import jax
import numpy as np
import pytest
import tiny

from pma_jax.interop import hf
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import is_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.initial_state import find_compatible_snapshot, make_initial_state
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state


@pytest.mark.slow
def test_run_starts_with_the_weights_of_an_imported_model(finished, workspace, tmp_path):
    newest = finished.snapshots[-1]
    hf.export_snapshot(newest.path, tmp_path / "theirs")
    hf.import_model(tmp_path / "theirs", tmp_path / "imported")
    # The rate is near zero: after the first steps the weights, and so the loss, are still the initial ones.
    keys = {"schedule__peak_rate": 1e-12, "training__total_tokens": 1024, "preview__windows": ()}
    initial_params = tiny.config(workspace, training__start_from=str(tmp_path / "imported"), **keys)
    run = train(initial_params, tmp_path / "run")
    assert run.snapshots[0].loss == pytest.approx(newest.loss, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), tiny.read(run.snapshots[0]), tiny.read(newest)
    )
    # The same call resumes from the run's state, even without the model that it started from.
    (tmp_path / "imported").rename(tmp_path / "moved")
    assert [s.step for s in train(initial_params, tmp_path / "run").snapshots] == [4]


@pytest.mark.slow
def test_resume_uses_the_runs_own_state_and_not_the_start_model(finished, workspace, tmp_path):
    complete = tiny.config(workspace, training__start_from=str(finished.path), preview__windows=())
    first = train(complete, tmp_path / "whole")
    # The directory as a kill after the first state leaves it.
    half = train(complete, tmp_path / "half")
    for folder, last in (("states", 8), ("snapshots", 8)):
        for path in (half.path / folder).iterdir():
            if path.name.isdigit() and int(path.name) > last:
                path.rmtree()
    again = train(complete, tmp_path / "half")
    tiny.assert_equal(tiny.read(again.snapshots[-1]), tiny.read(first.snapshots[-1]))


def test_another_model_is_refused_with_the_keys_to_set(finished, workspace, tmp_path):
    other = tiny.config(workspace, training__start_from=str(finished.path), model__hidden=64, model__remat="full")
    with pytest.raises(ValueError, match=r"does not match the run's: pass --config.model.hidden=32$"):
        train(other, tmp_path / "run")
    nothing = tiny.config(workspace, training__start_from=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="neither a run nor a snapshot"):
        train(nothing, tmp_path / "run")
    assert not is_run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize(
    "kind", ["smollm3", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mistral", "olmo2, grouped queries"))]
)
def test_imported_model_trains_exports_and_starts_on_another_mesh(workspace, tmp_path, kind):
    made = hf_models.model(kind)
    theirs = hf_models.write_random_hf_model(tmp_path / "theirs", made)
    hf.import_model(tmp_path / "theirs", tmp_path / "ours")

    def config(start_from, **changes):
        model = {f"model__{key}": value for key, value in (hf_models.SIZES | hf_models.KINDS[kind]).items()}
        return tiny.config(workspace, training__start_from=str(start_from), **model | changes)

    short = {"training__total_tokens": 2048, "preview__windows": ()}
    run = train(config(tmp_path / "ours", mesh__data=2, mesh__tensor=2, mesh__fsdp=2, **short), tmp_path / "run")
    assert run.snapshots[-1].loss < run.snapshots[0].loss
    hf.export_snapshot(run.path, tmp_path / "learnt")
    learnt = hf_models.read_hf_tensors(tmp_path / "learnt")
    assert {name: tensor.shape for name, tensor in learnt.items()} == hf_models.shapes(made)
    assert all((tensor != theirs[name]).any() for name, tensor in learnt.items())  # every tensor was trained
    hf.import_model(tmp_path / "learnt", tmp_path / "again")
    # Another mesh reads the same weights: after steps of a rate near zero, the loss is the last one.
    again = config(tmp_path / "again", mesh__fsdp=4, mesh__data=2, schedule__peak_rate=1e-12, **short)
    assert train(again, tmp_path / "next").snapshots[0].loss == pytest.approx(run.snapshots[-1].loss, rel=1e-5)


# --- Mixtures of experts ----------------------------------------------------------------------------------------------

BIAS = "blocks/moe/router_bias_E"


def mixture(workspace, start_from, **changes):
    """Return the tiny run's configuration with the mixture's model."""
    model = {f"model__{key}": value for key, value in (hf_models.SIZES | hf_models.MIXTURE).items()}
    return tiny.config(workspace, training__start_from=str(start_from), **model | changes)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Import a Hugging Face mixture."""
    folder = tmp_path_factory.mktemp("imported")
    hf_models.write_random_hf_model(folder / "theirs", hf_models.model("mixture"))
    hf.import_model(folder / "theirs", folder / "ours")
    return read_snapshot(folder / "ours")


def initial_params(config):
    """Return the parameters that a run of this configuration starts with, as numpy arrays."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = make_initial_state(config, abstract_params(config.model, mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh).params)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == shardings
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.optimizer))
    return tiny.named(jax.tree.map(np.asarray, state.params))


@pytest.mark.slow
@pytest.mark.mesh
def test_imported_mixture_starts_unchanged_with_zero_bias(imported, workspace):
    expected = tiny.named(tiny.read(imported))
    without = initial_params(mixture(workspace, imported.path, mesh__data=4, mesh__fsdp=2))
    tiny.assert_equal(without, expected)
    with_bias = initial_params(mixture(workspace, imported.path, model__router_bias=True, mesh__data=2, mesh__expert=4))
    assert BIAS not in expected and not with_bias.pop(BIAS).any()
    tiny.assert_equal(with_bias, expected)


@pytest.mark.long
@pytest.mark.mesh
def test_imported_mixture_trains_exports_and_resumes_on_another_mesh(imported, workspace, tmp_path):
    learning = {"training__total_tokens": 2048, "training__balance_loss_weight": 0.01, "preview__windows": ()}
    split = mixture(workspace, imported.path, mesh__data=2, mesh__expert=4, **learning)
    run = train(split, tmp_path / "run")
    assert run.snapshots[-1].loss < run.snapshots[0].loss
    learnt = tiny.read(run.snapshots[-1])
    hf.export_snapshot(run.path, tmp_path / "theirs")
    hf.import_model(tmp_path / "theirs", tmp_path / "again")
    tiny.assert_equal(tiny.read(read_snapshot(tmp_path / "again")), learnt)
    tiny.assert_equal(initial_params(mixture(workspace, run.path, mesh__data=1, mesh__fsdp=4, mesh__expert=2)), learnt)


@pytest.mark.slow
@pytest.mark.mesh
def test_bias_is_exported_with_the_model_and_never_dropped(workspace, tmp_path):
    model = {"model__router_bias": True, "model__shared_experts": 1, "model__router_scores": "sigmoid"}
    written = mixture(workspace, "", **model, mesh__data=2, mesh__expert=4)
    params = tiny.named(hf_models.write_pma_snapshot(tmp_path / "ours", written))
    assert params[BIAS].any()
    tiny.assert_equal(
        initial_params(mixture(workspace, tmp_path / "ours", **model, mesh__fsdp=2, mesh__expert=4)), params
    )
    without = mixture(workspace, tmp_path / "ours", **model | {"model__router_bias": False})
    with pytest.raises(ValueError, match=r"does not match the run's: pass --config.model.router_bias=True$"):
        train(without, tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 8}, "experts=4"),
        ({"expert_hidden": 16}, "expert_hidden=12"),
        ({"experts_per_token": 1}, "experts_per_token=2"),
        ({"router_normalized": False}, "router_normalized=True"),
        ({"experts": 0}, "experts=4"),
    ],
)
def test_mixture_with_other_experts_is_refused(imported, workspace, tmp_path, changes, message):
    other = mixture(workspace, imported.path, **{f"model__{key}": value for key, value in changes.items()})
    with pytest.raises(ValueError, match=rf"does not match the run's: pass --config.model.{message}$"):
        train(other, tmp_path / "run")


def test_keys_unused_by_the_model_may_differ(imported, finished, workspace):
    find_compatible_snapshot(mixture(workspace, imported.path, model__hidden=7), imported.path, "weights")
    dense = tiny.config(workspace, model__router_bias=False, model__expert_hidden=7)
    find_compatible_snapshot(dense, finished.path, "weights")
