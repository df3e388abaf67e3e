import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config import ScheduleConfig
from pma_jax.training.schedule import learning_rate

PEAK, FINAL, WARMUP, START, TOTAL = 4e-3, 4e-5, 1000, 8000, 10_000
SHAPES = ["cosine", "linear", "minus_sqrt"]


def schedule(decay, **keys):
    return ScheduleConfig(
        **{"peak_rate": PEAK, "warmup_tokens": WARMUP, "decay": decay, "decay_start_tokens": START, "final_rate": FINAL}
        | keys
    )


def rates(decay, tokens, **keys):
    return np.array([learning_rate(schedule(decay, **keys), TOTAL, int(t)) for t in tokens])


# The papers' formulas in tokens: D is the number of tokens since the decay began, T its length.
FORMULAS = {
    "cosine": lambda D, T: FINAL + 0.5 * (PEAK - FINAL) * (1 + np.cos(np.pi * D / T)),
    "linear": lambda D, T: PEAK + (FINAL - PEAK) * D / T,
    "minus_sqrt": lambda D, T: PEAK * (1 - np.sqrt(D / T)) + FINAL * np.sqrt(D / T),
}


@pytest.mark.parametrize("decay", ["none", *SHAPES])
def test_warm_up_is_linear_from_zero_to_a_constant_peak(decay):
    tokens = np.arange(0, WARMUP + 1, 50)
    np.testing.assert_allclose(rates(decay, tokens), PEAK * tokens / WARMUP, rtol=1e-15)
    assert (rates(decay, np.arange(WARMUP, START + 1, 100)) == PEAK).all()


@pytest.mark.parametrize("decay", SHAPES)
def test_decay_follows_its_formula_and_ends_at_the_final_rate(decay):
    tokens = np.arange(START, TOTAL + 1, 25)
    np.testing.assert_allclose(rates(decay, tokens), FORMULAS[decay](tokens - START, TOTAL - START), rtol=1e-12)
    assert rates(decay, [TOTAL])[0] == pytest.approx(FINAL, rel=1e-12)
    assert rates(decay, [TOTAL + 500])[0] == pytest.approx(FINAL, rel=1e-12), "the last step may end past the horizon"
    assert rates(decay, [TOTAL], final_rate=0.0)[0] == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize("decay", ["none", *SHAPES])
def test_rate_is_continuous_and_falls_only_in_the_decay(decay):
    steps = np.diff(rates(decay, range(TOTAL + 1)))
    assert (steps[:WARMUP] > 0).all() and (steps[WARMUP:] <= 0).all()
    # minus_sqrt is steepest at its first step, sqrt(1 / T) of the decrease, and still continuous.
    assert np.abs(steps).max() <= (PEAK - FINAL) * math.sqrt(1 / (TOTAL - START)) * (1 + 1e-9)


def test_constant_ignores_decay_keys():
    assert (rates("none", range(WARMUP, 2 * TOTAL, 100), decay_start_tokens=0) == PEAK).all()


@pytest.mark.parametrize("total", [TOTAL, 100 * TOTAL])
def test_inverse_square_root_needs_no_horizon(total):
    made = ScheduleConfig(PEAK, WARMUP, "inverse_sqrt", START)
    tokens = np.array([WARMUP, START, START + 1, 2 * START, 4 * START, 100 * START])
    expected = PEAK * np.minimum(np.sqrt(START / tokens), 1)
    np.testing.assert_allclose([learning_rate(made, total, int(t)) for t in tokens], expected, rtol=1e-15)


def test_zero_warm_up_starts_at_the_peak():
    assert rates("none", [0, 1], warmup_tokens=0).tolist() == [PEAK, PEAK]


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1), st.sampled_from(SHAPES))
def test_rate_stays_between_final_and_peak_after_warm_up(warmup, stable, decay_tokens, share, decay):
    start, total = warmup + stable, warmup + stable + decay_tokens
    made = ScheduleConfig(1e-3, warmup, decay, start, 1e-5)
    rate = learning_rate(made, total, warmup + round(share * (total - warmup)))
    assert 1e-5 * (1 - 1e-9) <= rate <= 1e-3
