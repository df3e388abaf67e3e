"""The best that any linear merge of K checkpoints can do: weights learned on text, the K numbers alone.

Legend: K checkpoints, D = K - 1 directions in which weights can change and still sum to 1.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
import scipy.optimize
from numpy.typing import ArrayLike

from pma_jax.merging.averager import average


@dataclasses.dataclass(frozen=True)
class LearnedWeights:
    """A merge that was fitted to a loss."""

    weights: np.ndarray  # float64 [K], sum to 1; may be negative
    loss: float  # of the merge by `weights`
    start_loss: float  # of the merge that the fit began with
    evaluations: int  # of the loss and its gradient


def learn_weights(
    loss: Callable[[Any], jax.Array], params_K: Sequence[Any], start: ArrayLike | None = None, steps: int = 100
) -> LearnedWeights:
    """Minimise `loss` of sum_k w_k theta_k over weights that sum to 1, by L-BFGS from `start` (default: the mean).

    The gradient is dL/dw_k = <grad L, theta_k - mean>: one backward pass, whatever K. Fit on one text and judge on
    another: K numbers can overfit a short one.

    Args:
        loss: of a parameter tree, differentiable; called under jit.
        params_K: K trees of one structure, in memory all at once, and as much again for their differences.
        start: [K], sums to 1.
        steps: of L-BFGS, at most; it stops when it no longer gains.

    Raises:
        ValueError: there are fewer than 2 trees, or `start` has another length or sum.
    """
    count = len(params_K)
    if count < 2:
        raise ValueError(f"{count} checkpoints leave no weight to learn: give 2 or more")
    begin = np.full(count, 1 / count) if start is None else np.asarray(start, np.float64)
    if begin.shape != (count,) or abs(begin.sum() - 1) > 1e-6:
        raise ValueError(f"start must be {count} weights that sum to 1, not {begin.tolist()}")
    # Differences from the mean: a weight's gradient would else drown in what all checkpoints share.
    mean = average(params_K, np.full(count, 1 / count))
    apart_K = [optax.tree.sub(params, mean) for params in params_K]
    free_KxD = np.asarray(scipy.linalg.null_space(np.ones((1, count))))

    @jax.jit
    def value_and_gradient(weights_K: jax.Array) -> tuple[jax.Array, jax.Array]:
        def merged(weights_K: jax.Array) -> jax.Array:
            scaled = [optax.tree.scale(weights_K[k], apart_K[k]) for k in range(count)]
            return loss(jax.tree.map(lambda base, *leaves: base + sum(leaves), mean, *scaled))

        return jax.value_and_grad(merged)(weights_K)

    def objective(move_D: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient_K = value_and_gradient(jnp.asarray(begin + free_KxD @ move_D, jnp.float32))
        return float(value), free_KxD.T @ np.asarray(gradient_K, np.float64)

    start_loss = objective(np.zeros(count - 1))[0]
    found = scipy.optimize.minimize(
        objective, np.zeros(count - 1), jac=True, method="L-BFGS-B", options={"maxiter": steps}
    )
    return LearnedWeights(begin + free_KxD @ found.x, float(found.fun), start_loss, int(found.nfev))
