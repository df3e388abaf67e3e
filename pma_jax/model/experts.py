"""Tokens to their experts and back: sorted, exchanged between devices where they split the experts, none dropped.

Legend: S tokens of this device, K experts a token, A = S K assignments (token s, choice k, at s K + k), E experts,
D width, F hidden width, X devices of the mesh axis `expert`, e = E / X experts of a device, C rows that a device sends
to each other one in a round, P rows at hand. A row index past the end (`A` or `P`) stands for no row.

Everything here works on a device's own arrays: call it inside a `jax.shard_map`.
"""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pma_jax.model.kernels.grouped_matmul import grouped_matmul
from pma_jax.model.kernels.matmul import MATMUL_NAME
from pma_jax.model.layers import swiglu

AXIS = "expert"  # the mesh axis that splits the experts
ROUND_CAPACITY_FACTOR = (
    1.25  # a round of the exchange holds so many times an even share; what is over waits for the next round
)

Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate [e, D, F], up [e, D, F], down [e, F, D]


def apply_experts(
    x_SxD: jax.Array, weights_SxK: jax.Array, chosen_SxK: jax.Array, matrices: Matrices, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Each token's weighted sum of what its chosen experts make of it: [S, D], and the rows that each expert worked on.

    Args:
        x_SxD: the tokens.
        weights_SxK: float32, of each choice.
        chosen_SxK: int32, distinct experts of each token, of all E.
        matrices: this device's experts, in the dtype of `x`; split along F, the sums are over this device's part.
        parts: X; 1 where no axis splits the experts.

    Returns:
        The sums (float32), and int32 [e]: the rows of this device's experts, whichever device they came from.
    """
    if parts > 1:
        return _exchanged(x_SxD, weights_SxK, chosen_SxK, matrices, parts)
    order_A, slot_A, sizes_E = _sorted(chosen_SxK.reshape(-1), matrices[0].shape[0])
    slot_SxK = slot_A.reshape(chosen_SxK.shape)
    rows_AxD = _dispatched(x_SxD, order_A, slot_SxK)
    return _combined(_gated_mlp(rows_AxD, sizes_E, matrices), weights_SxK, order_A, slot_SxK), sizes_E


def _exchanged(
    x_SxD: jax.Array, weights_SxK: jax.Array, chosen_SxK: jax.Array, matrices: Matrices, parts: int
) -> tuple[jax.Array, jax.Array]:
    """The same over X devices: rounds of one all-to-all there and one back, as many as the fullest pair needs.

    A balanced router needs one round, and the worst one X: buffers have the size of a round, and nothing is dropped.
    """
    S, K = chosen_SxK.shape
    A, experts_here = S * K, matrices[0].shape[0]
    most, C = _most_rows(S, K, experts_here), exchange_capacity(S, K, experts_here, parts)
    P = parts * C
    order_A, place_A, sizes_E = _sorted(chosen_SxK.reshape(-1), experts_here * parts)
    count_X = jnp.sum(sizes_E.reshape(parts, experts_here), axis=1)
    first_X = jnp.cumsum(count_X) - count_X
    device_SxK = chosen_SxK // experts_here
    from_start_SxK = place_A.reshape(S, K) - first_X[device_SxK]

    def round_of(r: jax.Array) -> tuple[jax.Array, jax.Array]:
        nth_XxC = r * C + jnp.arange(C)
        taken_XxC = jnp.where(nth_XxC < count_X[:, None], first_X[:, None] + nth_XxC, A)
        assignment_P = order_A.at[taken_XxC.reshape(-1)].get(mode="fill", fill_value=A)
        nth_SxK = from_start_SxK - r * C
        slot_SxK = jnp.where((nth_SxK >= 0) & (nth_SxK < C), device_SxK * C + nth_SxK, P)
        # No row counts as of an expert after the last: it sorts to the end, and no group holds it.
        expert_P = chosen_SxK.reshape(-1).at[assignment_P].get(mode="fill", fill_value=-1)
        expert_P = _swapped(jnp.where(expert_P < 0, experts_here, expert_P % experts_here), parts)
        rows_PxD = _swapped(_dispatched(x_SxD, assignment_P, slot_SxK), parts)
        order_P, back_P, sizes_e = _sorted(expert_P, experts_here)
        y_PxD = _gated_mlp(_dispatched(rows_PxD, order_P, back_P[:, None]), sizes_e, matrices)
        y_PxD = _swapped(_dispatched(y_PxD, back_P, order_P[:, None]), parts)
        return _combined(y_PxD, weights_SxK, assignment_P, slot_SxK), sizes_e

    done = round_of(jnp.int32(0))
    rounds = math.ceil(most / C)
    if rounds == 1:
        return done
    # All devices of the exchange go through the same rounds, or one would wait for ever.
    needed = jax.lax.pmax(-(-jnp.max(count_X) // C), AXIS)

    def another(done, r):
        more = jax.lax.cond(r < needed, round_of, lambda _: jax.tree.map(jnp.zeros_like, done), r)
        return jax.tree.map(jnp.add, done, more), None

    def others(done):
        return jax.lax.scan(jax.checkpoint(another), done, jnp.arange(1, rounds, dtype=jnp.int32))[0]

    return jax.lax.cond(needed > 1, others, lambda done: done, done)


def exchange_capacity(tokens: int, experts_per_token: int, experts_here: int, parts: int) -> int:
    """Rows that a device of the expert axis has room for in a round, to each other one: C."""
    even = math.ceil(ROUND_CAPACITY_FACTOR * tokens * experts_per_token / parts)
    return min(_whole_tiles(even), _most_rows(tokens, experts_per_token, experts_here))


def _most_rows(tokens: int, experts_per_token: int, experts_here: int) -> int:
    # At most so many of a token's choices live on one device, as they are distinct.
    return tokens * min(experts_per_token, experts_here)


def _whole_tiles(rows: int) -> int:
    # Grouped products on TPU pad rows to a multiple of this, with a copy.
    return -(-rows // 128) * 128 if rows > 128 else rows


def _gated_mlp(rows_PxD: jax.Array, sizes_e: jax.Array, matrices: Matrices) -> jax.Array:
    gate_exDxF, up_exDxF, down_exFxD = matrices
    gate_PxF = checkpoint_name(grouped_matmul(rows_PxD, gate_exDxF, sizes_e), MATMUL_NAME)
    up_PxF = checkpoint_name(grouped_matmul(rows_PxD, up_exDxF, sizes_e), MATMUL_NAME)
    return checkpoint_name(grouped_matmul(swiglu(gate_PxF, up_PxF), down_exFxD, sizes_e), MATMUL_NAME)


def _swapped(rows: jax.Array, parts: int) -> jax.Array:
    """Block i of the rows goes to device i of the exchange, and its block for this device comes back in its place."""
    blocks = rows.reshape(parts, -1, *rows.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(rows.shape)


def _sorted(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which item is n-th when sorted by group, where each item then is, and the size of each group; all int32."""
    A = group_A.shape[0]
    order_A = jnp.argsort(group_A, stable=True).astype(jnp.int32)
    place_A = jnp.zeros(A, jnp.int32).at[order_A].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    ends = jnp.searchsorted(group_A[order_A], jnp.arange(groups + 1), side="left")
    return order_A, place_A, jnp.diff(ends).astype(jnp.int32)


# --- Gathers whose gradients are gathers: derived by JAX, they would be scatters --------------------------------------


@jax.custom_vjp
def _dispatched(x_SxD: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Row p is the token of assignment p, or zeros for none: [P, D]. `slot_SxK` says where each assignment went."""
    return x_SxD.at[assignment_P // slot_SxK.shape[1]].get(mode="fill", fill_value=0)


def _dispatched_forward(x_SxD: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _dispatched(x_SxD, assignment_P, slot_SxK), slot_SxK


def _dispatched_backward(slot_SxK: jax.Array, g_PxD: jax.Array) -> tuple[jax.Array, None, None]:
    g_SxKxD = g_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.sum(g_SxKxD, axis=1, dtype=jnp.float32).astype(g_PxD.dtype), None, None


_dispatched.defvjp(_dispatched_forward, _dispatched_backward)


@jax.custom_vjp
def _combined(y_PxD: jax.Array, weights_SxK: jax.Array, assignment_P: jax.Array, slot_SxK: jax.Array) -> jax.Array:
    """Each token's weighted sum over its rows: float32 [S, D]."""
    y_SxKxD = y_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    return jnp.einsum("sk,skd->sd", weights_SxK, y_SxKxD, preferred_element_type=jnp.float32)


def _combined_forward(y_PxD, weights_SxK, assignment_P, slot_SxK):
    return _combined(y_PxD, weights_SxK, assignment_P, slot_SxK), (y_PxD, weights_SxK, assignment_P, slot_SxK)


def _combined_backward(saved: tuple[jax.Array, ...], g_SxD: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    y_PxD, weights_SxK, assignment_P, slot_SxK = saved
    weight_P = weights_SxK.reshape(-1).at[assignment_P].get(mode="fill", fill_value=0)
    g_PxD = g_SxD.at[assignment_P // slot_SxK.shape[1]].get(mode="fill", fill_value=0)
    y_SxKxD = y_PxD.at[slot_SxK].get(mode="fill", fill_value=0)
    d_weights = jnp.einsum("sd,skd->sk", g_SxD, y_SxKxD, preferred_element_type=jnp.float32)
    return (weight_P[:, None] * g_PxD).astype(y_PxD.dtype), d_weights, None, None


_combined.defvjp(_combined_forward, _combined_backward)
