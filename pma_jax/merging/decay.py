"""Merging as learning-rate decay: Theorem 3.1 of WSM (arXiv 2507.17634) and the shapes of its Figure 2.

Let theta_0 … theta_k be checkpoints of one trajectory, theta_i = theta_{i-1} - g_i, where g_i includes the
learning rate. Then
    sum_j c_j theta_j = theta_0 - sum_i w_i g_i,   w_i = c_i + … + c_k,   i = 1 … k:
merging checkpoints with coefficients c is the same as scaling the learning rate of update i by w_i. It approximates a
learning-rate decay without running one: with a real decay, later gradients would be evaluated at other parameters.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config import DECAY_SHAPES
from pma_jax.config.errors import UserError


def increasing_positions(tokens: ArrayLike) -> np.ndarray:
    """Return the positions [n] of checkpoints as float64.

    Raises:
        UserError: There are none, one is not finite, or they do not increase strictly.
    """
    positions = np.asarray(tokens, np.float64)
    if positions.ndim != 1 or len(positions) == 0:
        raise UserError("a merge needs at least one checkpoint")
    if not np.isfinite(positions).all() or (np.diff(positions) <= 0).any():
        raise UserError("checkpoints must be in order of tokens, oldest first, each position once")
    return positions


def from_update_weights(weights: ArrayLike) -> np.ndarray:
    """Convert weights of updates to coefficients of checkpoints, by Theorem 3.1 solved for c.

    c_0 = 1 - w_1, c_j = w_j - w_{j+1}, c_k = w_k.

    Args:
        weights: Weights [k] of the updates, oldest first. Weights in [0, 1] that never increase give coefficients >= 0;
            other weights give some negative coefficients, which is allowed.

    Returns:
        float64 [k + 1], sums to 1, oldest first.
    """
    w = np.asarray(weights, np.float64)
    return -np.diff(np.concatenate(([1.0], w, [0.0])))


def decay(n: int, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """Return merge coefficients that approximate a learning-rate decay over n evenly spaced checkpoints.

    The weights of the updates are w_i = f(i / n) for i = 1 … n - 1 (`from_update_weights` converts them).
    "linear" gives equal coefficients (the plain mean), "cosine" a bell shape, and "minus_sqrt" (1 - sqrt(t)) the
    largest coefficient to the oldest checkpoint.

    Args:
        n: Number of checkpoints, at least 1.
        shape: A name in DECAY_SHAPES, or a function f(t) that maps the completed fraction of the decay, 0 < t < 1, to
            the learning rate as a fraction of its peak.

    Returns:
        float64 [n], sums to 1, oldest first.

    Raises:
        UserError: `shape` is unknown, or `n` is less than 1.
    """
    return decay_at(np.arange(n), shape)


def decay_at(tokens: ArrayLike, shape: str | Callable[[float], float] = "linear") -> np.ndarray:
    """Return merge coefficients that approximate a learning-rate decay over n checkpoints at the given positions.

    The weights of the updates are w_i = f(t_i) for i = 1 … n - 1 (`from_update_weights` converts them), where t_i is
    the completed fraction of the decay at checkpoint i (from 0). The decay starts at the oldest checkpoint and ends
    one mean interval after the newest, so that evenly spaced checkpoints have t_i = i / n, as in `decay`. "linear"
    gives each checkpoint a coefficient proportional to the interval that follows it (the newest: the mean interval).

    Args:
        tokens: Positions [n] of the checkpoints in tokens, strictly increasing.
        shape: The same as for `decay`.

    Returns:
        float64 [n], sums to 1, oldest first.

    Raises:
        UserError: `shape` is unknown, there are no checkpoints, or positions do not increase.
    """
    f = shape if callable(shape) else DECAY_SHAPES.get(shape)
    if f is None:
        raise UserError(
            f"unknown decay shape {shape!r}: choose one of {', '.join(DECAY_SHAPES)}, or pass a function of progress"
        )
    positions = increasing_positions(tokens)
    n = len(positions)
    if n == 1:
        return np.ones(1)
    t = (positions[1:] - positions[0]) * ((n - 1) / n) / (positions[-1] - positions[0])
    return from_update_weights([f(float(t_i)) for t_i in t])
