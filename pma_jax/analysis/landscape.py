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
        """The parameters at a point of the plane."""
        return optax.tree.add_scale(optax.tree.add_scale(self.origin, x, self.first), y, self.second)

    def coordinates(self, params: Any) -> tuple[float, float, float]:
        """Return x and y of the nearest point of the plane, and the distance to it."""
        offset = optax.tree.sub(params, self.origin)
        x, y = inner_product(offset, self.first), inner_product(offset, self.second)
        rest = optax.tree.add_scale(optax.tree.add_scale(offset, -x, self.first), -y, self.second)
        return float(x), float(y), float(optax.tree.norm(rest))


def plane_through(first: Any, second: Any, third: Any) -> Plane:
    """The plane of three models; `first` is its origin, and `second` lies on its x axis.

    Raises ValueError where they lie on one line (or are equal): there is no such plane.
    """
    along, across = optax.tree.sub(second, first), optax.tree.sub(third, first)
    length = optax.tree.norm(along)
    if not float(length) > 0:
        raise ValueError("the first two models are equal: a plane goes through three that differ")
    x_axis = optax.tree.scale(1 / length, along)
    rest = optax.tree.add_scale(across, -inner_product(across, x_axis), x_axis)
    height = optax.tree.norm(rest)
    if not float(height) > 1e-5 * float(optax.tree.norm(across)):
        raise ValueError("the three models lie on one line: give one that lies beside it")
    return Plane(first, x_axis, optax.tree.scale(1 / height, rest))


def principal_plane(params_K: Sequence[Any]) -> Plane:
    """The plane that K models (3 or more) lie nearest to, by least squares; their mean is its origin.

    From the [K, K] matrix of inner products: no matrix of parameters by parameters is made. Raises ValueError where
    they lie on one line.
    """
    if len(params_K) < 3:
        raise ValueError(f"{len(params_K)} models do not span a plane: give 3 or more")
    mean = average(params_K, np.full(len(params_K), 1 / len(params_K)))
    apart_K = [optax.tree.sub(params, mean) for params in params_K]
    gram_KxK = np.array([[float(inner_product(a, b)) for b in apart_K] for a in apart_K])
    values_K, vectors_KxK = np.linalg.eigh(gram_KxK)
    if not values_K[-2] > 1e-6 * values_K[-1]:
        raise ValueError("the models lie on one line: there is no plane that they lie nearest to")
    axes = []
    for place in (-1, -2):
        axes.append(average(apart_K, vectors_KxK[:, place] / np.sqrt(values_K[place])))
    return Plane(mean, *axes)


def plane_of_two_weights(params: Any, leaf: str, first: tuple[int, ...], second: tuple[int, ...]) -> Plane:
    """The plane over two single weights of one leaf, all others as in `params`: the plane of PMA's Figure 8.

    Args:
        params: the origin.
        leaf: its name, such as "blocks/mlp/up".
        first: the index of the weight along x.
        second: that of the weight along y.

    Raises:
        ValueError: no leaf has that name (the names are listed), an index is outside, or both are the same.
    """
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]
    if leaf not in names:
        raise ValueError(f"no leaf {leaf!r}: it is one of {', '.join(names)}")
    shape = jax.tree.leaves(params)[names.index(leaf)].shape
    for index in (first, second):
        if len(index) != len(shape) or any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise ValueError(f"{index} is not an index of {leaf}, whose shape is {shape}")
    if first == second:
        raise ValueError(f"both weights are {first} of {leaf}: name two")

    def unit(index: tuple[int, ...]) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.zeros_like, params))
        place = names.index(leaf)
        one = np.zeros(shape, leaves[place].dtype)
        one[index] = 1
        # Placed as the leaf is: a scatter into a leaf that is split would need to be told where it goes.
        leaves[place] = jax.device_put(one, leaves[place].sharding)
        return jax.tree.unflatten(structure, leaves)

    return Plane(params, unit(first), unit(second))


def loss_over(loss: Callable[[Any], jax.Array], plane: Plane, xs_X: ArrayLike, ys_Y: ArrayLike) -> np.ndarray:
    """`loss` at every point of a grid over the plane: float64 [Y, X], for a contour plot. One compile; one model."""
    at = jax.jit(lambda plane_trees, x, y: loss(Plane(*plane_trees).at(x, y)))
    trees = (plane.origin, plane.first, plane.second)
    xs_X, ys_Y = np.asarray(xs_X, np.float32), np.asarray(ys_Y, np.float32)
    return np.array([[float(at(trees, x, y)) for x in xs_X] for y in ys_Y])
