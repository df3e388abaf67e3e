"""Causal attention and rotary positions.

Legend: B batch, L positions, N query heads, K key and value heads, G = N / K queries a key head, H head dim, h = H / 2,
Q queries of a block, M keys that the block sees.
"""

import math

import jax
import jax.numpy as jnp

QUERY_BLOCKS = 2  # a block of queries meets only the keys up to its end: 3/4 of the square; more gain little


def attention(q_BxLxNxH: jax.Array, k_BxLxKxH: jax.Array, v_BxLxKxH: jax.Array) -> jax.Array:
    """Causal grouped-query attention, scaled by 1 / sqrt(H); [B, L, N, H] in the dtype of `q`.

    Scores and softmax are float32 whatever the inputs.
    """
    B, L, N, H = q_BxLxNxH.shape
    K = k_BxLxKxH.shape[2]
    q_BxLxKxGxH = (q_BxLxNxH * (1 / math.sqrt(H))).reshape(B, L, K, N // K, H)
    # Heads before positions: every batched product is then a plain row-major matrix product.
    q_BxKxGxLxH = q_BxLxKxGxH.transpose(0, 2, 3, 1, 4)
    k_BxKxLxH, v_BxKxLxH = k_BxLxKxH.swapaxes(1, 2), v_BxLxKxH.swapaxes(1, 2)
    size = -(-L // QUERY_BLOCKS)
    blocks = []
    for start in range(0, L, size):
        stop = min(start + size, L)
        keys, values = k_BxKxLxH[:, :, :stop], v_BxKxLxH[:, :, :stop]
        blocks.append(_attend_block(q_BxKxGxLxH[:, :, :, start:stop], keys, values))
    y_BxKxGxLxH = jnp.concatenate(blocks, axis=3)
    return y_BxKxGxLxH.transpose(0, 3, 1, 2, 4).reshape(B, L, N, H)


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position / theta^(2i/H), float32 [L, 1, h] each."""
    frequency_h = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_Lx1xh = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency_h
    return jnp.cos(angle_Lx1xh), jnp.sin(angle_Lx1xh)


def rotate(x_BxLxNxH: jax.Array, cos_Lx1xh: jax.Array, sin_Lx1xh: jax.Array) -> jax.Array:
    """Rotary positions (RoFormer, arXiv 2104.09864): the halves of H turn by the tables' angles; float32 inside."""
    a, b = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos_Lx1xh - b * sin_Lx1xh, b * cos_Lx1xh + a * sin_Lx1xh], axis=-1)
    return rotated.astype(x_BxLxNxH.dtype)


def _attend_block(q_BxKxGxQxH: jax.Array, k_BxKxMxH: jax.Array, v_BxKxMxH: jax.Array) -> jax.Array:
    """The last Q of M positions attend to all M; [B, K, G, Q, H]."""
    queries, keys = q_BxKxGxQxH.shape[3], k_BxKxMxH.shape[2]
    scores_BxKxGxQxM = jnp.einsum("bkgqh,bkmh->bkgqm", q_BxKxGxQxH, k_BxKxMxH, preferred_element_type=jnp.float32)
    visible_QxM = jnp.arange(keys - queries, keys)[:, None] >= jnp.arange(keys)
    weights_BxKxGxQxM = jax.nn.softmax(jnp.where(visible_QxM, scores_BxKxGxQxM, -jnp.inf), axis=-1)
    return jnp.einsum("bkgqm,bkmh->bkgqh", weights_BxKxGxQxM.astype(v_BxKxMxH.dtype), v_BxKxMxH)
