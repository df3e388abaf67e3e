"""Statistics of losses: intervals over seeds, recovered shares, roughness, tokens to a loss."""

import dataclasses

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
