"""Hessian and Gauss-Newton products against the matrices of jax.hessian, and the algebra of merging."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from parameter_path import top_eigenpairs

from pma_jax.analysis import curvature
from pma_jax.analysis.curvature import inner_product
from pma_jax.analysis.workbench import open_workbench
from pma_jax.data.sampling import FIT
from pma_jax.model.decoder import init_params

TARGETS = jnp.asarray([0, 2, 1, 1])
WEIGHTS = jnp.asarray([1.0, 1.0, 0.0, 1.0])
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


@pytest.fixture
def params():
    rng = np.random.default_rng(1)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in {"in": (3, 4), "out": (4, 3)}.items()}


def outputs(params, batch):
    inputs, weights, _ = batch
    return jnp.tanh(inputs @ params["in"]) @ params["out"], weights


def loss_of_batch(params, batch):
    logits, weights = outputs(params, batch)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[2][:, None], 1)[:, 0]
    return jnp.sum(nats * weights)


ALL = (INPUTS, WEIGHTS / 3, TARGETS)
HESSIAN, GAUSS_NEWTON = (
    functools.partial(curvature.hessian, loss_of_batch),
    functools.partial(curvature.gauss_newton, outputs),
)
BATCHES = [jax.tree.map(lambda x, i=i: x[i : i + 2], ALL) for i in (0, 2)]


def loss(params):
    return loss_of_batch(params, ALL)


def hessian_product(params):
    return curvature.sum_products(HESSIAN, params, BATCHES)


def dense(function, params):
    flat, unflatten = ravel_pytree(params)
    return np.asarray(jax.hessian(lambda v: function(unflatten(v)))(flat), np.float64)


def dense_from_product(product, params):
    """Return the matrix of a product, column by column."""
    flat, unflatten = ravel_pytree(params)
    column_of = jax.jit(lambda column: ravel_pytree(product(unflatten(column)))[0])
    columns = [column_of(column) for column in np.eye(flat.size, dtype=np.float32)]
    return np.stack([np.asarray(c, np.float64) for c in columns], axis=1)


def test_hessian_products_equal_those_of_the_matrix(params):
    product = hessian_product(params)
    np.testing.assert_allclose(dense_from_product(product, params), dense(loss, params), atol=1e-5)


def test_slopes_are_products_with_the_gradient(params):
    deltas = [jax.tree.map(lambda p, k=k: jnp.full_like(p, k) * p**2, params) for k in (1.0, -2.0)]
    gradient = np.asarray(ravel_pytree(jax.grad(loss)(params))[0], np.float64)
    expected = [gradient @ np.asarray(ravel_pytree(delta)[0], np.float64) for delta in deltas]
    actual = curvature.directional_derivatives(loss_of_batch, params, BATCHES, deltas)
    np.testing.assert_allclose(actual.sum(axis=0), expected, rtol=1e-5)


@pytest.mark.slow
def test_gauss_newton_equals_jacobian_transpose_times_output_hessian_times_jacobian(params):
    flat, unflatten = ravel_pytree(params)
    logits = outputs(params, ALL)[0]
    jacobian = np.asarray(jax.jacobian(lambda v: outputs(unflatten(v), ALL)[0])(flat), np.float64).reshape(4, 3, -1)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    expected = sum(
        w / 3 * jacobian[i].T @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ jacobian[i]
        for i, w in enumerate(np.asarray(WEIGHTS))
    )
    actual = dense_from_product(curvature.sum_products(GAUSS_NEWTON, params, BATCHES), params)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert np.linalg.eigvalsh((actual + actual.T) / 2).min() > -1e-5


def test_top_of_the_spectrum_equals_that_of_the_matrix(params):
    values, vectors = top_eigenpairs(hessian_product(params), params, 3)
    exact = np.linalg.eigvalsh(dense(loss, params))[::-1][:3]
    np.testing.assert_allclose(values, exact, rtol=1e-2, atol=1e-4)
    flat = np.asarray(ravel_pytree(vectors[0])[0], np.float64)
    assert np.linalg.norm(flat) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(dense(loss, params) @ flat, values[0] * flat, atol=2e-2 * values[0])
    with pytest.raises(ValueError, match="24 parameters"):
        top_eigenpairs(hessian_product(params), params, 24)


@given(st.integers(2, 6), st.integers(0, 2**31))
def test_gains_are_differences_of_a_quadratic(count, seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(8, 8))
    hessian, slope = root @ root.T, rng.normal(size=8)
    deltas_K = rng.normal(size=(count, 8))
    weights = rng.normal(size=count)
    weights /= weights.sum() if abs(weights.sum()) > 0.1 else 1.0
    weights[-1] += 1 - weights.sum()
    matrix = deltas_K @ hessian @ deltas_K.T

    def quadratic(delta):
        return slope @ delta + delta @ hessian @ delta / 2

    merged = quadratic(weights @ deltas_K)
    each = np.array([quadratic(d) for d in deltas_K])
    scale = 1 + np.abs(each).max() * np.abs(weights).max() ** 2 * count
    assert curvature.merging_gain(matrix, weights) == pytest.approx(weights @ each - merged, abs=1e-9 * scale)
    over_last = curvature.merging_gain_over_last(matrix, weights, deltas_K @ slope)
    assert over_last == pytest.approx(each[-1] - merged, abs=1e-9 * scale)


def test_pairs_are_products_of_the_deltas(params):
    keys = jax.random.split(jax.random.key(0), 3)
    deltas = [jax.tree.map(lambda x, k=key: jax.random.normal(k, x.shape), params) for key in keys]
    flat = np.stack([np.asarray(ravel_pytree(d)[0], np.float64) for d in deltas])
    actual = curvature.pairwise_curvature(HESSIAN, params, BATCHES, deltas)
    for of_batch, batch in zip(actual, BATCHES, strict=True):
        expected = flat @ dense(functools.partial(loss_of_batch, batch=batch), params) @ flat.T
        np.testing.assert_allclose(of_batch, expected, atol=1e-4)
    np.testing.assert_allclose(actual.sum(axis=0), flat @ dense(loss, params) @ flat.T, atol=1e-4)


@pytest.mark.slow
def test_products_of_the_decoder_equal_differences_of_its_gradient(finished):
    bench = open_workbench(finished.config, part=FIT)
    with jax.set_mesh(bench.mesh):
        params, vector = (init_params(finished.config.model, jax.random.key(seed)) for seed in (0, 1))
        product = curvature.sum_products(bench.hessian, params, bench.batches)
        actual = product(vector)
        gradient = jax.jit(jax.grad(bench.loss))
        step = 1e-2
        ahead = gradient(jax.tree.map(lambda p, v: p + step * v, params, vector))
        behind = gradient(jax.tree.map(lambda p, v: p - step * v, params, vector))
        values, vectors = top_eigenpairs(product, params, 1)
        curved = product(vectors[0])
        gauss_newton = curvature.sum_products(bench.gauss_newton, params, bench.batches)
        spread = float(inner_product(vector, gauss_newton(vector)))
    expected = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / (2 * step), ahead, behind)
    assert distance(actual, expected) < 2e-2
    assert spread > 0  # Positive semi-definite, unlike the Hessian in general.
    assert distance(curved, jax.tree.map(lambda v: values[0] * np.asarray(v), vectors[0])) < 5e-2


def distance(actual, expected):
    actual, expected = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)
