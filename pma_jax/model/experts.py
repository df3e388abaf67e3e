"""Routed experts without dropped tokens: sort tokens by expert, exchange them between devices, and combine the results.

Legend: S tokens of this device, K experts per token, A = S K assignments (token s, choice k, at index s K + k),
E experts, D width, F hidden width, X devices of the mesh axis `expert`, e = E / X experts per device, C rows that a
device sends to each other device in one round, P rows of a buffer. A row index past the end (`A` or `P`) means no row.

All arrays are one device's parts: call these functions inside a `jax.shard_map`.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pma_jax.model.kernels.grouped_matmul import grouped_matmul
from pma_jax.model.kernels.matmul import MATMUL_NAME
from pma_jax.model.layers import swiglu

AXIS = "expert"  # the mesh axis that splits the experts
ROUND_CAPACITY_FACTOR = 1.25  # room of one round of the exchange, as a multiple of an even share

Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate [e, D, F], up [e, D, F], down [e, F, D]


def apply_experts(
    x_SxD: jax.Array, weights_SxK: jax.Array, chosen_SxK: jax.Array, matrices: Matrices, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Compute for each token the weighted sum of the outputs of its experts.

    Args:
        x_SxD: the tokens.
        weights_SxK: the weight of each choice, float32.
        chosen_SxK: the indices of each token's K distinct experts among all E, int32.
        matrices: this device's experts in the dtype of `x_SxD`. If F is partitioned, the result is a partial sum.
        parts: X, the number of devices that share the experts.

    Returns:
        The sums [S, D] (float32), and the load [e] (int32): tokens per expert of this device, from all devices.
    """
    if parts > 1:
        return _apply_with_exchange(x_SxD, weights_SxK, chosen_SxK, matrices, parts)
    order_A, slot_A, sizes_E = _sort_by_group(chosen_SxK.reshape(-1), matrices[0].shape[0])
    slot_SxK = slot_A.reshape(chosen_SxK.shape)
    rows_AxD = _dispatch(x_SxD, order_A, slot_SxK)
    return _combine(_gated_mlp(rows_AxD, sizes_E, matrices), weights_SxK, order_A, slot_SxK), sizes_E


