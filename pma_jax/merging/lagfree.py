"""Coefficients with a chosen mean age: a local polynomial fit to the trajectory, evaluated at a chosen point.

A mean of N snapshots reduces noise but lags by about half a window. A straight line fitted to the snapshots and
evaluated at the newest one has no lag and keeps part of the noise reduction. Evaluating the line between the newest
snapshot and the middle of the window trades lag for noise reduction.
"""

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError
from pma_jax.merging.decay import increasing_positions


def mean_age(coefficients: ArrayLike, tokens: ArrayLike) -> float:
    """Return the mean age of a merge relative to the newest snapshot: sum_k c_k (t_K - t_k), in tokens.

    Args:
        coefficients: [K], oldest first.
        tokens: [K], positions in tokens, oldest first.
    """
    t = np.asarray(tokens, np.float64)
    return float(np.dot(np.asarray(coefficients, np.float64), t[-1] - t))


def lagfree(tokens: ArrayLike | int, lag_fraction: float = 0.0, order: int = 1) -> np.ndarray:
    """Return the least-norm coefficients that evaluate a polynomial fit at, or some tokens before, the newest snapshot.

    Let e = t_K - lag_fraction · a, where a is the mean age of the plain mean. The coefficients solve
        minimise |c|²  subject to  sum_k c_k (t_k - e)^j = (1 if j = 0 else 0),  j = 0 … order.
    Order 1 fixes the sum (1) and the mean age (lag_fraction · a): a straight-line fit evaluated at e. Order 2 also
    removes the contribution of curvature: a parabola. For independent noise of equal variance, the least norm gives the
    least noise. Order 1 with lag_fraction = 1 is the plain mean; with two snapshots and lag_fraction = 0 it is the
    newest one alone.

    Args:
        tokens: [K], positions in tokens, strictly increasing, any spacing; or the number n of evenly spaced snapshots.
        lag_fraction: Mean age of the merge as a fraction of the plain mean's, in [0, 2]: 0 has no lag, 1 that of the
            plain mean. In the text of a recipe it is called `lag`.
        order: Degree of the polynomial, 1 or 2.

    Returns:
        float64 [K], sums to 1, oldest first. Small lags make the oldest coefficients negative. A single snapshot always
        gets 1.

    Raises:
        UserError: lag_fraction or order is out of range, positions do not increase, or there are 2 or more snapshots
            but not more than `order`.
    """
    t = increasing_positions(np.arange(float(tokens)) if isinstance(tokens, int) else tokens)
    if order not in (1, 2):
        raise UserError(f"order = {order}: choose 1 (a straight line) or 2 (a parabola)")
    if not 0 <= lag_fraction <= 2:
        raise UserError(f"lag = {lag_fraction}: choose 0 (no lag) to 2 (1: the lag of the plain mean)")
    n = len(t)
    if n == 1:
        return np.ones(1)
    if n <= order:
        raise UserError(f"lagfree of order {order} needs at least {order + 1} checkpoints, not {n}: widen the window")
    evaluation_point = t[-1] - lag_fraction * (t[-1] - t.mean())
    # Positions in units of the window keep the system well conditioned; the constraints do not change.
    x = (t - evaluation_point) / (t[-1] - t[0])
    Q, R = np.linalg.qr(np.vander(x, order + 1, increasing=True))
    constraints = np.eye(order + 1)[0]  # V^T c = (1, 0, …)
    c = Q @ np.linalg.solve(R.T, constraints)
    return c / c.sum()
