"""The lowest point of a curve that was measured on a grid, such as the best rate or the best span of a merge."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Vertex(NamedTuple):
    """The lowest point of a curve."""

    x: float
    y: float
    is_at_edge: bool  # the lowest value of the grid is at an end of it


def find_vertex(x: Sequence[float], y: Sequence[float], neighbours: int = 1) -> Vertex:
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
    center = positions[lowest]  # so that the fit is well conditioned
    a, b, c = np.polyfit(positions[near] - center, values[near], 2)
    vertex = -b / (2 * a) if a > 0 else 0.0
    if a <= 0 or not positions[near][0] <= center + vertex <= positions[near][-1]:
        return Vertex(float(center), float(values[lowest]), False)
    return Vertex(float(center + vertex), float(c + b * vertex + a * vertex**2), False)
