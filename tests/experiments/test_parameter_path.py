"""Directions, spectra and planes of experiments/why_it_works against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import parameter_path
import pytest
from jax.flatten_util import ravel_pytree

from pma_jax.config import MeshConfig
from pma_jax.runtime.mesh import make_mesh


def test_spectrum_of_a_sine_peaks_at_its_frequency_and_ignores_drift():
    k = np.arange(64)
    series = np.stack([np.sin(2 * np.pi * 8 / 64 * k), 3.0 + 0.5 * k], axis=1)
    frequencies, power = parameter_path.power_spectral_density(series, interval=2.0)
    assert power.shape == (33, 2)
    assert frequencies[np.argmax(power[:, 0])] == pytest.approx(8 / 64 / 2)
    assert power[:, 1].max() < 1e-20
    with pytest.raises(ValueError, match="at least 4 values"):
        parameter_path.power_spectral_density(np.zeros((3, 1)))


def test_projections_are_inner_products_with_unit_directions():
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(3, 40))
    models = [{"a": jnp.asarray(v[:10], jnp.float32), "b": jnp.asarray(v[10:], jnp.float32)} for v in flat]
    directions = parameter_path.random_directions(models[0], 2, seed=1)
    rows = np.stack([np.concatenate([np.asarray(d["a"]), np.asarray(d["b"])]) for d in directions]).astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    actual = parameter_path.projections(iter(models), directions, models[0])
    np.testing.assert_allclose(actual, (flat - flat[0]) @ rows.T, atol=1e-4)


PARAMS = {"a": jnp.arange(3.0), "b": jnp.arange(4.0).reshape(2, 2)}


def test_plane_over_two_weights_changes_nothing_else():
    plane = parameter_path.plane_of_two_weights(PARAMS, "b", (0, 1), (1, 0))
    moved = ravel_pytree(plane.at(2.0, -3.0))[0] - ravel_pytree(PARAMS)[0]
    np.testing.assert_allclose(moved, [0, 0, 0, 0, 2, -3, 0], atol=1e-6)


@pytest.mark.mesh
def test_two_weights_of_a_sharded_leaf():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((4, 6)), jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
        plane = parameter_path.plane_of_two_weights({"w": split}, "w", (1, 2), (3, 5))
        moved = plane.at(2.0, -3.0)["w"]
    expected = np.ones((4, 6))
    expected[1, 2], expected[3, 5] = 3, -2
    np.testing.assert_array_equal(moved, expected)
    assert moved.sharding.is_equivalent_to(split.sharding, 2)


@pytest.mark.parametrize(
    ("leaf", "first", "second", "message"),
    [("c", (0,), (1,), "one of a, b"), ("a", (0,), (3,), "not an index"), ("a", (1,), (1,), "two different indices")],
)
def test_missing_weights_are_refused(leaf, first, second, message):
    with pytest.raises(ValueError, match=message):
        parameter_path.plane_of_two_weights(PARAMS, leaf, first, second)
