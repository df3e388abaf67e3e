"""Recipes as filters, against their effect on a sine, and spectra of known series."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.analysis import spectrum
from pma_jax.merging import recipes


@given(st.integers(2, 20), st.floats(0, 0.5))
def test_response_of_a_recipe_equals_its_effect_on_a_sine(count, frequency):
    weights = recipes.wma(count)
    wave = np.exp(2j * np.pi * frequency * np.arange(count))
    response = spectrum.frequency_response(weights, [frequency])[0]
    np.testing.assert_allclose(weights @ wave, response * wave[-1], atol=1e-12)


@pytest.mark.parametrize("text", ["sma", "wma", "ema:alpha=0.2", "lagfree", "lagfree:lag=0.5", "decay:shape=linear"])
def test_constant_passes_and_the_slope_at_zero_is_the_mean_age(text):
    weights = recipes.coefficients(text, np.arange(8) * 100)
    assert spectrum.frequency_response(weights, [0.0])[0] == pytest.approx(1)
    small = 1e-6
    slope = spectrum.frequency_response(weights, [small])[0].imag / small
    assert -slope / (2 * np.pi) == pytest.approx(weights @ np.arange(7, -1, -1), abs=1e-6)


def test_positions_may_be_uneven():
    weights, positions = np.array([0.2, 0.3, 0.5]), np.array([0.0, 5.0, 6.0])
    wave = np.exp(2j * np.pi * 0.07 * positions)
    response = spectrum.frequency_response(weights, [0.07], positions)[0]
    np.testing.assert_allclose(weights @ wave, response * wave[-1], atol=1e-12)
