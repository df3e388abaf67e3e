"""Causal attention: one call.

Legend: B batch, L positions, N query heads, K key and value heads, G = N / K queries a key head, H head dim.
"""

import jax
import jax.numpy as jnp


def attention(q_BxLxNxH: jax.Array, k_BxLxKxH: jax.Array, v_BxLxKxH: jax.Array) -> jax.Array:
    """Causal grouped-query attention, scaled by 1 / sqrt(H); [B, L, N, H] in the dtype of `q`.

    Scores and softmax are float32 whatever the inputs.
    """
    return jax.nn.dot_product_attention(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, is_causal=True)


def rotate(x_BxLxNxH: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (RoFormer, arXiv 2104.09864): halves of H rotate by position / theta^(2i/H); float32 inside."""
    length, head_dim = x_BxLxNxH.shape[1], x_BxLxNxH.shape[3]
    frequency_h = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_Lx1xh = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency_h
    cos, sin = jnp.cos(angle_Lx1xh)[None], jnp.sin(angle_Lx1xh)[None]
    a, b = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxLxNxH.dtype)
