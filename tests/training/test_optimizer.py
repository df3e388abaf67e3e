"""Averaging while training: schedule-free AdamW and EMA against the papers' formulas, optax and float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.config import OptimizerConfig, resolve
from pma_jax.training import averages
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
from pma_jax.training.optimizer import eval_params, init_opt_state, update_params

SCHEDULE_FREE = {"optimizer__name": "schedule_free_adamw"}
HALF_LIFE = 3 * tiny.BATCH_TOKENS
EMA = {"optimizer__ema_half_life_tokens": HALF_LIFE}


# --- Formulas ---------------------------------------------------------------------------------------------------------


def quadratic_steps(config, rates, seed=0):
    """Return x, y and z after each step on a noisy quadratic, as `update_params` computes them."""
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)}
    moments = init_opt_state(config, params)
    result = []
    for rate, noise in zip(rates, rng.standard_normal((len(rates), 4, 3)), strict=True):
        gradients = {"w": params["w"] + jnp.asarray(0.3 * noise, jnp.float32)}
        update = jax.jit(update_params, static_argnums=(0, 5))
        params, moments = update(config, gradients, moments, params, rate, tiny.BATCH_TOKENS)
        result.append((eval_params(config, params, moments)["w"], params["w"], moments))
    return result


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_schedule_free_follows_algorithm_1(weight_decay):
    config = OptimizerConfig("schedule_free_adamw", b1=0.9, b2=0.95, weight_decay=weight_decay, clip_norm=0)
    rates = [0.01 * min(k / 5, 1) for k in range(1, 41)]
    rng = np.random.default_rng(0)
    y = rng.standard_normal((4, 3)).astype(np.float32).astype(np.float64)
    x, z, v, weights = y.copy(), y.copy(), np.zeros((4, 3)), 0.0
    noises = rng.standard_normal((len(rates), 4, 3))
    for k, ((x_found, y_found, _), rate) in enumerate(zip(quadratic_steps(config, rates), rates, strict=True), start=1):
        # arXiv 2405.15682, Algorithm 1, with weights of the largest rate so far, squared.
        gradient = y + 0.3 * noises[k - 1]
        v = config.b2 * v + (1 - config.b2) * gradient**2
        direction = gradient / (np.sqrt(v / (1 - config.b2**k)) + config.epsilon)
        z = z - rate * (direction + weight_decay * y)
        weights += max(rates[:k]) ** 2
        share = max(rates[:k]) ** 2 / weights
        x = (1 - share) * x + share * z
        y = (1 - config.b1) * z + config.b1 * x
        np.testing.assert_allclose(x_found, x, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(y_found, y, rtol=2e-5, atol=2e-6)


def test_schedule_free_equals_optax():
    config = OptimizerConfig("schedule_free_adamw", b1=0.95, weight_decay=0.1, clip_norm=0)
    peer = optax.contrib.schedule_free_adamw(0.02, b1=0.95, b2=config.b2, eps=config.epsilon, weight_decay=0.1)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)}
    moments = peer.init(params)
    for (_, y, _), noise in zip(quadratic_steps(config, [0.02] * 20), rng.standard_normal((20, 4, 3)), strict=True):
        gradients = {"w": params["w"] + jnp.asarray(0.3 * noise, jnp.float32)}
        updates, moments = peer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(y, params["w"], rtol=1e-5, atol=1e-6)


def test_ema_equals_optax_without_bias_correction():
    rows = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)
    peer = optax.ema(0.9, debias=True)
    kept = peer.init({"w": jnp.zeros(7)})
    mean = averages.empty({"w": jnp.zeros(7)})
    for k, row in enumerate(rows, start=1):
        expected, kept = peer.update({"w": jnp.asarray(row)}, kept)
        mean = jax.jit(averages.add_to_ema, static_argnums=2)(mean, {"w": jnp.asarray(row)}, 0.9)
        np.testing.assert_allclose(mean.mean["w"], expected["w"], rtol=1e-5, atol=1e-6)
        powers = 0.9 ** np.arange(k - 1, -1, -1, dtype=np.float64)
        np.testing.assert_allclose(mean.mean["w"], powers @ np.float64(rows[:k]) / powers.sum(), rtol=1e-5, atol=1e-6)
    assert int(mean.count) == 50


def test_ema_decay_has_its_half_life():
    decay = averages.ema_decay(1000, 10)
    powers = decay ** np.arange(5000)
    assert powers[:100].sum() / powers.sum() == pytest.approx(0.5)


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schedule_free(workspace, tmp_path_factory):
    return train(tiny.config(workspace, **SCHEDULE_FREE), tmp_path_factory.mktemp("free") / "run")


@pytest.fixture(scope="module")
def with_ema(workspace, tmp_path_factory):
    return tiny.train_and_record(tiny.config(workspace, **EMA), tmp_path_factory.mktemp("ema") / "run")


@pytest.mark.slow
def test_schedule_free_snapshots_hold_its_average(schedule_free):
    config, snapshot = schedule_free.config, schedule_free.snapshots[-1]
    state = tiny.read_state(schedule_free, 24)
    z = state.optimizer[1].z
    x = jax.tree.map(lambda y, z: (np.float64(y) - (1 - config.optimizer.b1) * np.float64(z)) / 0.9, state.params, z)
    tiny.assert_close(tiny.read(snapshot), x, rtol=1e-5, atol=1e-6)
    apart = tiny.read(snapshot)["embedding_VxD"] - np.asarray(state.params["embedding_VxD"])
    assert np.abs(apart).max() > 1e-4, "the average differs from the point of the gradients"
    (loss,) = tiny.losses(config, [tiny.read(snapshot)])
    assert snapshot.loss == pytest.approx(loss, rel=1e-6)
    assert snapshot.loss < schedule_free.snapshots[0].loss


@pytest.mark.slow
def test_schedule_free_resume_is_bitwise(schedule_free, tmp_path):
    copy = tiny.interrupted(schedule_free, tmp_path / "run")
    tiny.assert_same_run(train(copy.config, copy.path), schedule_free)


@pytest.mark.slow
def test_schedule_free_starts_from_a_snapshot(finished, workspace, tmp_path):
    keys = {"schedule__peak_rate": 1e-12, "training__total_tokens": 1024, "preview__windows": ()}
    config = tiny.config(workspace, training__start_from=str(finished.path), **keys, **SCHEDULE_FREE)
    run = train(config, tmp_path / "run")
    assert run.snapshots[0].loss == pytest.approx(finished.snapshots[-1].loss, rel=1e-5), "z starts there too"


def test_snapshots_with_ema_hold_the_ema(with_ema):
    run, weights = with_ema
    decay = 0.5 ** (1 / 3)
    for snapshot in run.snapshots:
        powers = decay ** np.arange(snapshot.step - 1, -1, -1, dtype=np.float64)
        shares = powers / powers.sum()
        mean = jax.tree.map(
            lambda *leaves, shares=shares: np.tensordot(shares, np.float64(leaves), 1),
            *[weights[step] for step in range(1, snapshot.step + 1)],
        )
        tiny.assert_close(tiny.read(snapshot), mean, rtol=2e-6, atol=1e-6)
        (loss,) = tiny.losses(run.config, [tiny.read(snapshot)])
        assert snapshot.loss == pytest.approx(loss, rel=1e-6)


def test_ema_does_not_change_training(with_ema, finished):
    steps = [[r for r in tiny.numbers(run) if r["kind"] == "train"] for run in (with_ema[0], finished)]
    assert steps[0] == steps[1]
    tiny.assert_equal(tiny.read_state(with_ema[0], 24).params, tiny.read_state(finished, 24).params)


@pytest.mark.slow
def test_ema_resume_is_bitwise(with_ema, tmp_path):
    copy = tiny.interrupted(with_ema[0], tmp_path / "run")
    tiny.assert_same_run(train(copy.config, copy.path), with_ema[0])


@pytest.mark.slow
def test_fork_may_enable_ema(finished, with_ema, tmp_path):
    config = resolve(finished.config, [f"optimizer.ema_half_life_tokens={HALF_LIFE}"])
    forked = fork(finished, 16 * tiny.BATCH_TOKENS, config, tmp_path / "run")
    run, weights = train(config, forked.path), with_ema[1]
    decay = 0.5 ** (1 / 3)
    shares = np.array([decay**k for k in range(3, -1, -1)])
    mean = jax.tree.map(
        lambda *leaves: np.tensordot(shares / shares.sum(), np.float64(leaves), 1), *[weights[s] for s in range(17, 21)]
    )
    assert run.snapshots[0].step == 20
    tiny.assert_close(tiny.read(run.snapshots[0]), mean, rtol=2e-6, atol=1e-6)


def test_rollback_cannot_keep_the_iterates_of_schedule_free(workspace):
    config = tiny.config(workspace, **SCHEDULE_FREE, spikes__attempts=1, spikes__window_tokens=16 * tiny.BATCH_TOKENS)
    with pytest.raises(ValueError, match=r"set spikes.optimizer=reset"):
        spikes = dataclasses.replace(config.spikes, optimizer="keep")
        configuration.resolve(dataclasses.asdict(dataclasses.replace(config, spikes=spikes)))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"optimizer__name": "sgd"}, "adamw, schedule_free_adamw, gpa_adamw"),
        ({"optimizer__ema_half_life_tokens": -1}, "from 0 to"),
        (SCHEDULE_FREE | EMA, "choose one"),
        (SCHEDULE_FREE | {"optimizer__b1": 0.0}, "between 0 and 1"),
        (SCHEDULE_FREE | {"model__experts": 4}, "router_bias=false"),
    ],
)
def test_incompatible_keys_are_refused(workspace, keys, why):
    with pytest.raises(ValueError, match=why):
        tiny.config(workspace, **keys)
