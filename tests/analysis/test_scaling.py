"""Fits recover the generating law, also under noise; comparisons against scipy and by hand."""

import numpy as np
import pytest

from pma_jax.analysis import comparison, scaling


def test_loss_curve_is_recovered():
    tokens = np.geomspace(1e6, 1e9, 12)
    curve = scaling.fit_loss_curve(tokens, 1.7 + 400 * tokens**-0.35)
    assert (curve.floor, curve.exponent) == (pytest.approx(1.7, rel=1e-3), pytest.approx(0.35, rel=1e-2))
    np.testing.assert_allclose(curve.predict(1e11), 1.7 + 400 * 1e11**-0.35, rtol=1e-3)


def test_one_outlier_does_not_move_a_loss_curve():
    tokens = np.geomspace(1e6, 1e9, 16)
    loss = 1.7 + 400 * tokens**-0.35
    loss[7] *= 1.3
    np.testing.assert_allclose(scaling.fit_loss_curve(tokens, loss).predict(1e10), 1.7 + 400 * 1e10**-0.35, rtol=5e-3)


def test_scaling_law_is_recovered():
    parameters, tokens = (x.ravel() for x in np.meshgrid(np.geomspace(1e6, 1e8, 4), np.geomspace(1e7, 1e10, 5)))
    truth = scaling.ScalingLaw(e=1.7, a=400, b=410, alpha=0.34, beta=0.28)
    law = scaling.fit_scaling_law(parameters, tokens, truth.predict(parameters, tokens))
    assert (law.alpha, law.beta) == (pytest.approx(0.34, rel=2e-2), pytest.approx(0.28, rel=2e-2))
    assert law.e == pytest.approx(1.7, rel=2e-2)
    np.testing.assert_allclose(law.predict(1e9, 1e11), truth.predict(1e9, 1e11), rtol=5e-3)


@pytest.mark.parametrize(
    ("tokens", "loss", "message"),
    [([1, 2, 3], [3, 2, 1], "at least 4"), ([1, 2, 3, -4], [4, 3, 2, 1], "above 0"), ([1, 2, 3, 4], [1, 2], "shapes")],
)
def test_unfittable_data_is_refused(tokens, loss, message):
    with pytest.raises(ValueError, match=message):
        scaling.fit_loss_curve(tokens, loss)


def test_single_model_size_has_no_exponent_of_size():
    with pytest.raises(ValueError, match="same number of parameters"):
        scaling.fit_scaling_law([1e6] * 6, [1e6, 2e6, 3e6, 4e6, 5e6, 6e6], [3, 2.9, 2.8, 2.7, 2.6, 2.5])


def test_tokens_to_reach_a_loss_are_interpolated_linearly():
    tokens, loss = [100, 200, 300], [4.0, 3.0, 2.0]
    assert comparison.tokens_to_reach(tokens, loss, 2.5) == 250
    assert comparison.tokens_to_reach(tokens, loss, 4.5) == 100
    assert comparison.tokens_to_reach(tokens, loss, 1.0) is None


def test_roughness_measures_steps_and_ignores_a_trend():
    assert comparison.roughness([2.0, 2.0, 2.0]) == 0
    assert comparison.roughness([1.0, 2.0, 1.0, 2.0]) == pytest.approx(np.log(2))
    noise = np.exp(0.1 * np.random.default_rng(0).normal(size=4000))
    trend = np.linspace(3, 1, 4000)
    assert comparison.roughness(noise * trend) == pytest.approx(0.1 * np.sqrt(2), rel=0.05)
    with pytest.raises(ValueError, match="above 0"):
        comparison.roughness([1.0, 0.0])
