"""The product with its own gradient: values and gradients of float64 numpy, whatever the mesh splits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from pma_jax.config import MeshConfig
from pma_jax.model.kernels.matmul import sharded_matmul
from pma_jax.runtime.mesh import make_mesh

S, D, E = 16, 8, 24


def arrays():
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape).astype(np.float32) for shape in ((S, D), (D, E), (S, E)))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("sizes", "matrix_spec", "spec"),
    [
        ((8, 1, 1), P(None, None), P("data", None)),
        ((2, 2, 2), P(None, "tensor"), P(("data", "fsdp"), "tensor")),
        ((1, 1, 8), P(None, "tensor"), P(None, "tensor")),
        ((2, 2, 2), P("fsdp", "tensor"), P(("data", "fsdp"), "tensor")),
        ((1, 8, 1), P("fsdp", None), P("fsdp", None)),
        ((1, 4, 2), P("tensor", "fsdp"), P("fsdp", None)),
    ],
)
def test_gradients_equal_numpys_on_any_mesh(sizes, matrix_spec, spec):
    x, matrix, g = arrays()
    with jax.set_mesh(make_mesh(MeshConfig(*sizes))):
        rows = P(spec[0], "tensor" if matrix_spec[0] == "tensor" else None)
        placed = jax.device_put(x, rows), jax.device_put(matrix, matrix_spec), jax.device_put(g, spec)

        @jax.jit
        def run(x, matrix, g):
            y, pullback = jax.vjp(lambda x, matrix: sharded_matmul(x, matrix, spec), x, matrix)
            return y, *pullback(g)

        y, d_x, d_matrix = run(*placed)
        assert (jax.typeof(d_x).sharding.spec, jax.typeof(d_matrix).sharding.spec) == (rows, matrix_spec)
    x, matrix, g = (a.astype(np.float64) for a in (x, matrix, g))
    for actual, expected in ((y, x @ matrix), (d_x, g @ matrix.T), (d_matrix, x.T @ g)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_gradients_keep_the_inputs_dtype():
    x, matrix, g = (jnp.asarray(a, jnp.bfloat16) for a in arrays())
    with jax.set_mesh(make_mesh(MeshConfig())):
        y, pullback = jax.vjp(lambda x, matrix: sharded_matmul(x, matrix, P(None, None)), x, matrix)
        d_x, d_matrix = pullback(g)
    assert (y.dtype, d_x.dtype, d_matrix.dtype) == (jnp.bfloat16,) * 3
    x, matrix, g = (np.asarray(a, np.float64) for a in (x, matrix, g))
    for actual, expected in ((y, x @ matrix), (d_x, g @ matrix.T), (d_matrix, x.T @ g)):
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=2**-7, atol=2**-6)
