"""Matmul of activations and a sharded weight matrix, as an einsum with a custom gradient.

Dimensions: S tokens of all sequences of the batch, D contracting dimension, E output dimension.
"""

import functools

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name

from pma_jax.runtime.mesh import gather_batch_axes, reshard_like

# The `checkpoint_name` of matmul results, by which a remat policy can save them. Policies such as `dots_saveable` do
# not see a matmul inside a `custom_vjp`.
MATMUL_CHECKPOINT_NAME = "matmul"


def sharded_matmul(x_SxD: jax.Array, matrix_DxE: jax.Array, out_sharding: P) -> jax.Array:
    """Multiply [S, D] by [D, E]; the result [S, E] has the sharding `out_sharding`.

    If the matrix is sharded along a mesh axis that also shards S (`fsdp`), it is all-gathered before the matmul and
    again in the backward pass, and its gradient is reduce-scattered.
    """
    return checkpoint_name(_sharded_matmul(x_SxD, matrix_DxE, out_sharding), MATMUL_CHECKPOINT_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sharded_matmul(x_SxD: jax.Array, matrix_DxE: jax.Array, out_sharding: P) -> jax.Array:
    return jnp.einsum("sd,de->se", x_SxD, gather_batch_axes(matrix_DxE), out_sharding=out_sharding)


def _forward(x_SxD: jax.Array, matrix_DxE: jax.Array, out_sharding: P) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sharded_matmul(x_SxD, matrix_DxE, out_sharding), (x_SxD, matrix_DxE)


def _backward(
    _out_sharding: P, residuals: tuple[jax.Array, jax.Array], g_SxE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_SxD, matrix_DxE = residuals
    d_x_SxD = jnp.einsum("se,de->sd", g_SxE, gather_batch_axes(matrix_DxE), out_sharding=jax.typeof(x_SxD).sharding)
    x_DxS = transpose_for_matmul(x_SxD)
    d_matrix_DxE = jnp.einsum("ds,se->de", x_DxS, g_SxE, out_sharding=jax.typeof(matrix_DxE).sharding)
    return reshard_like(x_SxD, d_x_SxD), reshard_like(matrix_DxE, d_matrix_DxE)


def transpose_for_matmul(x_SxD: jax.Array) -> jax.Array:
    """Transpose [S, D] to [D, S] for the matmul of a weight's gradient. On CPU, copy the data."""
    # On CPU, XLA multiplies a transposed view at two thirds of the speed of a transposed copy.
    return jax.lax.platform_dependent(x_SxD, cpu=_materialized_transpose, default=jnp.transpose)


def _materialized_transpose(x_SxD: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x_SxD.T)


_sharded_matmul.defvjp(_forward, _backward)
