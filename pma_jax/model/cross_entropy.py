"""Cross-entropy of hidden states, without storing the logits of all positions.

Legend: B batch, L positions, S = B L, N chunks of C positions, D width, V vocabulary. Inside `jax.shard_map`, arrays
are one device's shards.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from pma_jax.model.kernels.matmul import transpose_for_matmul
from pma_jax.runtime.mesh import RULES, axes_of, map_over_devices, non_manual_axes, reshard_like


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    x_BxLxD: jax.Array, head_DxV: jax.Array, targets_BxL: jax.Array, z_loss_weight: float, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Sum the objective and the cross-entropy over the positions whose target is not negative.

    The objective is cross-entropy plus `z_loss_weight` times log(Z)^2 (PaLM, arXiv 2204.02311, Section 5). Logits are
    float32 and computed in chunks of positions; the vocabulary may be sharded. Each chunk's gradient is computed in the
    forward pass, so that logits are neither stored nor recomputed. Call under `jax.set_mesh`.

    Args:
        x_BxLxD: The last hidden states, sharded along the batch axes.
        head_DxV: The output projection in the dtype of `x_BxLxD`, sharded as its parameter. It is gathered along the
            width, and its gradient is reduce-scattered.
        targets_BxL: int32; negative targets are not counted.
        z_loss_weight: Weight of log(Z)^2.
        chunk_tokens: Maximum number of positions per device in one chunk; at least 1.

    Returns:
        Two float32 scalars, summed over all devices: the objective, and cross-entropy in nats, without gradient.
    """
    sums = _sum_on_mesh(x_BxLxD, head_DxV, targets_BxL, z_loss_weight, chunk_tokens, with_gradients=False)
    return sums[0], sums[1]


