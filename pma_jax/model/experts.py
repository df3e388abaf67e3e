"""Experts of a dropless mixture-of-experts layer, with all-to-all between the devices that share the experts.

Dimensions: S tokens of this device, K experts per token, A = S K assignments (token s, choice k, at index s K + k),
E experts, D width, F hidden width, X devices along the mesh axis `expert`, e = E / X experts per device, C rows that
one device sends to another in one round, R = X C rows of an exchange buffer. An out-of-bounds index (`A` into
assignments, `R` into rows) marks an empty row: it belongs to no expert, and its contents and gradient are undefined.

All arrays are local shards: call these functions inside a `jax.shard_map`.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pma_jax.model.kernels.grouped_matmul import grouped_matmul
from pma_jax.model.kernels.matmul import MATMUL_CHECKPOINT_NAME
from pma_jax.model.layers import swiglu_of_halves

AXIS = "expert"  # the mesh axis that splits the experts
# Rows of an exchange buffer, relative to what a perfectly balanced router fills. The excess goes in further rounds.
CAPACITY_FACTOR_PER_ROUND = 1.25

Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate [e, D, F], up [e, D, F], down [e, F, D]


def apply_experts(
    x_SxD: jax.Array, router_weights_SxK: jax.Array, expert_ids_SxK: jax.Array, matrices: Matrices, expert_devices: int
) -> tuple[jax.Array, jax.Array]:
    """Compute for each token the weighted sum of the outputs of its experts.

    Args:
        x_SxD: The tokens.
        router_weights_SxK: The weight of each choice, float32.
        expert_ids_SxK: The indices of each token's K distinct experts among all E, int32.
        matrices: Weights of this device's experts, in the dtype of `x_SxD`. If F is sharded, the returned sums are
            partial: apply `psum` over the mesh axis that shards F.
        expert_devices: X, the number of devices along the mesh axis `expert`.

    Returns:
        The sums, float32 [S, D], and the number of tokens that devices along `expert` route to each expert of this
        device, int32 [e].
    """
    if expert_devices > 1:
        return _apply_with_exchange(x_SxD, router_weights_SxK, expert_ids_SxK, matrices, expert_devices)
    order_A, inverse_A, sizes_E = _sort_by_group(expert_ids_SxK.reshape(-1), matrices[0].shape[0])
    row_SxK = inverse_A.reshape(expert_ids_SxK.shape)
    rows_AxD = _gather_rows(x_SxD, order_A, row_SxK)
    return _gather_and_sum(
        _gated_mlp(rows_AxD, sizes_E, matrices, has_padding=False), router_weights_SxK, order_A, row_SxK
    ), sizes_E


def _apply_with_exchange(
    x_SxD: jax.Array, weights_SxK: jax.Array, expert_ids_SxK: jax.Array, matrices: Matrices, expert_devices: int
) -> tuple[jax.Array, jax.Array]:
    """Apply experts on X devices: each round sends tokens to their experts and results back, by all-to-all.

    Rows that exceed the capacity of a buffer go in further rounds, so no token is dropped. A balanced router needs one
    round; the worst case needs at most X.
    """
    S, K = expert_ids_SxK.shape
    A, local_experts = S * K, matrices[0].shape[0]
    C = rows_per_device_pair(S, K, local_experts, expert_devices)
    R = expert_devices * C
    order_A, inverse_A, sizes_E = _sort_by_group(expert_ids_SxK.reshape(-1), local_experts * expert_devices)
    count_X = jnp.sum(sizes_E.reshape(expert_devices, local_experts), axis=1)
    offset_X = jnp.cumsum(count_X) - count_X
    device_SxK = expert_ids_SxK // local_experts
    position_SxK = inverse_A.reshape(S, K) - offset_X[device_SxK]

    def run_round(round_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        position_XxC = round_index * C + jnp.arange(C)
        sorted_index_XxC = jnp.where(position_XxC < count_X[:, None], offset_X[:, None] + position_XxC, A)
        assignment_R = order_A.at[sorted_index_XxC.reshape(-1)].get(mode="fill", fill_value=A)
        row_SxK = position_SxK - round_index * C
        buffer_row_SxK = jnp.where((row_SxK >= 0) & (row_SxK < C), device_SxK * C + row_SxK, R)
        # Empty rows get the expert ID `local_experts`: they sort last and belong to no group.
        expert_R = expert_ids_SxK.reshape(-1).at[assignment_R].get(mode="fill", fill_value=-1)
        expert_R = _all_to_all(jnp.where(expert_R < 0, local_experts, expert_R % local_experts), expert_devices)
        rows_RxD = _all_to_all(_gather_rows(x_SxD, assignment_R, buffer_row_SxK), expert_devices)
        order_R, inverse_R, sizes_e = _sort_by_group(expert_R, local_experts)
        rows_RxD = _permute_rows(rows_RxD, order_R, inverse_R)
        y_RxD = _gated_mlp(rows_RxD, sizes_e, matrices, has_padding=True)
        y_RxD = _all_to_all(_permute_rows(y_RxD, inverse_R, order_R), expert_devices)
        return _gather_and_sum(y_RxD, weights_SxK, assignment_R, buffer_row_SxK), sizes_e

    total = run_round(jnp.int32(0))
    max_rounds = math.ceil(_max_rows_per_device_pair(S, K, local_experts) / C)
    if max_rounds == 1:
        return total
    # All devices must run the same number of rounds, or the all-to-all would deadlock.
    needed_rounds = jax.lax.pmax(-(-jnp.max(count_X) // C), AXIS)

    def add_round(total, r):
        update = jax.lax.cond(r < needed_rounds, run_round, lambda _: jax.tree.map(jnp.zeros_like, total), r)
        return jax.tree.map(jnp.add, total, update), None

    def run_further_rounds(total):
        # A scan over all possible rounds, because `while_loop` has no reverse-mode derivative.
        return jax.lax.scan(jax.checkpoint(add_round), total, jnp.arange(1, max_rounds, dtype=jnp.int32))[0]

    return jax.lax.cond(needed_rounds > 1, run_further_rounds, lambda total: total, total)


def rows_per_device_pair(tokens: int, experts_per_token: int, local_experts: int, expert_devices: int) -> int:
    """Return C, the maximum number of rows that one device sends to any one device per round."""
    capacity = math.ceil(CAPACITY_FACTOR_PER_ROUND * tokens * experts_per_token / expert_devices)
    return min(_round_up_to_tile(capacity), _max_rows_per_device_pair(tokens, experts_per_token, local_experts))


def _max_rows_per_device_pair(tokens: int, experts_per_token: int, local_experts: int) -> int:
    # The choices of a token are distinct, which bounds how many of them are on one device.
    return tokens * min(experts_per_token, local_experts)


def _round_up_to_tile(rows: int) -> int:
    # Grouped matmuls on TPU copy the rows to pad them to a multiple of 128. Up to 128 rows are one tile, unpadded.
    return -(-rows // 128) * 128 if rows > 128 else rows


def _gated_mlp(rows_RxD: jax.Array, sizes_e: jax.Array, matrices: Matrices, has_padding: bool) -> jax.Array:
    gate_exDxF, up_exDxF, down_exFxD = matrices
    # One product for both, so that the rows are read once in each pass, and their gradient is not a sum of two results.
    both_exDx2F = jnp.concatenate([gate_exDxF, up_exDxF], axis=2)
    both_Rx2F = checkpoint_name(grouped_matmul(rows_RxD, both_exDx2F, sizes_e, has_padding), MATMUL_CHECKPOINT_NAME)
    hidden_RxF = swiglu_of_halves(both_Rx2F)
    return checkpoint_name(grouped_matmul(hidden_RxF, down_exFxD, sizes_e, has_padding), MATMUL_CHECKPOINT_NAME)


def _all_to_all(rows: jax.Array, expert_devices: int) -> jax.Array:
    """Send the i-th block of rows to device i, and replace it by the block that device i sends here."""
    blocks = rows.reshape(expert_devices, -1, *rows.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(rows.shape)


def _sort_by_group(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort stably by group: return the permutation, its inverse, and the size of each group; all int32."""
    A = group_A.shape[0]
    order_A = jnp.argsort(group_A, stable=True).astype(jnp.int32)
    inverse_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(group_A[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
    return order_A, inverse_A, sizes


# --- Gathers whose gradients are gathers too; the gradients that JAX derives are scatters -----------------------------


@jax.custom_vjp
def _gather_rows(x_SxD: jax.Array, assignment_R: jax.Array, row_SxK: jax.Array) -> jax.Array:
    """Gather the token of each assignment from `x_SxD` into rows [R, D]; empty rows are copies of the last token.

    The gradient uses `row_SxK`, the row of each assignment.
    """
    return x_SxD.at[assignment_R // row_SxK.shape[1]].get(mode="clip")


def _gather_rows_forward(x_SxD: jax.Array, assignment_R: jax.Array, row_SxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather_rows(x_SxD, assignment_R, row_SxK), row_SxK


def _gather_rows_backward(row_SxK: jax.Array, g_RxD: jax.Array) -> tuple[jax.Array, None, None]:
    g_SxKxD = g_RxD.at[row_SxK].get(mode="fill", fill_value=0)
    return jnp.sum(g_SxKxD, axis=1, dtype=jnp.float32).astype(g_RxD.dtype), None, None


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@jax.custom_vjp
def _permute_rows(rows_RxD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> jax.Array:
    """Permute rows by `order_R`, whose inverse is `inverse_R`: both passes write each row once, and nothing else."""
    return rows_RxD.at[order_R].get(mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False)


def _permute_rows_forward(
    rows_RxD: jax.Array, order_R: jax.Array, inverse_R: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _permute_rows(rows_RxD, order_R, inverse_R), (order_R, inverse_R)


def _permute_rows_backward(saved: tuple[jax.Array, jax.Array], g_RxD: jax.Array) -> tuple[jax.Array, None, None]:
    order_R, inverse_R = saved
    return _permute_rows(g_RxD, inverse_R, order_R), None, None


_permute_rows.defvjp(_permute_rows_forward, _permute_rows_backward)


@jax.custom_vjp
def _gather_and_sum(y_RxD: jax.Array, weights_SxK: jax.Array, assignment_R: jax.Array, row_SxK: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's rows of `y_RxD`: float32 [S, D]."""
    y_SxKxD = y_RxD.at[row_SxK].get(mode="fill", fill_value=0)
    return jnp.einsum("sk,skd->sd", weights_SxK, y_SxKxD, preferred_element_type=jnp.float32)


def _gather_and_sum_forward(y_RxD, weights_SxK, assignment_R, row_SxK):
    return _gather_and_sum(y_RxD, weights_SxK, assignment_R, row_SxK), (y_RxD, weights_SxK, assignment_R, row_SxK)


def _gather_and_sum_backward(saved: tuple[jax.Array, ...], g_SxD: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    y_RxD, weights_SxK, assignment_R, row_SxK = saved
    # In the dtype of the rows: XLA for TPU would write products in float32 to memory.
    weight_R = weights_SxK.reshape(-1).at[assignment_R].get(mode="clip").astype(y_RxD.dtype)
    # Empty rows have undefined gradients.
    g_RxD = g_SxD.astype(y_RxD.dtype).at[assignment_R // row_SxK.shape[1]].get(mode="clip")
    # By row, where both factors are, and not by token, which would gather all rows again.
    d_weight_R = jnp.sum(g_RxD.astype(jnp.float32) * y_RxD.astype(jnp.float32), axis=1)
    d_weights = d_weight_R.at[row_SxK].get(mode="fill", fill_value=0)
    return weight_R[:, None] * g_RxD, d_weights, None, None


_gather_and_sum.defvjp(_gather_and_sum_forward, _gather_and_sum_backward)
