"""Flash attention from vendor libraries: cuDNN on GPU, Splash on TPU.

Legend: B batch, L positions, N query heads, K key and value heads, G = N / K query heads per key head, H head dim.
Arrays are one device's shards: `attention.attention` maps these functions over devices that split batch and heads.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

LANES = 128  # a block of Splash has a multiple of this many positions
MAX_BLOCK = 512


def cudnn_supports(length: int, head_dim: int, dtype: jnp.dtype) -> bool:
    """Return whether cuDNN supports this shape: 16-bit inputs, head dims up to 128 in multiples of 8."""
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128 and length > 1


def splash_supports(length: int, head_dim: int, dtype: jnp.dtype) -> bool:
    """Return whether Splash supports this shape: lengths in multiples of 128, head dims in multiples of 64."""
    return length % LANES == 0 and head_dim % 64 == 0 and dtype in (jnp.bfloat16, jnp.float32)


def cudnn_attention(
    q_BxLxNxH: jax.Array,
    k_BxLxKxH: jax.Array,
    v_BxLxKxH: jax.Array,
    segment_ids_BxL: jax.Array | None,
    window_tokens: int,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Compute causal attention by `jax.nn.dot_product_attention`.

    Args:
        q_BxLxNxH: Queries.
        k_BxLxKxH: Keys.
        v_BxLxKxH: Values.
        segment_ids_BxL: Positions attend only to positions with an equal id; None for a single segment. The mask takes
            B L L bytes.
        window_tokens: Number of positions that a position attends to, including itself; 0 for no limit.
        implementation: Passed on; "xla" runs on any platform.

    Returns:
        [B, L, N, H].
    """
    same_Bx1xLxL = (
        None if segment_ids_BxL is None else (segment_ids_BxL[:, None, :, None] == segment_ids_BxL[:, None, None])
    )
    return jax.nn.dot_product_attention(
        q_BxLxNxH,
        k_BxLxKxH,
        v_BxLxKxH,
        mask=same_Bx1xLxL,
        is_causal=True,
        local_window_size=(window_tokens - 1, 0) if window_tokens else None,
        implementation=implementation,
    )


def splash_attention(
    q_BxLxNxH: jax.Array,
    k_BxLxKxH: jax.Array,
    v_BxLxKxH: jax.Array,
    segment_ids_BxL: jax.Array | None,
    window_tokens: int,
    interpret: bool = False,
) -> jax.Array:
    """Compute the same as `cudnn_attention` by Splash; `interpret` emulates the kernel slowly on any platform."""
    # Imported here, because Pallas is slow to import and only needed on TPU.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, L, N, H = q_BxLxNxH.shape
    K = k_BxLxKxH.shape[2]
    q_BxKxGxLxH = (q_BxLxNxH * (1 / math.sqrt(H))).reshape(B, L, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BxKxLxH, v_BxKxLxH = k_BxLxKxH.transpose(0, 2, 1, 3), v_BxLxKxH.transpose(0, 2, 1, 3)
    mask = masks.LocalMask((L, L), (window_tokens - 1, 0), 0) if window_tokens else masks.CausalMask((L, L))
    block = math.gcd(L, MAX_BLOCK)
    kernel = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * (N // K)),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            use_fused_bwd_kernel=True,
        ),
        interpret=interpret,
    )
    segments = None if segment_ids_BxL is None else splash.SegmentIds(segment_ids_BxL, segment_ids_BxL)
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    y_BxKxGxLxH: Any = jax.vmap(over_heads)(q_BxKxGxLxH, k_BxKxLxH, v_BxKxLxH, segments)
    return y_BxKxGxLxH.transpose(0, 3, 1, 2, 4).reshape(B, L, N, H)
