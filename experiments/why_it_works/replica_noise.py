"""The loss of means over replicas, runs that continue from one checkpoint with different data orders."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def subset_mean_weights(replicas: int) -> dict[int, np.ndarray]:
    """Return the averaging weights of every subset of the replicas, by subset size.

    Returns:
        For each size m = 1 … replicas, an array [C(replicas, m), replicas] with one row per subset: 1/m for each
        replica in the subset, 0 for the others.
    """
    subsets = {m: itertools.combinations(range(replicas), m) for m in range(1, replicas + 1)}
    return {m: np.array([np.eye(replicas)[list(subset)].mean(axis=0) for subset in subsets[m]]) for m in subsets}


def extrapolate_to_many(replicas_n: Sequence[int], loss_nxD: ArrayLike) -> np.ndarray:
    """Return the loss of the mean of infinitely many replicas, the floor of L(m) = floor + noise / m (least squares).

    If the loss is quadratic and the replicas deviate independently from their expected weights, the floor is the loss
    at the expected weights.

    Args:
        replicas_n: Numbers of averaged replicas m.
        loss_nxD: Losses of their means, [n] or one column per document [n, D].

    Raises:
        ValueError: There are fewer than 2 different numbers of replicas.
    """
    replicas = np.asarray(replicas_n, np.float64)
    if len(np.unique(replicas)) < 2:
        raise ValueError("extrapolate_to_many needs at least 2 different numbers of replicas")
    return np.polyfit(1 / replicas, np.asarray(loss_nxD, np.float64), 1)[1]
