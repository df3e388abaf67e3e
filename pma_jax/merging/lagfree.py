"""Weights with a chosen mean age: a local polynomial fit to the trajectory, evaluated at a chosen point.

A mean of N checkpoints removes noise but lags: it stands where training was half a window ago. Fitting a line to the
checkpoints and evaluating it at the newest end removes the lag and keeps part of the noise reduction; evaluating it
between the newest end and the window's middle trades one for the other.
"""

import numpy as np
from numpy.typing import ArrayLike


def mean_age(coefficients: ArrayLike, tokens: ArrayLike) -> float:
    """How far a merge stands behind the newest checkpoint: sum_k c_k (t_K - t_k), in tokens.

    Args:
      coefficients: [K], oldest first.
      tokens: [K], positions in tokens, oldest first.
    """
    t = np.asarray(tokens, np.float64)
    return float(np.dot(np.asarray(coefficients, np.float64), t[-1] - t))


def lagfree(tokens: ArrayLike | int, lag: float = 0.0, order: int = 1) -> np.ndarray:
    """The least-norm weights that reproduce every polynomial of this order at a point `lag` behind the newest.

    With e = t_K - lag · a, a the mean age of the plain mean over these checkpoints, they solve
        minimise |c|²  subject to  sum_k c_k (t_k - e)^j = (1 if j = 0 else 0),  j = 0 … order.
    Order 1 fixes the sum (1) and the mean age (lag · a): a straight-line fit evaluated at e. Order 2 also removes
    the curvature's part: a parabola. Least norm is least noise when checkpoints carry independent noise. lag = 1 of
    order 1 is the plain mean; with two checkpoints order 1 at lag 0 is the newest alone.

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
