"""Spike detector: what it flags on synthetic and recorded traces, compared with the same rules in float64 numpy."""

import dataclasses
import functools
import json
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.config import Config, SpikesConfig, TrainingConfig
from pma_jax.training import spikes
from pma_jax.training.spikes import CALM, IRRECOVERABLE, OPEN, RECOVERED

# Durations in steps of one token.
LIMITS = SpikesConfig(
    window_tokens=100,
    patience_tokens=60,
    confirm_steps=5,
    loss_z=6.0,
    gradient_z=8.0,
    minimum_rise_nats=0.1,
    skip_gradient_z=0.0,
    attempts=1,
)
TOLD = dataclasses.replace(LIMITS, attempts=0)  # The readings of a run that never rolls back.
RECORDED = Path(__file__).parent / "recorded_traces.json"


def in_steps(limits):
    """Return a configuration with these thresholds whose steps are one token."""
    return Config(spikes=limits, training=TrainingConfig(sequence_length_tokens=1, batch_size_sequences=1))


CHUNK = 1000  # steps of one program, whatever the length of a trace


@functools.partial(jax.jit, static_argnums=0)
def scan(limits, detector, steps, losses, norms):
    """Return the detector after some steps, and every reading."""
    return jax.lax.scan(lambda d, x: spikes.observe(d, in_steps(limits), *x), detector, (steps, losses, norms))


def read(limits, losses, norms):
    """Return every reading of a trace; the first step is 1."""
    size, detector, readings = len(losses), spikes.empty_detector(limits.window_tokens), []
    padded = [np.pad(values, (0, -size % CHUNK), mode="edge").astype(np.float32) for values in (losses, norms)]
    steps = np.arange(1, len(padded[0]) + 1, dtype=np.int32)
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        detector, reading = scan(limits, detector, steps[part], *(values[part] for values in padded))
        readings.append(reading)
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:size], *readings)


def trace(steps, seed=0, spread=0.04, tails=0.0, warmup=200):
    """Return loss and gradient norm of a clean run.

    The loss falls fast at first and then by a power law, with noise of normal or Student's t tails.
    """
    rng, t = np.random.default_rng(seed), np.arange(1, steps + 1)

    def noise():
        return rng.standard_t(tails, steps) if tails else rng.standard_normal(steps)

    losses = 2.0 + 3.5 * np.exp(-t / warmup) + 0.8 / np.sqrt(1 + t / 1000) + spread * noise()
    norms = (0.5 + 6 * np.exp(-t / (warmup / 4))) * np.exp(0.25 * noise())
    return losses, norms


def spike_onsets(readings):
    """Return the onset steps of all detected spikes."""
    return sorted(set(readings.onset[readings.status != CALM].tolist()))


# --- No spike ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tails", "steps"),
    [(3.0, 5000), *(pytest.param(tails, 20_000, marks=pytest.mark.slow) for tails in (0.0, 5.0, 3.0))],
)
def test_clean_trace_with_warm_up_raises_no_alarm(tails, steps):
    losses, norms = trace(steps, seed=int(tails), tails=tails)
    assert spike_onsets(read(TOLD, losses, norms)) == []


@pytest.mark.parametrize(
    ("tails", "spread"),
    [
        pytest.param(tails, spread, marks=pytest.mark.slow if (tails, spread) == (3.0, 0.1) else pytest.mark.long)
        for tails in (0.0, 5.0, 3.0)
        for spread in (0.01, 0.1)
    ],
)
def test_false_alarms_are_at_most_one_in_100_000_steps(tails, spread):
    """Require no alarm in 200,000 steps of each kind, which shows a rate below one in 100,000."""
    losses, norms = trace(200_000, seed=7, spread=spread, tails=tails)
    assert spike_onsets(read(TOLD, losses, norms)) == []


@pytest.mark.slow
def test_autocorrelated_noise_raises_no_alarm():
    losses, norms = trace(20_000, tails=5.0)
    logs = np.log(norms)
    for values in (losses, logs):
        values[1:] += 0.5 * (values[:-1] - np.median(values))
    assert spike_onsets(read(TOLD, losses, np.exp(logs))) == []


