"""Held-out loss: nats a token, and what follows from it.

Legend: B batch, L positions, M = L + 1 tokens of a window, D width. An id t below 0 is not counted as a target; as an
input it stands for -t - 1, so that what is not learned (a prompt) is still seen. Padding, -1, is seen as id 0.
"""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pma_jax.model.cross_entropy import cross_entropy
from pma_jax.model.decoder import Params, make_decoder

PADDING = -1
# Batches that were begun and are not done. Where a CPU counts as several devices, XLA holds back programs beyond 32 a
# device on the threads that the running ones need to meet in their collectives: then nothing ever ends.
MAX_BATCHES_IN_FLIGHT = 8


def loss_sums(
    graph: nnx.GraphDef,
    params: Params,
    tokens_BxM: jax.Array,
    z_loss_weight: float = 0.0,
    balance_loss_weight: float = 0.0,
    router_z_loss_weight: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums over the tokens that count: the objective, and `nats` and `count` apart; `load_TxE` where there are experts.

    The objective is cross-entropy plus `z_loss_weight` times log(Z)^2, plus the routers' auxiliary losses (padding
    counts there: it is routed too). Sums, not means, so that batches of any raggedness add up exactly.
    """
    inputs_BxL, targets_BxL = tokens_BxM[:, :-1], tokens_BxM[:, 1:]
    model = make_decoder(graph, params)
    x_BxLxD, router = model.hidden(unmask_ids(inputs_BxL))
    chunk_tokens = model.config.logits_chunk_tokens
    objective, nats = cross_entropy(x_BxLxD, model.head(), targets_BxL, z_loss_weight, chunk_tokens)
    sums = {"nats": nats, "count": jnp.sum((targets_BxL >= 0).astype(jnp.float32))}
    if router:
        objective += balance_loss_weight * jnp.sum(router["balance"]) + router_z_loss_weight * jnp.sum(router["z"])
        sums["load_TxE"] = router["load_E"]
    return objective, sums


def unmask_ids(inputs_BxL: jax.Array) -> jax.Array:
    """The ids that the model reads: t, and -t - 1 where t is below 0."""
    return jnp.where(inputs_BxL < 0, ~inputs_BxL, inputs_BxL)


@functools.partial(jax.jit, static_argnums=0)
def evaluation_step(graph: nnx.GraphDef, params: Params, tokens_BxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of nats and count of the tokens of one batch: what `evaluate` runs on each."""
    _, sums = loss_sums(graph, params, tokens_BxM)
    return sums["nats"], sums["count"]


def evaluate(graph: nnx.GraphDef, params: Params, batches: Iterable[jax.Array]) -> float:
    """Mean nats a token over `batches` of int32 [B, M]; call under `jax.set_mesh`."""
    sums = []
    for tokens_BxM in batches:
        sums.append(evaluation_step(graph, params, tokens_BxM))
        if len(sums) > MAX_BATCHES_IN_FLIGHT:
            jax.block_until_ready(sums[-1 - MAX_BATCHES_IN_FLIGHT])
    nats, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
    return float(nats / count)


def perplexity(nats_per_token: float) -> float:
    """Exp of the loss."""
    return math.exp(nats_per_token)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in bits a byte of UTF-8: comparable between tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
