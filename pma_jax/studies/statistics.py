"""Statistics of experiments: estimates with intervals over seeds and documents, tests of equality, fair choices.

Losses have one axis of seeds (S) and, where documents are resampled too, one of held-out documents (D). Two contenders
are compared by the difference of their losses at the same seed, on the same documents.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.stats
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class MeanInterval:
    """An estimate from `count` values, by default their mean, with its confidence interval."""

    mean: float
    low: float
    high: float
    count: int


@dataclasses.dataclass(frozen=True)
class MeanEstimate:
    """The mean of paired differences or of values: (mean - truth) / standard_error follows Student's t."""

    mean: float
    standard_error: float
    degrees_of_freedom: float  # of the standard error
    count: int  # seeds

    def interval(self, confidence: float = CONFIDENCE) -> MeanInterval:
        """Return the confidence interval."""
        half_width = self.standard_error * float(scipy.stats.t.ppf((1 + confidence) / 2, self.degrees_of_freedom))
        return MeanInterval(self.mean, self.mean - half_width, self.mean + half_width, self.count)

    def p_value(self) -> float:
        """Return the p-value of the hypothesis that the truth is 0, against both sides. See `find_clear`."""
        return float(2 * scipy.stats.t.sf(abs(self._t(0.0)), self.degrees_of_freedom))

    def equivalence_p_value(self, margin: float) -> float:
        """Return the p-value of the hypothesis that the truth is not within `margin` of 0: two one-sided tests (TOST).

        It is below 0.05 exactly if the 90% interval lies within -margin and margin.
        """
        is_not_above = scipy.stats.t.sf(self._t(-margin), self.degrees_of_freedom)
        return max(float(is_not_above), self.excess_p_value(margin))

    def excess_p_value(self, margin: float) -> float:
        """Return the p-value of the hypothesis that the truth is `margin` or more: the test of non-inferiority."""
        if not margin > 0:
            raise UserError(f"the margin of equivalence must be above 0, not {margin}")
        return float(scipy.stats.t.cdf(self._t(margin), self.degrees_of_freedom))

    def _t(self, truth: float) -> float:
        difference = self.mean - truth
        if self.standard_error == 0:
            return float(np.sign(difference)) * np.inf if difference else 0.0
        return difference / self.standard_error


def paired_estimate(first: ArrayLike, second: ArrayLike) -> MeanEstimate:
    """Estimate the mean of first - second over pairs, such as seeds.

    Raises:
        UserError: There are fewer than 2 pairs, or the arguments are not 1-D or differ in length.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise UserError(f"expected 1-D values of equal length, not the shapes {a.shape} and {b.shape}")
    if len(a) < 2:
        raise UserError(f"a confidence interval needs at least 2 samples, not {len(a)}: run more seeds")
    difference = a - b
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    return MeanEstimate(float(difference.mean()), float(error), len(difference) - 1, len(difference))


def paired_difference(first: ArrayLike, second: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the interval of `paired_estimate`."""
    return paired_estimate(first, second).interval(confidence)


def mean_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Estimate the mean of values, such as one per seed, with Student's t confidence interval.

    Raises:
        UserError: There are fewer than 2 values, or they are not 1-D.
    """
    return paired_difference(values, np.zeros(np.shape(values)), confidence)


def deviation_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Estimate the standard deviation of normally distributed values, such as one per seed.

    Raises:
        UserError: There are fewer than 2 values, or they are not 1-D.
    """
    count = paired_estimate(values, np.zeros(np.shape(values))).count  # checks the argument
    deviation = float(np.std(np.asarray(values, np.float64), ddof=1))
    tails = (1 + confidence) / 2, (1 - confidence) / 2
    low, high = (deviation * float(np.sqrt((count - 1) / scipy.stats.chi2.ppf(tail, count - 1))) for tail in tails)
    return MeanInterval(deviation, low, high, count)


def estimate_over_documents(differences_SD: ArrayLike, tokens_D: ArrayLike) -> MeanEstimate:
    """Estimate the mean difference of two contenders, with an error that covers new seeds and new documents.

    Seeds and documents are resampled separately: the jackknife over each has the variance of that factor, and both have
    that of their interaction, which is subtracted once (random effects of two crossed factors; Searle, Casella and
    McCulloch, Variance Components, 1992, chapter 4). The degrees of freedom are Satterthwaite's.

    Args:
        differences_SD: Differences of losses, nats per token, of each seed on each document.
        tokens_D: Tokens of each document, the weights of its differences.

    Raises:
        UserError: There are fewer than 2 seeds or documents, or the shapes do not match.
    """
    x_SD, w_D = np.asarray(differences_SD, np.float64), np.asarray(tokens_D, np.float64)
    if x_SD.ndim != 2 or w_D.shape != x_SD.shape[1:]:
        raise UserError(
            f"expected losses of seeds x documents and tokens of documents, not {x_SD.shape} and {w_D.shape}"
        )
    seeds, documents = x_SD.shape
    if min(seeds, documents) < 2:
        raise UserError(f"an interval over seeds and documents needs 2 of each, not {seeds} and {documents}")
    if not (w_D > 0).all():
        raise UserError("each document needs at least 1 token")
    share_D = w_D / w_D.sum()
    by_seed_S, by_document_D = x_SD @ share_D, x_SD.mean(axis=0)
    mean = by_seed_S.mean()
    over_seeds = by_seed_S.var(ddof=1) / seeds
    without_D = (mean - share_D * by_document_D) / (1 - share_D)
    over_documents = (documents - 1) * np.mean((without_D - without_D.mean()) ** 2)
    rest_SD = x_SD - by_seed_S[:, None] - by_document_D + mean
    both = np.sum(share_D**2 * rest_SD**2) / (seeds * (seeds - 1)) * documents / (documents - 1)
    variance = max(over_seeds + over_documents - both, over_seeds, over_documents)
    spread = over_seeds**2 / (seeds - 1) + over_documents**2 / (documents - 1)
    degrees = (over_seeds + over_documents) ** 2 / spread if spread else seeds - 1
    return MeanEstimate(float(mean), float(np.sqrt(variance)), float(degrees), seeds)


