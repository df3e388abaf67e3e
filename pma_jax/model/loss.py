"""The loss of a batch and of a data set, in nats per target token, and its conversion to other units.

Legend: B batch, L positions, M = L + 1 tokens of a window, D width, E experts, T layers.

Negative ids are masked: t < 0 encodes the token -t - 1. The model reads that token as an input, but the token is
excluded from the loss as a target, for example in a prompt. Padding is -1, so the model reads token 0.
"""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from pma_jax.model.cross_entropy import cross_entropy, cross_entropy_of_targets
from pma_jax.model.decoder import Params, make_decoder

# Maximum number of dispatched, unfinished batches. XLA admits 32 programs per device. With several simulated devices on
# a CPU, further programs wait on the threads that the running programs need for their collectives: a deadlock.
MAX_BATCHES_IN_FLIGHT = 8


def loss_sums(
    graph: nnx.GraphDef,
    params: Params,
    tokens_BxM: jax.Array,
    z_loss_weight: float = 0.0,
    balance_loss_weight: float = 0.0,
    router_z_loss_weight: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum the training objective over the targets of a batch.

    The objective is cross-entropy plus `z_loss_weight` times log(Z)^2, plus the routers' auxiliary losses. The
    auxiliary losses include padding positions, which are routed too. The results are sums rather than means, so that
    those of batches with different numbers of targets can be added.

    Returns:
        The objective (float32), and a dict with the float32 sums `nats` (cross-entropy) and `count` (targets), and for
        a mixture of experts `load_TxE` (int32, tokens per expert of each layer).
    """
    inputs_BxL, targets_BxL = tokens_BxM[:, :-1], tokens_BxM[:, 1:]
    model = make_decoder(graph, params)
    x_BxLxD, router = model.hidden_states(decode_masked_ids(inputs_BxL))
    chunk_tokens = model.config.logits_chunk_tokens
    objective, nats = cross_entropy(x_BxLxD, model.head(), targets_BxL, z_loss_weight, chunk_tokens)
    sums = {"nats": nats, "count": jnp.sum((targets_BxL >= 0).astype(jnp.float32))}
    if router:
        objective += balance_loss_weight * jnp.sum(router["balance"]) + router_z_loss_weight * jnp.sum(router["z"])
        sums["load_TxE"] = router["load_E"]  # stacked over layers
    return objective, sums


def decode_masked_ids(ids_BxL: jax.Array) -> jax.Array:
    """Return the ids of the tokens that the model reads: -t - 1 for a masked id t < 0, other ids unchanged."""
    return jnp.where(ids_BxL < 0, ~ids_BxL, ids_BxL)


@functools.partial(jax.jit, static_argnums=0)
def evaluation_step(graph: nnx.GraphDef, params: Params, tokens_BxM: jax.Array) -> jax.Array:
    """Return the cross-entropy in nats of each target of a batch: float32 [B, L], replicated; 0 for masked targets."""
    model = make_decoder(graph, params)
    x_BxLxD, _ = model.hidden_states(decode_masked_ids(tokens_BxM[:, :-1]))
    nats_BxL, _ = cross_entropy_of_targets(x_BxLxD, model.head(), tokens_BxM[:, 1:], model.config.logits_chunk_tokens)
    return jax.reshard(nats_BxL, P(None, None))


@functools.partial(jax.jit, static_argnums=0)
def score_step(graph: nnx.GraphDef, params: Params, tokens_BxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Score the targets of each row of a batch.

    Returns:
        float32 [B], the sum of their cross-entropy in nats; and bool [B], whether each of them is the most likely
        token. Both are replicated. Masked targets do not count.
    """
    targets_BxL = tokens_BxM[:, 1:]
    model = make_decoder(graph, params)
    x_BxLxD, _ = model.hidden_states(decode_masked_ids(tokens_BxM[:, :-1]))
    nats_BxL, is_largest_BxL = cross_entropy_of_targets(
        x_BxLxD, model.head(), targets_BxL, model.config.logits_chunk_tokens
    )
    scores = jnp.sum(nats_BxL, axis=1), jnp.all(is_largest_BxL | (targets_BxL < 0), axis=1)
    return jax.reshard(scores, P(None))


def evaluate(graph: nnx.GraphDef, params: Params, batches: Iterable[jax.Array]) -> np.ndarray:
    """Compute the cross-entropy in nats of each target of batches of int32 [B, M]. Call under `jax.set_mesh`.

    Returns:
        float32 [R, L], the rows of all batches; 0 for masked targets. It is the same in all processes.
    """
    parts: list[jax.Array] = []
    for tokens_BxM in batches:
        parts.append(evaluation_step(graph, params, tokens_BxM))
        if len(parts) > MAX_BATCHES_IN_FLIGHT:
            parts[-1 - MAX_BATCHES_IN_FLIGHT].block_until_ready()
    return np.concatenate(jax.device_get(parts))


def perplexity(nats_per_token: float) -> float:
    """Convert the loss to perplexity, exp(loss)."""
    return math.exp(nats_per_token)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert the loss to bits per UTF-8 byte, which is comparable between tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
