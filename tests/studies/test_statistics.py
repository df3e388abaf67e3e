"""Statistics against closed forms, scipy, and simulation: intervals contain the truth as often as they say."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.config.errors import UserError
from pma_jax.studies import statistics
from pma_jax.studies.parabola import find_vertices

DRAWS = 2000
VALUES = st.lists(st.floats(-10, 10), min_size=3, max_size=12, unique=True)


def covered(intervals, truth):
    """Return the share of intervals that contain the truth."""
    return np.mean([interval.low <= truth <= interval.high for interval in intervals])


def test_paired_difference_is_the_paired_t_interval():
    a, b = np.random.default_rng(0).normal(size=(2, 9))
    actual = statistics.paired_difference(a, b)
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (actual.low, actual.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert actual.mean == pytest.approx(np.mean(a - b)) and actual.count == 9
    assert statistics.paired_estimate(a, b).p_value() == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue, rel=1e-12)


def test_mean_interval_is_the_one_sample_t_interval():
    values = [3.0, 4.0, 8.0]
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.9)
    actual = statistics.mean_interval(values, 0.9)
    assert (actual.low, actual.high) == pytest.approx((expected.low, expected.high), rel=1e-12)


@given(VALUES, st.floats(0.01, 20))
def test_equivalence_is_two_one_sided_tests_and_that_the_90_percent_interval_is_within_the_margin(values, margin):
    p = statistics.paired_estimate(values, np.zeros(len(values))).equivalence_p_value(margin)
    sides = [
        scipy.stats.ttest_1samp(values, -margin, alternative="greater").pvalue,
        scipy.stats.ttest_1samp(values, margin, alternative="less").pvalue,
    ]
    assert p == pytest.approx(max(sides), rel=1e-9, abs=1e-300)
    interval = statistics.mean_interval(values, 0.9)
    if abs(p - 0.05) > 1e-9:
        assert (p < 0.05) == (-margin < interval.low and interval.high < margin)


def test_values_without_spread_have_no_doubt():
    same = statistics.paired_estimate([1.0, 1.0], [1.0, 1.0])
    assert same.p_value() == 1 and same.equivalence_p_value(0.1) == 0
    apart = statistics.paired_estimate([2.0, 2.0], [1.0, 1.0])
    assert apart.p_value() == 0 and apart.equivalence_p_value(0.1) == 1


@pytest.mark.parametrize(
    ("seeds", "documents", "deviations"),
    [(8, 59, (1.0, 1.0, 1.0)), (8, 59, (1.0, 5.0, 0.5)), (5, 59, (1.0, 1.0, 4.0)), (8, 12, (1.0, 2.0, 1.0))],
)
def test_intervals_over_seeds_and_documents_cover_the_truth(seeds, documents, deviations):
    rng, truth = np.random.default_rng(1), 0.3
    tokens = rng.integers(500, 4000, documents)
    over_seeds, over_documents, both = deviations
    intervals = []
    for _ in range(DRAWS):
        differences = truth + over_seeds * rng.normal(size=(seeds, 1)) + both * rng.normal(size=(seeds, documents))
        differences += over_documents * rng.normal(size=documents)
        intervals.append(statistics.estimate_over_documents(differences, tokens).interval())
    assert 0.93 <= covered(intervals, truth) <= 0.97


def test_the_error_over_equal_documents_is_that_of_a_two_way_analysis_of_variance():
    x = np.random.default_rng(2).normal(size=(6, 20)) + np.arange(6)[:, None] + np.arange(20)
    estimate = statistics.estimate_over_documents(x, np.full(20, 100))
    rows, columns, mean = x.mean(1), x.mean(0), x.mean()
    rest = np.sum((x - rows[:, None] - columns + mean) ** 2) / (5 * 19)
    expected = 20 * rows.var(ddof=1) / 120 + 6 * columns.var(ddof=1) / 120 - rest / 120
    assert estimate.mean == pytest.approx(mean) and estimate.standard_error**2 == pytest.approx(expected, rel=1e-9)


def test_documents_that_agree_leave_the_interval_over_seeds():
    by_seed = np.random.default_rng(3).normal(size=8)
    estimate = statistics.estimate_over_documents(np.repeat(by_seed[:, None], 30, axis=1), np.arange(1, 31))
    expected = statistics.paired_estimate(by_seed, np.zeros(8))
    assert estimate.interval().low == pytest.approx(expected.interval().low, rel=1e-9)


def test_a_statistic_over_documents_is_the_difference_where_it_is_one_and_covers_where_it_is_a_vertex():
    rng = np.random.default_rng(11)
    tokens = rng.integers(500, 4000, 30)
    nats = (rng.normal(1.3, 0.05, (2, 6, 1)) + 0.2 * rng.normal(size=(2, 1, 30))) * tokens
    actual = statistics.statistic_over_documents(lambda losses: losses[0] - losses[1], nats, tokens)
    expected = statistics.difference_over_documents(*nats, tokens)
    assert actual.mean == pytest.approx(expected.mean, rel=1e-9)
    assert actual.standard_error == pytest.approx(expected.standard_error, rel=0.1)
    x, intervals = np.arange(5.0), []
    for _ in range(DRAWS // 10):  # parabolas whose vertices vary with seeds and documents, at 2 on average
        vertices = 2 + 0.1 * rng.normal(size=(6, 1)) + 0.4 * rng.normal(size=30)
        losses = 1.3 + 0.1 * (x[:, None, None] - vertices) ** 2
        estimate = statistics.statistic_over_documents(
            lambda losses: find_vertices(x, losses, 2)[0], losses * 1000, np.full(30, 1000)
        )
        intervals.append(estimate.interval())
    assert 0.91 <= covered(intervals, 2.0) <= 0.99


def test_draws_of_documents_give_the_error_of_a_mean_and_cover_the_truth():
    rng, intervals = np.random.default_rng(12), []
    for i in range(DRAWS // 4):
        losses = 0.3 + 0.1 * rng.normal(size=(8, 1)) + 0.4 * rng.normal(size=37) + 0.1 * rng.normal(size=(8, 37))
        draws = statistics.draw_documents(37, 100, seed=i)
        assert (draws[0] == 1).all() and (draws.sum(axis=1) == 37).all()
        intervals.append(statistics.estimate_from_draws(draws @ losses.T / 37, 37).interval())
    assert 0.92 <= covered(intervals, 0.3) <= 0.98


def test_ratios_of_means_cover_the_truth_and_agree_with_fieller_by_hand():
    rng, intervals = np.random.default_rng(4), []
    for _ in range(DRAWS):
        gain = rng.normal(0.08, 0.02, 8)
        intervals.append(statistics.ratio_of_means(0.9 * gain + rng.normal(0, 0.01, 8), gain))
    assert 0.93 <= covered(intervals, 0.9) <= 0.97
    a, b = np.array([0.9, 1.1, 1.3, 1.0]), np.array([1.0, 1.4, 1.5, 0.9])
    interval = statistics.ratio_of_means(a, b)
    for end in (interval.low, interval.high):  # where a t test of a - end * b is at its limit
        assert scipy.stats.ttest_1samp(a - end * b, 0).pvalue == pytest.approx(0.05, rel=1e-9)
    assert interval.mean == pytest.approx(a.mean() / b.mean())


def test_a_ratio_whose_denominator_may_be_zero_has_no_interval():
    assert statistics.ratio_of_means([1.0, 2.0, 1.5], [0.1, -0.2, 0.3]) is None


def test_a_choice_on_the_other_seeds_has_no_advantage_from_noise():
    rng = np.random.default_rng(5)
    advantage, naive = [], []
    for _ in range(300):
        losses = {str(i): rng.normal(size=8) for i in range(40)}
        advantage += statistics.choose_leaving_one_out(losses)[1]
        naive.append(min(values.mean() for values in losses.values()))
    assert abs(np.mean(advantage)) < 0.08 and np.mean(naive) < -0.6
    names, losses = statistics.choose_leaving_one_out({"a": [1.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0]})
    assert names == ["b", "b", "a"] and losses == [2.0, 2.0, 9.0]


@pytest.mark.slow
def test_clear_findings_have_few_false_ones_among_them():
    rng, false, clear = np.random.default_rng(7), [], 0
    for _ in range(400):
        truths = np.where(np.arange(32) < 8, 0.03, 0.0)
        draws = rng.normal(truths, 0.02, (8, 32))
        found = statistics.find_clear([statistics.paired_estimate(x, np.zeros(8)) for x in draws.T])
        clear += sum(found)
        false.append(sum(found[8:]) / max(sum(found), 1))
    assert clear > 400 * 4 and np.mean(false) < 0.05
    assert statistics.find_clear([]) == []
    p_values = [scipy.stats.ttest_1samp(x, 0).pvalue for x in draws.T]
    ranked = sorted(p_values)
    last = max((k for k in range(32) if ranked[k] <= 0.05 * (k + 1) / 32), default=-1)
    assert found == [last >= 0 and p <= ranked[last] for p in p_values], "Benjamini and Hochberg's step-up procedure"


def test_a_loss_is_not_worse_where_the_one_sided_test_says_so():
    x = np.array([-0.02, 0.001, -0.006, -0.011, 0.002, -0.004])
    estimate = statistics.paired_estimate(x, np.zeros(6))
    expected = scipy.stats.ttest_1samp(x, 0.003, alternative="less").pvalue
    assert estimate.excess_p_value(0.003) == pytest.approx(expected, rel=1e-9)
    assert estimate.equivalence_p_value(0.003) > estimate.p_value() / 2 > expected
    assert statistics.find_not_worse([estimate, statistics.paired_estimate(-x, np.zeros(6))], 0.003) == [True, False]
    with pytest.raises(UserError, match="margin"):
        estimate.excess_p_value(0)


def test_equal_findings_have_few_false_ones_among_them():
    rng, false, equal = np.random.default_rng(8), [], 0
    for _ in range(300):
        truths = np.where(np.arange(32) < 12, 0.0, 0.004)  # just outside the margin
        draws = rng.normal(truths, 0.002, (8, 32))
        found = statistics.find_equal([statistics.paired_estimate(x, np.zeros(8)) for x in draws.T], 0.003)
        equal += sum(found)
        false.append(sum(found[12:]) / max(sum(found), 1))
    assert equal > 300 * 8 and np.mean(false) < 0.05
    assert statistics.find_equal([], 0.003) == []


def test_intervals_of_a_deviation_cover_the_truth():
    rng = np.random.default_rng(8)
    intervals = [statistics.deviation_interval(rng.normal(0, 0.03, 8)) for _ in range(DRAWS)]
    assert 0.93 <= covered(intervals, 0.03) <= 0.97


@pytest.mark.parametrize("count", [3, 8])
def test_paired_intervals_cover_the_truth(count):
    rng = np.random.default_rng(9)
    intervals = [statistics.mean_interval(rng.normal(0.1, 0.03, count)) for _ in range(DRAWS)]
    assert 0.93 <= covered(intervals, 0.1) <= 0.97


@pytest.mark.parametrize("count", [3, 8, 41])
def test_power_is_the_share_of_findings(count):
    rng, difference, deviation = np.random.default_rng(6), 0.01, 0.008
    found = scipy.stats.ttest_1samp(rng.normal(difference, deviation, (20_000, count)), 0, axis=1).pvalue < 0.05
    error, degrees = deviation / np.sqrt(count), count - 1
    assert statistics.power(difference, error, degrees) == pytest.approx(found.mean(), abs=0.012)
    smallest = statistics.smallest_difference(statistics.MeanEstimate(0.1, error, degrees, count))
    assert statistics.power(smallest, error, degrees) == pytest.approx(0.8, abs=1e-9)
    assert statistics.power(0.0, error, degrees) == pytest.approx(0.05)
    assert all(statistics.power(x * error, error, degrees) > 0.9 for x in (10, 12, 13, 16, 100))


def test_the_difference_of_independent_estimates_has_the_p_value_of_welchs_test():
    rng = np.random.default_rng(7)
    first, second = rng.normal(0.3, 1.0, 8), rng.normal(0.0, 3.0, 5)
    ours = statistics.independent_difference(
        *(statistics.paired_estimate(x, np.zeros(len(x))) for x in (first, second))
    )
    assert ours.p_value() == pytest.approx(scipy.stats.ttest_ind(first, second, equal_var=False).pvalue)


def test_what_has_no_interval_is_refused():
    for wrong, message in (
        (lambda: statistics.mean_interval([1.0]), "run more seeds"),
        (lambda: statistics.paired_difference([1.0, 2.0], [1.0]), "equal length"),
        (lambda: statistics.estimate_over_documents([[1.0, 2.0]], [5, 5]), "2 of each"),
        (lambda: statistics.estimate_over_documents([[1.0, 2.0]] * 2, [5]), "seeds x documents"),
        (lambda: statistics.estimate_over_documents([[1.0, 2.0]] * 2, [5, 0]), "at least 1 token"),
        (lambda: statistics.choose_leaving_one_out({"a": [1.0]}), "at least 2 seeds"),
        (lambda: statistics.paired_estimate([1.0, 2.0], [1.0, 3.0]).equivalence_p_value(0.0), "above 0"),
    ):
        with pytest.raises(UserError, match=message):
            wrong()
