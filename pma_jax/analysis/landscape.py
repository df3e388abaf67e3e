"""The loss over a plane of parameter space: through checkpoints and their merge, or over two weights of one layer.

PMA (arXiv 2505.12082) Figure 8 draws such contours. Legend: K trees; X, Y points along the plane's axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from pma_jax.analysis.curvature import inner_product
from pma_jax.merging.averager import average


@dataclasses.dataclass(frozen=True)
class Plane:
    """origin + x · first + y · second; the axes are orthogonal trees of length 1, so x and y are distances."""

    origin: Any
    first: Any
    second: Any

    def at(self, x: jax.Array | float, y: jax.Array | float) -> Any:
        """Return the parameters at the point (x, y)."""
        return optax.tree.add_scale(optax.tree.add_scale(self.origin, x, self.first), y, self.second)

    def coordinates(self, params: Any) -> tuple[float, float, float]:
        """Return x and y of the nearest point of the plane, and the distance to it."""
        offset = optax.tree.sub(params, self.origin)
        x, y = inner_product(offset, self.first), inner_product(offset, self.second)
        rest = optax.tree.add_scale(optax.tree.add_scale(offset, -x, self.first), -y, self.second)
        return float(x), float(y), float(optax.tree.norm(rest))


def principal_plane(params_K: Sequence[Any]) -> Plane:
    """Fit the plane with the least squared distance to K models; the mean of the models is the origin.

    The principal axes come from the [K, K] matrix of inner products, so no parameters-by-parameters matrix is needed.

    Args:
        params_K: K >= 3 parameter trees.

    Raises:
        ValueError: There are fewer than 3 models, or they are on one line.
    """
    if len(params_K) < 3:
        raise ValueError(f"{len(params_K)} models do not span a plane: give 3 or more")
    mean = average(params_K, np.full(len(params_K), 1 / len(params_K)))
    deltas_K = [optax.tree.sub(params, mean) for params in params_K]
    gram_KxK = np.array([[float(inner_product(a, b)) for b in deltas_K] for a in deltas_K])
    values_K, vectors_KxK = np.linalg.eigh(gram_KxK)
    if not values_K[-2] > 1e-6 * values_K[-1]:
        raise ValueError("the models are on one line, so they define no plane: give other models")
    axes = [average(deltas_K, vectors_KxK[:, i] / np.sqrt(values_K[i])) for i in (-1, -2)]
    return Plane(mean, *axes)


def plane_of_two_weights(params: Any, leaf: str, first: tuple[int, ...], second: tuple[int, ...]) -> Plane:
    """Return the plane in which two single weights of one leaf vary (PMA, Figure 8).

    Args:
        params: The origin.
        leaf: Name of the leaf, such as "blocks/mlp/up".
        first: Index of the weight along x.
        second: Index of the weight along y.

    Raises:
        ValueError: No leaf has that name (the error lists the names), an index is out of range, or the indices are
            equal.
    """
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]
    if leaf not in names:
        raise ValueError(f"no leaf {leaf!r}: it is one of {', '.join(names)}")
    shape = jax.tree.leaves(params)[names.index(leaf)].shape
    for index in (first, second):
        if len(index) != len(shape) or any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise ValueError(f"{index} is not an index of {leaf}, whose shape is {shape}")
    if first == second:
        raise ValueError(f"both weights are {first} of {leaf}: give two different indices")

    def unit(index: tuple[int, ...]) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.zeros_like, params))
        i = names.index(leaf)
        one = np.zeros(shape, leaves[i].dtype)
        one[index] = 1
        # Made on the host: a scatter into a sharded array would need an explicit output sharding.
        leaves[i] = jax.device_put(one, leaves[i].sharding)
        return jax.tree.unflatten(structure, leaves)

    return Plane(params, unit(first), unit(second))


def loss_over(loss: Callable[[Any], jax.Array], plane: Plane, xs_X: ArrayLike, ys_Y: ArrayLike) -> np.ndarray:
    """Evaluate `loss` at every point of a grid on the plane, for a contour plot.

    The loss is compiled once, and one model is in memory beside the plane.

    Args:
        loss: Function of a parameter tree.
        plane: The plane.
        xs_X: Grid coordinates along the first axis.
        ys_Y: Grid coordinates along the second axis.

    Returns:
        Losses, float64 [Y, X].
    """
    at = jax.jit(lambda plane_trees, x, y: loss(Plane(*plane_trees).at(x, y)))
    trees = (plane.origin, plane.first, plane.second)
    xs_X, ys_Y = np.asarray(xs_X, np.float32), np.asarray(ys_Y, np.float32)
    return np.array([[float(at(trees, x, y)) for x in xs_X] for y in ys_Y])
