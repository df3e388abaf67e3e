"""BEMA, the bias-corrected average: against float64 loops, and in runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pma_jax.config import OptimizerConfig, resolve
from pma_jax.config.errors import UserError
from pma_jax.planning import disk
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training import averages
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state, begin_bema, init_state_from_seed, replace_params

STEP = tiny.BATCH_TOKENS
# It begins after step 10, in the first interval after which a run that was interrupted at step 12 resumes.
BEMA = {"optimizer__bema_start_tokens": 9 * STEP + 1, "optimizer__bema_interval_tokens": 3 * STEP}
ROWS = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)


# --- Formulas ---------------------------------------------------------------------------------------------------------


def models(config, rows, interval=1):
    """Return the model after each of the rows, which are the parameters after steps 0, 1, ..."""
    bema = averages.empty_bema(jnp.zeros(7))
    result = []
    for t, row in enumerate(jnp.asarray(rows)):
        if t % interval == 0:
            bema = averages.add_to_bema(bema, row, jnp.int32(t), config)
        result.append(np.asarray(averages.bema_params(bema, row, jnp.int32(t), config)))
    return result


def mean64(steps, theta_0, theta):
    """Return mu in float64, with the default powers, that began with theta_0 and to which theta of these was added."""
    mu = theta_0
    for t in steps:
        beta = (10 + t) ** -0.5
        mu = (1 - beta) * mu + beta * np.float64(theta[t])
    return mu


@pytest.mark.parametrize("interval", [1, 4])
def test_bema_follows_algorithm_1(interval):
    rows = np.float64(ROWS)
    for t, model in enumerate(models(OptimizerConfig(), ROWS, interval)):
        mu = mean64(range(interval, t + 1, interval), rows[0], rows)
        np.testing.assert_allclose(model, mu + (10 + t) ** -0.2 * (rows[t] - rows[0]), rtol=1e-5, atol=1e-6)


def test_bema_without_correction_is_the_average():
    found = models(OptimizerConfig(bema_bias_power=1e3, bema_ema_power=0.7, bema_multiplier=2.0, bema_lag=3.0), ROWS)
    betas = (3 + 2 * np.arange(40.0)) ** -0.7
    betas[0] = 1
    weights = betas * np.append(np.cumprod((1 - betas)[:0:-1])[::-1], 1)
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(found[-1], weights @ np.float64(ROWS), rtol=1e-5, atol=1e-6)


def test_bema_of_constant_parameters_is_these():
    np.testing.assert_array_equal(models(OptimizerConfig(), [ROWS[0]] * 40, 3), [ROWS[0]] * 40)


def test_correction_overshoots_as_the_comment_of_the_start_says():
    bema = averages.add_to_bema(averages.empty_bema(jnp.zeros(1)), jnp.zeros(1), jnp.int32(0), OptimizerConfig())
    # The parameters stay 1 away from the origin, where the average is still.
    past = [averages.bema_params(bema, jnp.ones(1), jnp.int32(t), OptimizerConfig())[0] for t in (100, 400, 1536)]
    np.testing.assert_allclose(past, [0.39, 0.30, 0.23], atol=5e-3)


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(workspace, tmp_path_factory):
    return tiny.train_and_record(tiny.config(workspace, **BEMA), tmp_path_factory.mktemp("bema") / "run")


def assert_bema(snapshot, theta_0, weights, added):
    """Assert that a snapshot is BEMA's model, with these parameters after each step, of which some were added."""

    def model(theta_0, *theta):
        rows = dict(zip(weights, theta, strict=True))
        mu = mean64(added, np.float64(theta_0), rows)
        return mu + (10 + snapshot.step) ** -0.2 * (np.float64(rows[snapshot.step]) - theta_0)

    tiny.assert_close(tiny.read(snapshot), jax.tree.map(model, theta_0, *weights.values()), rtol=1e-5, atol=1e-6)


def test_snapshots_hold_the_model_of_each_step(trained):
    run, weights = trained
    for snapshot in run.snapshots:
        if snapshot.step < 10:
            tiny.assert_equal(tiny.read(snapshot), weights[snapshot.step])
        else:
            assert_bema(snapshot, weights[10], weights, range(13, snapshot.step + 1, 3))
        (loss,) = tiny.losses(run.config, [tiny.read(snapshot)])
        assert snapshot.loss == pytest.approx(loss, rel=1e-6)


def test_training_is_unchanged(trained, finished):
    steps = [[r for r in tiny.numbers(run) if r["kind"] == "train"] for run in (trained[0], finished)]
    assert steps[0] == steps[1]
    tiny.assert_equal(tiny.read_state(trained[0], 24).params, tiny.read_state(finished, 24).params)