def difference_over_documents(first_SD: ArrayLike, second_SD: ArrayLike, tokens_D: ArrayLike) -> MeanEstimate:
    """Estimate the loss of one model less that of another, in nats per token, over seeds and documents.

    Args:
        first_SD: The summed loss of the first model, in nats, of each seed on each document.
        second_SD: That of the second.
        tokens_D: Tokens of each document.
    """
    difference_SD = np.asarray(first_SD, np.float64) - np.asarray(second_SD, np.float64)
    return estimate_over_documents(difference_SD / np.asarray(tokens_D, np.float64), tokens_D)


def statistic_over_documents(
    statistic: Callable[[np.ndarray], ArrayLike], nats_XSD: ArrayLike, tokens_D: ArrayLike
) -> MeanEstimate:
    """Estimate the mean over seeds of a statistic of losses, with an error that covers new seeds and new documents.

    The jackknife: the pseudo-values of the statistic, D times its value less D - 1 times that without one document, are
    values of that document (Miller, "The jackknife - a review", 1974), which `estimate_over_documents` resamples. The
    statistic has to be smooth in the losses, such as the vertex of a parabola through them; ranks are not.

    Args:
        statistic: Maps losses in nats per token, [..., S], to one value per seed [S].
        nats_XSD: The summed losses of models in nats, [..., S, D]: of each seed on each document.
        tokens_D: Tokens of each document.
    """
    nats, tokens = np.asarray(nats_XSD, np.float64), np.asarray(tokens_D, np.float64)
    count, total, sums = len(tokens), tokens.sum(), nats.sum(axis=-1)
    whole_S = np.asarray(statistic(sums / total), np.float64)
    without = [np.asarray(statistic((sums - nats[..., d]) / (total - tokens[d]))) for d in range(count)]
    pseudo_SD = np.stack([count * whole_S - (count - 1) * without_S for without_S in without], axis=-1)
    estimate = estimate_over_documents(pseudo_SD, np.ones(count))
    return dataclasses.replace(estimate, mean=float(whole_S.mean()))


