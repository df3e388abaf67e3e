"""Statistics of losses: intervals over seeds, ranking, noise by number of replicas, roughness, tokens to a loss."""

import dataclasses
import itertools

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class MeanInterval:
    """A mean, its confidence interval from `low` to `high`, and the `count` of values."""

    mean: float
    low: float
    high: float
    count: int


def paired_difference(first: ArrayLike, second: ArrayLike, confidence: float = 0.95) -> MeanInterval:
    """Estimate the mean of first - second over pairs, such as seeds, with Student's t confidence interval.

    Raises:
        ValueError: There are fewer than 2 pairs, or the lengths differ.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"first and second must be 1-D with equal shapes, not {a.shape} and {b.shape}")
    if len(a) < 2:
        raise ValueError(f"a confidence interval needs at least 2 pairs, not {len(a)}: repeat with other seeds")
    difference = a - b
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half_width = error * scipy.stats.t.ppf((1 + confidence) / 2, len(difference) - 1)
    return MeanInterval(float(mean), float(mean - half_width), float(mean + half_width), len(difference))


def mean_interval(values_n: ArrayLike, confidence: float = 0.95) -> MeanInterval:
    """Estimate the mean of values, such as one per seed, with Student's t confidence interval.

    Raises:
        ValueError: There are fewer than 2 values.
    """
    return paired_difference(values_n, np.zeros(np.shape(values_n)), confidence)


def recovered_share(raw_loss: float, annealed_loss: float | None, loss: float) -> float | None:
    """Return the fraction of annealing's loss reduction that `loss` achieves: 0 at `raw_loss`, 1 at `annealed_loss`.

    Return None if `annealed_loss` is None, or if annealing did not reduce the loss.
    """
    if annealed_loss is None or annealed_loss >= raw_loss:
        return None
    return (raw_loss - loss) / (raw_loss - annealed_loss)


def kendall_tau(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Compute Kendall's tau-b of two rankings: 1 if they are the same, 0 if unrelated, -1 if reversed.

    Raises:
        ValueError: `forecast` or `truth` is constant, has fewer than 2 values, or contains NaN.
    """
    tau = scipy.stats.kendalltau(forecast, truth).statistic
    if not np.isfinite(tau):
        raise ValueError(
            "Kendall's tau is undefined: forecast or truth has no ranking, because it is constant or contains NaN"
        )
    return float(tau)


def regret(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Return the true loss of the candidate with the lowest forecast loss, minus the lowest true loss."""
    picked = int(np.argmin(np.asarray(forecast, np.float64)))
    truth = np.asarray(truth, np.float64)
    return float(truth[picked] - truth.min())


def tokens_to_reach(tokens_n: ArrayLike, loss_n: ArrayLike, loss: float) -> float | None:
    """Return the tokens at which a loss curve first reaches `loss`, by linear interpolation; None if it never does."""
    tokens, losses = np.asarray(tokens_n, np.float64), np.asarray(loss_n, np.float64)
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(tokens[0])
    fraction = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return float(tokens[i - 1] + fraction * (tokens[i] - tokens[i - 1]))


def roughness(series_n: ArrayLike) -> float:
    """Return the root mean square of the differences of log(value) between consecutive values.

    A roughness of 0.1 corresponds to changes of about 10%. Meant for gradient norms: a slow trend contributes little.

    Raises:
        ValueError: There are fewer than 2 values, or one is not above 0.
    """
    series = np.asarray(series_n, np.float64)
    if len(series) < 2 or not (series > 0).all():
        raise ValueError("roughness needs 2 or more values above 0")
    return float(np.sqrt(np.mean(np.diff(np.log(series)) ** 2)))


@dataclasses.dataclass(frozen=True)
class ReplicaNoise:
    """The loss of the mean of m replicas, L(m) = floor + noise_per_replica / m, in nats per token.

    Replicas are runs that continue from one checkpoint with different data orders. If the loss is quadratic and the
    replicas deviate independently from their expected weights, `floor` is the loss at the expected weights (the limit
    of many replicas), and one replica has the expected loss floor + noise_per_replica.
    """

    floor: float
    noise_per_replica: float


def subset_mean_weights(replicas: int) -> dict[int, np.ndarray]:
    """Return the averaging weights of every subset of the replicas, by subset size.

    Returns:
        For each size m = 1 … replicas, an array [C(replicas, m), replicas] with one row per subset: 1/m for each
        replica in the subset, 0 for the others.
    """
    subsets = {m: itertools.combinations(range(replicas), m) for m in range(1, replicas + 1)}
    return {m: np.array([np.eye(replicas)[list(subset)].mean(axis=0) for subset in subsets[m]]) for m in subsets}


def fit_replica_noise(replicas_n: ArrayLike, loss_n: ArrayLike) -> ReplicaNoise:
    """Fit L(m) = floor + noise_per_replica / m by least squares.

    Args:
        replicas_n: [n], numbers of averaged replicas m.
        loss_n: [n], losses of their means.

    Raises:
        ValueError: There are fewer than 2 different numbers of replicas.
    """
    replicas, loss = np.asarray(replicas_n, np.float64), np.asarray(loss_n, np.float64)
    if len(np.unique(replicas)) < 2:
        raise ValueError("fit_replica_noise needs at least 2 different numbers of replicas")
    noise, floor = np.polyfit(1 / replicas, loss, 1)
    return ReplicaNoise(float(floor), float(noise))