def _apply_with_exchange(
    x_SxD: jax.Array, weights_SxK: jax.Array, chosen_SxK: jax.Array, matrices: Matrices, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Apply experts on X devices: each round sends tokens to their experts and results back, by all-to-all.

    There are as many rounds as the fullest pair of devices needs: one for a balanced router, and at most X. Buffers
    have the size of one round, and no token is dropped.
    """
    S, K = chosen_SxK.shape
    A, experts_here = S * K, matrices[0].shape[0]
    most, C = _most_rows(S, K, experts_here), exchange_capacity(S, K, experts_here, parts)
    P = parts * C
    order_A, place_A, sizes_E = _sort_by_group(chosen_SxK.reshape(-1), experts_here * parts)
    count_X = jnp.sum(sizes_E.reshape(parts, experts_here), axis=1)
    first_X = jnp.cumsum(count_X) - count_X
    device_SxK = chosen_SxK // experts_here
    from_start_SxK = place_A.reshape(S, K) - first_X[device_SxK]

    def run_round(r: jax.Array) -> tuple[jax.Array, jax.Array]:
        nth_XxC = r * C + jnp.arange(C)
        taken_XxC = jnp.where(nth_XxC < count_X[:, None], first_X[:, None] + nth_XxC, A)
        assignment_P = order_A.at[taken_XxC.reshape(-1)].get(mode="fill", fill_value=A)
        nth_SxK = from_start_SxK - r * C
        slot_SxK = jnp.where((nth_SxK >= 0) & (nth_SxK < C), device_SxK * C + nth_SxK, P)
        # An empty row is assigned to an expert past the last, so that it sorts to the end and belongs to no group.
        expert_P = chosen_SxK.reshape(-1).at[assignment_P].get(mode="fill", fill_value=-1)
        expert_P = _all_to_all(jnp.where(expert_P < 0, experts_here, expert_P % experts_here), parts)
        rows_PxD = _all_to_all(_dispatch(x_SxD, assignment_P, slot_SxK), parts)
        order_P, back_P, sizes_e = _sort_by_group(expert_P, experts_here)
        y_PxD = _gated_mlp(_dispatch(rows_PxD, order_P, back_P[:, None]), sizes_e, matrices)
        y_PxD = _all_to_all(_dispatch(y_PxD, back_P, order_P[:, None]), parts)
        return _combine(y_PxD, weights_SxK, assignment_P, slot_SxK), sizes_e

    done = run_round(jnp.int32(0))
    rounds = math.ceil(most / C)
    if rounds == 1:
        return done
    # All devices must run the same number of rounds, or the all-to-all would deadlock.
    needed = jax.lax.pmax(-(-jnp.max(count_X) // C), AXIS)

    def add_round(done, r):
        more = jax.lax.cond(r < needed, run_round, lambda _: jax.tree.map(jnp.zeros_like, done), r)
        return jax.tree.map(jnp.add, done, more), None

    def run_further_rounds(done):
        return jax.lax.scan(jax.checkpoint(add_round), done, jnp.arange(1, rounds, dtype=jnp.int32))[0]

    return jax.lax.cond(needed > 1, run_further_rounds, lambda done: done, done)


def exchange_capacity(tokens: int, experts_per_token: int, experts_here: int, parts: int) -> int:
    """Return C, the rows that a device can send to each other device in one round."""
    even = math.ceil(ROUND_CAPACITY_FACTOR * tokens * experts_per_token / parts)
    return min(_round_up_to_tile(even), _most_rows(tokens, experts_per_token, experts_here))


def _most_rows(tokens: int, experts_per_token: int, experts_here: int) -> int:
    # The choices of a token are distinct, which bounds how many of them are on one device.
    return tokens * min(experts_per_token, experts_here)


def _round_up_to_tile(rows: int) -> int:
    # Grouped products on TPU pad (and copy) rows to a multiple of 128.
    return -(-rows // 128) * 128 if rows > 128 else rows


def _gated_mlp(rows_PxD: jax.Array, sizes_e: jax.Array, matrices: Matrices) -> jax.Array:
    gate_exDxF, up_exDxF, down_exFxD = matrices
    gate_PxF = checkpoint_name(grouped_matmul(rows_PxD, gate_exDxF, sizes_e), MATMUL_NAME)
    up_PxF = checkpoint_name(grouped_matmul(rows_PxD, up_exDxF, sizes_e), MATMUL_NAME)
    return checkpoint_name(grouped_matmul(swiglu(gate_PxF, up_PxF), down_exFxD, sizes_e), MATMUL_NAME)


def _all_to_all(rows: jax.Array, parts: int) -> jax.Array:
    """Send the i-th block of rows to device i, and replace it by the block that device i sends here."""
    blocks = rows.reshape(parts, -1, *rows.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(rows.shape)


def _sort_by_group(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort stably by group: return the order, each item's place in it, and the size of each group; all int32."""
    A = group_A.shape[0]
    order_A = jnp.argsort(group_A, stable=True).astype(jnp.int32)
    place_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    ends = jnp.searchsorted(group_A[order_A], jnp.arange(groups + 1), side="left")
    return order_A, place_A, jnp.diff(ends).astype(jnp.int32)


# --- Gathers whose gradients are gathers too; the gradients that JAX derives are scatters -----------------------------


@jax.custom_vjp
def _dispatch(x_SxD: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Gather the token of each assignment: [P, D], zeros for none. `slot_SxK` is the row of each assignment."""
    return x_SxD.at[assignment_P // slot_SxK.shape[1]].get(mode="fill", fill_value=0)


def _dispatch_forward(x_SxD: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _dispatch(x_SxD, assignment_P, slot_SxK), slot_SxK


def _dispatch_backward(slot_SxK: jax.Array, g_PxD: jax.Array) -> tuple[jax.Array, None, None]:
    g_SxKxD = g_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.sum(g_SxKxD, axis=1, dtype=jnp.float32).astype(g_PxD.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(y_PxD: jax.Array, weights_SxK: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Sum each token's rows, weighted: float32 [S, D]."""
    y_SxKxD = y_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.einsum("sk,skd->sd", weights_SxK, y_SxKxD, preferred_element_type=jnp.float32)


def _combine_forward(y_PxD, weights_SxK, assignment_P, slot_SxK):
    return _combine(y_PxD, weights_SxK, assignment_P, slot_SxK), (y_PxD, weights_SxK, assignment_P, slot_SxK)


def _combine_backward(saved: tuple[jax.Array, ...], g_SxD: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    y_PxD, weights_SxK, assignment_P, slot_SxK = saved
    weight_P = weights_SxK.reshape(-1).at[assignment_P].get(mode="fill", fill_value=0)
    g_PxD = g_SxD.at[assignment_P // slot_SxK.shape[1]].get(mode="fill", fill_value=0)
    y_SxKxD = y_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    d_weights = jnp.einsum("sd,skd->sk", g_SxD, y_SxKxD, preferred_element_type=jnp.float32)
    return (weight_P[:, None] * g_PxD).astype(y_PxD.dtype), d_weights, None, None


_combine.defvjp(_combine_forward, _combine_backward)
