"""Routed experts without dropped tokens: sort tokens by expert, exchange them between devices, and combine the results.

Dimensions: S tokens of this device, K experts per token, A = S K assignments (token s, choice k, at index s K + k),
E experts, D width, F hidden width, X devices of the mesh axis `expert`, e = E / X experts per device, C rows per pair
of devices and round, R = X C rows of an exchange buffer. A row index past the end (`A` or `R`) means no row.

All arrays are local shards: call these functions inside a `jax.shard_map`.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pma_jax.model.kernels.grouped_matmul import grouped_matmul
from pma_jax.model.kernels.matmul import MATMUL_NAME
from pma_jax.model.layers import swiglu

AXIS = "expert"  # the mesh axis that splits the experts
ROUND_CAPACITY_FACTOR = 1.25  # buffer rows per round, relative to a balanced router

Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate [e, D, F], up [e, D, F], down [e, F, D]


def apply_experts(
    x_SxD: jax.Array, router_weights_SxK: jax.Array, expert_ids_SxK: jax.Array, matrices: Matrices, expert_devices: int
) -> tuple[jax.Array, jax.Array]:
    """Compute for each token the weighted sum of the outputs of its experts.

    Args:
        x_SxD: The tokens.
        router_weights_SxK: The weight of each choice, float32.
        expert_ids_SxK: The indices of each token's K distinct experts among all E, int32.
        matrices: This device's experts in the dtype of `x_SxD`. If F is sharded, the result is a partial sum: `psum` it
            over the mesh axis of F.
        expert_devices: X, the number of devices along the mesh axis `expert`.

    Returns:
        The sums [S, D] (float32), and the load [e] (int32): the tokens that all devices send to each local expert.
    """
    if expert_devices > 1:
        return _apply_with_exchange(x_SxD, router_weights_SxK, expert_ids_SxK, matrices, expert_devices)
    order_A, slot_A, sizes_E = _sort_by_group(expert_ids_SxK.reshape(-1), matrices[0].shape[0])
    slot_SxK = slot_A.reshape(expert_ids_SxK.shape)
    rows_AxD = _dispatch(x_SxD, order_A, slot_SxK)
    return _combine(_gated_mlp(rows_AxD, sizes_E, matrices), router_weights_SxK, order_A, slot_SxK), sizes_E


def _apply_with_exchange(
    x_SxD: jax.Array, weights_SxK: jax.Array, expert_ids_SxK: jax.Array, matrices: Matrices, expert_devices: int
) -> tuple[jax.Array, jax.Array]:
    """Apply experts on X devices: each round sends tokens to their experts and results back, by all-to-all.

    The number of rounds follows from the largest number of rows that one device sends to another: one if the router is
    balanced, and at most X. Buffers have the size of one round, and no token is dropped.
    """
    S, K = expert_ids_SxK.shape
    A, local_experts = S * K, matrices[0].shape[0]
    max_rows, C = _max_rows(S, K, local_experts), rows_per_device_pair(S, K, local_experts, expert_devices)
    R = expert_devices * C
    order_A, slot_A, sizes_E = _sort_by_group(expert_ids_SxK.reshape(-1), local_experts * expert_devices)
    count_X = jnp.sum(sizes_E.reshape(expert_devices, local_experts), axis=1)
    first_X = jnp.cumsum(count_X) - count_X
    device_SxK = expert_ids_SxK // local_experts
    rank_SxK = slot_A.reshape(S, K) - first_X[device_SxK]

    def run_round(round_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank_XxC = round_index * C + jnp.arange(C)
        source_XxC = jnp.where(rank_XxC < count_X[:, None], first_X[:, None] + rank_XxC, A)
        assignment_R = order_A.at[source_XxC.reshape(-1)].get(mode="fill", fill_value=A)
        rank_in_round_SxK = rank_SxK - round_index * C
        slot_SxK = jnp.where((rank_in_round_SxK >= 0) & (rank_in_round_SxK < C), device_SxK * C + rank_in_round_SxK, R)
        # An empty row is assigned to an expert past the last, so that it sorts to the end and belongs to no group.
        expert_R = expert_ids_SxK.reshape(-1).at[assignment_R].get(mode="fill", fill_value=-1)
        expert_R = _all_to_all(jnp.where(expert_R < 0, local_experts, expert_R % local_experts), expert_devices)
        rows_RxD = _all_to_all(_dispatch(x_SxD, assignment_R, slot_SxK), expert_devices)
        order_R, slot_R, sizes_e = _sort_by_group(expert_R, local_experts)
        y_RxD = _gated_mlp(_dispatch(rows_RxD, order_R, slot_R[:, None]), sizes_e, matrices)
        y_RxD = _all_to_all(_dispatch(y_RxD, slot_R, order_R[:, None]), expert_devices)
        return _combine(y_RxD, weights_SxK, assignment_R, slot_SxK), sizes_e

    total = run_round(jnp.int32(0))
    rounds = math.ceil(max_rows / C)
    if rounds == 1:
        return total
    # All devices must run the same number of rounds, or the all-to-all would deadlock.
    needed = jax.lax.pmax(-(-jnp.max(count_X) // C), AXIS)

    def add_round(total, r):
        update = jax.lax.cond(r < needed, run_round, lambda _: jax.tree.map(jnp.zeros_like, total), r)
        return jax.tree.map(jnp.add, total, update), None

    def run_further_rounds(total):
        return jax.lax.scan(jax.checkpoint(add_round), total, jnp.arange(1, rounds, dtype=jnp.int32))[0]

    return jax.lax.cond(needed > 1, run_further_rounds, lambda total: total, total)


def rows_per_device_pair(tokens: int, experts_per_token: int, local_experts: int, expert_devices: int) -> int:
    """Return C, the maximum number of rows that one device sends to any one device per round."""
    balanced_rows = math.ceil(ROUND_CAPACITY_FACTOR * tokens * experts_per_token / expert_devices)
    return min(_round_up_to_tile(balanced_rows), _max_rows(tokens, experts_per_token, local_experts))


def _max_rows(tokens: int, experts_per_token: int, local_experts: int) -> int:
    # The choices of a token are distinct, which bounds how many of them are on one device.
    return tokens * min(experts_per_token, local_experts)


def _round_up_to_tile(rows: int) -> int:
    # Grouped matmuls on TPU pad (and copy) rows to a multiple of 128; fewer rows than that fit one tile.
    return -(-rows // 128) * 128 if rows > 128 else rows


def _gated_mlp(rows_RxD: jax.Array, sizes_e: jax.Array, matrices: Matrices) -> jax.Array:
    gate_exDxF, up_exDxF, down_exFxD = matrices
    gate_RxF = checkpoint_name(grouped_matmul(rows_RxD, gate_exDxF, sizes_e), MATMUL_NAME)
    up_RxF = checkpoint_name(grouped_matmul(rows_RxD, up_exDxF, sizes_e), MATMUL_NAME)
    return checkpoint_name(grouped_matmul(swiglu(gate_RxF, up_RxF), down_exFxD, sizes_e), MATMUL_NAME)


def _all_to_all(rows: jax.Array, expert_devices: int) -> jax.Array:
    """Send the i-th block of rows to device i, and replace it by the block that device i sends here."""
    blocks = rows.reshape(expert_devices, -1, *rows.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(rows.shape)


def _sort_by_group(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort stably by group: return the permutation, its inverse, and the size of each group; all int32."""
    A = group_A.shape[0]
    order_A = jnp.argsort(group_A, stable=True).astype(jnp.int32)
    slot_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    ends = jnp.searchsorted(group_A[order_A], jnp.arange(groups + 1), side="left")
    return order_A, slot_A, jnp.diff(ends).astype(jnp.int32)


