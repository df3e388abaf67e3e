"""A mixture of experts, which replaces the MLP of a block: its router, load balancing, and experts.

Legend: B batch, L positions, S = B L tokens, D width, E experts, K experts per token, F hidden width of an expert,
T layers.

The router's bias (auxiliary-loss-free balancing, arXiv 2408.15664) affects which experts are chosen, but not their
weights. It has neither gradients nor weight decay: `update_router_bias` changes it after each optimizer step, from the
load of the global batch. It is a leaf of the tree of parameters, so that snapshots contain it, and previews, merges and
evaluation use it. Merges average it with the same coefficients as the parameters: the scores that it is added to come
from the averaged router, each model's bias compensates for its own router, and averaging reduces the noise of its
latest updates.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from pma_jax.config import ModelConfig
from pma_jax.model.experts import apply_experts
from pma_jax.model.layers import truncated_normal_param
from pma_jax.runtime.mesh import RULES, map_over_devices, non_manual_axes

ROUTER_BIAS = "router_bias_E"  # the only leaf of the tree of parameters that is not trained by gradient
# load_E: tokens per expert, int32 [E]; balance and z: losses summed over positions, float32 scalars.
RouterSums = dict[str, jax.Array]


class RouterBias(nnx.Variable):
    """Variable of the router that is saved with the parameters but not trained by gradient."""


class MixtureOfExperts(nnx.Module):
    """Router and routed experts. Shared experts (`model.shared_experts`) are the MLP of the block itself."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, spec = config, RULES.spec
        E, D, F = c.experts, c.width, c.expert_hidden
        shrink = 1 / math.sqrt(2 * c.layers)
        self.config = nnx.static(config)
        self.router_DxE = truncated_normal_param(rngs, (D, E), spec("width", None), D)
        if c.router_bias:
            self.router_bias_E = RouterBias(jnp.zeros((E,), jnp.float32))
        self.expert_gate_ExDxF = truncated_normal_param(rngs, (E, D, F), spec("experts", "width", "hidden"), D)
        self.expert_up_ExDxF = truncated_normal_param(rngs, (E, D, F), spec("experts", "width", "hidden"), D)
        self.expert_down_ExFxD = truncated_normal_param(rngs, (E, F, D), spec("experts", "hidden", "width"), F, shrink)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, RouterSums]:
        """Apply the experts to hidden states; return the result [B, L, D], and the router's sums over the batch."""
        c, spec = self.config, RULES.spec
        batch, widening = spec("batch", None, None), spec("experts", "width", "hidden")
        parts = {  # name -> array, partition
            "x_BxLxD": (x_BxLxD, batch),
            "router_DxE": (self.router_DxE[...], P(None, None)),
            "bias_E": (self.router_bias_E[...] if c.router_bias else jnp.zeros((c.experts,)), P(None)),
            "gate_ExDxF": (self.expert_gate_ExDxF[...], widening),
            "up_ExDxF": (self.expert_up_ExDxF[...], widening),
            "down_ExFxD": (self.expert_down_ExFxD[...], spec("experts", "hidden", "width")),
        }
        y_BxLxD, sums = map_over_devices(
            functools.partial(_apply_on_device, c, non_manual_axes()),
            ({name: part for name, (_, part) in parts.items()},),
            (batch, {"load_E": spec("experts"), "balance": P(), "z": P()}),
        )({name: x for name, (x, _) in parts.items()})
        return y_BxLxD, sums | {"load_E": jax.reshard(sums["load_E"], P(None))}


