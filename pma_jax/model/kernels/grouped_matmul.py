"""Grouped matmul: each row is multiplied by the matrix of its group, as in a mixture of experts.

Shape suffixes: R rows, E groups, D the contracted dim, F the other dim of the matrices, t rows per block, N blocks.

On TPU this is Megablox (grouped matmuls in Pallas, after MegaBlocks, arXiv 2211.15841), and on NVIDIA Hopper GPUs
`grouped_hopper`. Elsewhere the rows are divided into blocks that each belong to one group: on other NVIDIA GPUs one
batched matmul multiplies all blocks, and on other platforms a loop multiplies block after block. `jax.lax.ragged_dot`
is not used, because on CPU and GPU it lowers to a dense matmul over all groups, which takes E times the FLOPs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pma_jax.model.kernels.grouped_hopper import gradient_by_hopper, hopper_supports, product_by_hopper

# Rows, D and F in one step of Megablox; the tiles of two steps fit into the 16 MiB VMEM of a v5e.
TPU_TILE = (512, 1024, 1024)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, has_padding: bool = True
) -> jax.Array:
    """Multiply each row by the matrix of its group, accumulating in float32.

    Call it inside `jax.shard_map`; the arrays are one device's shards.

    Args:
        rows_RxD: Rows sorted by group.
        matrices_ExDxF: One matrix per group.
        sizes_E: Rows per group, int32. Rows after the last group have undefined results.
        has_padding: Whether there may be rows after the last group; they may be NaN, as may their gradients.

    Returns:
        [R, F] in the dtype of the rows.
    """
    del has_padding
    return _product(rows_RxD, matrices_ExDxF, sizes_E, False)


def _forward(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, has_padding: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    del has_padding
    return _product(rows_RxD, matrices_ExDxF, sizes_E, False), (rows_RxD, matrices_ExDxF, sizes_E)


def _backward(has_padding: bool, saved: tuple[jax.Array, ...], g_RxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_RxD, matrices_ExDxF, sizes_E = saved
    d_rows = _product(g_RxF, matrices_ExDxF, sizes_E, True)
    by_hopper = functools.partial(gradient_by_hopper, has_padding=has_padding)
    on_gpu = by_hopper if hopper_supports(rows_RxD, matrices_ExDxF) else _gradient_by_batch
    d_matrices = jax.lax.platform_dependent(
        rows_RxD, g_RxF, sizes_E, tpu=_gradient_by_megablox, cuda=on_gpu, default=_gradient_by_loop
    )
    return d_rows, d_matrices, None


grouped_matmul.defvjp(_forward, _backward)


def _product(rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    """Multiply each row by the matrix of its group, or by its transpose.

    For the transpose, D and F change places in the names of the rows and of the result, here and in the implementations
    below: the rows are [R, F], and the result is [R, D].
    """
    on_gpu = product_by_hopper if hopper_supports(rows_RxD, matrices_ExDxF) else _product_by_batch
    by_platform = {"tpu": _product_by_megablox, "cuda": on_gpu, "default": _product_by_loop}
    by_platform = {name: functools.partial(product, transposed=transposed) for name, product in by_platform.items()}
    return jax.lax.platform_dependent(rows_RxD, matrices_ExDxF, sizes_E, **by_platform)


# --- Any platform: a loop over blocks ---------------------------------------------------------------------------------


def _product_by_loop(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    contracted = 1 if transposed else 0
    R, F = rows_RxD.shape[0], matrices_ExDxF.shape[1 if transposed else 2]
    t, count, block = _loop_blocks(R, sizes_E)
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


def _gradient_by_loop(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Compute the gradient of the matrices [E, D, F]: per group, the transposed rows times their gradients."""
    t, count, block = _loop_blocks(rows_RxD.shape[0], sizes_E)
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


def _loop_blocks(
    rows: int, sizes_E: jax.Array
) -> tuple[int, jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """Return t, the number of non-empty blocks, and a function from a block's index to its position.

    The position consists of the block's group, its first row, and the number of rows of the group from that row on.
    """
    # A quarter of the mean group size, within limits. On average half of each group's last block is wasted: if no limit
    # applies, this adds an eighth to the FLOPs.
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


# --- Other GPUs: one batched matmul of all blocks ---------------------------------------------------------------------

# On a GPU each iteration of a loop would synchronise with the host, which takes as long as the matmul of a block, and
# one block does not use the complete device. Batching instead costs memory, because each block has a copy of the matrix
# of its group, and FLOPs, because up to E blocks are empty.


def _product_by_batch(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    index_Nxt, group_N, position_R = _batch_blocks(rows_RxD.shape[0], sizes_E)
    rows_NxtxD = rows_RxD.at[index_Nxt].get(mode="fill", fill_value=0)
    product = "ntf,ndf->ntd" if transposed else "ntd,ndf->ntf"
    y_NxtxF = jnp.einsum(product, rows_NxtxD, matrices_ExDxF[group_N], preferred_element_type=jnp.float32)
    y_NxtxF = y_NxtxF.astype(rows_RxD.dtype)
    return y_NxtxF.reshape(-1, y_NxtxF.shape[-1])[position_R]


def _gradient_by_batch(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    index_Nxt, group_N, _ = _batch_blocks(rows_RxD.shape[0], sizes_E)
    rows_NxtxD, g_NxtxF = (x.at[index_Nxt].get(mode="fill", fill_value=0) for x in (rows_RxD, g_RxF))
    d_NxDxF = jnp.einsum("ntd,ntf->ndf", rows_NxtxD, g_NxtxF, preferred_element_type=jnp.float32)
    # Sum the blocks of each group by a matmul, because a scatter-add on a GPU uses atomics, whose order is not
    # deterministic. Empty blocks add zeros.
    one_hot_ExN = (jnp.arange(sizes_E.shape[0])[:, None] == group_N).astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if rows_RxD.dtype == jnp.float32 else None
    return jnp.einsum("en,ndf->edf", one_hot_ExN, d_NxDxF, precision=precision).astype(rows_RxD.dtype)


def _batch_blocks(rows: int, sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divide the rows into blocks of t rows.

    Returns:
        The indices of each block's rows, [N, t], padded with R; each block's group, [N]; and each row's position in the
        flattened blocks, [R].
    """
    E = sizes_E.shape[0]
    # A quarter of the mean group size, rounded up to a multiple of 128. The blocks have room for at least E * t more
    # rows than there are, so padding adds a quarter to the FLOPs, or more where t was rounded up.
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


def _gradient_by_megablox(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, tile = _pad_to_tiles(rows_RxD, g_RxF.shape[1])
    return tgmm(rows.T, _pad_to_tiles(g_RxF, 1)[0], sizes_E, rows.dtype, tile)


def _pad_to_tiles(rows_RxD: jax.Array, F: int) -> tuple[jax.Array, tuple[int, int, int]]:
    """Return the rows padded to a multiple of the tile, and the tile's sizes for R, D and F."""
    R, D = rows_RxD.shape
    tile_rows = min(TPU_TILE[0], -(-R // 128) * 128)
    return _pad_rows(rows_RxD, -R % tile_rows), (tile_rows, min(TPU_TILE[1], D), min(TPU_TILE[2], F))
