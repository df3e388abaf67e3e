"""Planes through models: geometry against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.analysis import landscape
from pma_jax.config import MeshConfig
from pma_jax.runtime.mesh import make_mesh


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


def test_plane_over_two_weights_changes_nothing_else(points):
    params = model(points[0])
    plane = landscape.plane_of_two_weights(params, "b", (0, 1), (1, 0))
    moved = flat(plane.at(2.0, -3.0)) - flat(params)
    np.testing.assert_allclose(moved, [0, 0, 0, 0, 2, -3, 0], atol=1e-6)


@pytest.mark.mesh
def test_two_weights_of_a_sharded_leaf():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((4, 6)), jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
        plane = landscape.plane_of_two_weights({"w": split}, "w", (1, 2), (3, 5))
        moved = plane.at(2.0, -3.0)["w"]
    expected = np.ones((4, 6))
    expected[1, 2], expected[3, 5] = 3, -2
    np.testing.assert_array_equal(moved, expected)
    assert moved.sharding.is_equivalent_to(split.sharding, 2)


@pytest.mark.parametrize(
    ("leaf", "first", "second", "message"),
    [("c", (0,), (1,), "one of a, b"), ("a", (0,), (3,), "not an index"), ("a", (1,), (1,), "two different indices")],
)
def test_missing_weights_are_refused(points, leaf, first, second, message):
    with pytest.raises(ValueError, match=message):
        landscape.plane_of_two_weights(model(points[0]), leaf, first, second)
