"""Rows of the embedding, with a gradient that is summed in float32 and split as the table is.

Legend: B batch, L positions, V vocabulary, D width, X devices that split it, d = D / X; inside the `jax.shard_map` a
device's own parts of them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import P

from pma_jax.runtime.mesh import RULES, axes_of, placed_as


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embedded(table_VxD: jax.Array, tokens_BxL: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows [B, L, D] of the tokens (int32 [B, L]) in `dtype`, split along the batch axes."""
    # The gather wants its table whole; rows that are not used cost no arithmetic.
    whole_VxD = jax.reshard(table_VxD.astype(dtype), P(None, None))
    return whole_VxD.at[tokens_BxL].get(out_sharding=RULES.spec("batch", None, None))


def _forward(
    table_VxD: jax.Array, tokens_BxL: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embedded(table_VxD, tokens_BxL, dtype), (table_VxD, tokens_BxL)


def _backward(_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], g_BxLxD: jax.Array) -> tuple[jax.Array, None]:
    table_VxD, tokens_BxL = saved
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    rows, table = RULES.spec("batch", None, None), RULES.spec("vocabulary", "width")
    words = table_VxD.shape[0]
    if not any(mesh.shape[axis] > 1 for axis in axes):
        tokens_BxL, g_BxLxD = jax.reshard(tokens_BxL, P(None, None)), jax.reshard(g_BxLxD, P(None, None, None))
        return placed_as(table_VxD, _rows_added(tokens_BxL, g_BxLxD, 0, words).astype(table_VxD.dtype)), None
    vocabulary_axes, width_axes = axes_of(table[0]), axes_of(table[1])
    own_words = words // math.prod(mesh.shape[axis] for axis in vocabulary_axes)

    def own_share(tokens_BxL: jax.Array, g_BxLxD: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(vocabulary_axes) * own_words
        d_VxD = _rows_added(tokens_BxL, g_BxLxD, first, own_words)
        d_VxD = jax.lax.psum(d_VxD, tuple(axis for axis in axes_of(rows[0]) if axis not in width_axes))
        # Not along the last dim: XLA for TPU would sum it whole where a part is not of 128s.
        parts_VxXxd = d_VxD.reshape(own_words, math.prod(mesh.shape[axis] for axis in width_axes), -1)
        return jax.lax.psum_scatter(parts_VxXxd, width_axes, scatter_dimension=1)

    d_table_VxD = jax.shard_map(
        own_share,
        in_specs=(P(rows[0], None), rows),
        out_specs=table,
        axis_names=set(axes),
        check_vma=False,  # as around it: see `accumulate`
    )(jax.reshard(tokens_BxL, P(rows[0], None)), jax.reshard(g_BxLxD, rows))
    return d_table_VxD.astype(table_VxD.dtype), None


def _rows_added(tokens_BxL: jax.Array, g_BxLxD: jax.Array, first: jax.Array | int, words: int) -> jax.Array:
    """Float32 sums [words, D] of the gradients at each word from `first` on; those at other words are left out."""
    word_BxL = tokens_BxL - first
    # A negative index would count from the end.
    word_BxL = jnp.where(word_BxL < 0, words, word_BxL)
    zeros_VxD = jnp.zeros((words, g_BxLxD.shape[-1]), jnp.float32)
    return zeros_VxD.at[word_BxL].add(g_BxLxD.astype(jnp.float32), mode="drop")


embedded.defvjp(_forward, _backward)
