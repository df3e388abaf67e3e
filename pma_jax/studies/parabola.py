"""The lowest point of a curve that was measured on a grid, such as the best rate or the best span of a merge."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Vertex(NamedTuple):
    """The lowest point of a curve."""

    x: float
    y: float
    is_at_edge: bool  # the lowest value of the grid is at an end of it


def find_vertex(x: ArrayLike, y: ArrayLike, neighbours: int = 1) -> Vertex:
    """Return the vertex of the parabola through the lowest point of a grid and its neighbours.

    At an edge of the grid, or if the parabola has no minimum between these points, it is the lowest point itself.

    Args:
        x: Positions in ascending order, on a scale on which the curve is about a parabola, such as a logarithm.
        y: The values there, such as losses.
        neighbours: Points on either side of the lowest that are fitted; with more than one, by least squares.
    """
    positions, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    lowest = int(values.argmin())
    if lowest in (0, len(values) - 1):
        return Vertex(float(positions[lowest]), float(values[lowest]), True)
    near = slice(max(lowest - neighbours, 0), lowest + neighbours + 1)
    return Vertex(*_fit(positions[near], values[near], positions[lowest]), False)


def find_vertices(x: ArrayLike, losses_XS: ArrayLike, lowest: int, neighbours: int = 1) -> np.ndarray:
    """Return the vertex of each seed's curve: its positions and its values, [2, S].

    All parabolas are fitted to the same points, those around `lowest`, so that the vertices change smoothly with the
    losses. A curve that has no minimum between these points has its lowest one there.

    Args:
        x: Positions, as those of `find_vertex`.
        losses_XS: The values there, of each seed.
        lowest: Index of the position with the lowest mean (`lowest_mean`).
        neighbours: As those of `find_vertex`.
    """
    positions, losses = np.asarray(x, np.float64), np.asarray(losses_XS, np.float64)
    near = slice(max(lowest - neighbours, 0), lowest + neighbours + 1)
    vertices = [_fit(positions[near], values, positions[lowest]) for values in losses[near].T]
    return np.transpose(vertices)


def lowest_mean(nats_XSD: ArrayLike) -> int:
    """Return the index of the lowest mean over seeds of losses that are summed over documents."""
    return int(np.asarray(nats_XSD, np.float64).sum(axis=-1).mean(axis=-1).argmin())


def _fit(positions: np.ndarray, values: np.ndarray, center: float) -> tuple[float, float]:
    """Return the vertex of a parabola through points; their lowest one if it has no minimum between them."""
    if len(positions) > 2:
        a, b, c = np.polyfit(positions - center, values, 2)  # centered, so that the fit is well conditioned
        vertex = -b / (2 * a) if a > 0 else np.inf
        if positions[0] <= center + vertex <= positions[-1]:
            return float(center + vertex), float(c + b * vertex + a * vertex**2)
    at = int(values.argmin())
    return float(positions[at]), float(values[at])
