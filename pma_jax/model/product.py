"""The product of activations and a matrix, with a gradient that is fast on every platform.

Legend: S positions of all sequences, D the dim that is summed over, E the matrix's other dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import P

from pma_jax.mesh import placed_as


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x_SxD: jax.Array, matrix_DxE: jax.Array, spec: P, dtype: jnp.dtype | None) -> jax.Array:
    """[S, D] times [D, E] -> [S, E], partitioned as `spec`, in `dtype` (None: the inputs').

    Gradients are products in the dtype of `x`: one of float32 logits is rounded to it first.
    """
    return jnp.einsum("sd,de->se", x_SxD, matrix_DxE, out_sharding=spec, preferred_element_type=dtype)


def _forward(
    x_SxD: jax.Array, matrix_DxE: jax.Array, spec: P, dtype: jnp.dtype | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x_SxD, matrix_DxE, spec, dtype), (x_SxD, matrix_DxE)


def _backward(
    _spec: P, _dtype: jnp.dtype | None, saved: tuple[jax.Array, jax.Array], g_SxE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_SxD, matrix_DxE = saved
    g_SxE = g_SxE.astype(x_SxD.dtype)
    # XLA on CPU multiplies by x transposed, but at two thirds of the speed that it reaches once x lies transposed.
    x_DxS = jax.lax.platform_dependent(x_SxD, cpu=_laid_out_transposed, default=jnp.transpose)
    d_x = jnp.einsum("se,de->sd", g_SxE, matrix_DxE, out_sharding=jax.typeof(x_SxD).sharding)
    d_matrix = jnp.einsum("ds,se->de", x_DxS, g_SxE, out_sharding=jax.typeof(matrix_DxE).sharding)
    return placed_as(x_SxD, d_x), placed_as(matrix_DxE, d_matrix)


def _laid_out_transposed(x_SxD: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x_SxD.T)


product.defvjp(_forward, _backward)
