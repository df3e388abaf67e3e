"""Learned merging weights: the K coefficients that minimise a loss, a bound for every fixed recipe.

Shape suffixes: K checkpoints, D = K - 1 directions in which the weights can change while their sum stays 1.
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

from pma_jax.merging.averager import average


@dataclasses.dataclass(frozen=True)
class LearnedWeights:
    """The result of fitting merging weights to a loss."""

    weights: np.ndarray  # float64 [K], sum to 1; may be negative
    loss: float  # of the merge by `weights`
    start_loss: float  # of the merge by the initial weights


def learn_weights(loss: Callable[[Any], jax.Array], params_K: Sequence[Any], iterations: int = 100) -> LearnedWeights:
    """Minimise `loss` of sum_k w_k theta_k over weights that sum to 1, by L-BFGS from the mean.

    The gradient dL/dw_k = <grad L, theta_k - mean> takes one backward pass for any K. Fit on one text and evaluate on
    another: K numbers can overfit a short text.

    Args:
        loss: Differentiable function of a parameter tree; called under jit.
        params_K: K trees with the same structure. Memory holds all of them, and their differences from the mean.
        iterations: Maximum number of L-BFGS iterations.

    Raises:
        ValueError: There are fewer than 2 trees.
    """
    count = len(params_K)
    if count < 2:
        raise ValueError(f"learned weights need 2 or more checkpoints, not {count}")
    start_K = np.full(count, 1 / count)
    # Differences from the mean, because the part that all checkpoints share would dominate the gradient in float32.
    mean = average(params_K, start_K)
    deltas_K = [optax.tree.sub(params, mean) for params in params_K]
    free_KxD = np.asarray(scipy.linalg.null_space(np.ones((1, count))))

    @jax.jit
    def value_and_gradient(weights_K: jax.Array) -> tuple[jax.Array, jax.Array]:
        def merged(weights_K: jax.Array) -> jax.Array:
            scaled = [optax.tree.scale(weights_K[k], deltas_K[k]) for k in range(count)]
            return loss(jax.tree.map(lambda base, *leaves: base + sum(leaves), mean, *scaled))

        return jax.value_and_grad(merged)(weights_K)

    def objective(move_D: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient_K = value_and_gradient(jnp.asarray(start_K + free_KxD @ move_D, jnp.float32))
        return float(value), free_KxD.T @ np.asarray(gradient_K, np.float64)

    start_loss = objective(np.zeros(count - 1))[0]
    result = scipy.optimize.minimize(
        objective, np.zeros(count - 1), jac=True, method="L-BFGS-B", options={"maxiter": iterations}
    )
    return LearnedWeights(start_K + free_KxD @ result.x, float(result.fun), start_loss)
