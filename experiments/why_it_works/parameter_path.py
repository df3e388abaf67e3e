"""Directions and planes in parameter space, and the spectrum of the path that snapshots take along them.

Shape suffixes, joined by x: K snapshots, D directions, F frequencies.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.signal
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree
from numpy.typing import ArrayLike

from pma_jax.analysis.curvature import MatrixVectorProduct, inner_product
from pma_jax.analysis.landscape import Plane
from pma_jax.runs.integrity import named_leaves


def top_eigenpairs(product: MatrixVectorProduct, like: Any, count: int, seed: int = 0) -> tuple[np.ndarray, list[Any]]:
    """Compute the `count` largest eigenvalues, descending, and their unit eigenvectors as trees, by Lanczos (ARPACK).

    Vectors are float64 in host memory, so this is for models of up to some tens of millions of parameters.

    Args:
        product: Multiplies a symmetric matrix by a vector.
        like: Tree with the structure, shapes, dtypes and shardings of the vectors.
        count: Number of eigenpairs.
        seed: Seed of the random starting vector.

    Returns:
        The eigenvalues [count] and a list of their eigenvectors.

    Raises:
        ValueError: `count` is not between 1 and the number of parameters minus 1.
    """
    flat, unravel = ravel_pytree(jax.device_get(like))
    size = flat.size
    if not 0 < count < size:
        raise ValueError(f"count must be 1 to {size - 1}, not {count}: the model has {size} parameters")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)

    def as_tree(vector: np.ndarray) -> Any:
        return jax.device_put(unravel(jnp.asarray(vector, flat.dtype)), shardings)

    def times(vector: np.ndarray) -> np.ndarray:
        return np.asarray(ravel_pytree(jax.device_get(product(as_tree(vector))))[0], np.float64)

    operator = scipy.sparse.linalg.LinearOperator((size, size), matvec=times)  # pyrefly: ignore
    start = np.random.default_rng(seed).standard_normal(size)
    values, vectors = scipy.sparse.linalg.eigsh(operator, k=count, which="LA", v0=start, tol=1e-3)
    order = np.argsort(values)[::-1]
    return values[order], [as_tree(vectors[:, i]) for i in order]


def random_directions(like: Any, count: int, seed: int = 0) -> list[Any]:
    """Draw `count` random pytrees of unit L2 norm with the structure and shapes of `like`.

    If `like` has many elements, the pytrees are nearly orthogonal.
    """
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        optax.tree.scale(1 / optax.tree.norm(tree), tree)
        for tree in (optax.tree.random_like(key, like) for key in keys)
    ]


def projections(params_K: Iterable[Any], directions_D: Sequence[Any], origin: Any) -> np.ndarray:
    """Compute the inner product of params_k - origin with each direction: float64 [K, D].

    These are coordinates of the parameters if the directions have unit norm, as those of `random_directions` have.
    """
    rows = []
    for params in params_K:
        offset = optax.tree.sub(params, origin)
        rows.append([float(inner_product(offset, direction)) for direction in directions_D])
    return np.array(rows, np.float64)


def power_spectral_density(series_KxD: ArrayLike, interval: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the power spectral density of each of D series by a periodogram.

    Each series is detrended linearly and multiplied by a Hann window, so that drift does not leak into all frequencies.

    Args:
        series_KxD: D series of K evenly spaced values.
        interval: Spacing of the values, such as the snapshot interval in tokens.

    Returns:
        Frequencies [F] in cycles per unit of `interval` (cycles per token for tokens), and densities [F, D], with
            F = K // 2 + 1.

    Raises:
        ValueError: There are fewer than 4 values.
    """
    series = np.asarray(series_KxD, np.float64)
    if len(series) < 4:
        raise ValueError(f"a series must have at least 4 values, not {len(series)}")
    return scipy.signal.periodogram(series, fs=1 / interval, window="hann", detrend="linear", axis=0)


def plane_of_two_weights(params: Any, leaf: str, x_index: tuple[int, ...], y_index: tuple[int, ...]) -> Plane:
    """Return the plane in which two single weights of one leaf vary (PMA, Figure 8).

    Args:
        params: Parameter tree, the origin of the plane.
        leaf: Name of the leaf, such as "blocks/mlp/up".
        x_index: Index in the leaf of the weight that varies along x.
        y_index: Index in the leaf of the weight that varies along y.

    Raises:
        ValueError: No leaf has that name (the error lists the names), an index is out of range, or the indices are
            equal.
    """
    leaf_of_name = named_leaves(params, "/")
    if leaf not in leaf_of_name:
        raise ValueError(f"no leaf {leaf!r}: it is one of {', '.join(leaf_of_name)}")
    shape = leaf_of_name[leaf].shape
    for index in (x_index, y_index):
        if len(index) != len(shape) or any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise ValueError(f"{index} is not an index of {leaf}, whose shape is {shape}")
    if x_index == y_index:
        raise ValueError(f"both weights are {x_index} of {leaf}: give two different indices")

    def unit_tree(index: tuple[int, ...]) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.zeros_like, params))
        i = list(leaf_of_name).index(leaf)
        one = np.zeros(shape, leaves[i].dtype)
        one[index] = 1
        # Made on the host: a scatter into a sharded array would need an explicit output sharding.
        leaves[i] = jax.device_put(one, leaves[i].sharding)
        return jax.tree.unflatten(structure, leaves)

    return Plane(params, unit_tree(x_index), unit_tree(y_index))