@pytest.mark.parametrize("drift", [1e-3, -1e-3])
def test_slow_drift_raises_no_alarm_where_an_equal_jump_does(drift):
    losses, norms = trace(3000)
    drifting = losses + drift * np.arange(3000)  # 3 nats in total.
    assert spike_onsets(read(TOLD, drifting, norms)) == []
    losses[1500:] += 3
    assert spike_onsets(read(TOLD, losses, norms)) == [1501]


def test_single_hard_batches_are_not_spikes():
    losses, norms = trace(2000)
    losses[300::100] += 2
    norms[350::100] *= 50
    assert spike_onsets(read(TOLD, losses, norms)) == []


def test_permanently_larger_gradients_become_the_new_level():
    losses, norms = trace(2000)
    norms[1000:] *= 100
    readings = read(TOLD, losses, norms)
    assert not (readings.status == IRRECOVERABLE).any()
    assert (readings.status[1000 + TOLD.window_tokens :] == CALM).all()


def test_nothing_is_flagged_before_the_window_is_full():
    losses, norms = trace(99)
    losses[50:] += 5
    assert spike_onsets(read(TOLD, losses, norms)) == []


# --- Spikes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tails", "traces"), [(0.0, 6), *(pytest.param(tails, 20, marks=pytest.mark.slow) for tails in (0.0, 3.0))]
)
def test_planted_spikes_are_detected_and_distinguished_from_collapses(tails, traces):
    actual = 0
    for seed in range(traces):
        rng = np.random.default_rng(100 + seed)
        losses, norms = trace(2000, seed, tails=tails)
        begin, height = int(rng.integers(300, 1200)), rng.uniform(0.8, 4)
        # Up within 5 steps; a transient spike decays with a half-life of 10, a collapse stays.
        shape = np.minimum(np.arange(1, 2001 - begin) / 5, 1)
        if seed % 2:
            shape = shape * 0.5 ** (np.maximum(np.arange(2000 - begin) - 5, 0) / 4)
        losses[begin:] += height * shape
        norms[begin : begin + 10] *= 20
        readings = read(LIMITS, losses, norms)
        onsets = spike_onsets(readings)
        assert onsets and abs(onsets[0] - (begin + 1)) <= 5, (seed, onsets, begin)
        assert (readings.status == IRRECOVERABLE).any() == (not seed % 2), seed
        assert (readings.status == RECOVERED).any() == bool(seed % 2), seed
        actual += 1
    assert actual == traces


def test_collapse_is_declared_when_the_patience_ends():
    losses, norms = trace(1000)
    losses[600:] += 1
    readings = read(LIMITS, losses, norms)
    first = int(np.argmax(readings.status == IRRECOVERABLE))
    assert first + 1 == 600 + LIMITS.patience_tokens
    assert readings.onset[first] == 601 and readings.declared[first] == first + 1
    assert (readings.status[602:first] == OPEN).all()
    assert readings.median_loss[first] == pytest.approx(np.median(losses[500:600]), rel=1e-6), (
        "the window excludes losses of the spike"
    )
    assert (readings.status[first:] == IRRECOVERABLE).all(), "until the run rolls back"


def test_run_without_rollback_adopts_the_new_level():
    losses, norms = trace(1500)
    losses[600:] += 1
    losses[1200:] += 1
    readings = read(TOLD, losses, norms)
    assert np.flatnonzero(readings.status == IRRECOVERABLE).tolist() == [659, 1259]


def test_loss_between_two_spikes_has_recovered():
    losses, norms = trace(1000)
    for begin in (500, 530, 560):
        losses[begin : begin + 4] += 2
    readings = read(LIMITS, losses, norms)
    assert not (readings.status == IRRECOVERABLE).any()
    assert (readings.status == RECOVERED).sum() == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["loss", "norm"])
def test_non_finite_value_is_irrecoverable_at_once_even_early(bad, which):
    losses, norms = trace(50)
    (losses if which == "loss" else norms)[20:] = bad
    readings = read(LIMITS, losses, norms)
    assert np.flatnonzero(readings.status == IRRECOVERABLE)[0] == 20
    assert readings.declared[-1] == 21
    reports = read(TOLD, losses, norms)
    assert set(reports.declared[20:].tolist()) == {21}, "reported once, not at every step"


