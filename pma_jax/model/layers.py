"""Small parts of the decoder: parameter initialisers, RMSNorm, SwiGLU, and the embedding lookup.

Legend: B batch, L positions, V vocabulary, D width, X devices that split the width, d = D / X. Inside `jax.shard_map`
arrays are one device's parts.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from pma_jax.runtime.mesh import RULES, axes_of, map_over_devices, non_manual_axes, reshard_like


def truncated_normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], spec: P, fan_in: int, gain: float = 1.0
) -> nnx.Param:
    """Draw a float32 parameter, partitioned as `spec`, from a truncated normal distribution.

    The normal distribution has the standard deviation gain / sqrt(fan_in) and is truncated at two of these.
    """
    initializer = nnx.initializers.truncated_normal(stddev=gain / math.sqrt(fan_in))
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32, out_sharding=spec))


def ones_param(*shape: int, spec: P | None = None) -> nnx.Param:
    """Make the float32 scale of a norm, partitioned as `spec`; None: replicated."""
    return nnx.Param(jnp.ones(shape, jnp.float32, out_sharding=spec))


@functools.partial(jax.checkpoint, static_argnums=2)  # saves its inputs for the gradient, not their float32 copies
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Return x / rms(x) * scale (arXiv 1910.07467), computed in float32, in the dtype of `x`.

    The root mean square is over the last dims of `x`, as many as `scale` has.
    """
    x32, dims = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=dims, keepdims=True) + epsilon)
    return (x32 * inverse * scale).astype(x.dtype)


@jax.checkpoint  # saves its two inputs for the gradient, and none of the three intermediates
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up (SwiGLU, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


@jax.checkpoint  # saves its input for the gradient, and not the halves, which would be copies
def swiglu_of_halves(both: jax.Array) -> jax.Array:
    """Return silu(gate) * up of [..., 2F], the first half of whose last dim is `gate` and the second `up`."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed_tokens(table_VxD: jax.Array, tokens_BxL: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Look up the embedding of each token.

    Args:
        table_VxD: Float32 parameter. Its gradient is summed in float32 and partitioned as the table.
        tokens_BxL: int32 token ids.
        dtype: Dtype of the result.

    Returns:
        [B, L, D], partitioned along the batch axes.
    """
    # The lookup needs an unsharded table.
    full_VxD = jax.reshard(table_VxD.astype(dtype), P(None, None))
    return full_VxD.at[tokens_BxL].get(out_sharding=RULES.spec("batch", None, None))


def _embed_fwd(
    table_VxD: jax.Array, tokens_BxL: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embed_tokens(table_VxD, tokens_BxL, dtype), (table_VxD, tokens_BxL)


def _embed_bwd(_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], g_BxLxD: jax.Array) -> tuple[jax.Array, None]:
    table_VxD, tokens_BxL = saved
    mesh = jax.sharding.get_abstract_mesh()
    rows_spec, table_spec = RULES.spec("batch", None, None), RULES.spec("vocabulary", "width")
    vocabulary_size = table_VxD.shape[0]
    if not any(mesh.shape[axis] > 1 for axis in non_manual_axes()):
        tokens_BxL, g_BxLxD = jax.reshard(tokens_BxL, P(None, None)), jax.reshard(g_BxLxD, P(None, None, None))
        d_VxD = _sum_by_token(tokens_BxL, g_BxLxD, 0, vocabulary_size)
        return reshard_like(table_VxD, d_VxD.astype(table_VxD.dtype)), None
    vocabulary_axes, width_axes = axes_of(table_spec[0]), axes_of(table_spec[1])
    rows_per_device = vocabulary_size // math.prod(mesh.shape[axis] for axis in vocabulary_axes)

    def reduce_on_device(tokens_BxL: jax.Array, g_BxLxD: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(vocabulary_axes) * rows_per_device
        d_VxD = _sum_by_token(tokens_BxL, g_BxLxD, first, rows_per_device)
        d_VxD = jax.lax.psum(d_VxD, tuple(axis for axis in axes_of(rows_spec[0]) if axis not in width_axes))
        # Not scattered along the last dim: XLA for TPU would all-reduce it where d is no multiple of 128.
        parts_VxXxd = d_VxD.reshape(rows_per_device, math.prod(mesh.shape[axis] for axis in width_axes), -1)
        return jax.lax.psum_scatter(parts_VxXxd, width_axes, scatter_dimension=1)

    in_specs = P(rows_spec[0], None), rows_spec
    d_table_VxD = map_over_devices(reduce_on_device, in_specs, table_spec)(tokens_BxL, g_BxLxD)
    return d_table_VxD.astype(table_VxD.dtype), None


def _sum_by_token(tokens_BxL: jax.Array, g_BxLxD: jax.Array, first: jax.Array | int, size: int) -> jax.Array:
    """Sum gradients by token id: float32 [size, D] for ids first … first + size - 1; other ids are dropped."""
    row_BxL = tokens_BxL - first
    # A negative index would count from the end.
    row_BxL = jnp.where(row_BxL < 0, size, row_BxL)
    zeros_VxD = jnp.zeros((size, g_BxLxD.shape[-1]), jnp.float32)
    return zeros_VxD.at[row_BxL].add(g_BxLxD.astype(jnp.float32), mode="drop")


embed_tokens.defvjp(_embed_fwd, _embed_bwd)