# Resumes from step 8, before the start, and from step 16, after it.
@pytest.mark.parametrize("step", [12, pytest.param(20, marks=pytest.mark.slow)])
def test_resume_is_bitwise(trained, tmp_path, step):
    copy = tiny.interrupted(trained[0], tmp_path / "run", step)
    tiny.assert_same_run(train(copy.config, copy.path), trained[0])


@pytest.mark.slow
def test_average_may_begin_with_the_initial_parameters(workspace, tmp_path):
    config = tiny.config(workspace, training__total_tokens=8 * STEP, optimizer__bema_interval_tokens=STEP)
    run, weights = tiny.train_and_record(config, tmp_path / "run")
    with jax.set_mesh(make_mesh(config.mesh)):
        theta_0 = jax.tree.map(np.asarray, init_state_from_seed(config).params)
    for snapshot in run.snapshots:
        assert_bema(snapshot, theta_0, weights, range(1, snapshot.step + 1))


@pytest.mark.parametrize("is_merge", [False, True])
@pytest.mark.slow
def test_fork_begins_where_it_starts(finished, tmp_path, is_merge):
    source = finished.snapshots[0]
    config = resolve(
        finished.config, [f"optimizer.bema_interval_tokens={2 * STEP}", f"optimizer.bema_start_tokens={STEP}"]
    )
    forked = fork(finished, 16 * STEP, config, tmp_path / "run", weights=source.path if is_merge else None)
    run, weights = tiny.train_and_record(config, forked.path)
    theta_0 = tiny.read(source) if is_merge else tiny.read_state(finished, 16).params
    assert run.snapshots[0].step == 20
    assert_bema(run.snapshots[0], theta_0, weights, [17, 19])  # intervals are counted from the start, step 1


def test_average_begins_again_with_new_parameters_or_waits_for_its_start(trained):
    config, state = trained[0].config, tiny.read_state(trained[0], 24)
    params = jax.tree.map(lambda p: p + 1, state.params)
    replaced = begin_bema(config, replace_params(config, state, params), 24 * STEP)
    tiny.assert_equal((replaced.bema.origin, replaced.bema.mean.mean), (params, params))
    assert int(begin_bema(config, replace_params(config, replaced, params), 8 * STEP).bema.mean.count) == 0
    assert int(begin_bema(config, replaced, 8 * STEP).bema.mean.count) == 0, "a fork whose average begins later"


@pytest.mark.slow
@pytest.mark.mesh
def test_run_with_split_parameters_equals_one_with_copies(workspace, tmp_path):
    keys = {"training__total_tokens": 8 * STEP, "preview__windows": (), "optimizer__bema_interval_tokens": 3 * STEP}
    split = tiny.train_split(tmp_path, workspace, **keys)
    state = abstract_state(split.config, make_mesh(split.config.mesh))
    expected = jax.tree.map(lambda p: p.sharding, state.params)
    for tree in (state.bema.origin, state.bema.mean.mean, tiny.read_state(split, 8).bema.mean.mean):
        assert jax.tree.map(lambda p: p.sharding, tree) == expected


def test_plan_counts_two_more_copies(workspace):
    sizes = []
    for keys in ({}, BEMA):
        config = tiny.config(workspace, **keys)
        sizes.append(disk.estimate_storage_bytes(config, abstract_state(config, make_mesh(config.mesh))))
    count_bytes = 4
    assert sizes[1]["state_bytes"] - sizes[0]["state_bytes"] == 2 * sizes[0]["snapshot_bytes"] + count_bytes


def test_intervals_are_counted_from_the_start(workspace):
    config = tiny.config(workspace, **BEMA)
    assert [t for t in range(1, 25) if config.is_bema_step(t * STEP)] == [10, 13, 16, 19, 22]
    late = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, bema_start_tokens=10 * STEP))
    assert [t for t in range(1, 25) if late.is_bema_step(t * STEP)] == [10, 13, 16, 19, 22]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (BEMA | {"optimizer__ema_half_life_tokens": 1000}, "choose one"),
        (BEMA | {"optimizer__name": "gpa_adamw"}, "choose one"),
        (BEMA | {"optimizer__name": "schedule_free_adamw"}, "choose one"),
        (BEMA | {"optimizer__bema_interval_tokens": 255}, "less than one step's 256 tokens"),
        (BEMA | {"optimizer__bema_start_tokens": 24 * STEP}, "must be less than training.total_tokens"),
        (BEMA | {"optimizer__bema_lag": 0.5}, "from 1 to"),
        (BEMA | {"replicas__method": "diloco"}, "does not combine"),
        ({"optimizer__bema_start_tokens": STEP}, "is without effect: .* set optimizer.bema_interval_tokens"),
        ({"optimizer__bema_lag": 2.0}, "bema_lag is without effect"),
    ],
)
def test_what_does_not_fit_is_refused(workspace, keys, message):
    with pytest.raises(UserError, match=message):
        tiny.config(workspace, **keys)