# --- Gathers whose gradients are gathers too; the gradients that JAX derives are scatters -----------------------------


@jax.custom_vjp
def _dispatch(x_SxD: jax.Array, assignment_R: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Gather the row of `x_SxD` for each assignment: [R, D], zeros where there is none.

    `slot_SxK`, the inverse of `assignment_R`, is used by the gradient. To permute rows, K is 1 and `assignment_R` is
    the permutation.
    """
    return x_SxD.at[assignment_R // slot_SxK.shape[1]].get(mode="fill", fill_value=0)


def _dispatch_forward(x_SxD: jax.Array, assignment_R: jax.Array, slot_SxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _dispatch(x_SxD, assignment_R, slot_SxK), slot_SxK


def _dispatch_backward(slot_SxK: jax.Array, g_RxD: jax.Array) -> tuple[jax.Array, None, None]:
    g_SxKxD = g_RxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.sum(g_SxKxD, axis=1, dtype=jnp.float32).astype(g_RxD.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(y_RxD: jax.Array, weights_SxK: jax.Array, assignment_R: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's rows of `y_RxD`: float32 [S, D]."""
    y_SxKxD = y_RxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.einsum("sk,skd->sd", weights_SxK, y_SxKxD, preferred_element_type=jnp.float32)


def _combine_forward(y_RxD, weights_SxK, assignment_R, slot_SxK):
    return _combine(y_RxD, weights_SxK, assignment_R, slot_SxK), (y_RxD, weights_SxK, assignment_R, slot_SxK)


def _combine_backward(saved: tuple[jax.Array, ...], g_SxD: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    y_RxD, weights_SxK, assignment_R, slot_SxK = saved
    weight_R = weights_SxK.reshape(-1).at[assignment_R].get(mode="fill", fill_value=0)
    g_RxD = g_SxD.at[assignment_R // slot_SxK.shape[1]].get(mode="fill", fill_value=0)
    y_SxKxD = y_RxD.at[slot_SxK].get(mode="fill", fill_value=0)
    d_weights = jnp.einsum("sd,skd->sk", g_SxD, y_SxKxD, preferred_element_type=jnp.float32)
    return (weight_R[:, None] * g_RxD).astype(y_RxD.dtype), d_weights, None, None


_combine.defvjp(_combine_forward, _combine_backward)
