"""Planes through models: geometry against float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.analysis import landscape


def model(values):
    return {"a": jnp.asarray(values[:3], jnp.float32), "b": jnp.asarray(values[3:], jnp.float32).reshape(2, 2)}


def flat(params):
    return np.concatenate([np.asarray(params["a"]).ravel(), np.asarray(params["b"]).ravel()]).astype(np.float64)


@pytest.fixture
def points():
    return np.random.default_rng(0).normal(size=(5, 7))


def test_plane_of_three_models_contains_them(points):
    models = [model(p) for p in points[:3]]
    plane = landscape.principal_plane(models)
    for params in models:
        x, y, distance = plane.coordinates(params)
        assert distance < 1e-5
        np.testing.assert_allclose(flat(plane.at(x, y)), flat(params), atol=1e-5)
    assert abs(flat(plane.x_axis) @ flat(plane.y_axis)) < 1e-6
    for axis in (plane.x_axis, plane.y_axis):
        assert np.linalg.norm(flat(axis)) == pytest.approx(1, rel=1e-5)


def test_model_off_the_plane_has_its_distance(points):
    plane = landscape.principal_plane([model(p) for p in points[:3]])
    basis, _ = np.linalg.qr((points[1:3] - points[0]).T)
    offset = points[3] - points[0]
    expected = np.linalg.norm(offset - basis @ (basis.T @ offset))
    assert plane.coordinates(model(points[3]))[2] == pytest.approx(expected, rel=1e-5)


def test_collinear_models_span_no_plane(points):
    one, two = points[:2]
    with pytest.raises(ValueError, match="one line"):
        landscape.principal_plane([model(one), model(two), model((one + two) / 2)])


def test_principal_plane_equals_that_of_the_singular_vectors(points):
    plane = landscape.principal_plane([model(p) for p in points])
    apart = points - points.mean(axis=0)
    _, _, rows = np.linalg.svd(apart)
    for axis, row in zip((plane.x_axis, plane.y_axis), rows, strict=False):
        assert abs(flat(axis) @ row) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(flat(plane.origin), points.mean(axis=0), atol=1e-6)


def test_grid_contains_the_loss_at_each_point(points):
    plane = landscape.principal_plane([model(p) for p in points[:3]])
    xs, ys = [-1.0, 0.0, 2.0], [0.5, 1.5]
    grid = landscape.loss_on_grid(lambda p: jnp.sum(p["a"] ** 2) + jnp.sum(p["b"] ** 3), plane, xs, ys)
    assert grid.shape == (2, 3)
    for j, y in enumerate(ys):
        for i, x in enumerate(xs):
            at = flat(plane.origin) + x * flat(plane.x_axis) + y * flat(plane.y_axis)
            assert grid[j, i] == pytest.approx(np.sum(at[:3] ** 2) + np.sum(at[3:] ** 3), rel=1e-4)
