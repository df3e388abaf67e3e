"""Generalized primal averaging: against float64, against AdamW and its EMA, and in runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pma_jax.config import OptimizerConfig
from pma_jax.config.errors import UserError
from pma_jax.model.decoder import graph_definition
from pma_jax.planning import disk
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import averages
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
from pma_jax.training.optimizer import GpaState, eval_params, gradient_params, init_opt_state, update_params
from pma_jax.training.state import abstract_state, init_state_from_seed, replace_params
from pma_jax.training.step import make_train_step

STEP = tiny.BATCH_TOKENS
GPA = {"optimizer__name": "gpa_adamw", "optimizer__gpa_half_life_tokens": 5 * STEP}
RATES = [0.01 * min(k / 5, 1) for k in range(1, 41)]
RNG = np.random.default_rng(0)
START, NOISES = RNG.standard_normal((4, 3)).astype(np.float32), 0.3 * RNG.standard_normal((40, 4, 3))
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


# --- Formulas ---------------------------------------------------------------------------------------------------------


def quadratic_steps(config):
    """Return the evaluated parameters and z after each step on a noisy quadratic; z is that of AdamW without GPA."""
    params = {"w": jnp.asarray(START)}
    opt_state = init_opt_state(config, params)
    update = jax.jit(update_params, static_argnums=(0, 5))
    result = []
    for rate, noise in zip(RATES, NOISES, strict=True):
        gradients = {"w": gradient_params(config, params, opt_state)["w"] + jnp.asarray(noise, jnp.float32)}
        params, opt_state = update(config, gradients, opt_state, params, rate, STEP)
        z = opt_state.z if config.name == "gpa_adamw" else params
        result.append((eval_params(config, params, opt_state)["w"], z["w"]))
    return result


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize(("half_life", "mu_x"), [(0, 0.9 ** (1 / 32)), (5 * STEP, 0.5 ** (1 / 5))])
def test_gpa_follows_the_paper(weight_decay, half_life, mu_x):
    config = OptimizerConfig("gpa_adamw", weight_decay=weight_decay, clip_norm=0, gpa_half_life_tokens=half_life)
    x = z = np.float64(START)
    m, v = np.zeros((4, 3)), np.zeros((4, 3))
    for k, (found_x, found_z) in enumerate(quadratic_steps(config), start=1):
        gradient = 0.7 * x + 0.3 * z + NOISES[k - 1]
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        direction = m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.95**k)) + 1e-8)
        z = (1 - RATES[k - 1] * weight_decay) * z - RATES[k - 1] * direction
        x = mu_x * x + (1 - mu_x) * z
        np.testing.assert_allclose(found_z, z, **CLOSE)
        np.testing.assert_allclose(found_x, x, **CLOSE)


def test_gpa_that_forgets_at_once_is_adamw():
    adamw = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    config = dataclasses.replace(adamw, name="gpa_adamw", gpa_half_life_tokens=1)  # mu_x = 0.5^256
    np.testing.assert_allclose(quadratic_steps(config), quadratic_steps(adamw), **CLOSE)


def test_gpa_without_interpolation_is_adamw_with_an_ema():
    adamw = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    config = dataclasses.replace(adamw, name="gpa_adamw", gpa_interpolation=0.0, gpa_half_life_tokens=5 * STEP)
    decay, ema = averages.ema_decay(5 * STEP, STEP), averages.empty(jnp.asarray(START))
    for k, ((x, z), (params, _)) in enumerate(
        zip(quadratic_steps(config), quadratic_steps(adamw), strict=True), start=1
    ):
        np.testing.assert_allclose(z, params, **CLOSE)
        ema = averages.add_to_ema(ema, params, decay)
        # The EMA leaves out the initial parameters, from which x starts.
        np.testing.assert_allclose(x, decay**k * START + (1 - decay**k) * ema.mean, **CLOSE)


def test_interpolation_with_a_small_share_does_not_drift():
    ones = np.float32(np.linspace(0.5, 1.5, 7))
    params = jax.lax.fori_loop(0, 10_000, lambda _, p: averages.interpolate(p, ones, 1e-4), jnp.asarray(ones))
    np.testing.assert_array_equal(params, ones)


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(workspace, tmp_path_factory):
    return train(tiny.config(workspace, **GPA), tmp_path_factory.mktemp("gpa") / "run")


def test_snapshots_hold_the_average(run):
    state, snapshot = tiny.read_state(run, 24), run.snapshots[-1]
    tiny.assert_equal(tiny.read(snapshot), state.params)
    apart = jax.tree.map(lambda x, z: np.abs(x - z).max(), state.params, state.optimizer.z)
    assert min(jax.tree.leaves(apart)) > 1e-4
    assert snapshot.loss == pytest.approx(tiny.losses(run.config, [tiny.read(snapshot)])[0], rel=1e-6)
    assert snapshot.loss < run.snapshots[0].loss


@pytest.mark.slow
def test_resume_is_bitwise(run, tmp_path):
    copy = tiny.interrupted(run, tmp_path / "run")
    tiny.assert_same_run(train(copy.config, copy.path), run)


def test_gradients_are_computed_between_x_and_z(run, workspace):
    state, mesh = tiny.read_state(run, 24), make_mesh(run.config.mesh)
    y = jax.tree.map(lambda x, z: 0.7 * x + 0.3 * z, state.params, state.optimizer.z)
    batch = np.random.default_rng(0).integers(0, 256, (8, 33), np.int32)
    losses = []
    with jax.set_mesh(mesh):
        plain = dataclasses.replace(init_state_from_seed(tiny.config(workspace)), params=y)
        for config, start in ((run.config, state), (tiny.config(workspace), plain)):
            step = make_train_step(config, graph_definition(config.model))
            losses.append(float(step(start, put_batch(mesh, batch), 1e-3)[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_new_parameters_replace_both_iterates(run):
    state = tiny.read_state(run, 24)
    params = jax.tree.map(lambda p: p + 1, state.params)
    replaced = replace_params(run.config, state, params)
    tiny.assert_equal(replaced.optimizer.z, params)
    tiny.assert_equal(gradient_params(run.config.optimizer, params, replaced.optimizer), params)
    tiny.assert_equal(replaced.optimizer.adamw, state.optimizer.adamw)


def test_fork_starts_from_merged_weights(run, workspace, tmp_path):
    config = tiny.config(workspace, **GPA, schedule__peak_rate=1e-12)
    forked = train(config, fork(run, 16 * STEP, config, tmp_path / "run", weights=run.snapshots[0].path).path)
    assert forked.snapshots[0].loss == pytest.approx(run.snapshots[0].loss, rel=1e-5), "z starts there too"


@pytest.mark.slow
@pytest.mark.mesh
def test_run_with_split_parameters_equals_one_with_copies(workspace, tmp_path):
    keys = GPA | {"training__total_tokens": 8 * STEP, "preview__windows": ()}
    split = tiny.train_split(tmp_path, workspace, **keys)
    state = abstract_state(split.config, make_mesh(split.config.mesh))
    assert isinstance(state.optimizer, GpaState)
    assert jax.tree.map(lambda p: p.sharding, state.params) == jax.tree.map(lambda p: p.sharding, state.optimizer.z)


def test_plan_counts_one_more_copy(workspace):
    sizes = []
    for keys in ({}, GPA):
        config = tiny.config(workspace, **keys)
        sizes.append(disk.estimate_storage_bytes(config, abstract_state(config, make_mesh(config.mesh))))
    assert sizes[1]["state_bytes"] - sizes[0]["state_bytes"] == sizes[0]["snapshot_bytes"] == sizes[1]["snapshot_bytes"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (GPA | {"optimizer__gpa_interpolation": 1.0}, "0 or more and below 1"),
        (GPA | {"optimizer__gpa_half_life_tokens": -1}, "from 0 to"),
        (GPA | {"optimizer__ema_half_life_tokens": 1000}, "choose one"),
        (GPA | {"model__experts": 4}, "gpa_adamw .*router_bias=false"),
        (GPA | {"replicas__method": "diloco"}, "does not combine"),
        ({"optimizer__gpa_interpolation": 0.5}, "gpa_interpolation is without effect: .* set optimizer.name=gpa_adamw"),
        ({"optimizer__gpa_half_life_tokens": 1000}, "gpa_half_life_tokens is without effect"),
    ],
)
def test_what_does_not_fit_is_refused(workspace, keys, message):
    with pytest.raises(UserError, match=message):
        tiny.config(workspace, **keys)
