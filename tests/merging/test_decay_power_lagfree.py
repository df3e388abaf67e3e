"""Decay shapes, power-function EMAs and local fits: hand-derived values and float64 simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config import DECAY_SHAPES
from pma_jax.config.errors import UserError
from pma_jax.merging import recipes

# WSM, Figure 2, n = 10, to three decimals.
WSM_TABLE = {
    "linear": [0.1] * 10,
    "minus_sqrt": [0.316, 0.131, 0.101, 0.085, 0.075, 0.067, 0.062, 0.058, 0.054, 0.051],
    "cosine": [0.024, 0.071, 0.111, 0.139, 0.155, 0.155, 0.139, 0.111, 0.071, 0.024],
    "exponential": [0.126, 0.033, 0.041, 0.052, 0.065, 0.082, 0.103, 0.130, 0.163, 0.206],
}

uneven_tokens = st.lists(st.integers(1, 10**6), min_size=4, max_size=30).map(np.cumsum)


@pytest.mark.parametrize("shape", WSM_TABLE)
def test_decay_weights_equal_the_papers(shape):
    np.testing.assert_allclose(recipes.decay(10, shape), WSM_TABLE[shape], atol=5.01e-4)
    np.testing.assert_allclose(recipes.coefficients(f"decay:shape={shape}", np.arange(5, 15)), recipes.decay(10, shape))


@pytest.mark.parametrize("shape", [*DECAY_SHAPES, lambda t: (1 - t) ** 3])
def test_decay_weights_turn_a_constant_rate_trajectory_into_the_decayed_one(shape):
    rng = np.random.default_rng(0)
    n, rate = 12, 0.03
    gradients = rng.normal(size=(n - 1, 5))
    constant = np.cumsum(np.concatenate([rng.normal(size=(1, 5)), -rate * gradients]), axis=0)
    f = shape if callable(shape) else DECAY_SHAPES[shape]
    decayed = constant[0].copy()
    for i, gradient in enumerate(gradients, start=1):
        decayed -= rate * f(i / n) * gradient
    np.testing.assert_allclose(recipes.decay(n, shape) @ constant, decayed, rtol=1e-12)


def update_weights(coefficients):
    """Return the update weights of WSM's Theorem 3.1: w_i = c_i + … + c_k, i = 1 … k."""
    return np.cumsum(np.asarray(coefficients)[::-1])[::-1][1:]


@given(st.lists(st.floats(-2, 2), min_size=0, max_size=20))
def test_from_update_weights_inverts_the_theorem(weights):
    c = recipes.from_update_weights(weights)
    assert c.shape == (len(weights) + 1,) and c.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(update_weights(c), weights, atol=1e-12)


def test_decay_at_uneven_positions():
    # The horizon is one mean interval (2) after the newest: the update that ends at token 1 of 8 keeps 7/8.
    np.testing.assert_allclose(update_weights(recipes.decay_at([0, 1, 5, 6], "linear")), [7 / 8, 3 / 8, 2 / 8])
    np.testing.assert_array_equal(recipes.decay_at([7], "cosine"), [1])
    for n, shape, message in ((3, "square", "decay shape"), (0, "linear", "at least one checkpoint")):
        with pytest.raises(ValueError, match=message):
            recipes.decay(n, shape)


@pytest.mark.parametrize(("sigma", "gamma"), [(0.05, 16.97), (0.10, 6.94), (0.15, 3.56), (0.20, 1.83), (0.25, 0.72)])
def test_gamma_of_a_relative_width(sigma, gamma):
    assert recipes.gamma_from_sigma_rel(sigma) == pytest.approx(gamma, abs=5e-3)
    g = recipes.gamma_from_sigma_rel(sigma)
    assert np.sqrt((g + 1) / ((g + 2) ** 2 * (g + 3))) == pytest.approx(sigma, rel=1e-9)


def test_gamma_zero_is_the_plain_mean():
    assert recipes.gamma_from_sigma_rel(12**-0.5) == pytest.approx(0, abs=1e-6)
    for largest in (12**-0.5, 0.2887):  # the documented bound is rounded up
        np.testing.assert_allclose(recipes.power(10, largest), recipes.sma(10), atol=1e-6)
    for sigma in (0, -1, 0.2888, 0.3, float("nan")):
        with pytest.raises(ValueError, match="sigma_rel"):
            recipes.gamma_from_sigma_rel(sigma)


@given(uneven_tokens, st.floats(0.03, 0.28))
def test_power_equals_its_running_update_at_any_positions(tokens, sigma):
    gamma = recipes.gamma_from_sigma_rel(sigma)
    models = np.random.default_rng(0).normal(size=(len(tokens), 3))
    running, before = np.zeros(3), 0.0
    for t, model in zip(tokens.astype(np.float64), models, strict=True):
        beta = (1 - (t - before) / t) ** (gamma + 1)
        running, before = beta * running + (1 - beta) * model, t
    np.testing.assert_allclose(recipes.power(tokens, sigma) @ models, running, atol=1e-9)


