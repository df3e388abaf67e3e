"""The kernels for NVIDIA GPUs return float64 numpy's values and gradients. These tests need a GPU:

JAX_PLATFORMS=cuda,cpu JAX_DISABLE_MOST_OPTIMIZATIONS=0 python -m pytest tests/model/test_gpu_kernels.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from pma_jax.model.attention import attention
from pma_jax.model.kernels import flash_attention
from pma_jax.model.kernels.grouped_hopper import hopper_supports
from pma_jax.model.kernels.grouped_matmul import grouped_matmul

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
E, D, F = 6, 256, 384


def exact(x):
    """Return what a bfloat16 array holds, in float64."""
    return np.asarray(x.astype(jnp.float32), np.float64)


def relative_error(actual, expected):
    return np.linalg.norm(exact(actual) - expected) / np.linalg.norm(expected)


def test_other_devices_and_shapes_are_not_supported():
    rows, matrices = jnp.zeros((256, D), jnp.bfloat16), jnp.zeros((E, D, F), jnp.bfloat16)
    if jax.default_backend() != "gpu":
        assert not hopper_supports(rows, matrices)
    assert not hopper_supports(rows.astype(jnp.float32), matrices.astype(jnp.float32))
    assert not hopper_supports(rows[:100], matrices)
    assert not hopper_supports(rows[:, :100], matrices[:, :100])


@needs_gpu
@pytest.mark.parametrize(
    "sizes",
    [
        [100, 0, 37, 119, 0, 256],
        [512, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 511],
        [64, 64, 128, 64, 128, 64],
        [3, 0, 9, 1, 0, 50],
    ],
    ids=str,
)  # The last sizes leave rows without a group, which are NaN, as are their gradients.
def test_hoppers_grouped_product_and_gradients(sizes):
    total = sum(sizes)
    keys = [jax.random.key(k) for k in range(3)]
    shapes = ((512, D), (E, D, F), (512, F))
    x, matrices, g = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    assert hopper_supports(x, matrices) or "H" not in jax.devices()[0].device_kind
    x, g = x.at[total:].set(jnp.nan), g.at[total:].set(jnp.nan)

    @jax.jit
    def run(x, matrices, sizes, g):
        y, pullback = jax.vjp(lambda x, m: grouped_matmul(x, m, sizes, total < 512), x, matrices)
        return y, *pullback(g)

    y, d_x, d_matrices = run(x, matrices, jnp.asarray(sizes, jnp.int32), g)
    x, matrices, g = exact(x), exact(matrices), exact(g)
    ends = np.cumsum(sizes)
    spans = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
    products = np.concatenate([x[span] @ matrix for span, matrix in zip(spans, matrices, strict=True)])
    d_rows = np.concatenate([g[span] @ matrix.T for span, matrix in zip(spans, matrices, strict=True)])
    assert relative_error(y[:total], products) < 3e-3
    assert relative_error(d_x[:total], d_rows) < 3e-3
    assert relative_error(d_matrices, np.stack([x[span].T @ g[span] for span in spans])) < 3e-3


@needs_gpu
@pytest.mark.parametrize(("packed", "window"), [(False, 0), (False, 100), (True, 0), (True, 100)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cudnns_attention(head_dim, packed, window):
    B, L, N, K = 2, 256, 4, 2
    assert flash_attention.cudnn_supports(L, head_dim, jnp.dtype("bfloat16"))
    rng = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(rng.standard_normal((B, L, n, head_dim)), jnp.bfloat16) for n in (N, K, K, N))
    documents = np.cumsum(rng.random((B, L)) < 0.03, axis=1).astype(np.int32) if packed else None
    ids = None if documents is None else jnp.asarray(documents)

    @jax.jit
    def run(q, k, v, g):
        y, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, ids, window), q, k, v)
        return y, *pullback(g)

    y, *gradients = run(q, k, v, g)

    def in_float64(q, k, v):
        heads = [(q[:, :, n], k[:, :, n * K // N], v[:, :, n * K // N]) for n in range(N)]
        return np.stack([reference.one_head(*three, documents, window) for three in heads], axis=2)

    inputs = [exact(x) for x in (q, k, v)]
    assert relative_error(y, in_float64(*inputs)) < 1e-2
    for index, gradient in enumerate(gradients):  # along a random direction of each input
        direction = np.random.default_rng(index).standard_normal(gradient.shape)
        sides = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[index] = moved[index] + sign * 1e-5 * direction
            sides.append(np.sum(exact(g) * in_float64(*moved)))
        expected = (sides[0] - sides[1]) / 2e-5
        scale = np.linalg.norm(exact(gradient)) * np.linalg.norm(direction) / np.sqrt(direction.size)
        assert abs(np.sum(exact(gradient) * direction) - expected) < 0.05 * scale
