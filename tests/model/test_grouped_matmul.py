import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.model.kernels import grouped_matmul as grouped
from pma_jax.model.kernels.grouped_matmul import grouped_matmul

E, D, F = 4, 12, 20
SIZES = [
    [5, 0, 11, 16],
    [32, 0, 0, 0],
    [0, 0, 0, 32],
    [8, 8, 8, 8],
    [0, 0, 0, 0],
    [3, 0, 9, 1],
]  # The last sizes leave rows without a group.


def arrays(rows=32, dim=D, other=F):
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) for shape in ((rows, dim), (E, dim, other), (rows, other)))


def by_groups(sizes, x, matrices):
    ends = np.cumsum(sizes)
    return np.concatenate([x[end - n : end] @ matrix for n, end, matrix in zip(sizes, ends, matrices, strict=True)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_and_gradients_equal_numpys(sizes):
    x, matrices, g = arrays()
    total = sum(sizes)

    @jax.jit
    def run(x, matrices, sizes, g):
        y, pullback = jax.vjp(lambda x, m: grouped_matmul(x, m, sizes), x, matrices)
        return y, *pullback(g)

    args = (np.float32(x), np.float32(matrices), np.int32(sizes), np.float32(g))
    y, d_x, d_matrices = run(*args)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(y[:total], by_groups(sizes, x, matrices), **close)
    np.testing.assert_allclose(d_x[:total], by_groups(sizes, g, matrices.swapaxes(1, 2)), **close)
    for e, (n, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        np.testing.assert_allclose(d_matrices[e], x[end - n : end].T @ g[end - n : end], **close)


@pytest.mark.parametrize("rows", [32, 1500])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_batched_blocks_for_gpus_are_the_same_function(sizes, rows):
    sizes = np.array(sizes) * rows // 32
    x, matrices, g = arrays(rows=rows)
    total, ends = sizes.sum(), np.cumsum(sizes)
    matrices[sizes == 0] = np.nan  # Never visited.
    args = (np.float32(x), np.float32(matrices), np.float32(g), np.int32(sizes))

    @jax.jit
    def run(x, matrices, g, sizes):
        return (
            grouped._product_by_batch(x, matrices, sizes),
            grouped._product_by_batch(g, matrices, sizes, transposed=True),
            grouped._gradient_by_batch(x, g, sizes),
        )

    y, d_x, d_matrices = run(*args)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(y[:total], by_groups(sizes, x, matrices), **close)
    np.testing.assert_allclose(d_x[:total], by_groups(sizes, g, matrices.swapaxes(1, 2)), **close)
    for e, (n, end) in enumerate(zip(sizes, ends, strict=True)):
        np.testing.assert_allclose(d_matrices[e], x[end - n : end].T @ g[end - n : end], **close)


def test_gpu_runs_one_batch_of_each_product():
    def objective(x, matrices, sizes):
        return jnp.sum(grouped_matmul(x, matrices, sizes) ** 2)

    shapes = [((1024, 256), jnp.bfloat16), ((E, 256, 128), jnp.bfloat16), ((E,), jnp.int32)]
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    text = jax.export.export(jax.jit(jax.grad(objective, (0, 1))), platforms=["cuda"])(*abstract).mlir_module()
    # Forward, both gradients, and the sum of the blocks' gradients; each group has an eighth of the rows or more.
    assert text.count("stablehlo.dot_general") == 4 and "while" not in text and "ragged_dot" not in text


def test_group_without_rows_is_not_visited():
    x, matrices, _ = arrays()
    matrices[1] = np.nan  # Zero times NaN would be NaN.
    y = jax.jit(grouped_matmul)(np.float32(x), np.float32(matrices), np.int32([20, 0, 6, 6]))
    assert np.isfinite(y).all()
    # The computation also covers only the non-empty blocks: a loop of dynamic length over one small product.
    lowered = jax.jit(grouped_matmul).lower(np.float32(x), np.float32(matrices), np.int32([20, 0, 6, 6]))
    assert lowered.compile().cost_analysis()["flops"] < 1.5 * 2 * 32 * D * F


def test_bfloat16_rows_are_summed_in_float32():
    x, matrices, _ = arrays(rows=32, dim=512)
    x, matrices = jnp.asarray(x, jnp.bfloat16), jnp.asarray(matrices, jnp.bfloat16)
    y = jax.jit(grouped_matmul)(x, matrices, np.int32([8, 8, 0, 16]))
    expected = by_groups([8, 8, 0, 16], np.asarray(x, np.float64), np.asarray(matrices, np.float64))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-7, atol=2**-4)


def test_tpu_runs_three_megablox_kernels_and_no_dense_product():
    def objective(x, matrices, sizes):
        return jnp.sum(grouped_matmul(x, matrices, sizes) ** 2)

    shapes = [((1024, 256), jnp.bfloat16), ((E, 256, 128), jnp.bfloat16), ((E,), jnp.int32)]
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    text = jax.export.export(jax.jit(jax.grad(objective, (0, 1))), platforms=["tpu"])(*abstract).mlir_module()
    # Forward, gradient of the rows, gradient of the matrices: all kernels, no other product.
    assert text.count("tpu_custom_call") == 3
    assert "dot_general" not in text and "ragged_dot" not in text


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[100, 0, 37, 119], [256, 0, 0, 0]], ids=str)
def test_megablox_is_the_same_function(sizes, monkeypatch):
    from jax.experimental import pallas

    real = pallas.pallas_call
    monkeypatch.setattr(pallas, "pallas_call", lambda *args, **kwargs: real(*args, **kwargs | {"interpret": True}))
    x, matrices, g = (np.float32(a) for a in arrays(rows=256, dim=128, other=256))
    sizes = jnp.asarray(sizes, jnp.int32)
    for by_megablox, by_blocks, args in [
        (grouped._product_by_megablox, grouped._product_by_loop, (x, matrices)),
        (grouped._product_by_megablox, grouped._product_by_loop, (g, matrices.swapaxes(1, 2))),
        (grouped._gradient_by_megablox, grouped._gradient_by_loop, (x, g)),
    ]:
        np.testing.assert_allclose(by_megablox(*args, sizes), by_blocks(*args, sizes), rtol=1e-4, atol=1e-3)
    transposed = grouped._product_by_megablox(g, matrices, sizes, transposed=True)
    np.testing.assert_allclose(transposed, by_groups(sizes, g, matrices.swapaxes(1, 2)), rtol=1e-4, atol=1e-3)
