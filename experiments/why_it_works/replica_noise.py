"""The loss of means over replicas, runs that continue from one checkpoint with different data orders."""

import dataclasses
import itertools

import numpy as np
from numpy.typing import ArrayLike


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
