"""Weights with a chosen mean age: a local polynomial fit to the trajectory, evaluated at a chosen point.

A mean of N checkpoints removes noise but lags: it is where training was half a window ago. A straight line fitted to
the checkpoints and evaluated at the newest one has no lag and keeps part of the noise reduction; evaluated between
there and the middle of the window it trades one for the other.
"""

import numpy as np
from numpy.typing import ArrayLike


def mean_age(coefficients: ArrayLike, tokens: ArrayLike) -> float:
    """Return how far a merge lags behind the newest checkpoint: sum_k c_k (t_K - t_k), in tokens.

    Args:
        coefficients: [K], oldest first.
        tokens: [K], positions in tokens, oldest first.
    """
    t = np.asarray(tokens, np.float64)
    return float(np.dot(np.asarray(coefficients, np.float64), t[-1] - t))


def lagfree(tokens: ArrayLike | int, lag: float = 0.0, order: int = 1) -> np.ndarray:
    """Return the least-norm weights that reproduce every polynomial of this order at a position behind the newest.

    With e = t_K - lag · a, where a is the mean age of the plain mean, they solve
        minimise |c|²  subject to  sum_k c_k (t_k - e)^j = (1 if j = 0 else 0),  j = 0 … order.
    Order 1 fixes the sum (1) and the mean age (lag · a): a straight-line fit evaluated at e. Order 2 also removes the
    contribution of curvature: a parabola. The least norm is the least noise if checkpoints carry independent noise.
    Order 1 with lag = 1 is the plain mean; with two checkpoints and lag = 0 it is the newest one alone.

    Args:
        tokens: [K], positions in tokens, increasing, any spacing; or n, for n even positions.
        lag: 0 (the newest end) to 1 (the plain mean's age), at most 2.
        order: 1 or 2.

    Returns:
        float64 [K], sums to 1, oldest first; older weights are negative when lag is small.

    Raises:
        ValueError: lag or order is out of range, or there are too few checkpoints for the order.
    """
    t = np.arange(float(tokens)) if isinstance(tokens, int) else np.asarray(tokens, np.float64)
    if order not in (1, 2):
        raise ValueError(f"order = {order}: choose 1 (a straight line) or 2 (a parabola)")
    if not 0 <= lag <= 2:
        raise ValueError(f"lag = {lag}: choose 0 (no lag) to 1 (the plain mean's), at most 2")
    n = len(t)
    if n == 1:
        return np.ones(1)
    if n <= order:
        raise ValueError(f"lagfree of order {order} needs at least {order + 1} checkpoints, not {n}: widen the window")
    evaluated_at = t[-1] - lag * (t[-1] - t.mean())
    # Positions in units of the window keep the system well conditioned; the constraints do not change.
    x = (t - evaluated_at) / (t[-1] - t[0])
    Q, R = np.linalg.qr(np.vander(x, order + 1, increasing=True))
    first = np.eye(order + 1)[0]
    c = Q @ np.linalg.solve(R.T, first)
    return c / c.sum()
