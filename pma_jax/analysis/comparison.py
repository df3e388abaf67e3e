"""Statistics of losses: differences over seeds, rankings, noise against replicas, smoothness, tokens saved."""

import dataclasses
import itertools

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its confidence interval."""

    mean: float
    low: float
    high: float
    count: int


def paired_difference(first: ArrayLike, second: ArrayLike, confidence: float = 0.95) -> Difference:
    """Estimate the mean of first - second over pairs, such as seeds, with Student's t interval.

    Raises:
        ValueError: There are fewer than 2 pairs, or the lengths differ.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"give pairs: the shapes are {a.shape} and {b.shape}")
    if len(a) < 2:
        raise ValueError("a single pair has no interval: repeat with other seeds")
    difference = a - b
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half_width = error * scipy.stats.t.ppf((1 + confidence) / 2, len(difference) - 1)
    return Difference(float(mean), float(mean - half_width), float(mean + half_width), len(difference))


def mean_interval(values_n: ArrayLike, confidence: float = 0.95) -> Difference:
    """Estimate the mean of values over seeds, with its interval: the `paired_difference` from 0."""
    return paired_difference(values_n, np.zeros(np.shape(values_n)), confidence)


def recovered_share(raw_loss: float, annealed_loss: float | None, loss: float) -> float | None:
    """Return the share of annealing's gain that a model with `loss` has, or None if annealing gained nothing."""
    if annealed_loss is None or annealed_loss >= raw_loss:
        return None
    return (raw_loss - loss) / (raw_loss - annealed_loss)


def kendall_tau(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Compute Kendall's tau-b of two rankings: 1 if they are the same, 0 if unrelated, -1 if reversed.

    Raises:
        ValueError: All values of one side are equal, so there is no ranking.
    """
    tau = scipy.stats.kendalltau(forecast, truth).statistic
    if not np.isfinite(tau):
        raise ValueError("all values are equal, so there is no ranking")
    return float(tau)


def regret(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Return the true loss of the forecast's first choice minus the lowest true loss: 0 if it chose the best."""
    picked = int(np.argmin(np.asarray(forecast, np.float64)))
    truth = np.asarray(truth, np.float64)
    return float(truth[picked] - truth.min())


def tokens_to_reach(tokens_n: ArrayLike, loss_n: ArrayLike, loss: float) -> float | None:
    """Return the tokens at which a curve first reaches `loss`, interpolated linearly, or None if it never does."""
    tokens, losses = np.asarray(tokens_n, np.float64), np.asarray(loss_n, np.float64)
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(tokens[0])
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1]))


def roughness(series_n: ArrayLike) -> float:
    """Return the root mean square change of log(value) between neighbours: 0.1 is about 10% per step.

    Meant for gradient norms: a trend over the full series hardly contributes.

    Raises:
        ValueError: There are fewer than 2 values, or one is not above 0.
    """
    series = np.asarray(series_n, np.float64)
    if len(series) < 2 or not (series > 0).all():
        raise ValueError("roughness needs 2 or more values above 0")
    return float(np.sqrt(np.mean(np.diff(np.log(series)) ** 2)))


@dataclasses.dataclass(frozen=True)
class NoiseSplit:
    """L(m) = floor + noise / m in nats per token, for the mean of m replicas.

    Replicas are runs that continue from one point with other data orders. Where the loss is quadratic and the replicas'
    noise independent, the noise of one replica adds `noise`, and `floor` is the loss of the path that they share.
    """

    floor: float
    noise: float


def subset_rows(count: int) -> dict[int, np.ndarray]:
    """Return, for m = 1 … count, the rows of weights [C(count, m), count] of the means over every m replicas."""
    members = {m: itertools.combinations(range(count), m) for m in range(1, count + 1)}
    return {m: np.array([np.eye(count)[list(each)].mean(axis=0) for each in members[m]]) for m in members}


def fit_noise(counts_n: ArrayLike, loss_n: ArrayLike) -> NoiseSplit:
    """Fit L(m) = floor + noise / m by least squares.

    Args:
        counts_n: [n], numbers of replicas m.
        loss_n: [n], losses of their means.

    Raises:
        ValueError: There are fewer than 2 different counts.
    """
    counts, loss = np.asarray(counts_n, np.float64), np.asarray(loss_n, np.float64)
    if len(np.unique(counts)) < 2:
        raise ValueError("a split needs losses of means over two or more different numbers of replicas")
    noise, floor = np.polyfit(1 / counts, loss, 1)
    return NoiseSplit(float(floor), float(noise))
