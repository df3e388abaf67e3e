"""Learned merging weights: the K weights that minimise a loss.

If the fit converges, no fixed recipe has a lower loss on the same text.

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

from pma_jax.merging.averager import weighted_sum


@dataclasses.dataclass(frozen=True)
class LearnedWeights:
    """The result of fitting merging weights to a loss."""

    weights: np.ndarray  # float64 [K], sum to 1; may be negative
    loss: float  # of the merge with `weights`
    start_loss: float  # of the uniform mean, where the fit starts


def learn_weights(loss: Callable[[Any], jax.Array], params_K: Sequence[Any], iterations: int = 100) -> LearnedWeights:
    """Minimise `loss` of sum_k w_k theta_k over weights that sum to 1, by L-BFGS from the uniform mean.

    The gradient dL/dw_k = <grad L, theta_k - mean> takes one backward pass for any K. Fit the weights on one text and
    evaluate them on another, because K weights can overfit a short text.

    Args:
        loss: Differentiable function of a parameter tree; called under jit.
        params_K: K trees of equal structure. Memory holds all of them and their differences from the mean.
        iterations: Maximum number of L-BFGS iterations.

    Raises:
        ValueError: There are fewer than 2 trees.
    """
    count = len(params_K)
    if count < 2:
        raise ValueError(f"learned weights need 2 or more checkpoints, not {count}")
    start_K = np.full(count, 1 / count)
    # Differences from the mean: the part that all checkpoints share would otherwise dominate the gradient in float32.
    mean = weighted_sum(params_K, start_K)
    deltas_K = [optax.tree.sub(params, mean) for params in params_K]
    # Orthonormal basis of the changes of the weights that keep their sum.
    basis_KxD = np.asarray(scipy.linalg.null_space(np.ones((1, count))))

    @jax.jit
    def value_and_gradient(weights_K: jax.Array) -> tuple[jax.Array, jax.Array]:
        def merged(weights_K: jax.Array) -> jax.Array:
            scaled = [optax.tree.scale(weights_K[k], deltas_K[k]) for k in range(count)]
            return loss(jax.tree.map(lambda base, *leaves: base + sum(leaves), mean, *scaled))

        return jax.value_and_grad(merged)(weights_K)

    def objective(move_D: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient_K = value_and_gradient(jnp.asarray(start_K + basis_KxD @ move_D, jnp.float32))
        return float(value), basis_KxD.T @ np.asarray(gradient_K, np.float64)

    start_loss = objective(np.zeros(count - 1))[0]
    result = scipy.optimize.minimize(
        objective, np.zeros(count - 1), jac=True, method="L-BFGS-B", options={"maxiter": iterations}
    )
    return LearnedWeights(start_K + basis_KxD @ result.x, float(result.fun), start_loss)
