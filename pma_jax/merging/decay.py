"""Merging as learning-rate decay: Theorem 3.1 of WSM (arXiv 2507.17634) and the shapes of its Figure 2.

Let theta_0 … theta_k be checkpoints of one trajectory, theta_i = theta_{i-1} - g_i, where g_i includes the
learning rate. Then
    sum_j c_j theta_j = theta_0 - sum_i w_i g_i,   w_i = c_i + … + c_k,   i = 1 … k:
coefficients c of checkpoints are weights w of updates, so a decay that never ran corresponds to a row c. The theorem
neglects that later gradients would have been taken at other points.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config import DECAY_SHAPES


def from_update_weights(weights: ArrayLike) -> np.ndarray:
    """Return the merge whose updates have these weights, the inverse of Theorem 3.1.

    c_0 = 1 - w_1, c_j = w_j - w_{j+1}, c_k = w_k.

    Args:
        weights: [k], of the updates, oldest first. Weights that decrease within [0, 1] give coefficients >= 0; others
            give negative ones, which is allowed.

    Returns:
        float64 [k + 1], sums to 1, oldest first.
    """
    w = np.asarray(weights, np.float64)
    return -np.diff(np.concatenate(([1.0], w, [0.0])))


def decay(n: int, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """Return the coefficients that correspond to a decay over n evenly spaced checkpoints: w_i = f(i / n).

    Linear decay is the plain mean, cosine is bell-shaped, and 1 - sqrt has its largest weight on the oldest.

    Args:
        n: Number of checkpoints, at least 1.
        shape: A name in DECAY_SHAPES, or f(t), the remaining fraction of the rate at t in (0, 1).

    Returns:
        float64 [n], sums to 1, oldest first.

    Raises:
        ValueError: The shape is unknown, or n is 0.
    """
    return decay_at(np.arange(n), shape)


def decay_at(tokens: ArrayLike, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """Return `decay`'s coefficients for any positions: w_i = f(t), t the fraction of the decay passed at checkpoint i.

    The decay starts at the oldest checkpoint and ends one mean interval after the newest, so that an even grid gives
    t = i / n. On an uneven grid `linear` is therefore the mean over tokens, not over checkpoints.

    Args:
        tokens: [n], positions in tokens, increasing.
        shape: The same as for `decay`.

    Returns:
        float64 [n], sums to 1, oldest first.

    Raises:
        ValueError: The same as for `decay`.
    """
    f = shape if callable(shape) else DECAY_SHAPES.get(shape)
    if f is None:
        raise ValueError(
            f"decay has no shape {shape!r}: choose one of {', '.join(DECAY_SHAPES)}, or pass a function of t"
        )
    t = np.asarray(tokens, np.float64)
    n = len(t)
    if n < 1:
        raise ValueError("decay needs at least one checkpoint")
    if n == 1:
        return np.ones(1)
    passed = (t[1:] - t[0]) * ((n - 1) / n) / (t[-1] - t[0])
    return from_update_weights([f(float(x)) for x in passed])
