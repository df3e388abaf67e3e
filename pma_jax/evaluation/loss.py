"""Held-out loss: nats a token, and what follows from it.

Legend: B batch, L positions, M = L + 1 tokens of a window, V vocabulary. A token id below 0 is padding: not counted.
"""

import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pma_jax.mesh import RULES
from pma_jax.model.decoder import Params, apply_with_router

PADDING = -1


def loss_sums(
    graph: nnx.GraphDef,
    params: Params,
    tokens_BxM: jax.Array,
    z_loss_weight: float = 0.0,
    balance_loss_weight: float = 0.0,
    router_z_loss_weight: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums over the tokens that count: the objective, and `nats` and `count` apart; `load_TxE` where there are experts.

    The objective is cross-entropy plus `z_loss_weight` times log(Z)^2 (PaLM, arXiv 2204.02311, Section 5), plus the
    routers' auxiliary losses (padding counts there: it is routed too). Sums, not means, so that batches of any
    raggedness add up exactly.
    """
    inputs_BxL, targets_BxL = tokens_BxM[:, :-1], tokens_BxM[:, 1:]
    counted_BxL = (targets_BxL >= 0).astype(jnp.float32)
    logits_BxLxV, router = apply_with_router(graph, params, jnp.maximum(inputs_BxL, 0))
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    # A product with a one-hot, not a gather: it works when the vocabulary is split, and XLA fuses it.
    one_hot_BxLxV = jax.nn.one_hot(targets_BxL, logits_BxLxV.shape[-1], dtype=logits_BxLxV.dtype)
    nats = jnp.sum((log_z_BxL - jnp.sum(logits_BxLxV * one_hot_BxLxV, axis=-1)) * counted_BxL)
    objective = nats + z_loss_weight * jnp.sum(jnp.square(log_z_BxL) * counted_BxL)
    sums = {"nats": nats, "count": jnp.sum(counted_BxL)}
    if router:
        objective += balance_loss_weight * jnp.sum(router["balance"]) + router_z_loss_weight * jnp.sum(router["z"])
        sums["load_TxE"] = router["load_E"]
    return objective, sums


@functools.partial(jax.jit, static_argnums=0)
def _evaluation_step(graph: nnx.GraphDef, params: Params, tokens_BxM: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, sums = loss_sums(graph, params, tokens_BxM)
    return sums["nats"], sums["count"]


def evaluate(graph: nnx.GraphDef, params: Params, batches: Iterable[jax.Array]) -> float:
    """Mean nats a token over `batches` of int32 [B, M]; call under `jax.set_mesh`."""
    sums = [_evaluation_step(graph, params, tokens_BxM) for tokens_BxM in batches]
    nats, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
    return float(nats / count)


def on_mesh(mesh: jax.sharding.Mesh, tokens_BxM: np.ndarray) -> jax.Array:
    """This process's rows of a batch as one array split along the batch axes."""
    sharding = jax.NamedSharding(mesh, RULES.spec("batch", None))
    return jax.make_array_from_process_local_data(sharding, tokens_BxM)


def perplexity(nats_per_token: float) -> float:
    """exp of the loss."""
    return math.exp(nats_per_token)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in bits a byte of UTF-8: comparable between tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
