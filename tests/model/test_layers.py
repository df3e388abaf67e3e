"""The embedding lookup and its gradient equal numpy's on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.config import MeshConfig
from pma_jax.model.layers import embed_tokens
from pma_jax.runtime.mesh import RULES, make_mesh

V, D, B, L = 16, 8, 8, 64


def gradient_of(mesh, tokens, g, dtype=jnp.float32):
    table = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        split = jax.device_put(table, RULES.spec("vocabulary", "width"))
        rows, words = jax.device_put(g, RULES.spec("batch", None, None)), jax.device_put(tokens, RULES.spec("batch"))

        @jax.jit
        def run(table, tokens, g):
            y, pullback = jax.vjp(lambda table: embed_tokens(table, tokens, jnp.dtype(dtype)), table)
            return y, *pullback(g)

        y, d_table = run(split, words, rows)
        assert d_table.sharding.is_equivalent_to(split.sharding, 2) and d_table.dtype == jnp.float32
    np.testing.assert_array_equal(y, jnp.asarray(table, dtype)[tokens])
    return np.asarray(d_table)


@pytest.mark.mesh
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 2, 2)])
def test_rows_and_gradient_equal_numpys_on_any_mesh(sizes):
    rng = np.random.default_rng(1)
    tokens, g = rng.integers(0, V, (B, L), dtype=np.int32), rng.standard_normal((B, L, D)).astype(np.float32)
    found = gradient_of(make_mesh(MeshConfig(*sizes)), tokens, g)
    expected = np.zeros((V, D))
    np.add.at(expected, tokens, g.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.mesh
def test_gradient_of_a_frequent_token_is_not_lost_to_rounding():
    """Sum 512 ones, where a sum in bfloat16 would stop at 256."""
    tokens, g = np.full((B, L), 3, np.int32), jnp.ones((B, L, D), jnp.bfloat16)
    found = gradient_of(make_mesh(MeshConfig(1, 2, 2, 2)), tokens, g, jnp.bfloat16)
    assert (found[3] == B * L).all() and not np.delete(found, 3, axis=0).any()
