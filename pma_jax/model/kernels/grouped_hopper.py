"""Grouped matmul on NVIDIA GPUs of the Hopper generation: the kernels of Pallas' Mosaic GPU that come with JAX 0.11.

Shape suffixes as in `grouped_matmul`: R rows, E groups, D the contracted dim, F the other dim of the matrices.
"""

import jax
import jax.numpy as jnp

_DEVICES = ("H100", "H200", "H800", "H20")  # in the names of devices; a GH200 has an H200
_TILE = 128  # rows and columns of a tile
_CONTRACTED = 64  # elements of the contracted dim per step of a tile
# Steps that are in shared memory at a time. On an H200, 4, 5 and 6 were within 5% of each other, and 2 half as fast.
_CONCURRENT_STEPS = 5
_CONCURRENT_STEPS_OF_GRADIENT = 4
_MAX_NEIGHBOURS = 12  # tiles of the same rows that run together, so that they find these rows in the L2 cache


def hopper_supports(rows_RxD: jax.Array, matrices_ExDxF: jax.Array) -> bool:
    """Return whether the mesh's devices are Hoppers, and the kernels support these shapes and dtypes."""
    if jax.__version_info__ < (0, 11):  # jaxlib 0.10.1 lacks an operation that the kernel of the gradient calls
        return False
    mesh = jax.sharding.get_abstract_mesh()
    device = jax.devices()[0] if mesh.empty else mesh.abstract_device
    is_hopper = device.platform == "gpu" and any(name in device.device_kind for name in _DEVICES)
    is_16bit = rows_RxD.dtype == matrices_ExDxF.dtype and rows_RxD.dtype in (jnp.bfloat16, jnp.float16)
    fits = rows_RxD.shape[0] >= _TILE and all(size % _TILE == 0 for size in matrices_ExDxF.shape[1:])
    return is_hopper and is_16bit and fits


def product_by_hopper(
    rows_RxD: jax.Array, matrices_ExDxF: jax.Array, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    """Multiply each row by the matrix of its group, or by its transpose; see `grouped_matmul`."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return ragged_dot(
        rows_RxD,
        matrices_ExDxF,
        group_sizes=sizes_E,
        block_m=_TILE,
        block_n=_TILE,
        block_k=_CONTRACTED,
        max_concurrent_steps=_CONCURRENT_STEPS,
        grid_block_n=_neighbours(matrices_ExDxF.shape[1 if transposed else 2]),
        transpose_rhs=transposed,
    )


def gradient_by_hopper(rows_RxD: jax.Array, g_RxF: jax.Array, sizes_E: jax.Array, has_padding: bool) -> jax.Array:
    """Compute the gradient of the matrices, [E, D, F]: per group, the transposed rows times their gradients."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    if has_padding:
        # The kernel multiplies rows of the next group by zero, and rows without a group may be NaN.
        is_in_group_Rx1 = (jnp.arange(rows_RxD.shape[0]) < jnp.sum(sizes_E))[:, None]
        rows_RxD, g_RxF = (jnp.where(is_in_group_Rx1, x, 0) for x in (rows_RxD, g_RxF))
    return transposed_ragged_dot(
        rows_RxD,
        g_RxF,
        group_sizes=sizes_E,
        block_m=_TILE,
        block_n=_TILE,
        block_k=_CONTRACTED,
        max_concurrent_steps=_CONCURRENT_STEPS_OF_GRADIENT,
        grid_block_n=_neighbours(g_RxF.shape[1]),
    )


def _neighbours(size: int) -> int:
    """Return how many neighbouring tiles along a dim of `size` elements run together: a divisor of their number."""
    return max(n for n in range(1, _MAX_NEIGHBOURS + 1) if (size // _TILE) % n == 0)
