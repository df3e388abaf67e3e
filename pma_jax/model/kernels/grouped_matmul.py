"""The product of rows, sorted by group, with one matrix a group: what a dropless mixture of experts computes.

Legend: R rows, E groups, D the dim that is summed over, F the matrices' other dim, t rows of a block, N blocks.

On TPU it is Megablox (grouped matrix products in Pallas, after MegaBlocks, arXiv 2211.15841). Elsewhere rows are cut
into blocks of one group each, and a group without rows is never visited: `jax.lax.ragged_dot` lowers on CPU and GPU to
a dense product over all groups, E times the arithmetic. On NVIDIA's GPUs all blocks are one batched product; on other
platforms a loop over the blocks that there are.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

TPU_TILE = (512, 1024, 1024)  # rows, D, F of one step of Megablox; 2 of each fit in the 16 MiB of a v5e's VMEM


@jax.custom_vjp
def grouped_matmul(rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Row r times the matrix of its group: [R, F] in the dtype of the rows, summed in float32.

    The first `sizes_E[0]` (int32) rows are of group 0, the next `sizes_E[1]` of group 1, and so on; where they add up
    to less than R, the rows past them are of no group, and what they give is not defined. No sharding: an array here is
    a device's own part (call it inside a `jax.shard_map`).
    """
    return _forward(rows_RxD, matrices_ExDxF, sizes_E)[0]