def route(config: ModelConfig, logits_SxE: jax.Array, bias_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the K experts with the largest score plus bias for each token.

    Args:
        config: `router_scores`, `router_normalized` and `experts_per_token` (K) are used.
        logits_SxE: The router's outputs, float32.
        bias_E: The router's bias, float32.

    Returns:
        Scores [S, E], float32; weights of the chosen experts [S, K], float32: their scores, normalised over K if
        `router_normalized`; and indices of the chosen experts [S, K], int32.
    """
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[config.router_scores]
    scores_SxE = score(logits_SxE)
    _, chosen_SxK = jax.lax.top_k(jax.lax.stop_gradient(scores_SxE + bias_E), config.experts_per_token)
    weights_SxK = jnp.take_along_axis(scores_SxE, chosen_SxK, axis=-1)
    if config.router_normalized:
        weights_SxK = weights_SxK / (jnp.sum(weights_SxK, axis=-1, keepdims=True) + 1e-20)
    return scores_SxE, weights_SxK, chosen_SxK


def update_router_bias(bias_TxE: jax.Array, load_TxE: jax.Array, rate: float) -> jax.Array:
    """Raise the bias of experts below the mean load by `rate`, and lower that of experts above it by `rate`.

    This is Algorithm 1 of arXiv 2408.15664.
    """
    load_TxE = load_TxE.astype(jnp.float32)
    return bias_TxE + rate * jnp.sign(jnp.mean(load_TxE, axis=-1, keepdims=True) - load_TxE)


def load_metrics(load_TxE: jax.Array, tokens: int, experts_per_token: int) -> dict[str, jax.Array]:
    """Measure how uneven the load of the experts is, and how many assignments were dropped.

    `load_max_violation` and `load_min_violation` are (load - mean) / mean of the fullest and the emptiest expert of any
    layer (MaxVio, arXiv 2408.15664, Equation 4): 0 if the load is even, -1 for an expert without a token.
    """
    mean = tokens * experts_per_token / load_TxE.shape[-1]
    violation_TxE = load_TxE.astype(jnp.float32) / mean - 1
    wanted_T = jnp.full(load_TxE.shape[0], tokens * experts_per_token, jnp.int32)
    return {
        "load_max_violation": jnp.max(violation_TxE),
        "load_min_violation": jnp.min(violation_TxE),
        "dropped": jnp.sum(wanted_T - jnp.sum(load_TxE, axis=-1)),
    }


def _apply_on_device(
    config: ModelConfig, axes: tuple[str, ...], own: dict[str, jax.Array]
) -> tuple[jax.Array, RouterSums]:
    """Route one device's tokens and apply its experts; `axes` are the mesh axes of the enclosing shard_map."""
    B, L, D = own["x_BxLxD"].shape
    x_SxD = own["x_BxLxD"].reshape(B * L, D)
    # float32 on all platforms, because rounding of scores changes which experts are chosen.
    logits_SxE = jnp.dot(x_SxD.astype(jnp.float32), own["router_DxE"], precision=jax.lax.Precision.HIGHEST)
    scores_SxE, weights_SxK, chosen_SxK = route(config, logits_SxE, own["bias_E"])
    width_dims = {"gate_ExDxF": 1, "up_ExDxF": 1, "down_ExFxD": 2}
    gate, up, down = (_gather_width(own[name], dim, axes) for name, dim in width_dims.items())
    expert_devices = jax.lax.axis_size(RULES.experts) if RULES.experts in axes else 1
    y_SxD, load_e = apply_experts(x_SxD, weights_SxK, chosen_SxK, (gate, up, down), expert_devices)
    if RULES.hidden in axes:
        y_SxD = jax.lax.psum(y_SxD, RULES.hidden)
    batch_axes = tuple(a for a in RULES.batch if a in axes)
    sums = {
        "balance": _balance_loss(scores_SxE.reshape(B, L, -1), chosen_SxK.reshape(B, L, -1)),
        "z": jnp.sum(jnp.square(jax.nn.logsumexp(logits_SxE, axis=-1))),
    }
    sums = jax.lax.psum(sums, batch_axes)
    # Not over the expert axis: along it, a device's experts have already processed the tokens of all devices.
    load_e = jax.lax.psum(load_e, tuple(a for a in batch_axes if a != RULES.experts))
    return y_SxD.astype(x_SxD.dtype).reshape(B, L, D), sums | {"load_E": load_e}


def _balance_loss(scores_BxLxE: jax.Array, chosen_BxLxK: jax.Array) -> jax.Array:
    """Compute the load-balancing loss, summed over positions: L E sum_e f_e p_e per sequence, which is L if balanced.

    f_e is the share of assignments to expert e, and p_e its mean share of the scores (Switch, arXiv 2101.03961,
    Equations 4 to 6), within groups of tokens as in GShard (arXiv 2006.16668). A group is one sequence, so the sum does
    not depend on how a batch is split over microbatches and devices.
    """
    (_, L, E), K = scores_BxLxE.shape, chosen_BxLxK.shape[-1]
    count_BxE = jnp.sum(chosen_BxLxK[..., None] == jnp.arange(E), axis=(1, 2))
    share_BxLxE = scores_BxLxE / jnp.sum(scores_BxLxE, axis=-1, keepdims=True)
    return E * jnp.sum(count_BxE / (L * K) * jnp.sum(share_BxLxE, axis=1))


def _gather_width(matrix: jax.Array, width_dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Gather a device's expert matrices along `fsdp`."""
    return jax.lax.all_gather(matrix, RULES.width, axis=width_dim, tiled=True) if RULES.width in axes else matrix
