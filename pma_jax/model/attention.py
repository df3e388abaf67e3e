"""Causal attention and rotary positions.

Legend: B batch, L positions, N query heads, K key and value heads, G = N / K queries a key head, H head dim, h = H / 2,
Q queries of a block, M keys that the block sees.
"""

import math

import jax
import jax.numpy as jnp

from pma_jax.mesh import placed_as

QUERY_BLOCKS = 2  # a block of queries meets only the keys up to its end: 3/4 of the square; more gain little


def attention(q_BxLxNxH: jax.Array, k_BxLxKxH: jax.Array, v_BxLxKxH: jax.Array) -> jax.Array:
    """Causal grouped-query attention, scaled by 1 / sqrt(H); [B, L, N, H] in the dtype of `q`.

    Scores and softmax are float32 whatever the inputs.
    """
    B, L, N, H = q_BxLxNxH.shape
    K = k_BxLxKxH.shape[2]
    q_BxLxKxGxH = (q_BxLxNxH * (1 / math.sqrt(H))).reshape(B, L, K, N // K, H)
    # Heads before positions, and keys and values transposed: every batched product, the gradients' too, then reads its
    # large operand row by row.
    q_BxKxGxLxH = q_BxLxKxGxH.transpose(0, 2, 3, 1, 4)
    k_BxKxHxL, v_BxKxHxL = k_BxLxKxH.transpose(0, 2, 3, 1), v_BxLxKxH.transpose(0, 2, 3, 1)
    size = -(-L // QUERY_BLOCKS)
    blocks = []
    for start in range(0, L, size):
        stop = min(start + size, L)
        q_BxKxGxQxH = q_BxKxGxLxH[:, :, :, start:stop]
        blocks.append(_attend_block(q_BxKxGxQxH, k_BxKxHxL[..., :stop], v_BxKxHxL[..., :stop]))
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


@jax.custom_vjp
def _attend_block(q_BxKxGxQxH: jax.Array, k_BxKxHxM: jax.Array, v_BxKxHxM: jax.Array) -> jax.Array:
    """The last Q of M positions attend to all M; [B, K, G, Q, H]."""
    return _attend_block_forward(q_BxKxGxQxH, k_BxKxHxM, v_BxKxHxM)[0]


def _attend_block_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    queries, keys = q.shape[3], k.shape[3]
    scores_BxKxGxQxM = jnp.einsum("bkgqh,bkhm->bkgqm", q, k, preferred_element_type=jnp.float32)
    visible_QxM = jnp.arange(keys - queries, keys)[:, None] >= jnp.arange(keys)
    scores_BxKxGxQxM = jnp.where(visible_QxM, scores_BxKxGxQxM, -jnp.inf)
    weights_BxKxGxQxM = jnp.exp(scores_BxKxGxQxM - jnp.max(scores_BxKxGxQxM, axis=-1, keepdims=True))
    inverse_BxKxGxQx1 = 1 / jnp.sum(weights_BxKxGxQxM, axis=-1, keepdims=True)
    weights_BxKxGxQxM = weights_BxKxGxQxM.astype(v.dtype)
    # Normalised after the product: H numbers a query to scale, not M.
    y_BxKxGxQxH = jnp.einsum("bkgqm,bkhm->bkgqh", weights_BxKxGxQxM, v, preferred_element_type=jnp.float32)
    y_BxKxGxQxH = (y_BxKxGxQxH * inverse_BxKxGxQx1).astype(q.dtype)
    return y_BxKxGxQxH, (q, k, v, weights_BxKxGxQxM, inverse_BxKxGxQx1, y_BxKxGxQxH)


def _attend_block_backward(saved: tuple[jax.Array, ...], g_BxKxGxQxH: jax.Array) -> tuple[jax.Array, ...]:
    # The softmax's row sum over M, of weights times their gradients, equals one over H, of outputs times theirs
    # (FlashAttention, arXiv 2205.14135, Appendix B.2); what autodiff derives, XLA on CPU runs at half the speed.
    q, k, v, weights_BxKxGxQxM, inverse_BxKxGxQx1, y_BxKxGxQxH = saved
    g32_BxKxGxQxH = g_BxKxGxQxH.astype(jnp.float32) * inverse_BxKxGxQx1
    row_BxKxGxQx1 = jnp.sum(g32_BxKxGxQxH * y_BxKxGxQxH, axis=-1, keepdims=True)
    g_BxKxGxQxH = g32_BxKxGxQxH.astype(q.dtype)
    d_weights_BxKxGxQxM = jnp.einsum("bkgqh,bkhm->bkgqm", g_BxKxGxQxH, v, preferred_element_type=jnp.float32)
    d_scores_BxKxGxQxM = (weights_BxKxGxQxM * (d_weights_BxKxGxQxM - row_BxKxGxQx1)).astype(q.dtype)
    d_q = jnp.einsum("bkgqm,bkhm->bkgqh", d_scores_BxKxGxQxM, k)
    d_k = jnp.einsum("bkgqh,bkgqm->bkhm", q, d_scores_BxKxGxQxM)
    d_v = jnp.einsum("bkgqh,bkgqm->bkhm", g_BxKxGxQxH, weights_BxKxGxQxM)
    return tuple(placed_as(x, d) for x, d in ((q, d_q), (k, d_k), (v, d_v)))


_attend_block.defvjp(_attend_block_forward, _attend_block_backward)
