"""Merging as learning-rate decay: WSM's Theorem 3.1 (arXiv 2507.17634) and the shapes its Figure 2 draws.

Take checkpoints theta_0 … theta_k of one trajectory, theta_i = theta_{i-1} - g_i (g_i holds the learning rate). Then
    sum_j c_j theta_j = theta_0 - sum_i w_i g_i,   w_i = c_i + … + c_k,   i = 1 … k:
weights c over checkpoints are weights w over updates, and a decay that never ran is a set of c. The theorem ignores
that later gradients would have been taken at other points.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config import DECAY_SHAPES


def from_update_weights(weights: ArrayLike) -> np.ndarray:
    """The merge in which update i counts w_i, Theorem 3.1's inverse: c_0 = 1 - w_1, c_j = w_j - w_{j+1}, c_k = w_k.

    Args:
      weights: [k], weights of the updates, oldest first. Decreasing weights in [0, 1] give coefficients >= 0; others
        give negative ones, which is allowed.

    Returns:
      float64 [k + 1], sums to 1, oldest first.
    """
    w = np.asarray(weights, np.float64)
    return -np.diff(np.concatenate(([1.0], w, [0.0])))


def decay(n: int, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """Coefficients that stand for a decay of this shape over n checkpoints: Theorem 3.1 with w_i = f(i / n).

    Linear decay is the plain mean, cosine is bell-shaped, 1 - sqrt has its heaviest weight on the oldest.

    Args:
      n: checkpoints, at least 1.
      shape: a name in DECAY_SHAPES, or f(t): what is left of the rate at t in (0, 1).

    Returns:
      float64 [n], sums to 1, oldest first.

    Raises:
      ValueError: the shape is unknown.
    """
    return decay_at(np.arange(n), shape)


def decay_at(tokens: ArrayLike, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """`decay` for checkpoints at uneven positions: w_i = f(t), t the share of the decay passed at checkpoint i.

    The decay starts at the oldest checkpoint and reaches its end one mean interval after the newest, so that an even
    grid gives i / n. On an uneven grid `linear` is therefore the mean over tokens and not over checkpoints.

    Args:
      tokens: [n], positions in tokens, increasing.
      shape: as for `decay`.

    Returns:
      float64 [n], sums to 1, oldest first.
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