def _forward(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y_RxF = jax.lax.platform_dependent(
        rows_RxD,
        matrices_ExDxF,
        sizes_E,
        tpu=_product_by_megablox,
        cuda=_product_by_batch,
        default=_product_by_blocks,
    )
    return y_RxF, (rows_RxD, matrices_ExDxF, sizes_E)


def _backward(saved: tuple[jax.Array, ...], g_RxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_RxD, matrices_ExDxF, sizes_E = saved
    d_rows = jax.lax.platform_dependent(
        g_RxF,
        matrices_ExDxF,
        sizes_E,
        tpu=functools.partial(_product_by_megablox, transposed=True),
        cuda=functools.partial(_product_by_batch, transposed=True),
        default=functools.partial(_product_by_blocks, transposed=True),
    )
    d_matrices = jax.lax.platform_dependent(
        rows_RxD, g_RxF, sizes_E, tpu=_outer_by_megablox, cuda=_outer_by_batch, default=_outer_by_blocks
    )
    return d_rows, d_matrices, None


grouped_matmul.defvjp(_forward, _backward)


# --- A loop over blocks: any platform ---------------------------------------------------------------------------------


def _product_by_blocks(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    contracted = 1 if transposed else 0
    R, F = rows_RxD.shape[0], matrices_ExDxF.shape[1 if transposed else 2]
    t, count, block = _blocks(R, sizes_E)
    rows_RxD = _padded(rows_RxD, t)

    def add(i: jax.Array, y_RxF: jax.Array) -> jax.Array:
        group, start, _ = block(i)
        rows_txD = jax.lax.dynamic_slice_in_dim(rows_RxD, start, t)
        matrix = jax.lax.dynamic_index_in_dim(matrices_ExDxF, group, keepdims=False)
        y_txF = jax.lax.dot_general(
            rows_txD, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32
        )
        # A group's last block reaches into the next group, whose own blocks come later and write over it.
        return jax.lax.dynamic_update_slice_in_dim(y_RxF, y_txF.astype(rows_RxD.dtype), start, 0)

    return jax.lax.fori_loop(0, count, add, jnp.zeros((R + t, F), rows_RxD.dtype))[:R]


def _outer_by_blocks(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The gradient of the matrices: for each group, its rows' transpose times their gradients; [E, D, F]."""
    t, count, block = _blocks(rows_RxD.shape[0], sizes_E)
    rows_RxD, g_RxF = _padded(rows_RxD, t), _padded(g_RxF, t)

    def add(i: jax.Array, d_ExDxF: jax.Array) -> jax.Array:
        group, start, length = block(i)
        inside_tx1 = (jnp.arange(t) < length)[:, None]
        rows_txD = jnp.where(inside_tx1, jax.lax.dynamic_slice_in_dim(rows_RxD, start, t), 0)
        g_txF = jnp.where(inside_tx1, jax.lax.dynamic_slice_in_dim(g_RxF, start, t), 0)
        d_DxF = jnp.einsum("td,tf->df", rows_txD, g_txF, preferred_element_type=jnp.float32)
        so_far = jax.lax.dynamic_index_in_dim(d_ExDxF, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(d_ExDxF, so_far + d_DxF, group, 0)

    zeros = jnp.zeros((sizes_E.shape[0], rows_RxD.shape[1], g_RxF.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, add, zeros).astype(rows_RxD.dtype)


def _blocks(
    rows: int, sizes_E: jax.Array
) -> tuple[int, jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """Rows of a block, how many blocks have rows, and of the i-th its group, first row, and rows of its group."""
    # A quarter of an even share: half of the last block of a group is wasted, an eighth of the arithmetic then.
    t = min(max(32, -(-rows // (4 * sizes_E.shape[0]))), 512)
    blocks_E = -(-sizes_E // t)
    end_E = jnp.cumsum(blocks_E)
    start_E = jnp.cumsum(sizes_E) - sizes_E

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        group = jnp.searchsorted(end_E, i, side="right", method="compare_all")
        within = (i - (end_E[group] - blocks_E[group])) * t
        return group, start_E[group] + within, sizes_E[group] - within

    return t, end_E[-1], block


def _padded(rows_RxD: jax.Array, extra: int) -> jax.Array:
    return jnp.pad(rows_RxD, ((0, extra), (0, 0)))


# --- One batched product of all blocks: GPU ---------------------------------------------------------------------------

# A loop would wait in every round for the host, which on a GPU takes as long as the block's product, and a block alone
# does not fill the chip. The price: each block has a copy of its group's matrix, and up to E blocks are empty.


def _product_by_batch(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    index_Nxt, group_N, slot_R = _batch(rows_RxD.shape[0], sizes_E)
    rows_NxtxD = rows_RxD.at[index_Nxt].get(mode="fill", fill_value=0)
    product = "ntf,ndf->ntd" if transposed else "ntd,ndf->ntf"
    y_NxtxF = jnp.einsum(product, rows_NxtxD, matrices_ExDxF[group_N], preferred_element_type=jnp.float32)
    y_NxtxF = y_NxtxF.astype(rows_RxD.dtype)
    return y_NxtxF.reshape(-1, y_NxtxF.shape[-1])[slot_R]


def _outer_by_batch(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    index_Nxt, group_N, _ = _batch(rows_RxD.shape[0], sizes_E)
    rows_NxtxD, g_NxtxF = (x.at[index_Nxt].get(mode="fill", fill_value=0) for x in (rows_RxD, g_RxF))
    d_NxDxF = jnp.einsum("ntd,ntf->ndf", rows_NxtxD, g_NxtxF, preferred_element_type=jnp.float32)
    # Summed by a product: a scatter would add atomically, in another order each time. Empty blocks add zeros.
    of_group_ExN = (jnp.arange(sizes_E.shape[0])[:, None] == group_N).astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if rows_RxD.dtype == jnp.float32 else None
    return jnp.einsum("en,ndf->edf", of_group_ExN, d_NxDxF, precision=precision).astype(rows_RxD.dtype)


def _batch(rows: int, sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows of each block [N, t] (past the last row where it has fewer), its group [N], and each row's place [R]."""
    E = sizes_E.shape[0]
    # A quarter of an even share, in whole tiles, as of those the empty blocks cost a quarter of the arithmetic.
    t = min(-(-rows // (4 * E * 128)) * 128, rows)
    blocks_E = -(-sizes_E // t)
    end_E, end_row_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    first_E, first_row_E = end_E - blocks_E, end_row_E - sizes_E
    block_N = jnp.arange(-(-rows // t) + E)
    group_N = jnp.minimum(jnp.searchsorted(end_E, block_N, side="right", method="compare_all"), E - 1)
    within_Nxt = (block_N - first_E[group_N])[:, None] * t + jnp.arange(t)
    index_Nxt = jnp.where(within_Nxt < sizes_E[group_N][:, None], first_row_E[group_N][:, None] + within_Nxt, rows)
    row_R = jnp.arange(rows)
    group_R = jnp.minimum(jnp.searchsorted(end_row_E, row_R, side="right", method="compare_all"), E - 1)
    return index_Nxt, group_N, first_E[group_R] * t + row_R - first_row_E[group_R]


# --- Megablox: TPU ----------------------------------------------------------------------------------------------------


def _product_by_megablox(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    F = matrices_ExDxF.shape[1 if transposed else 2]
    rows, tile = _tiled(rows_RxD, F)
    y = gmm(rows, matrices_ExDxF, sizes_E, rows.dtype, tile, transpose_rhs=transposed)
    return y[: rows_RxD.shape[0]]


def _outer_by_megablox(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, tile = _tiled(rows_RxD, g_RxF.shape[1])
    return tgmm(rows.T, _tiled(g_RxF, 1)[0], sizes_E, rows.dtype, tile)


def _tiled(rows_RxD: jax.Array, F: int) -> tuple[jax.Array, tuple[int, int, int]]:
    """The rows, padded to a whole number of tiles, and the tile's sizes."""
    R, D = rows_RxD.shape
    tile_rows = min(TPU_TILE[0], -(-R // 128) * 128)
    return _padded(rows_RxD, -R % tile_rows), (tile_rows, min(TPU_TILE[1], D), min(TPU_TILE[2], F))
