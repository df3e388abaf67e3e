"""The loss on a plane in parameter space, such as the plane that fits a set of models best.

PMA (arXiv 2505.12082) Figure 8 draws such contours. Shape suffixes: K models; X, Y grid points along the axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import ArrayLike

from pma_jax.analysis.curvature import inner_product
from pma_jax.config.errors import UserError
from pma_jax.merging.averager import weighted_sum


@dataclasses.dataclass(frozen=True)
class Plane:
    """The points origin + x · x_axis + y · y_axis; the axes are orthonormal trees, so x and y are distances."""

    origin: Any  # as the axes, a tree with the structure of the parameters
    x_axis: Any
    y_axis: Any

    def at(self, x: jax.Array | float, y: jax.Array | float) -> Any:
        """Return the parameters at the point (x, y)."""
        return optax.tree.add_scale(optax.tree.add_scale(self.origin, x, self.x_axis), y, self.y_axis)

    def coordinates(self, params: Any) -> tuple[float, float, float]:
        """Return (x, y, distance) of the point of the plane nearest to `params`."""
        offset = optax.tree.sub(params, self.origin)
        x, y = inner_product(offset, self.x_axis), inner_product(offset, self.y_axis)
        rest = optax.tree.add_scale(optax.tree.add_scale(offset, -x, self.x_axis), -y, self.y_axis)
        return float(x), float(y), float(optax.tree.norm(rest))


def principal_plane(params_K: Sequence[Any]) -> Plane:
    """Fit the plane with the least squared distance to K models. Its origin is their mean.

    The principal axes come from the [K, K] matrix of inner products, so no parameters-by-parameters matrix is needed.

    Args:
        params_K: K >= 3 parameter trees, all in memory, as are their differences from the mean.

    Raises:
        UserError: There are fewer than 3 models, or they are on one line.
    """
    if len(params_K) < 3:
        raise UserError(f"{len(params_K)} models do not span a plane: give 3 or more")
    mean = weighted_sum(params_K, np.full(len(params_K), 1 / len(params_K)))
    deltas_K = [optax.tree.sub(params, mean) for params in params_K]
    gram_KxK = np.array([[float(inner_product(a, b)) for b in deltas_K] for a in deltas_K])
    eigenvalues_K, eigenvectors_KxK = np.linalg.eigh(gram_KxK)
    if not eigenvalues_K[-2] > 1e-6 * eigenvalues_K[-1]:
        raise UserError("the models are on one line, so they define no plane: give other models")
    axes = [weighted_sum(deltas_K, eigenvectors_KxK[:, i] / np.sqrt(eigenvalues_K[i])) for i in (-1, -2)]
    return Plane(mean, *axes)


def loss_on_grid(loss: Callable[[Any], jax.Array], plane: Plane, xs_X: ArrayLike, ys_Y: ArrayLike) -> np.ndarray:
    """Evaluate `loss` at every point of a grid on the plane, for a contour plot.

    The loss is compiled once. Memory holds one model in addition to the three trees of the plane.

    Args:
        loss: Function of a parameter tree.
        plane: The plane.
        xs_X: Grid coordinates along the x axis.
        ys_Y: Grid coordinates along the y axis.

    Returns:
        Losses, float64 [Y, X].
    """
    loss_at = jax.jit(lambda plane_trees, x, y: loss(Plane(*plane_trees).at(x, y)))
    plane_trees = (plane.origin, plane.x_axis, plane.y_axis)
    xs_X, ys_Y = np.asarray(xs_X, np.float32), np.asarray(ys_Y, np.float32)
    return np.array([[float(loss_at(plane_trees, x, y)) for x in xs_X] for y in ys_Y])
