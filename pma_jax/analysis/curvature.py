"""Curvature of the loss around a merge, from Hessian-vector products, without forming a matrix over the parameters.

PMA (arXiv 2505.12082) Section 4.6 expands the loss around an optimum theta* to second order. With delta_k = theta_k -
theta*, the loss of model k exceeds that of theta* by 1/2 delta_k' H delta_k, and the loss of the mean model exceeds it
by 1/2 d' H d, where d is the mean of the delta_k. How far the second is below the mean of the first depends on the
products delta_i' H delta_j with i != j, which `pairwise_curvature` measures.

Shape suffixes: K models, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

MatrixVectorProduct = Callable[[Any], Any]  # v -> M v for a matrix M; v and M v are pytrees like the parameters


def inner_product(first: Any, second: Any) -> jax.Array:
    """Compute the inner product of two pytrees of equal structure, float32 []."""
    # Not a dot of flattened leaves, because flattening a sharded leaf would gather it.
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), first, second)
    return sum(jax.tree.leaves(products), jnp.zeros(()))


def make_hessian_vector_product(
    loss: Callable[[Any, Any], jax.Array], params: Any, batches: Sequence[Any]
) -> MatrixVectorProduct:
    """Return v -> H v for the Hessian H of a loss at `params`, computed as the gradient of <gradient, v>.

    Reverse mode is used twice, because the decoder's custom VJPs do not support forward mode. A product costs about two
    gradients. Call the function under the same `jax.set_mesh` as the loss.

    Args:
        loss: Maps parameters and a batch to the batch's part of the loss, [].
        params: The parameters at which the loss is differentiated.
        batches: Trees of arrays of equal shapes; the parts of all add up to the loss. One is in memory at a time.
    """
    product = jax.jit(lambda at, vector, batch: jax.grad(lambda p: inner_product(jax.grad(loss)(p, batch), vector))(at))
    return lambda vector: _sum_trees(product(params, vector, batch) for batch in batches)


def make_gauss_newton_vector_product(
    outputs: Callable[[Any, Any], tuple[jax.Array, jax.Array]], params: Any, batches: Sequence[Any]
) -> MatrixVectorProduct:
    """Return v -> G v for the Gauss-Newton matrix of a mean cross-entropy at `params`; it is positive semidefinite.

    G = J' H_out J, with the Jacobian J of the logits and H_out = diag(p) - p p' for the softmax p at each position.

    Args:
        outputs: Maps parameters and a batch to logits [..., V] and the weight of each position in the mean [...].
        params: The parameters at which the logits are linearised.
        batches: Trees of arrays of equal shapes; the weights in all add up to 1. One is in memory at a time.
    """

    @jax.jit
    def product(at: Any, vector: Any, batch: Any) -> Any:
        logits, pull, weights = jax.vjp(lambda p: outputs(p, batch), at, has_aux=True)
        # J v without forward mode: apply the transpose of the linear map u -> J' u to v.
        tangent = jax.vjp(lambda cotangent: pull(cotangent)[0], jnp.zeros_like(logits))[1](vector)[0]
        p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        curved = p * (tangent - jnp.sum(p * tangent, axis=-1, keepdims=True))
        return pull((curved * weights[..., None]).astype(logits.dtype))[0]

    return lambda vector: _sum_trees(product(params, vector, batch) for batch in batches)


def pairwise_curvature(product: MatrixVectorProduct, deltas_K: Sequence[Any]) -> np.ndarray:
    """Compute delta_i' H delta_j for every pair from K products, symmetrised: float64 [K, K]."""
    matrix_KxK = np.zeros((len(deltas_K), len(deltas_K)))
    for j, delta in enumerate(deltas_K):
        curved = product(delta)
        matrix_KxK[:, j] = [float(inner_product(other, curved)) for other in deltas_K]
    return (matrix_KxK + matrix_KxK.T) / 2


def directional_derivatives(
    loss: Callable[[Any, Any], jax.Array], params: Any, batches: Sequence[Any], deltas_K: Sequence[Any]
) -> np.ndarray:
    """Compute the derivative of a loss at `params` along each delta, float64 [K]. Call it under `jax.set_mesh`.

    For `loss` and `batches`, see `make_hessian_vector_product`.
    """
    of_batch = jax.jit(jax.grad(loss))
    gradient = _sum_trees(of_batch(params, batch) for batch in batches)
    return np.array([float(inner_product(gradient, delta)) for delta in deltas_K])


def merging_gain(matrix_KxK: ArrayLike, coefficients_K: ArrayLike) -> float:
    """Predict to second order how far a merge's loss is below the weighted mean of the models' losses, in nats.

    The gain is 1/2 (sum_k c_k M_kk - c' M c). For coefficients that sum to 1, the gradient terms cancel (PMA Section
    4.6). If H is positive definite, the coefficients are positive and the models differ, the gain is positive (Jensen's
    inequality). See `merging_gain_over_last` for the gain over the newest model.

    Args:
        matrix_KxK: M, from `pairwise_curvature`.
        coefficients_K: c, the coefficients of the merge.
    """
    matrix, coefficients = np.asarray(matrix_KxK, np.float64), np.asarray(coefficients_K, np.float64)
    return float(coefficients @ np.diag(matrix) - coefficients @ matrix @ coefficients) / 2


def merging_gain_over_last(matrix_KxK: ArrayLike, coefficients_K: ArrayLike, slopes_K: ArrayLike) -> float:
    """Predict by the quadratic expansion L(theta_K) - L(sum_k c_k theta_k), the gain over the newest model, in nats.

    Unlike in `merging_gain`, the gradient terms remain: they account for the drift along the trajectory.

    Args:
        matrix_KxK: From `pairwise_curvature`.
        coefficients_K: Coefficients of the merge.
        slopes_K: From `directional_derivatives`, at the point from which the deltas are measured.
    """
    matrix, coefficients = np.asarray(matrix_KxK, np.float64), np.asarray(coefficients_K, np.float64)
    slopes = np.asarray(slopes_K, np.float64)
    return float(slopes[-1] + matrix[-1, -1] / 2 - coefficients @ slopes - coefficients @ matrix @ coefficients / 2)


def _sum_trees(trees: Iterable[Any]) -> Any:
    return functools.reduce(optax.tree.add, trees)