def test_power_is_the_profiles_integral_with_the_requested_width():
    tokens = np.arange(1, 20_001)
    c = recipes.power(tokens, 0.1)
    middle = (tokens - 0.5) / tokens[-1]
    assert np.sqrt(c @ middle**2 - (c @ middle) ** 2) == pytest.approx(0.1, abs=1e-4)
    np.testing.assert_allclose(recipes.power(30, 0.1), recipes.power(np.arange(1, 31) * 7e9, 0.1), rtol=1e-9)


def test_power_truncated_to_a_window_keeps_the_ratios():
    complete, cut = recipes.power(30, 0.1), recipes.power(np.arange(21, 31), 0.1, start_tokens=20)
    np.testing.assert_allclose(cut, complete[20:] / complete[20:].sum(), rtol=1e-12)
    for tokens, start in (([0, 1], 0), ([5, 6], 5), ([5, 6], -1)):
        with pytest.raises(ValueError, match=r"power|start_tokens"):
            recipes.power(tokens, 0.1, start_tokens=start)


@given(uneven_tokens, st.floats(0, 1.5), st.integers(0, 2**32 - 1))
def test_lagfree_reproduces_any_line_at_its_point(tokens, lag, seed):
    c = recipes.lagfree(tokens, lag)
    age = lag * recipes.mean_age(recipes.sma(len(tokens)), tokens)
    span = tokens[-1] - tokens[0]
    assert recipes.mean_age(c, tokens) == pytest.approx(age, abs=1e-9 * span)
    intercept, slope = np.random.default_rng(seed).normal(size=2)

    def line(t):
        return intercept + slope * (t - tokens[0]) / span

    assert c @ line(tokens) == pytest.approx(line(tokens[-1] - age), abs=1e-9)


@given(uneven_tokens, st.floats(0, 1.0), st.integers(0, 2**32 - 1))
def test_lagfree_of_order_two_reproduces_any_parabola(tokens, lag, seed):
    c = recipes.lagfree(tokens, lag, order=2)
    span = tokens[-1] - tokens[0]
    at = tokens[-1] - lag * recipes.mean_age(recipes.sma(len(tokens)), tokens)
    coefficients = np.random.default_rng(seed).normal(size=3)

    def parabola(t):
        return np.polyval(coefficients, (t - tokens[-1]) / span)

    # Clustered positions make the weights large, so the bound scales with their norm.
    assert c @ parabola(tokens) == pytest.approx(parabola(at), abs=1e-9 * max(1, np.linalg.norm(c)))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("lag", [0.0, 0.5, 1.0])
def test_lagfree_has_the_least_norm(order, lag):
    rng = np.random.default_rng(0)
    for tokens in (np.arange(10), np.cumsum(rng.uniform(0.2, 2, 12)) * 1e9):
        c = recipes.lagfree(tokens, lag, order)
        x = (tokens - tokens[-1] + lag * recipes.mean_age(recipes.sma(len(tokens)), tokens)) / tokens[-1]
        constraints = np.stack([x**j for j in range(order + 1)])
        np.testing.assert_allclose(c, np.linalg.pinv(constraints) @ np.eye(order + 1)[0], atol=1e-9)
        np.testing.assert_allclose(c, np.linalg.lstsq(constraints, np.eye(order + 1)[0])[0], atol=1e-9)
        moved = c + 0.1 * (np.eye(len(c)) - np.linalg.pinv(constraints) @ constraints) @ rng.normal(size=len(c))
        assert np.linalg.norm(moved) > np.linalg.norm(c)


def test_lagfree_weights_of_three_points():
    # A straight line through 0, 1, 2 evaluated at 2: -1/6, 1/3, 5/6.
    np.testing.assert_allclose(recipes.lagfree([0, 1, 2]), [-1 / 6, 1 / 3, 5 / 6], atol=1e-12)
    np.testing.assert_allclose(recipes.lagfree(3), [-1 / 6, 1 / 3, 5 / 6], atol=1e-12)
    np.testing.assert_allclose(recipes.lagfree(10, lag_fraction=1.0), recipes.sma(10), atol=1e-12)
    np.testing.assert_allclose(recipes.lagfree([3, 9]), [0, 1], atol=1e-12)
    np.testing.assert_allclose(recipes.lagfree([3, 4, 9], order=2), [0, 0, 1], atol=1e-12)
    np.testing.assert_array_equal(recipes.lagfree([5], lag_fraction=0.5), [1])
    half = recipes.lagfree(10, lag_fraction=0.5)
    assert recipes.mean_age(half, np.arange(10)) == pytest.approx(2.25)
    np.testing.assert_allclose(half, (recipes.lagfree(10) + recipes.sma(10)) / 2, atol=1e-12)


@pytest.mark.parametrize("positions", [[3, 2, 1], [1, 1, 2], [1, 2, float("nan")], [1, 2, float("inf")], []])
@pytest.mark.parametrize(
    "recipe",
    [recipes.decay_at, lambda t: recipes.power(t, 0.1), recipes.lagfree, lambda t: recipes.coefficients("sma", t)],
)
def test_positions_out_of_order_are_refused(recipe, positions):
    with pytest.raises(UserError, match=r"in order of tokens|at least one checkpoint"):
        recipe(positions)
