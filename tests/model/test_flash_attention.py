"""Every kernel returns float64 numpy's values and gradients for every mask; Splash runs in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from pma_jax.config import MeshConfig
from pma_jax.model.attention import attention, xla_attention
from pma_jax.model.kernels import flash_attention as kernels
from pma_jax.runtime.mesh import RULES, make_mesh

B, L, N, K, H = 2, 256, 4, 2, 64
KERNELS = {
    "xla": xla_attention,
    "cudnn's call, run by xla": functools.partial(kernels.cudnn_attention, implementation="xla"),
    "splash": functools.partial(kernels.splash_attention, interpret=True),
}


def inputs():
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((B, L, n, H)).astype(np.float32) for n in (N, K, K, N))
    documents = np.cumsum(rng.random((B, L)) < 0.03, axis=1).astype(np.int32)
    return (q, k, v), g, documents


def exact(q, k, v, documents, window):
    """Return attention in float64, [B, L, N, H]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = N // K
    heads = [(q[:, :, n], k[:, :, n // group], v[:, :, n // group]) for n in range(N)]
    return np.stack([reference.one_head(*three, documents, window) for three in heads], axis=2)


@pytest.mark.parametrize(
    "name", ["xla", *(pytest.param(name, marks=pytest.mark.slow) for name in KERNELS if name != "xla")]
)
@pytest.mark.parametrize(
    ("packed", "window"),
    [(True, 100), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, 0), (False, 100), (False, 0)])],
)
def test_values_and_gradients_equal_float64(name, window, packed):
    (q, k, v), g, documents = inputs()
    documents = documents if packed else None
    run = lambda q, k, v: KERNELS[name](q, k, v, None if documents is None else jnp.asarray(documents), window)  # noqa: E731
    y, pullback = jax.vjp(run, q, k, v)
    np.testing.assert_allclose(y, exact(q, k, v, documents, window), atol=1e-5)
    # The directional derivative by central differences of float64 numpy, along a random direction of each input.
    for index, gradient in enumerate(pullback(g)):
        direction = np.random.default_rng(index).standard_normal(gradient.shape)
        sides = []
        for sign in (1, -1):
            moved = [x.astype(np.float64) for x in (q, k, v)]
            moved[index] = moved[index] + sign * 1e-5 * direction
            sides.append(np.sum(g * exact(*moved, documents, window)))
        expected = (sides[0] - sides[1]) / 2e-5
        assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(expected, rel=1e-4, abs=1e-2)


@pytest.mark.mesh
@pytest.mark.parametrize("window", [0, 3])
def test_masks_on_a_mesh_equal_those_of_one_device(window):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((8, 7, n, 4)).astype(np.float32) for n in (4, 2, 2)]
    documents = np.cumsum(rng.random((8, 7)) < 0.3, axis=1).astype(np.int32)

    def energy(q, k, v, documents):
        return jnp.sum(jnp.sin(attention(q, k, v, documents, window)))

    gradients = jax.jit(jax.grad(energy, argnums=(0, 1, 2)))
    expected = gradients(*arrays, documents)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, RULES.spec("batch", None, "heads", None)) for x in arrays]
        actual = gradients(*placed, jax.device_put(documents, RULES.spec("batch", None)))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)


def test_unsupported_shapes_are_refused():
    assert kernels.splash_supports(256, 128, jnp.dtype("bfloat16"))
    assert not kernels.splash_supports(200, 128, jnp.dtype("bfloat16"))
    assert not kernels.splash_supports(256, 32, jnp.dtype("bfloat16"))
    assert kernels.cudnn_supports(200, 128, jnp.dtype("bfloat16"))
    assert not kernels.cudnn_supports(200, 128, jnp.dtype("float32"))
    assert not kernels.cudnn_supports(200, 256, jnp.dtype("bfloat16"))
