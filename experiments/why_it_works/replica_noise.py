"""The loss of means over replicas, runs that continue from one checkpoint with different data orders."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

# Which snapshots of each replica are averaged: its last one, or all since the replicas began.
AT_THE_END, OVER_TIME = "at the end", "over time"


def name_of_mean(replicas: int, time: str) -> str:
    """Return the key in the results of the mean of `replicas` replicas: `AT_THE_END` of the run, or `OVER_TIME`."""
    return f"mean of {replicas} {time}"


def subset_mean_weights(replicas: int) -> dict[int, np.ndarray]:
    """Return the averaging weights of every subset of the replicas, by subset size.

    Returns:
        For each size m = 1 … replicas, an array [C(replicas, m), replicas] with one row per subset: 1/m for each
        replica in the subset, 0 for the others.
    """
    subsets = {m: itertools.combinations(range(replicas), m) for m in range(1, replicas + 1)}
    return {m: np.array([np.eye(replicas)[list(subset)].mean(axis=0) for subset in subsets[m]]) for m in subsets}


def extrapolate_to_many(replicas_n: Sequence[int], loss_nxD: ArrayLike, degree: int) -> np.ndarray:
    """Return the loss of the mean of infinitely many replicas: the constant of a polynomial in 1/m (least squares).

    With replicas that deviate independently from their expected weights, the expected loss of the mean of m is of
    degree 1 in 1/m if the loss is quadratic, and of degree 2 if it has a third order too (or a fourth, for Gaussian
    deviations). The constant is then the loss at the expected weights.

    Args:
        replicas_n: Numbers of averaged replicas m.
        loss_nxD: Losses of their means, [n] or one column per document [n, D].
        degree: Degree of the polynomial.

    Raises:
        ValueError: There are fewer different numbers of replicas than the polynomial has coefficients.
    """
    replicas = np.asarray(replicas_n, np.float64)
    if len(np.unique(replicas)) <= degree:
        raise ValueError(f"extrapolate_to_many needs at least {degree + 1} different numbers of replicas")
    return np.polyfit(1 / replicas, np.asarray(loss_nxD, np.float64), degree)[-1]
