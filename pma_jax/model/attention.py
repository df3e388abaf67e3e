"""Causal attention with one kernel per platform, and rotary position embeddings.

Legend: B batch, L positions, N query heads, K key and value heads, G = N / K query heads per key head, H head dim,
h = H / 2, Q queries of a block, M keys that the block attends to.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pma_jax.model.kernels.flash_attention import cudnn_attention, cudnn_supports, splash_attention, splash_supports
from pma_jax.runtime.mesh import RULES, map_over_devices, reshard_like

QUERY_BLOCKS = 2  # 2 blocks compute 3/4 of the L x L scores, as none reads keys after its end
KERNELS = {
    "gpu": (cudnn_supports, cudnn_attention),
    "tpu": (splash_supports, splash_attention),
}  # platform -> (supports, kernel)


def attention(
    q_BxLxNxH: jax.Array,
    k_BxLxKxH: jax.Array,
    v_BxLxKxH: jax.Array,
    segment_ids_BxL: jax.Array | None = None,
    window_tokens: int = 0,
) -> jax.Array:
    """Compute causal grouped-query attention, scaled by 1 / sqrt(H).

    The softmax is float32 for all dtypes. The platform of the mesh determines the kernel: cuDNN's flash attention on
    GPU and Splash on TPU, if they support the shape (`cudnn_supports`, `splash_supports`), else XLA.

    Args:
        q_BxLxNxH: Queries.
        k_BxLxKxH: Keys; query head n reads key head n // G.
        v_BxLxKxH: Values.
        segment_ids_BxL: int32; positions attend only within their segment. None: each row is one segment.
        window_tokens: Each position attends to itself and the `window_tokens - 1` positions before it; 0: to itself and
            all positions before it.

    Returns:
        [B, L, N, H] in the dtype of the queries.
    """
    mesh = jax.sharding.get_abstract_mesh()
    platform = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    supports, kernel = KERNELS.get(platform, (None, None))
    if supports is None or kernel is None or not supports(q_BxLxNxH.shape[1], q_BxLxNxH.shape[3], q_BxLxNxH.dtype):
        return xla_attention(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, segment_ids_BxL, window_tokens)
    kernel = functools.partial(kernel, window_tokens=window_tokens)
    if not mesh.empty:  # each device computes complete sequences and heads
        heads, rows = RULES.spec("batch", None, "heads", None), RULES.spec("batch", None)
        kernel = map_over_devices(kernel, (heads, heads, heads, None if segment_ids_BxL is None else rows), heads)
    return kernel(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, segment_ids_BxL)


def xla_attention(
    q_BxLxNxH: jax.Array,
    k_BxLxKxH: jax.Array,
    v_BxLxKxH: jax.Array,
    segment_ids_BxL: jax.Array | None,
    window_tokens: int,
) -> jax.Array:
    """Compute `attention` on any platform, with memory for all L x L scores."""
    B, L, N, H = q_BxLxNxH.shape
    K = k_BxLxKxH.shape[2]
    # Shard K explicitly: JAX would shard G, the query heads that share a key head.
    grouped_spec = RULES.spec("batch", None, "heads", None, None)
    q_BxLxKxGxH = _reshape_with_sharding(q_BxLxNxH * (1 / math.sqrt(H)), (B, L, K, N // K, H), grouped_spec)
    # In this layout every batched matmul, forward and backward, reads its larger operand contiguously.
    q_BxKxGxLxH = q_BxLxKxGxH.transpose(0, 2, 3, 1, 4)
    k_BxKxHxL, v_BxKxHxL = k_BxLxKxH.transpose(0, 2, 3, 1), v_BxLxKxH.transpose(0, 2, 3, 1)
    size = -(-L // QUERY_BLOCKS)
    blocks = []
    for start in range(0, L, size):
        stop = min(start + size, L)
        first = max(0, start - window_tokens + 1) if window_tokens else 0
        visible = _mask(start, stop, first, segment_ids_BxL, window_tokens)
        q_BxKxGxQxH = q_BxKxGxLxH[:, :, :, start:stop]
        blocks.append(_attend_block(q_BxKxGxQxH, k_BxKxHxL[..., first:stop], v_BxKxHxL[..., first:stop], visible))
    y_BxKxGxLxH = jnp.concatenate(blocks, axis=3)
    y_BxLxKxGxH = y_BxKxGxLxH.transpose(0, 3, 1, 2, 4)
    return _reshape_with_sharding(y_BxLxKxGxH, (B, L, N, H), RULES.spec("batch", None, "heads", None))


def _reshape_with_sharding(x: jax.Array, shape: tuple[int, ...], spec: jax.P) -> jax.Array:
    return jnp.reshape(x, shape, out_sharding=None if jax.sharding.get_abstract_mesh().empty else spec)


def _mask(start: int, stop: int, first: int, segment_ids_BxL: jax.Array | None, window_tokens: int) -> jax.Array:
    """Compute which of the keys [first, stop) each of the queries [start, stop) attends to.

    Returns:
        bool, [Q, M] or, with segments, [B, 1, 1, Q, M].
    """
    distance_QxM = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
    visible_QxM = distance_QxM >= 0
    if window_tokens:
        visible_QxM &= distance_QxM < window_tokens
    if segment_ids_BxL is None:
        return visible_QxM
    same_BxQxM = segment_ids_BxL[:, start:stop, None] == segment_ids_BxL[:, None, first:stop]
    return (same_BxQxM & visible_QxM)[:, None, None]


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Compute cos and sin of position / theta^(2i/H) for i in [0, h), float32 [L, 1, h] each."""
    frequency_h = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_Lx1xh = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency_h
    return jnp.cos(angle_Lx1xh), jnp.sin(angle_Lx1xh)


