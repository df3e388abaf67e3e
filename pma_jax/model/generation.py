"""Greedy generation with a cache of keys and values.

The prompts of a batch end at the same position: shorter ones are padded on the left. Rotary embeddings depend on
distances only, so padding does not change what a row generates.

Legend: B batch, P positions of the padded prompts, M positions of the cache, L positions of one call, T layers,
D width, N query heads, K key and value heads, G = N / K, H head dim, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from pma_jax.config import ModelConfig
from pma_jax.model.attention import attention, rotary_tables, rotary_tables_of_layer
from pma_jax.model.decoder import Block, Decoder, Params, cast_matrices, make_decoder, segment_ids
from pma_jax.model.layers import embed_tokens, rms_norm
from pma_jax.runtime.mesh import RULES, gather_batch_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """A batch of unfinished texts."""

    tokens: jax.Array  # int32 [B, M]: the padded prompts, then what is generated
    first: jax.Array  # int32 [B], the position of each row's first token
    keys: jax.Array  # [T, B, M, K, H] in the compute dtype, of the positions before the newest token
    values: jax.Array  # as keys
    position: jax.Array  # int32, the position of the newest token


@functools.partial(jax.jit, static_argnums=(0, 4))
def start_generation(
    graph: nnx.GraphDef, params: Params, prompts_BxP: jax.Array, first_B: jax.Array, room: int
) -> Generation:
    """Read the prompts, and choose the first token of each row. Call under `jax.set_mesh`.

    Args:
        graph: The model.
        params: Its parameters.
        prompts_BxP: int32; each row's prompt ends at the last position.
        first_B: int32, the position of the first token of each prompt, less than P.
        room: How many tokens `continue_generation` may return in all.
    """
    model = make_decoder(graph, params)
    c, (B, length) = model.config, prompts_BxP.shape
    M = length + room + 1
    shape, spec = (c.layers, B, M, c.kv_heads, c.head_dim), RULES.spec(None, "batch", None, "heads", None)
    empty = jnp.zeros(shape, jnp.dtype(c.compute_dtype), out_sharding=spec)
    tokens_BxM = jnp.pad(prompts_BxP, ((0, 0), (0, room + 1)))
    start = Generation(tokens_BxM, first_B, empty, empty, jnp.int32(0))
    return _extend(model, _blocks(model), start, length)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def continue_generation(
    graph: nnx.GraphDef, params: Params, generation: Generation, count: int
) -> tuple[Generation, jax.Array]:
    """Choose more tokens of each row. Call under `jax.set_mesh`.

    Returns:
        The longer texts; and int32 [B, count], replicated: the next `count` tokens of each row.
    """
    model = make_decoder(graph, params)
    blocks, first = _blocks(model), generation.position

    def step(generation: Generation, _: None) -> tuple[Generation, None]:
        return _extend(model, blocks, generation, 1), None

    generation, _ = jax.lax.scan(step, generation, None, length=count)
    chosen_BxC = jax.lax.dynamic_slice_in_dim(generation.tokens, first, count, axis=1)
    return generation, jax.reshard(chosen_BxC, P(None, None))


def _blocks(model: Decoder) -> Block:
    """Return the blocks with matrices in the compute dtype, cast once for all tokens."""
    return cast_matrices(model.blocks, jnp.dtype(model.config.compute_dtype))


def _extend(model: Decoder, blocks: Block, generation: Generation, length: int) -> Generation:
    """Read the tokens at the next `length` positions, and write the most likely token after them."""
    c, start = model.config, generation.position
    tokens_BxL = jax.lax.dynamic_slice_in_dim(generation.tokens, start, length, axis=1)
    x_BxLxD = embed_tokens(model.embedding_VxD[...], tokens_BxL, jnp.dtype(c.compute_dtype))
    M = generation.tokens.shape[1]
    rotary: Any = [
        jax.lax.dynamic_slice_in_dim(table, start, length) for table in rotary_tables(M, c.head_dim, c.rope_theta)
    ]
    segments_BxM = _segments(c, generation)

    def step(carry: tuple[jax.Array, Any], layer: tuple[Block, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
        (x_BxLxD, caches), (block, t) = carry, layer
        caches = list(caches)  # carried, so that XLA writes to them in place

        def attend(q_BxLxNxH: jax.Array, k_BxLxKxH: jax.Array, v_BxLxKxH: jax.Array) -> jax.Array:
            for i, new in enumerate((k_BxLxKxH, v_BxLxKxH)):
                caches[i] = jax.lax.dynamic_update_slice(caches[i], new[None], (t, 0, start, 0, 0))
            if length > 1:  # the prompts, which are read first
                window = c.attention_window_tokens
                return attention(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, segments_BxM[:, :length], window)
            keys, values = (jax.lax.dynamic_index_in_dim(cache, t, keepdims=False) for cache in caches)
            return _attend_to_cache(q_BxLxNxH, keys, values, _visible(c, segments_BxM, start))

        x_BxLxD, _ = block(x_BxLxD, rotary_tables_of_layer(rotary, t, c.no_rope_interval), attend)
        return (x_BxLxD, tuple(caches)), None

    carry = x_BxLxD, (generation.keys, generation.values)
    (x_BxLxD, (keys, values)), _ = jax.lax.scan(step, carry, (blocks, jnp.arange(c.layers)))
    x_BxD = rms_norm(x_BxLxD[:, -1], model.final_norm_D[...], c.norm_epsilon)
    head_DxV = gather_batch_axes(model.head())
    spec = RULES.spec("batch", "vocabulary")
    logits_BxV = jnp.einsum("bd,dv->bv", x_BxD, head_DxV, out_sharding=spec, preferred_element_type=jnp.float32)
    chosen_B = jnp.argmax(jax.reshard(logits_BxV, RULES.spec("batch", None)), axis=1).astype(jnp.int32)
    end = start + length
    tokens_BxM = jax.lax.dynamic_update_slice_in_dim(generation.tokens, chosen_B[:, None], end, axis=1)
    return dataclasses.replace(generation, tokens=tokens_BxM, keys=keys, values=values, position=end)


def _segments(config: ModelConfig, generation: Generation) -> jax.Array:
    """Return the document number of each token, from 1, and 0 for the padding: int32 [B, M]."""
    tokens_BxM = generation.tokens
    is_text_BxM = jnp.arange(tokens_BxM.shape[1]) >= generation.first[:, None]
    if config.separator_token < 0:
        return is_text_BxM.astype(jnp.int32)
    return jnp.where(is_text_BxM, 1 + segment_ids(tokens_BxM, config.separator_token), 0)


def _visible(config: ModelConfig, segments_BxM: jax.Array, position: jax.Array) -> jax.Array:
    """Compute which positions of the cache the token at `position` attends to: bool [B, M]."""
    distance_M = position - jnp.arange(segments_BxM.shape[1])
    visible_M = distance_M >= 0
    if config.attention_window_tokens:
        visible_M &= distance_M < config.attention_window_tokens
    own_Bx1 = jax.lax.dynamic_slice_in_dim(segments_BxM, position, 1, axis=1)
    return visible_M & (segments_BxM == own_Bx1)


def _attend_to_cache(
    q_Bx1xNxH: jax.Array, k_BxMxKxH: jax.Array, v_BxMxKxH: jax.Array, visible_BxM: jax.Array
) -> jax.Array:
    """Compute the attention of one position over the cache, as `attention` does: [B, 1, N, H]."""
    (B, _, N, H), K = q_Bx1xNxH.shape, k_BxMxKxH.shape[2]
    spec = RULES.spec("batch", "heads", None, None)
    q_BxKxGxH = jnp.reshape(q_Bx1xNxH * (1 / math.sqrt(H)), (B, K, N // K, H), out_sharding=spec)
    scores_BxKxGxM = jnp.einsum(
        "bkgh,bmkh->bkgm", q_BxKxGxH, k_BxMxKxH, out_sharding=spec, preferred_element_type=jnp.float32
    )
    weights_BxKxGxM = jax.nn.softmax(jnp.where(visible_BxM[:, None, None], scores_BxKxGxM, -jnp.inf))
    y_BxKxGxH = jnp.einsum("bkgm,bmkh->bkgh", weights_BxKxGxM.astype(q_Bx1xNxH.dtype), v_BxMxKxH, out_sharding=spec)
    return jnp.reshape(y_BxKxGxH, q_Bx1xNxH.shape, out_sharding=RULES.spec("batch", None, "heads", None))
