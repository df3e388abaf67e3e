"""The loss on text as a plain function of the parameters, which can be differentiated twice.

Legend: B sequences, L positions, M = L + 1 tokens of a window, V vocabulary.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from pma_jax.model.decoder import Params, apply
from pma_jax.model.loss import unmask_ids


def text_loss(graph: nnx.GraphDef, batches: Sequence[jax.Array]) -> Callable[[Params], jax.Array]:
    """Mean nats a token over `batches` of int32 [B, M] (below 0: not counted), as `evaluation.loss.evaluate` counts it.

    Training's cross-entropy never holds the logits and so has a gradient rule of its own, which has no second
    derivative; this one holds them, a batch at a time. Call under `jax.set_mesh`.
    """

    def loss(params: Params) -> jax.Array:
        sums = [_sums(apply(graph, params, unmask_ids(b[:, :-1])), b[:, 1:]) for b in batches]
        nats, count = jnp.sum(jnp.stack([jnp.stack(pair) for pair in sums]), axis=0)
        return nats / count

    return loss


def text_outputs(graph: nnx.GraphDef, tokens_BxM: jax.Array) -> Callable[[Params], tuple[jax.Array, jax.Array]]:
    """Logits [B, L, V] and the weight of each position [B, L], for `curvature.gauss_newton_product`."""
    weights_BxL = (tokens_BxM[:, 1:] >= 0).astype(jnp.float32)
    return lambda params: (apply(graph, params, unmask_ids(tokens_BxM[:, :-1])), weights_BxL)


def _sums(logits_BxLxV: jax.Array, targets_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits_BxLxV = logits_BxLxV.astype(jnp.float32)
    # Not a gather: the vocabulary may be split over devices.
    hit_BxLxV = targets_BxL[..., None] == jnp.arange(logits_BxLxV.shape[-1])
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    nats_BxL = log_z_BxL - jnp.sum(jnp.where(hit_BxLxV, logits_BxLxV, 0), axis=-1)
    counted_BxL = (targets_BxL >= 0).astype(jnp.float32)
    return jnp.sum(nats_BxL * counted_BxL), jnp.sum(counted_BxL)