def cross_entropy_of_targets(
    x_BxLxD: jax.Array, head_DxV: jax.Array, targets_BxL: jax.Array, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Compute the cross-entropy of each target in nats, without gradient. See `cross_entropy` for the arguments.

    Returns:
        float32 [B, L], 0 for negative targets; and bool [B, L], whether no token has a larger logit than the target,
        False for negative targets.
    """
    sums = _sum_on_mesh(x_BxLxD, head_DxV, targets_BxL, 0.0, chunk_tokens, with_gradients=False)
    return sums[2], sums[3]


def _forward(
    x_BxLxD: jax.Array, head_DxV: jax.Array, targets_BxL: jax.Array, z_loss_weight: float, chunk_tokens: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    objective, nats, d_x_BxLxD, d_head_DxV = _sum_on_mesh(
        x_BxLxD, head_DxV, targets_BxL, z_loss_weight, chunk_tokens, with_gradients=True
    )
    return (objective, nats), (reshard_like(x_BxLxD, d_x_BxLxD), reshard_like(head_DxV, d_head_DxV))


def _backward(
    _weight: float, _chunk: int, gradients: tuple[jax.Array, jax.Array], g: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    d_x_BxLxD, d_head_DxV = gradients
    return (d_x_BxLxD * g[0]).astype(d_x_BxLxD.dtype), (d_head_DxV * g[0]).astype(d_head_DxV.dtype), None


cross_entropy.defvjp(_forward, _backward)


def _sum_on_mesh(
    x_BxLxD: jax.Array,
    head_DxV: jax.Array,
    targets_BxL: jax.Array,
    z_loss_weight: float,
    chunk_tokens: int,
    with_gradients: bool,
) -> tuple[jax.Array, ...]:
    """Compute both sums over all devices of the mesh.

    Also return the objective's gradients of `x` and `head` if they are requested, or else the nats of each target and
    whether it is the most likely token.
    """
    x, head, rows = RULES.spec("batch", None, None), RULES.spec("width", "vocabulary"), RULES.spec("batch", None)
    mesh = jax.sharding.get_abstract_mesh()
    split = any(mesh.shape[axis] > 1 for axis in non_manual_axes())
    own = functools.partial(
        _sum_on_device,
        z_loss_weight=z_loss_weight,
        chunk_tokens=chunk_tokens,
        with_gradients=with_gradients,
        axes=[axes_of(part) if split else () for part in (x[0], head[0], head[1])],
    )
    if not split:  # without shard_map, because XLA on CPU keeps collectives over one device, which synchronise
        full = (jax.reshard(array, P(*[None] * array.ndim)) for array in (x_BxLxD, head_DxV, targets_BxL))
        return own(*full)
    sums = (P(), P(), x, head) if with_gradients else (P(), P(), rows, rows)
    return map_over_devices(own, (x, head, rows), sums)(x_BxLxD, head_DxV, targets_BxL)


def _sum_on_device(
    x_BxLxD: jax.Array,
    head_DxV: jax.Array,
    targets_BxL: jax.Array,
    *,
    z_loss_weight: float,
    chunk_tokens: int,
    with_gradients: bool,
    axes: list[tuple[str, ...]],
) -> tuple[jax.Array, ...]:
    """Compute the sums over the positions of all devices; `axes` are the mesh axes of batch, width and vocabulary."""
    batch_axes, width_axes, vocabulary_axes = axes
    if width_axes:
        head_DxV = jax.lax.all_gather(head_DxV, width_axes, axis=0, tiled=True)
    S, (D, V) = math.prod(targets_BxL.shape), head_DxV.shape
    C = -(-S // (count := -(-S // chunk_tokens)))
    padding = count * C - S
    x_NxCxD = jnp.pad(x_BxLxD.reshape(S, D), ((0, padding), (0, 0))).reshape(count, C, D)
    targets_NxC = jnp.pad(targets_BxL.reshape(S), (0, padding), constant_values=-1).reshape(count, C)
    first = jax.lax.axis_index(vocabulary_axes) * V if vocabulary_axes else 0

    def add_chunk(sums: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]):
        x_CxD, targets_C = chunk
        logits_CxV = jnp.einsum("cd,dv->cv", x_CxD, head_DxV, preferred_element_type=jnp.float32)
        largest_C = _reduce(jax.lax.pmax, vocabulary_axes, jnp.max(logits_CxV, axis=1))
        weights_CxV = jnp.exp(logits_CxV - largest_C[:, None])
        # A comparison, which XLA fuses, instead of a gather: a target in another device's shard of V matches nothing.
        hit_CxV = targets_C[:, None] - first == jnp.arange(V)
        rows_2xC = jnp.stack([jnp.sum(weights_CxV, axis=1), jnp.sum(jnp.where(hit_CxV, logits_CxV, 0), axis=1)])
        total_C, target_C = _reduce(jax.lax.psum, vocabulary_axes, rows_2xC)
        log_z_C = largest_C + jnp.log(total_C)
        counted_C = (targets_C >= 0).astype(jnp.float32)
        nats_C = (log_z_C - target_C) * counted_C
        nats = jnp.sum(nats_C)
        objective = nats + z_loss_weight * jnp.sum(jnp.square(log_z_C) * counted_C)
        if not with_gradients:
            return (sums[0] + objective, sums[1] + nats), (nats_C, (targets_C >= 0) & (target_C >= largest_C))
        scale_Cx1 = ((1 + 2 * z_loss_weight * log_z_C) / total_C * counted_C)[:, None]
        d_logits_CxV = (weights_CxV * scale_Cx1 - hit_CxV * counted_C[:, None]).astype(x_CxD.dtype)
        d_x_CxD = jnp.einsum("cv,dv->cd", d_logits_CxV, head_DxV, preferred_element_type=jnp.float32)
        x_DxC = transpose_for_matmul(x_CxD)
        d_head_DxV = jnp.einsum("dc,cv->dv", x_DxC, d_logits_CxV, preferred_element_type=jnp.float32)
        return (sums[0] + objective, sums[1] + nats, sums[2] + d_head_DxV), d_x_CxD.astype(x_CxD.dtype)

    zero = jnp.zeros((), jnp.float32)
    sums = (zero, zero, jnp.zeros((D, V), jnp.float32)) if with_gradients else (zero, zero)
    if count == 1:
        sums, rest = add_chunk(sums, (x_NxCxD[0], targets_NxC[0]))
    else:
        sums, rest = jax.lax.scan(add_chunk, sums, (x_NxCxD, targets_NxC))
    objective, nats, *gradient = sums
    numbers = _reduce(jax.lax.psum, batch_axes, (objective, nats))
    if not with_gradients:
        return *numbers, *(jnp.reshape(values, -1)[:S].reshape(targets_BxL.shape) for values in rest)
    d_head_DxV = _reduce(jax.lax.psum, tuple(axis for axis in batch_axes if axis not in width_axes), gradient[0])
    if width_axes:
        d_head_DxV = jax.lax.psum_scatter(d_head_DxV, width_axes, scatter_dimension=0, tiled=True)
    d_x_BxLxD = jnp.reshape(jnp.asarray(rest), (-1, D))[:S].reshape(x_BxLxD.shape)
    return *numbers, _reduce(jax.lax.psum, vocabulary_axes, d_x_BxLxD), d_head_DxV.astype(head_DxV.dtype)


def _reduce(collective: Callable[[Any, tuple[str, ...]], Any], axes: tuple[str, ...], x: Any) -> Any:
    return collective(x, axes) if axes else x
