"""How much of a loss is noise: from means over replicas, runs that went on from one point with other data orders.

At a point of a loss that is quadratic around it, the mean of m replicas whose noise is independent has the loss
L(m) = floor + noise / m: the noise of one adds `noise`, and `floor` is the loss of the path that they share.
"""

import dataclasses
import itertools

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class NoiseSplit:
    """L(m) = floor + noise / m, nats a token."""

    floor: float
    noise: float


def subset_rows(count: int) -> dict[int, np.ndarray]:
    """M -> rows [C(count, m), count] of the means over every m of `count` replicas, for m = 1 to `count`."""
    rows = {}
    for m in range(1, count + 1):
        chosen = list(itertools.combinations(range(count), m))
        rows[m] = np.zeros((len(chosen), count))
        for row, members in zip(rows[m], chosen, strict=True):
            row[list(members)] = 1 / m
    return rows


def fit_noise(counts_n: ArrayLike, loss_n: ArrayLike) -> NoiseSplit:
    """The split of least squares. Raises ValueError for fewer than 2 different counts."""
    counts, loss = np.asarray(counts_n, np.float64), np.asarray(loss_n, np.float64)
    if len(np.unique(counts)) < 2:
        raise ValueError("the loss of means over two numbers of replicas, or more, tells noise from the rest")
    noise, floor = np.polyfit(1 / counts, loss, 1)
    return NoiseSplit(float(floor), float(noise))
