"""Curvature of the loss around a merge, from Hessian-vector products, without forming a matrix over the parameters.

PMA (arXiv 2505.12082) Section 4.6 expands the loss around an optimum theta* to second order. With delta_k = theta_k -
theta*, the loss of model k exceeds that of theta* by 1/2 delta_k' H delta_k, and the loss of the mean model exceeds it
by 1/2 d' H d, where d is the mean of the delta_k. How far the second is below the mean of the first depends on the
products delta_i' H delta_j with i != j, which `pairwise_curvature` measures.

Shape suffixes, joined by x: N batches, K models, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

MatrixVectorProduct = Callable[[Any], Any]  # v -> M v for a matrix M; v and M v are pytrees like the parameters
# Maps parameters and a batch to v -> M v, for the matrix M of the batch.
MatrixOfBatch = Callable[[Any, Any], MatrixVectorProduct]


def inner_product(first: Any, second: Any) -> jax.Array:
    """Compute the inner product of two pytrees of equal structure, float32 []."""
    # Not a dot of flattened leaves, because flattening a sharded leaf would gather it.
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), first, second)
    return sum(jax.tree.leaves(products), jnp.zeros(()))


def hessian(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any) -> MatrixVectorProduct:
    """Return v -> H v for the Hessian H of the loss of a batch, to be traced by `jax.jit`.

    Reverse mode is used twice, because the decoder's custom VJPs do not support forward mode. A product costs about two
    gradients.

    Args:
        loss: Maps parameters and a batch to the batch's part of the loss, [].
        params: The parameters at which the loss is differentiated.
        batch: What `loss` needs of the text.
    """
    pull = jax.vjp(lambda at: jax.grad(loss)(at, batch), params)[1]  # v -> v' H, which is H v: H is symmetric
    return lambda vector: pull(vector)[0]


def gauss_newton(
    outputs: Callable[[Any, Any], tuple[jax.Array, jax.Array]], params: Any, batch: Any
) -> MatrixVectorProduct:
    """Return v -> G v for the Gauss-Newton matrix G of a batch's cross-entropy, to be traced by `jax.jit`.

    G = J' H_out J, with the Jacobian J of the logits and H_out = diag(p) - p p' for the softmax p at each position. It
    is positive semidefinite.

    Args:
        outputs: Maps parameters and a batch to logits [..., V] and the weight of each position in the loss [...].
        params: The parameters at which the logits are linearised.
        batch: What `outputs` needs of the text.
    """
    logits, pull, weights = jax.vjp(lambda at: outputs(at, batch), params, has_aux=True)
    # J v without forward mode: apply the transpose of the linear map u -> J' u to v.
    push = jax.vjp(lambda cotangent: pull(cotangent)[0], jnp.zeros_like(logits))[1]
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)

    def product(vector: Any) -> Any:
        (tangent,) = push(vector)
        curved = p * (tangent - jnp.sum(p * tangent, axis=-1, keepdims=True))
        return pull((curved * weights[..., None]).astype(logits.dtype))[0]

    return product


def sum_products(matrix: MatrixOfBatch, params: Any, batches_N: Sequence[Any]) -> MatrixVectorProduct:
    """Return v -> M v for the sum M of a matrix over batches of equal shapes; one of them is in memory at a time.

    Call the function under the same `jax.set_mesh` as the loss.

    Args:
        matrix: `hessian` or `gauss_newton` of a function, such as `Workbench.hessian`.
        params: The parameters at which the loss is differentiated.
        batches_N: Batches whose parts add up to the loss, such as `Workbench.batches`.
    """
    product = jax.jit(lambda at, batch, vector: matrix(at, batch)(vector))
    return lambda vector: functools.reduce(optax.tree.add, (product(params, batch, vector) for batch in batches_N))


def pairwise_curvature(
    matrix: MatrixOfBatch, params: Any, batches_N: Sequence[Any], deltas_K: Sequence[Any]
) -> np.ndarray:
    """Compute delta_i' M delta_j of each batch for every pair from K products, symmetrised: float64 [N, K, K].

    Call it under the same `jax.set_mesh` as the loss.

    Args:
        matrix: As in `sum_products`.
        params: The parameters at which the loss is differentiated.
        batches_N: Batches of equal shapes. The sum over those whose parts add up to the loss is the loss's matrix.
        deltas_K: Trees like the parameters.
    """

    @jax.jit
    def products_of_batch(at: Any, batch: Any, deltas_K: Any) -> jax.Array:
        product = matrix(at, batch)

        def column(delta: Any) -> jax.Array:
            curved = product(delta)
            return jax.lax.map(lambda other: inner_product(other, curved), deltas_K)

        return jax.lax.map(column, deltas_K)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *deltas_K)
    matrix_NxKxK = np.array([products_of_batch(params, batch, stacked) for batch in batches_N], np.float64)
    return (matrix_NxKxK + np.swapaxes(matrix_NxKxK, 1, 2)) / 2


def directional_derivatives(
    loss: Callable[[Any, Any], jax.Array], params: Any, batches_N: Sequence[Any], deltas_K: Sequence[Any]
) -> np.ndarray:
    """Compute the derivative of the loss of each batch along each delta, float64 [N, K]. Call it under `jax.set_mesh`.

    For the arguments, see `hessian` and `pairwise_curvature`.
    """

    @jax.jit
    def slopes_of_batch(at: Any, batch: Any, deltas: Any) -> jax.Array:
        gradient = jax.grad(loss)(at, batch)
        return jnp.stack([inner_product(gradient, delta) for delta in deltas])

    return np.array([slopes_of_batch(params, batch, tuple(deltas_K)) for batch in batches_N], np.float64)


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