def draw_documents(documents: int, draws: int, seed: int = 0) -> np.ndarray:
    """Draw how often each document counts, with replacement: float64 [1 + draws, D]; in row 0 each counts once."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(documents, np.full(documents, 1 / documents), draws)
    return np.concatenate([np.ones((1, documents)), counts]).astype(np.float64)


def estimate_from_draws(values_NS: ArrayLike, documents: int) -> MeanEstimate:
    """Estimate the mean over seeds of a statistic that is not smooth, such as one of ranks, by the bootstrap.

    Seeds and documents are resampled separately, as by `estimate_over_documents`; the variance of their interaction is
    in both. Where seeds share something, such as a truth that is the mean of the others, the part over seeds is too
    small: on rankings both about cancel.

    Args:
        values_NS: The statistic of each seed; row 0 on all documents, the others each on a draw (`draw_documents`).
        documents: Number of documents that were drawn from; of several texts, the fewest.
    """
    values = np.asarray(values_NS, np.float64)
    seeds = values.shape[1]
    over_seeds = values[0].var(ddof=1) / seeds
    over_documents = values[1:].mean(axis=1).var(ddof=1)
    spread = over_seeds**2 / (seeds - 1) + over_documents**2 / (documents - 1)
    degrees = (over_seeds + over_documents) ** 2 / spread if spread else seeds - 1
    return MeanEstimate(float(values[0].mean()), float(np.sqrt(over_seeds + over_documents)), float(degrees), seeds)


def ratio_of_means(numerator: ArrayLike, denominator: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval | None:
    """Estimate mean(numerator) / mean(denominator) over pairs, such as seeds, with Fieller's interval.

    Fieller, "Some problems in interval estimation", 1954. Return None if the denominator's own interval contains 0: the
    ratio then has no bounded interval.

    Raises:
        UserError: As `paired_estimate`.
    """
    count = paired_estimate(numerator, denominator).count  # checks the arguments
    pairs = np.array([numerator, denominator], np.float64)
    top, bottom = pairs.mean(axis=1)
    covariance = np.cov(pairs) / count
    t2 = scipy.stats.t.ppf((1 + confidence) / 2, count - 1) ** 2
    # The ratios r for which mean(numerator) - r mean(denominator) does not differ from 0: x r² - 2 y r + z <= 0.
    x = bottom**2 - t2 * covariance[1, 1]
    y = top * bottom - t2 * covariance[0, 1]
    z = top**2 - t2 * covariance[0, 0]
    if x <= 0:
        return None
    root = np.sqrt(max(y * y - x * z, 0.0))
    return MeanInterval(float(top / bottom), float((y - root) / x), float((y + root) / x), count)


def choose_leaving_one_out(losses: Mapping[str, Sequence[float]]) -> tuple[list[str], list[float]]:
    """Choose the best of several contenders for each seed on the other seeds.

    The losses of the choices are those of a choice that has not seen the seed that judges it, so they have no advantage
    from the choice among many.

    Args:
        losses: Loss of each seed, by contender.

    Returns:
        The contender that was chosen for each seed, and its loss there.
    """
    names = list(losses)
    losses_CS = np.array([losses[name] for name in names], np.float64)
    seeds = losses_CS.shape[1]
    if seeds < 2:
        raise UserError(f"a choice on the other seeds needs at least 2 seeds, not {seeds}")
    others_CS = losses_CS.sum(axis=1, keepdims=True) - losses_CS
    chosen_S = others_CS.argmin(axis=0)
    return [names[i] for i in chosen_S], losses_CS[chosen_S, np.arange(seeds)].tolist()


def find_clear(estimates: Sequence[MeanEstimate], false_discovery_rate: float = 0.05) -> list[bool]:
    """Return which differences of a table are clearly not 0, by Benjamini and Hochberg's procedure.

    Of the differences that it returns as clear, on average at most the given share is 0 in truth.
    """
    return _reject([estimate.p_value() for estimate in estimates], false_discovery_rate)


def find_equal(estimates: Sequence[MeanEstimate], margin: float, false_discovery_rate: float = 0.05) -> list[bool]:
    """Return which differences of a table are within `margin` of 0, by two one-sided tests each.

    As for `find_clear`, of those that it returns on average at most the given share is not.
    """
    return _reject([estimate.equivalence_p_value(margin) for estimate in estimates], false_discovery_rate)


def find_not_worse(estimates: Sequence[MeanEstimate], margin: float, false_discovery_rate: float = 0.05) -> list[bool]:
    """Return which losses are not higher than what they are compared with by `margin`, as `find_clear` does."""
    return _reject([estimate.excess_p_value(margin) for estimate in estimates], false_discovery_rate)


def judge(estimates: Sequence[MeanEstimate], margin: float) -> list[str]:
    """Say of each difference of a table: "equal" (`find_equal`), "higher" or "lower" (`find_clear`), or "not shown"."""
    verdicts = []
    for estimate, is_equal, is_clear in zip(
        estimates, find_equal(estimates, margin), find_clear(estimates), strict=True
    ):
        direction = "higher" if estimate.mean > 0 else "lower"
        verdicts.append("equal" if is_equal else direction if is_clear else "not shown")
    return verdicts


def _reject(p_values: Sequence[float], false_discovery_rate: float) -> list[bool]:
    """Return which hypotheses Benjamini and Hochberg's procedure rejects."""
    if not p_values:
        return []
    return (scipy.stats.false_discovery_control(p_values) <= false_discovery_rate).tolist()


def power(difference: float, error: float, degrees_of_freedom: float, significance: float = 0.05) -> float:
    """Return the probability that a t test finds a true difference.

    Args:
        difference: The true mean, in nats.
        error: The standard error of its estimate, in nats.
        degrees_of_freedom: Those of the standard error.
        significance: Highest p-value that counts as a finding, of both sides.
    """
    critical = scipy.stats.t.ppf(1 - significance / 2, degrees_of_freedom)
    shift = difference / error
    # The lower tail as the upper one of the mirrored distribution: scipy's `cdf` is NaN where it is tiny.
    return float(sum(scipy.stats.nct(degrees_of_freedom, x).sf(critical) for x in (shift, -shift)))


def smallest_difference(estimate: MeanEstimate, wanted_power: float = 0.8, significance: float = 0.05) -> float:
    """Return the smallest true difference, in nats, that an estimate like this finds with the wanted power."""
    degrees = estimate.degrees_of_freedom
    found = scipy.optimize.root_scalar(
        lambda x: power(x, 1.0, degrees, significance) - wanted_power, bracket=(1e-9, 1e3)
    )
    return estimate.standard_error * found.root


def independent_difference(first: MeanEstimate, second: MeanEstimate) -> MeanEstimate:
    """Estimate the mean of one estimate less that of another of other runs or other text, with Welch's test."""
    variances = [estimate.standard_error**2 for estimate in (first, second)]
    each = [v**2 / estimate.degrees_of_freedom for v, estimate in zip(variances, (first, second), strict=True)]
    count = min(first.count, second.count)
    return MeanEstimate(
        first.mean - second.mean, float(np.sqrt(sum(variances))), sum(variances) ** 2 / sum(each), count
    )
