"""Curvature around a merge, by products with the Hessian that never make a matrix of parameters.

PMA (arXiv 2505.12082) Section 4.6 expands the loss around an optimum theta*: with delta_k = theta_k - theta*,
L(mean) - L* = 1/2 mean' H mean is below the mean of L_k - L* = 1/2 delta_k' H delta_k, by the off-diagonal products
delta_i' H delta_j. `pairwise` measures them. Legend: K models, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from numpy.typing import ArrayLike

Product = Callable[[Any], Any]  # a vector, as a parameter tree -> the matrix times it


def inner_product(first: Any, second: Any) -> jax.Array:
    """Return the sum over all leaves of first · second, float32 []; each device sums its own shards first."""
    # Not a dot of flattened leaves: flattening a sharded leaf would gather it.
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), first, second)
    return sum(jax.tree.leaves(products), jnp.zeros(()))


def hessian_product(loss: Callable[[Any], jax.Array], params: Any) -> Product:
    """Return v -> H v, H the Hessian of `loss` at `params`: the gradient of <gradient, v>.

    Reverse over reverse: the decoder's products have gradients of their own, which forward mode cannot see through.
    Costs about two gradients a product. Call under `jax.set_mesh` as the loss is.
    """
    product = jax.jit(lambda at, vector: jax.grad(lambda p: inner_product(jax.grad(loss)(p), vector))(at))
    return lambda vector: product(params, vector)


def gauss_newton_product(outputs: Callable[[Any], tuple[jax.Array, jax.Array]], params: Any) -> Product:
    """Return v -> G v, G = J' H_out J the Gauss-Newton matrix of mean cross-entropy at `params`: never negative.

    `outputs` gives logits [..., V] and the weight of each position [...], which need not sum to 1 (counted tokens: 1,
    padding: 0). H_out = diag(p) - p p' of the softmax p at each position.
    """

    @jax.jit
    def product(at: Any, vector: Any) -> Any:
        logits, pull, weights = jax.vjp(outputs, at, has_aux=True)
        # J v as the transpose of u -> J' u, which is linear: again without forward mode.
        tangent = jax.vjp(lambda cotangent: pull(cotangent)[0], jnp.zeros_like(logits))[1](vector)[0]
        p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        moved = p * (tangent - jnp.sum(p * tangent, axis=-1, keepdims=True))
        return pull((moved * (weights / jnp.sum(weights))[..., None]).astype(logits.dtype))[0]

    return lambda vector: product(params, vector)


def pairwise(product: Product, deltas_K: Sequence[Any]) -> np.ndarray:
    """delta_i' H delta_j for every pair, symmetrised: float64 [K, K], from K products."""
    matrix_KxK = np.zeros((len(deltas_K), len(deltas_K)))
    for j, delta in enumerate(deltas_K):
        curved = product(delta)
        matrix_KxK[:, j] = [float(inner_product(other, curved)) for other in deltas_K]
    return (matrix_KxK + matrix_KxK.T) / 2


def slopes(loss: Callable[[Any], jax.Array], params: Any, deltas_K: Sequence[Any]) -> np.ndarray:
    """Return gradient' delta_k of `loss` at `params`: float64 [K], from one gradient. Call under `jax.set_mesh`."""
    gradient = jax.jit(jax.grad(loss))(params)
    return np.array([float(inner_product(gradient, delta)) for delta in deltas_K])


def merging_gain(matrix_KxK: ArrayLike, weights_K: ArrayLike) -> float:
    """What a quadratic says merging gains over the weighted mean of the losses: 1/2 (sum_k w_k M_kk - w' M w), nats.

    Where the weights sum to 1, the gradient's part is the same in both and cancels (PMA Section 4.6). For any
    positive-definite H and weights that are not negative it is above 0 as soon as the models differ (Jensen): the gain
    over the LAST model is `merging_gain_over_last`.
    """
    matrix, weights = np.asarray(matrix_KxK, np.float64), np.asarray(weights_K, np.float64)
    return float(weights @ np.diag(matrix) - weights @ matrix @ weights) / 2


def merging_gain_over_last(matrix_KxK: ArrayLike, weights_K: ArrayLike, slopes_K: ArrayLike) -> float:
    """What a quadratic says merging gains over the newest model: L(theta_K) - L(sum_k w_k theta_k), nats.

    `slopes_K` are gradient' delta_k at the point of expansion: they do not cancel here, and drift lives in them.
    """
    matrix, weights = np.asarray(matrix_KxK, np.float64), np.asarray(weights_K, np.float64)
    slopes = np.asarray(slopes_K, np.float64)
    return float(slopes[-1] + matrix[-1, -1] / 2 - weights @ slopes - weights @ matrix @ weights / 2)


def off_diagonal_share(matrix_KxK: ArrayLike) -> float:
    """Sum of the off-diagonal entries over that of the diagonal.

    -1: the deltas cancel (merging removes all of it); 0: they are independent (a mean keeps 1/K); K - 1: they are equal
    (merging gains nothing).
    """
    matrix = np.asarray(matrix_KxK, np.float64)
    return float((matrix.sum() - np.trace(matrix)) / np.trace(matrix))


def top_eigenpairs(product: Product, like: Any, count: int, seed: int = 0) -> tuple[np.ndarray, list[Any]]:
    """The `count` largest eigenvalues, descending, and their eigenvectors as trees of length 1, by Lanczos (ARPACK).

    Vectors live in host memory as float64: for models of up to some tens of millions of parameters. Raises ValueError
    where `count` is not below the number of parameters.
    """
    leaves, structure = jax.tree.flatten(like)
    size = sum(leaf.size for leaf in leaves)
    if not 0 < count < size:
        raise ValueError(f"count must be 1 to {size - 1}, not {count}: the model has {size} parameters")
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def as_tree(vector: np.ndarray) -> Any:
        parts = zip(np.split(vector, ends), leaves, strict=True)
        placed = [jax.device_put(part.reshape(leaf.shape).astype(leaf.dtype), leaf.sharding) for part, leaf in parts]
        return jax.tree.unflatten(structure, placed)

    def times(vector: np.ndarray) -> np.ndarray:
        curved = jax.device_get(jax.tree.leaves(product(as_tree(vector))))
        return np.concatenate([leaf.ravel() for leaf in curved]).astype(np.float64)

    operator = scipy.sparse.linalg.LinearOperator((size, size), matvec=times)  # pyrefly: ignore
    begin = np.random.default_rng(seed).standard_normal(size)
    values, vectors = scipy.sparse.linalg.eigsh(operator, k=count, which="LA", v0=begin, tol=1e-3)
    order = np.argsort(values)[::-1]
    return values[order], [as_tree(vectors[:, i]) for i in order]
