"""The lowest point of a curve on a grid, compared with curves whose minimum is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax.studies.parabola import find_vertex, find_vertices, lowest_mean

GRID = np.linspace(-3, 3, 7)


@given(st.floats(-2, 2), st.floats(0.1, 10), st.floats(-5, 5), st.sampled_from([1, 2]))
def test_the_vertex_of_a_parabola_is_found_between_the_points(center, curvature, low, neighbours):
    found = find_vertex(GRID.tolist(), (curvature * (GRID - center) ** 2 + low).tolist(), neighbours)
    assert found.x == pytest.approx(center, abs=1e-6) and found.y == pytest.approx(low, abs=1e-6)
    assert not found.is_at_edge


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12), st.integers(1, 3))
def test_the_vertex_stays_beside_the_lowest_point(values, neighbours):
    x = np.arange(len(values), dtype=float).tolist()
    found, lowest = find_vertex(x, values, neighbours), int(np.argmin(values))
    assert abs(found.x - lowest) <= neighbours and found.is_at_edge == (lowest in (0, len(values) - 1))


def test_an_edge_is_said_and_its_point_returned():
    assert find_vertex([0, 1, 2, 3], [4, 3, 2, 1]) == (3, 1, True)
    assert find_vertex([0, 1, 2, 3], [1, 2, 3, 4]) == (0, 1, True)


def test_each_seed_has_the_vertex_of_its_own_parabola_around_the_lowest_mean():
    centers = np.array([-0.3, 0.0, 0.4])
    losses = 0.5 * (GRID[:, None] - centers) ** 2 + [1.0, 2.0, 3.0]
    lowest = lowest_mean(losses[:, :, None] * [0.5, 0.5])
    assert GRID[lowest] == 0
    np.testing.assert_allclose(find_vertices(GRID, losses, lowest), [centers, [1.0, 2.0, 3.0]], atol=1e-9)
    far = 0.5 * (GRID[:, None] - np.array([-0.9, -0.3, 0.4, 2.1])) ** 2
    assert find_vertices(GRID, far, lowest)[0, -1] == 1.0, "no minimum near the lowest mean: its lowest point there"
