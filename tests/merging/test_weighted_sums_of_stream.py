"""Streaming averages: one checkpoint ahead, bounded memory, the same sums, and failing loaders."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pma_jax.merging import averager, recipes


def make_checkpoints(count, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [
        {"a": rng.normal(size=(8, 16)).astype(dtype), "b": {"c": rng.normal(size=(64,)).astype(dtype)}}
        for _ in range(count)
    ]


def as_float32(x):
    return x.astype(np.float32)


def abstract_on(mesh, dtype=jnp.float32):
    return {
        "a": jax.ShapeDtypeStruct((8, 16), dtype, sharding=jax.NamedSharding(mesh, jax.P("x", "y"))),
        "b": {"c": jax.ShapeDtypeStruct((64,), dtype, sharding=jax.NamedSharding(mesh, jax.P("y")))},
    }


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 2), np.float32),
        ((2, 4), jnp.bfloat16),
        pytest.param((2, 4), np.float32, marks=pytest.mark.slow),
        pytest.param((4, 2), jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_rows_equal_float64_from_host_or_mesh(shape, dtype):
    mesh = jax.make_mesh(shape, ("x", "y"))
    params_K, like = make_checkpoints(5, dtype), abstract_on(mesh)
    C = np.stack([recipes.coefficients(text, [1, 2, 3, 4, 5]) for text in ("sma", "ema:alpha=0.2", "sma:3", "lagfree")])
    wanted_R = [jax.tree.map(lambda *x, c=c: np.tensordot(c, np.stack(x).astype(np.float64), 1), *params_K) for c in C]
    on_mesh_K = [jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), p, like) for p in params_K]
    for trees in (params_K, on_mesh_K):
        with jax.set_mesh(mesh):
            results_R = averager.weighted_sums_of_stream(iter(trees), C)
            in_float32_R = averager.weighted_sums_of_stream((jax.tree.map(as_float32, tree) for tree in trees), C)
        for result, in_float32, expected in zip(results_R, in_float32_R, wanted_R, strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), in_float32, expected)
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(dtype)), result, in_float32)
    for result in results_R:
        assert all(
            jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), result, like))
        )
    assert results_R[0]["a"].dtype == dtype


def test_loading_overlaps_adding_and_runs_one_ahead(monkeypatch):
    events, loaded = [], [threading.Event() for _ in range(5)]
    add, adds = averager.add_weighted, iter(range(5))

    def loads():
        for k, params in enumerate(make_checkpoints(5)):
            events.append(("load", k))
            loaded[k].set()
            yield params

    def add_while_loading(*arguments):
        k = next(adds)
        assert k == 4 or loaded[k + 1].wait(120), "the next one is loaded before this one is added"
        total = add(*arguments)
        events.append(("added", k))
        return total

    monkeypatch.setattr(averager, "add_weighted", add_while_loading)
    averager.weighted_sums_of_stream(loads(), recipes.sma(5)[None])
    at = {event: i for i, event in enumerate(events)}
    for k in range(3):
        assert at["load", k + 2] > at["added", k], "never two ahead"


@pytest.mark.mesh
def test_devices_hold_the_total_and_at_most_two_trees(monkeypatch):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    leaf = jax.ShapeDtypeStruct((8, 4096), jnp.float32, sharding=sharding)
    like = {f"layer{i}": leaf for i in range(10)}
    before, add, held_bytes = {id(x) for x in jax.live_arrays()}, averager.add_weighted, []

    def load():
        return {name: jax.device_put(np.ones(leaf.shape, np.float32), sharding) for name in like}

    def measure():
        held_bytes.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in before and not x.is_deleted()))

    def add_and_measure(*arguments):
        measure()
        total = add(*arguments)
        measure()
        return total

    monkeypatch.setattr(averager, "add_weighted", add_and_measure)
    averager.weighted_sums_of_stream((load() for _ in range(6)), recipes.sma(6)[None])
    leaf_bytes = 8 * 4096 * 4
    assert 20 * leaf_bytes <= max(held_bytes) <= 30 * leaf_bytes + 64  # And the multiplier.


@pytest.mark.mesh
def test_loader_runs_under_the_callers_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    seen = []

    def loads():
        for params in make_checkpoints(2):
            seen.append(jax.sharding.get_mesh())
            yield params

    with jax.set_mesh(mesh):
        averager.weighted_sums_of_stream(loads(), [[0.5, 0.5]])
    assert seen == [mesh, mesh]


def test_errors_of_the_loader_are_raised():
    def broken():
        yield make_checkpoints(1)[0]
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        averager.weighted_sums_of_stream(broken(), recipes.sma(3)[None])
    with pytest.raises(ValueError, match="3 weights but only 2 trees"):
        averager.weighted_sums_of_stream(make_checkpoints(2), recipes.sma(3)[None])
    with pytest.raises(ValueError, match="checkpoint 2 differs from the first in 1 leaf: b/c has shape"):
        first, second = make_checkpoints(2)
        second["b"]["c"] = np.zeros(3, np.float32)
        averager.weighted_sums_of_stream([first, second], [[0.5, 0.5]])
    for weights in (recipes.sma(2), np.zeros((0, 2))):
        with pytest.raises(ValueError, match="one row per recipe"):
            averager.weighted_sums_of_stream(make_checkpoints(2), weights)
    with pytest.raises(ValueError, match="finite"):
        averager.weighted_sums_of_stream(make_checkpoints(2), [[np.inf, 0]])


def test_integers_must_be_equal():
    params_K = [{"w": np.ones(2, np.float32), "n": np.array(k)} for k in (1, 1, 2)]
    assert averager.weighted_sums_of_stream(params_K[:2], [[0.5, 0.5]])[0]["n"] == 1
    with pytest.raises(ValueError, match=r"not averaged .*; checkpoint 3 differs in 1 leaf: n$"):
        averager.weighted_sums_of_stream(params_K, recipes.sma(3)[None])
