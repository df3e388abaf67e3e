"""Rankings of the experiment forecasts: against scipy's Kendall tau, and on results whose order is known."""

import numpy as np
import pytest
import rankings
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(lambda values: len(set(values)) > 1)


@given(VALUES, VALUES)
def test_tau_is_that_of_scipy(first, second):
    expected = scipy.stats.kendalltau(first, second).statistic
    assert rankings.kendall_tau([first, second], [second, second])[0] == pytest.approx(expected, abs=1e-12)


def test_a_constant_forecast_has_no_ranking():
    with pytest.raises(ValueError, match="no ranking"):
        rankings.kendall_tau([1, 1], [1, 2])


def test_the_regret_is_what_the_first_setting_loses():
    truth = [[1.0, 2.0, 3.0, 4.0]] * 2
    np.testing.assert_array_equal(rankings.regret([[5.0, 1.0, 6.0, 7.0], truth[0]], truth), [1.0, 0.0])


def made_up(noise: float) -> dict:
    """Return results of five settings, four seeds and twelve documents, whose losses are in order but for noise."""
    rng, tokens = np.random.default_rng(0), np.full(12, 100.0)
    sweep = {}
    for i in range(5):
        nats = lambda i=i: (1.3 + 0.01 * i + noise * rng.normal(size=(4, 12))) * tokens  # noqa: E731
        sweep[str(i)] = {"annealed": nats(), "0.5": {"sma": nats()}}
    return {"sweep": sweep, "document_tokens": {"select": tokens, "report": tokens}}


def test_losses_without_noise_rank_as_the_truth_and_noise_of_documents_widens_the_interval():
    exact, noisy = made_up(0.0), made_up(0.05)
    ranking = rankings.judge_ranking(exact, "sma", 0.5)
    assert (ranking.tau == 1).all() and (ranking.regret == 0).all()
    judged = rankings.judge_ranking(noisy, "sma", 0.5)
    by_seed = [
        scipy.stats.kendalltau(
            [of["0.5"]["sma"][seed].sum() for of in noisy["sweep"].values()],
            [np.delete(of["annealed"], seed, axis=0).sum() for of in noisy["sweep"].values()],
        ).statistic
        for seed in range(4)
    ]
    np.testing.assert_allclose(judged.tau[0], by_seed)
    assert judged.tau.shape == (1 + rankings.DRAWS, 4) and judged.tau[1:].mean(axis=1).std() > 0
    estimate = rankings.estimate(noisy, judged.tau)
    assert estimate.standard_error > np.std(by_seed, ddof=1) / 2
