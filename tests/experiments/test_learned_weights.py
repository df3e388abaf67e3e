"""Learned weights against the optimum of linear algebra, and on a real run."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from learned_weights import learn_weights

from pma_jax.analysis.workbench import text_loss
from pma_jax.data.sampling import FIT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runtime.mesh import make_mesh


def models(count, size=12, seed=0):
    rng = np.random.default_rng(seed)
    return [{"a": jnp.asarray(v[:5]), "b": jnp.asarray(v[5:])} for v in rng.normal(size=(count, size)).astype("f4")]


def flat(params):
    return np.concatenate([np.asarray(params["a"]), np.asarray(params["b"])]).astype(np.float64)


def test_weights_of_a_quadratic_loss_solve_its_equations():
    params_K = models(4)
    rng = np.random.default_rng(1)
    root = rng.normal(size=(12, 12))
    hessian, optimum = root @ root.T / 12 + np.eye(12), rng.normal(size=12)

    def loss(params):
        apart = jnp.concatenate([params["a"], params["b"]]) - jnp.asarray(optimum, jnp.float32)
        return apart @ jnp.asarray(hessian, jnp.float32) @ apart / 2

    learned = learn_weights(loss, params_K)
    # Minimise 1/2 (M w - t)' H (M w - t) under sum w = 1: one linear system with a Lagrange multiplier.
    stacked = np.stack([flat(p) for p in params_K], axis=1)
    system = np.block([[stacked.T @ hessian @ stacked, np.ones((4, 1))], [np.ones((1, 4)), np.zeros((1, 1))]])
    exact = np.linalg.solve(system, np.append(stacked.T @ hessian @ optimum, 1))[:4]
    np.testing.assert_allclose(learned.weights, exact, atol=2e-3)
    assert learned.weights.sum() == pytest.approx(1, abs=1e-9)
    assert learned.loss <= learned.start_loss


def test_single_model_has_no_weights_to_learn():
    with pytest.raises(ValueError, match="2 or more"):
        learn_weights(lambda p: jnp.sum(p["a"]), models(1))


@pytest.mark.slow
def test_learned_weights_beat_the_mean_on_their_training_text(finished):
    config, mesh = finished.config, make_mesh(finished.config.mesh)
    abstract = abstract_params(config.model, mesh)
    params_K = [snapshots.restore_params(s, abstract) for s in finished.snapshots[-4:]]
    with jax.set_mesh(mesh):
        text = make_evaluator(config, mesh, FIT)
        loss = text_loss(text.graph, text.batches)
        alone = float(jax.jit(loss)(params_K[-1]))
        learned = learn_weights(loss, params_K, iterations=30)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *params_K)
        merged = jax.tree.map(lambda *leaves: sum(map(operator.mul, learned.weights.tolist(), leaves)), *params_K)
    of_last, of_mean, of_learned = tiny.losses(config, [params_K[-1], mean, merged], FIT)
    assert alone == pytest.approx(of_last, rel=1e-5)
    assert learned.start_loss == pytest.approx(of_mean, rel=1e-5)
    assert learned.loss == pytest.approx(of_learned, rel=1e-5)
    assert of_learned < min(of_mean, of_last)  # Both are points of one simplex, so the best is no worse.