def test_non_finite_norm_is_ignored_where_its_update_is_skipped():
    limits = dataclasses.replace(LIMITS, skip_gradient_z=12.0)
    losses, norms = trace(1000)
    norms[[20, 500]] = np.nan
    norms[700] *= 1e4
    readings = read(limits, losses, norms)
    assert np.flatnonzero(readings.skip).tolist() == [20, 500, 700]
    assert readings.total_skips[-1] == 3
    assert spike_onsets(readings) == []


def test_rollback_restores_the_window_from_before_the_spike():
    losses, norms = trace(700)
    losses[600:] += 1
    detector = spikes.empty_detector(LIMITS.window_tokens)
    step, keys = jax.jit(spikes.observe, static_argnums=1), in_steps(LIMITS)
    for i in range(700):
        detector, reading = step(
            detector, in_steps(LIMITS), jnp.int32(i + 1), jnp.float32(losses[i]), jnp.float32(norms[i])
        )
    assert reading.status == IRRECOVERABLE
    detector, reading = step(
        spikes.close_spike(detector), keys, jnp.int32(580), jnp.float32(losses[580]), jnp.float32(1)
    )
    assert reading.status == CALM
    assert reading.median_loss == pytest.approx(np.median(losses[500:600]), rel=1e-6)


# --- Comparison with numpy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [16, 17, 99, 100])
def test_z_scores_equal_numpys(window):
    limits = dataclasses.replace(LIMITS, window_tokens=window)
    losses, norms = trace(window + 1, tails=3.0)
    last = jax.tree.map(lambda x: x[-1], read(limits, losses, norms))
    for values, z in ((losses, last.loss_z), (np.log(norms), last.gradient_z)):
        before = values[:-1].astype(np.float32).astype(np.float64)
        spread = 1.4826 * np.median(np.abs(before - np.median(before)))
        assert z == pytest.approx((values[-1] - np.median(before)) / spread, rel=1e-3)


@hypothesis.given(data=hypothesis.strategies.data(), window=hypothesis.strategies.sampled_from([1, 2, 7, 64, 65]))
def test_the_median_is_numpys(data, window):
    finite = hypothesis.strategies.floats(-(2.0**60), 2.0**60, width=32)
    losses = np.array(data.draw(hypothesis.strategies.lists(finite, min_size=window, max_size=window)), np.float32)
    detector = dataclasses.replace(spikes.empty_detector(window), recent_losses=jnp.asarray(losses))
    observe = jax.jit(spikes.observe, static_argnums=1)
    _, reading = observe(detector, in_steps(LIMITS), jnp.int32(1), jnp.float32(1), jnp.float32(1))
    smallest_normal = np.finfo(np.float32).tiny  # XLA may flush smaller numbers to 0; numpy keeps them
    np.testing.assert_allclose(reading.median_loss, np.median(losses), rtol=0, atol=smallest_normal)
    spread = np.float32(1.4826) * np.median(np.abs(losses - np.median(losses)))
    np.testing.assert_allclose(reading.loss_spread, max(spread, spikes.MIN_LOSS_SPREAD), rtol=1e-6)


def test_trace_without_noise_has_no_outliers():
    losses, norms = np.full(300, 2.0), np.full(300, 1.0)
    losses[200:], norms[200:] = 2.05, 1.05
    assert spike_onsets(read(TOLD, losses, norms)) == []


# --- Recorded runs ----------------------------------------------------------------------------------------------------


NOISY = dataclasses.replace(TOLD, confirm_steps=20, loss_z=1.7, minimum_rise_nats=0.2)  # As the experiment sets them.


def recorded():
    return json.loads(RECORDED.read_text())["traces"]


@pytest.mark.parametrize("name", [t["name"] for t in recorded()])
def test_recorded_runs_are_classified_correctly(name):
    """Replay every step of real runs, whose collapses were located on their curves."""
    run = next(t for t in recorded() if t["name"] == name)
    readings = read(NOISY, run["losses"], run["gradient_norms"])
    assert spike_onsets(read(TOLD, run["losses"], run["gradient_norms"])) == [], "by the defaults: noise of 0.2 nats"
    if run["collapse_steps"] is None:
        assert spike_onsets(readings) == []
        return
    low, high = run["collapse_steps"]
    assert any(low <= step <= high for step in spike_onsets(readings))
    assert (readings.status == IRRECOVERABLE).any()
