"""Streaming DiLoCo: DiLoCo of one fragment of the model after the other, with a delay and in few bits.

P fragments f are sent in turn, each every H tokens; V tokens after it was sent, a fragment is used:

    Delta_k   = theta^f - theta_k^f [+ r_k^f]          sent as Q(Delta_k), quantised; r are residuals of rounding
    Delta     = (1/K) sum_k Q(Delta_k)                 in float32
    v^f       <- Delta + beta v^f
    theta^f   <- theta^f - eta (Delta + beta v^f)
    [r_k^f    <- Delta_k - Q(Delta_k)]
    theta_k^f <- alpha theta_k^f + (1 - alpha) theta^f V tokens later

With one fragment, no delay, float32 and alpha = 0 it is DiLoCo. The delay is that of the algorithm: JAX runs the
programs of a device one after the other, so that here sending does not overlap with training.

Source: Douillard et al., arXiv 2501.18512: Nesterov with beta = 0.9, and alpha of 0 or 0.5; its fragments are a few
layers each, in sequence or strided, where here a fragment is a range of layers. The defaults eta = 0.4 and P = 3 are
those of descriptions of it, not checked in its text. MaxText's main branch has eta = 0.3, V = 0 and alpha = 0, sends
strided layers, and takes all unstacked parameters as a fragment of their own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import ReplicasConfig
from pma_jax.replicas import fragments, quantize
from pma_jax.replicas.diloco import outer_step
from pma_jax.replicas.workers import AXIS, Tree, Workers, axis_size, broadcast, mean, on_shards

Outer = dict[str, Tree]  # "params": theta; "momentum": v; "residuals": r, [K, ...], if there is error feedback


def init(config: ReplicasConfig, params: Tree, count: int) -> Outer:
    """Return the outer parameters, which begin at those of the workers, with momentum and residuals of 0."""
    outer = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    if config.streaming_error_feedback:
        outer["residuals"] = broadcast(outer["momentum"], count)
    return outer


def send(config: ReplicasConfig, workers: Workers, fragment: int) -> Workers:
    """Send the outer gradient of a fragment, and take a step of the outer optimizer on it."""
    outer, count = dict(workers.outer), config.streaming_fragments
    theta, momentum = (fragments.take(outer[name], fragment, count) for name in ("params", "momentum"))
    theta_K = fragments.take(workers.params, fragment, count, dim=1)
    change_K = [outer_f - inner_f for outer_f, inner_f in zip(theta, theta_K, strict=True)]
    if config.streaming_error_feedback:
        residuals = fragments.take(outer["residuals"], fragment, count, dim=1)
        change_K = [change + residual for change, residual in zip(change_K, residuals, strict=True)]
    if config.streaming_dtype == "float32":
        change = mean(change_K)
    else:
        change = gathered_mean(change_K, config.streaming_dtype)
        if config.streaming_error_feedback:
            rounded_K = quantized(change_K, config.streaming_dtype)
            left = [exact - rounded for exact, rounded in zip(change_K, rounded_K, strict=True)]
            outer["residuals"] = fragments.put(outer["residuals"], left, fragment, count, dim=1)
    optimizer = optax.trace(config.streaming_momentum, nesterov=True)
    theta, momentum = outer_step(optimizer, config.streaming_rate, change, theta, momentum)
    outer["params"] = fragments.put(outer["params"], theta, fragment, count)
    outer["momentum"] = fragments.put(outer["momentum"], momentum, fragment, count)
    return dataclasses.replace(workers, outer=outer)


def receive(config: ReplicasConfig, workers: Workers, fragment: int) -> Workers:
    """Mix the outer parameters of a fragment into those of each worker."""
    count, alpha = config.streaming_fragments, config.streaming_mixing
    theta = fragments.take(workers.outer["params"], fragment, count)
    theta_K = fragments.take(workers.params, fragment, count, dim=1)
    mixed_K = [alpha * inner + (1 - alpha) * outer for outer, inner in zip(theta, theta_K, strict=True)]
    return dataclasses.replace(workers, params=fragments.put(workers.params, mixed_K, fragment, count, dim=1))


def quantized(leaves_K: list[jax.Array], kind: quantize.Kind) -> list[jax.Array]:
    """Return the leaves [K, ...] of each worker as they arrive when they are sent in few bits."""

    @jax.vmap
    def arriving(x: jax.Array, scale: jax.Array) -> jax.Array:
        return quantize.dequantize_leaf(quantize.quantize_leaf(x, scale, kind), scale, kind)

    return on_shards(lambda shards: list(map(arriving, shards, quantize.leaf_scales(shards, kind))), leaves_K)


def gathered_mean(leaves_K: list[jax.Array], kind: quantize.Kind) -> list[jax.Array]:
    """Average over the workers what each of them sends in few bits: [K, ...] to [...].

    Between devices, packed levels are gathered; each device adds the values of all workers in float32.
    """

    def average(shard: jax.Array, scales: jax.Array) -> jax.Array:
        levels = jax.vmap(lambda x, scale: quantize.quantize_leaf(x, scale, kind))(shard, scales)
        if axis_size() > 1:  # between workers of one device, nothing is sent
            codes = jax.vmap(lambda x: quantize.pack(x, kind))(levels)
            codes, scales = (jax.lax.all_gather(x, AXIS, tiled=True) for x in (codes, scales))
            levels = jax.vmap(lambda x: quantize.unpack(x, kind, shard.shape[1:]))(codes)
        return jax.vmap(lambda x, scale: quantize.dequantize_leaf(x, scale, kind))(levels, scales).mean(0)

    def average_all(shards: list[jax.Array]) -> list[jax.Array]:
        return list(map(average, shards, quantize.leaf_scales(shards, kind)))

    return on_shards(average_all, leaves_K, drops_workers=True)
