import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from pma_jax.config import MeshConfig
from pma_jax.model import attention as module
from pma_jax.model.attention import apply_rotary, rotary_tables
from pma_jax.runtime.mesh import RULES, make_mesh

attention = jax.jit(module.attention)


def heads(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Lengths that the query blocks divide, do not divide, and exceed.
@pytest.mark.parametrize("length", [1, 3, 8, 13])
@pytest.mark.parametrize(("n", "k"), [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_float64(length, n, k):
    q, keys, v = heads(2, length, n, 6), heads(2, length, k, 6, seed=1), heads(2, length, k, 6, seed=2)
    actual = attention(q, keys, v)
    for head in range(n):
        shared = head // (n // k)
        expected = reference.one_head(
            *(x.astype(np.float64) for x in (q[:, :, head], keys[:, :, shared], v[:, :, shared]))
        )
        np.testing.assert_allclose(actual[:, :, head], expected, atol=2e-6)


def test_gradients_equal_jaxs():
    q, k, v, g = (heads(2, 13, n, 8, seed=n) for n in (4, 2, 2, 4))

    def gradients(f):
        return jax.jit(lambda *qkv: jax.vjp(f, *qkv)[1](g))(q, k, v)

    oracle = gradients(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True))
    for actual, expected in zip(gradients(module.attention), oracle, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.mesh
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [MeshConfig(8, 1, 1), MeshConfig(2, 4, 1)], ids=str)
def test_gradients_on_a_mesh_even_with_one_head(sizes, n):
    q, k, v = (heads(8, 5, n, 4, seed=s) for s in range(3))

    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sum(jnp.sin(module.attention(*qkv))), argnums=(0, 1, 2)))
    expected = gradients(q, k, v)
    mesh = make_mesh(sizes)
    sharding = jax.NamedSharding(mesh, RULES.spec("batch", None, "heads", None))
    with jax.set_mesh(mesh):
        placed = jax.grad(lambda *qkv: jnp.sum(jnp.sin(module.attention(*qkv))), argnums=(0, 1, 2))
        actual = jax.jit(placed)(*(jax.device_put(x, sharding) for x in (q, k, v)))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)
        assert a.sharding.is_equivalent_to(sharding, 4)


def test_curvature_equals_jaxs():
    q, k, v = (heads(1, 6, 2, 4, seed=s) for s in range(3))

    def curvature(f):
        energy = jax.grad(lambda q: jnp.sum(jnp.sin(f(q, k, v))))
        return jax.jit(lambda q: jax.jvp(energy, (q,), (v,))[1])(q)

    oracle = curvature(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True))
    np.testing.assert_allclose(curvature(module.attention), oracle, atol=1e-5)


def test_grouped_heads_equal_repeated_heads():
    q, k, v = heads(1, 12, 6, 4), heads(1, 12, 2, 4, seed=1), heads(1, 12, 2, 4, seed=2)
    repeated = attention(q, np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2))
    np.testing.assert_allclose(attention(q, k, v), repeated, atol=1e-6)


def test_large_scores_stay_finite():
    q, k, v = heads(1, 8, 2, 4) * 1e4, heads(1, 8, 2, 4, seed=1) * 1e4, heads(1, 8, 2, 4, seed=2)
    gradients = jax.jit(lambda *qkv: jax.vjp(module.attention, *qkv)[1](v))(q, k, v)
    assert np.isfinite(attention(q, k, v)).all()
    assert all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_inputs_use_a_float32_softmax():
    q, k, v = (jnp.asarray(heads(1, 64, 2, 8, seed=s), jnp.bfloat16) for s in range(3))
    y = attention(q, k, v)
    assert y.dtype == jnp.bfloat16
    exact = attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, atol=2e-2)
    # Scores in bfloat16 would be off by 2^-9 relative; the row sums of float32 weights are not.
    ones = attention(q, k, jnp.ones_like(v))
    np.testing.assert_allclose(np.asarray(ones, np.float32), 1.0, atol=4e-3)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    length, head_dim = 24, 8
    tables = rotary_tables(length, head_dim, 100.0)
    q, k = (np.broadcast_to(heads(1, 1, 1, head_dim, seed=s), (1, length, 1, head_dim)) for s in (0, 1))
    turned_q, turned_k = apply_rotary(q, *tables), apply_rotary(k, *tables)
    np.testing.assert_allclose(np.linalg.norm(turned_q, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    products = np.einsum("lh,mh->lm", turned_q[0, :, 0], turned_k[0, :, 0])
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(products[0]) > 0.1
    np.testing.assert_allclose(turned_q[0, :, 0], reference.rotate(q[:, :, 0].astype(np.float64), 100.0)[0], atol=1e-5)
