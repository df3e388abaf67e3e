"""Product of rows, sorted by group, with one matrix per group: the core of a mixture of experts without dropping.

Legend: R rows, E groups, D the contracted dim, F the other dim of the matrices, t rows per block, N blocks.

On TPU this is Megablox (grouped matrix products in Pallas, after MegaBlocks, arXiv 2211.15841). On other platforms rows
are divided into blocks of one group each, and groups without rows are skipped: on NVIDIA GPUs all blocks are one
batched product, elsewhere a loop visits the blocks. `jax.lax.ragged_dot` is not used because on CPU and GPU it lowers
to a dense product over all groups, with E times the arithmetic.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

TPU_TILE = (512, 1024, 1024)  # rows, D, F of one step of Megablox; 2 of each fit in the 16 MiB of a v5e's VMEM


@jax.custom_vjp
def grouped_matmul(rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Multiply each row by the matrix of its group, accumulating in float32.

    Call it inside a `jax.shard_map`: arrays are one device's parts.

    Args:
        rows_RxD: Rows sorted by group.
        matrices_ExDxF: One matrix per group.
        sizes_E: Rows per group, int32. Rows past their sum belong to no group, and their results are undefined.

    Returns:
        [R, F] in the dtype of the rows.
    """
    return _forward(rows_RxD, matrices_ExDxF, sizes_E)[0]


def _forward(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(rows_RxD, matrices_ExDxF, sizes_E, False), (rows_RxD, matrices_ExDxF, sizes_E)


def _backward(saved: tuple[jax.Array, ...], g_RxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_RxD, matrices_ExDxF, sizes_E = saved
    d_rows = _product(g_RxF, matrices_ExDxF, sizes_E, True)
    d_matrices = jax.lax.platform_dependent(
        rows_RxD, g_RxF, sizes_E, tpu=_outer_by_megablox, cuda=_outer_by_batch, default=_outer_by_blocks
    )
    return d_rows, d_matrices, None


grouped_matmul.defvjp(_forward, _backward)


def _product(rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    """Multiply each row by the matrix of its group, or by its transpose."""
    ways = {"tpu": _product_by_megablox, "cuda": _product_by_batch, "default": _product_by_blocks}
    ways = {platform: functools.partial(way, transposed=transposed) for platform, way in ways.items()}
    return jax.lax.platform_dependent(rows_RxD, matrices_ExDxF, sizes_E, **ways)


# --- Any platform: a loop over blocks ---------------------------------------------------------------------------------


def _product_by_blocks(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    contracted = 1 if transposed else 0
    R, F = rows_RxD.shape[0], matrices_ExDxF.shape[1 if transposed else 2]
    t, count, block = _blocks(R, sizes_E)
    rows_RxD = _pad_rows(rows_RxD, t)

    def add(i: jax.Array, y_RxF: jax.Array) -> jax.Array:
        group, start, _ = block(i)
        rows_txD = jax.lax.dynamic_slice_in_dim(rows_RxD, start, t)
        matrix = jax.lax.dynamic_index_in_dim(matrices_ExDxF, group, keepdims=False)
        y_txF = jax.lax.dot_general(
            rows_txD, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32
        )
        # A group's last block extends into the next group, whose own blocks are written later and replace it.
        return jax.lax.dynamic_update_slice_in_dim(y_RxF, y_txF.astype(rows_RxD.dtype), start, 0)

    return jax.lax.fori_loop(0, count, add, jnp.zeros((R + t, F), rows_RxD.dtype))[:R]


def _outer_by_blocks(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Compute the gradient of the matrices [E, D, F]: per group, the transposed rows times their gradients."""
    t, count, block = _blocks(rows_RxD.shape[0], sizes_E)
    rows_RxD, g_RxF = _pad_rows(rows_RxD, t), _pad_rows(g_RxF, t)

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
    """Return t, the number of blocks with rows, and a function from a block's index to its position.

    The position is the block's group, its first row, and the number of rows left in the group from there.
    """
    # A quarter of an even share: half of each group's last block is wasted on average, an eighth of the arithmetic.
    t = min(max(32, -(-rows // (4 * sizes_E.shape[0]))), 512)
    blocks_E = -(-sizes_E // t)
    end_E = jnp.cumsum(blocks_E)
    start_E = jnp.cumsum(sizes_E) - sizes_E

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        group = jnp.searchsorted(end_E, i, side="right", method="compare_all")
        within = (i - (end_E[group] - blocks_E[group])) * t
        return group, start_E[group] + within, sizes_E[group] - within

    return t, end_E[-1], block


def _pad_rows(rows_RxD: jax.Array, extra: int) -> jax.Array:
    return jnp.pad(rows_RxD, ((0, extra), (0, 0)))


# --- GPU: one batched product of all blocks ---------------------------------------------------------------------------

# On a GPU each iteration of a loop would wait for the host, as long as the block's product takes, and one block does
# not fill the device. The cost of batching: each block has a copy of its group's matrix, and up to E blocks are empty.


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
    # Summed by a product, because a scatter would add atomically, in a nondeterministic order. Empty blocks add zeros.
    of_group_ExN = (jnp.arange(sizes_E.shape[0])[:, None] == group_N).astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if rows_RxD.dtype == jnp.float32 else None
    return jnp.einsum("en,ndf->edf", of_group_ExN, d_NxDxF, precision=precision).astype(rows_RxD.dtype)


def _batch(rows: int, sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the row indices [N, t] of each block (R for none), its group [N], and the slot of each row [R]."""
    E = sizes_E.shape[0]
    # A quarter of an even share, rounded up to tiles: empty blocks then cost a quarter of the arithmetic.
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


# --- TPU: Megablox ----------------------------------------------------------------------------------------------------


def _product_by_megablox(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    F = matrices_ExDxF.shape[1 if transposed else 2]
    rows, tile = _pad_to_tiles(rows_RxD, F)
    y = gmm(rows, matrices_ExDxF, sizes_E, rows.dtype, tile, transpose_rhs=transposed)
    return y[: rows_RxD.shape[0]]


def _outer_by_megablox(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, tile = _pad_to_tiles(rows_RxD, g_RxF.shape[1])
    return tgmm(rows.T, _pad_to_tiles(g_RxF, 1)[0], sizes_E, rows.dtype, tile)


def _pad_to_tiles(rows_RxD: jax.Array, F: int) -> tuple[jax.Array, tuple[int, int, int]]:
    """Pad the rows to a multiple of the tile, and return the tile's sizes."""
    R, D = rows_RxD.shape
    tile_rows = min(TPU_TILE[0], -(-R // 128) * 128)
    return _pad_rows(rows_RxD, -R % tile_rows), (tile_rows, min(TPU_TILE[1], D), min(TPU_TILE[2], F))