def rotary_tables_of_layer(
    tables: tuple[jax.Array, jax.Array], layer: jax.Array, no_rope_interval: int
) -> tuple[jax.Array, jax.Array]:
    """Return the tables of a layer, counted from 0: every `no_rope_interval`-th does not rotate; 0: all do."""
    if not no_rope_interval:
        return tables
    is_rotated = (layer + 1) % no_rope_interval != 0
    return jnp.where(is_rotated, tables[0], 1.0), jnp.where(is_rotated, tables[1], 0.0)


def apply_rotary(x_BxLxNxH: jax.Array, cos_Lx1xh: jax.Array, sin_Lx1xh: jax.Array) -> jax.Array:
    """Rotate each pair (x[i], x[i + h]) of H by the angle of its position and i, in float32 (arXiv 2104.09864)."""
    a, b = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos_Lx1xh - b * sin_Lx1xh, b * cos_Lx1xh + a * sin_Lx1xh], axis=-1)
    return rotated.astype(x_BxLxNxH.dtype)


@jax.custom_vjp
def _attend_block(q_BxKxGxQxH: jax.Array, k_BxKxHxM: jax.Array, v_BxKxHxM: jax.Array, visible: jax.Array) -> jax.Array:
    """Compute the attention of Q queries over M keys; every query needs a visible key. Returns [B, K, G, Q, H]."""
    return _attend_block_forward(q_BxKxGxQxH, k_BxKxHxM, v_BxKxHxM, visible)[0]


def _attend_block_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores_BxKxGxQxM = jnp.einsum("bkgqh,bkhm->bkgqm", q, k, preferred_element_type=jnp.float32)
    scores_BxKxGxQxM = jnp.where(visible, scores_BxKxGxQxM, -jnp.inf)
    weights_BxKxGxQxM = jnp.exp(scores_BxKxGxQxM - jnp.max(scores_BxKxGxQxM, axis=-1, keepdims=True))
    inverse_BxKxGxQx1 = 1 / jnp.sum(weights_BxKxGxQxM, axis=-1, keepdims=True)
    weights_BxKxGxQxM = weights_BxKxGxQxM.astype(v.dtype)
    # Normalise after the matmul, because this scales H numbers per query instead of M.
    y_BxKxGxQxH = jnp.einsum("bkgqm,bkhm->bkgqh", weights_BxKxGxQxM, v, preferred_element_type=jnp.float32)
    y_BxKxGxQxH = (y_BxKxGxQxH * inverse_BxKxGxQx1).astype(q.dtype)
    return y_BxKxGxQxH, (q, k, v, weights_BxKxGxQxM, inverse_BxKxGxQx1, y_BxKxGxQxH)


def _attend_block_backward(residuals: tuple[jax.Array, ...], g_BxKxGxQxH: jax.Array) -> tuple[jax.Array | None, ...]:
    # In the gradient of the softmax, the sum over M of weights times their gradients equals the sum over H of outputs
    # times their gradients (FlashAttention, arXiv 2205.14135, Appendix B.2). On CPU, autodiff runs at half the speed.
    q, k, v, weights_BxKxGxQxM, inverse_BxKxGxQx1, y_BxKxGxQxH = residuals
    g32_BxKxGxQxH = g_BxKxGxQxH.astype(jnp.float32) * inverse_BxKxGxQx1
    row_BxKxGxQx1 = jnp.sum(g32_BxKxGxQxH * y_BxKxGxQxH, axis=-1, keepdims=True)
    g_BxKxGxQxH = g32_BxKxGxQxH.astype(q.dtype)
    d_weights_BxKxGxQxM = jnp.einsum("bkgqh,bkhm->bkgqm", g_BxKxGxQxH, v, preferred_element_type=jnp.float32)
    d_scores_BxKxGxQxM = (weights_BxKxGxQxM * (d_weights_BxKxGxQxM - row_BxKxGxQx1)).astype(q.dtype)
    d_q = jnp.einsum("bkgqm,bkhm->bkgqh", d_scores_BxKxGxQxM, k)
    d_k = jnp.einsum("bkgqh,bkgqm->bkhm", q, d_scores_BxKxGxQxM)
    d_v = jnp.einsum("bkgqh,bkgqm->bkhm", g_BxKxGxQxH, weights_BxKxGxQxM)
    return *(reshard_like(x, d) for x, d in ((q, d_q), (k, d_k), (v, d_v))), None


_attend_block.defvjp(_attend_block_forward, _attend_block_backward)
