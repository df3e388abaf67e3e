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

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired_difference(first: ArrayLike, second: ArrayLike, confidence: float = 0.95) -> Difference:
    """Mean of first - second over pairs (seeds), with Student's t interval.

    Raises ValueError for fewer than 2 pairs, or different lengths.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"give pairs: the shapes are {a.shape} and {b.shape}")
    if len(a) < 2:
        raise ValueError("one pair has no interval: repeat with other seeds")
    apart = a - b
    error = apart.std(ddof=1) / np.sqrt(len(apart))
    reach = error * scipy.stats.t.ppf((1 + confidence) / 2, len(apart) - 1)
    return Difference(float(apart.mean()), float(apart.mean() - reach), float(apart.mean() + reach), len(apart))


def mean_interval(values_n: ArrayLike, confidence: float = 0.95) -> Difference:
    """The mean of values over seeds, with its interval: their `paired_difference` from 0, which raises as that does."""
    return paired_difference(values_n, np.zeros(np.shape(values_n)), confidence)


def kendall_tau(forecast: ArrayLike, truth: ArrayLike) -> float:
    """How well one ranking agrees with another: 1 the same, 0 unrelated, -1 reversed (tau-b: ties count half).

    Raises ValueError where all values of one side are the same: they rank nothing.
    """
    tau = scipy.stats.kendalltau(forecast, truth).statistic
    if not np.isfinite(tau):
        raise ValueError("all values are the same: they rank nothing")
    return float(tau)


def regret(forecast: ArrayLike, truth: ArrayLike) -> float:
    """The true loss of what the forecast puts first, over the best true loss: 0 where it picks the best."""
    picked = int(np.argmin(np.asarray(forecast, np.float64)))
    truth = np.asarray(truth, np.float64)
    return float(truth[picked] - truth.min())


def tokens_to_reach(tokens_n: ArrayLike, loss_n: ArrayLike, loss: float) -> float | None:
    """Tokens at which a curve first comes down to `loss`, a straight line between measurements; None: it never does."""
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
    """Root mean square change of the logarithm from one value to the next: 0 is constant, 0.1 about a tenth a step.

    For gradient norms: a trend over the whole series hardly counts. Raises ValueError for fewer than 2 values, or where
    one is not above 0.
    """
    series = np.asarray(series_n, np.float64)
    if len(series) < 2 or not (series > 0).all():
        raise ValueError("roughness is of 2 or more values above 0")
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
    rows = {}
    for m in range(1, count + 1):
        chosen = list(itertools.combinations(range(count), m))
        rows[m] = np.zeros((len(chosen), count))
        for row, members in zip(rows[m], chosen, strict=True):
            row[list(members)] = 1 / m
    return rows


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
        raise ValueError("the loss of means over two numbers of replicas, or more, tells noise from the rest")
    noise, floor = np.polyfit(1 / counts, loss, 1)
    return NoiseSplit(float(floor), float(noise))
