"""Streaming: one checkpoint ahead, bounded memory, the same sums, and what a failing loader does."""

import threading
import time

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


def abstract_on(mesh, dtype=jnp.float32):
    return {
        "a": jax.ShapeDtypeStruct((8, 16), dtype, sharding=jax.NamedSharding(mesh, jax.P("x", "y"))),
        "b": {"c": jax.ShapeDtypeStruct((64,), dtype, sharding=jax.NamedSharding(mesh, jax.P("y")))},
    }


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("recipe", ["sma", "ema:alpha=0.2", "sma:3", "lagfree"])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_stream_matches_float64_from_host_or_mesh(shape, recipe, compensated):
    mesh = jax.make_mesh(shape, ("x", "y"))
    params_K, like = make_checkpoints(5, jnp.bfloat16), abstract_on(mesh)
    c = recipes.coefficients(recipe, [1, 2, 3, 4, 5])
    want = jax.tree.map(lambda *x: np.tensordot(c, np.stack(x).astype(np.float64), 1), *params_K)
    for place in (lambda p: p, lambda p: jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), p, like)):
        with jax.set_mesh(mesh):
            result = averager.average_stream(
                map(place, params_K), c, like=like, dtype="float32", compensated=compensated
            )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), result, want)
        assert all(
            jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), result, like))
        )
    kept = averager.average_stream(iter(params_K), c)
    assert kept["a"].dtype == jnp.bfloat16


def test_stream_equals_the_fused_form_bit_for_bit_for_equal_weights():
    params_K = make_checkpoints(10, jnp.bfloat16)
    stream = averager.average_stream(params_K, recipes.sma(10))
    jax.tree.map(np.testing.assert_array_equal, stream, averager.average(params_K, recipes.sma(10)))


def test_loading_overlaps_adding_and_runs_one_ahead(monkeypatch):
    events, lock = [], threading.Lock()

    def note(*event):
        with lock:
            events.append(event)

    def loads():
        for k, params in enumerate(make_checkpoints(5)):
            note("load", k)
            time.sleep(0.02)
            note("loaded", k)
            yield params

    add = averager._LeafSum.add

    def slow_add(self, params, weight, name):
        k = int(name.split()[-1]) - 1
        note("add", k)
        time.sleep(0.05)
        add(self, params, weight, name)
        note("added", k)

    monkeypatch.setattr(averager._LeafSum, "add", slow_add)
    averager.average_stream(loads(), recipes.sma(5))
    at = {event: i for i, event in enumerate(events)}
    for k in range(4):
        assert at["load", k + 1] < at["added", k], "the next load starts before this one is added"
        assert at["loaded", k + 1] < at["added", k], "and is done when adding takes longer"
    for k in range(3):
        assert at["load", k + 2] > at["added", k], "but never two ahead"


def test_a_device_holds_the_total_and_one_leaf_when_trees_come_from_the_host():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    leaf = jax.ShapeDtypeStruct((8, 4096), jnp.float32, sharding=sharding)
    like = {f"layer{i}": leaf for i in range(10)}
    host = {name: np.ones(leaf.shape, np.float32) for name in like}
    before = {id(x) for x in jax.live_arrays()}
    peak, running = [0], threading.Event()

    def sample():
        while not running.is_set():
            # Other threads delete arrays while this one looks at them.
            sizes = [0 if x.is_deleted() else x.nbytes for x in jax.live_arrays() if id(x) not in before]
            peak[0] = max(peak[0], sum(sizes))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        averager.average_stream((dict(host) for _ in range(6)), recipes.sma(6), like=like)
    finally:
        running.set()
        sampler.join()
    leaf_bytes = 8 * 4096 * 4
    assert 10 * leaf_bytes <= peak[0] <= 12 * leaf_bytes


def test_the_loader_sees_the_callers_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    seen = []

    def loads():
        for params in make_checkpoints(2):
            seen.append(jax.sharding.get_mesh())
            yield params

    with jax.set_mesh(mesh):
        averager.average_stream(loads(), [0.5, 0.5])
    assert seen == [mesh, mesh]


def test_failures_are_passed_on():
    def broken():
        yield make_checkpoints(1)[0]
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        averager.average_stream(broken(), recipes.sma(3))
    with pytest.raises(ValueError, match="3 weights but only 2 checkpoints"):
        averager.average_stream(make_checkpoints(2), recipes.sma(3))
    with pytest.raises(ValueError, match="checkpoint 2 differs from the first in 1 leaf: b/c has shape"):
        first, second = make_checkpoints(2)
        second["b"]["c"] = np.zeros(3, np.float32)
        averager.average_stream([first, second], [0.5, 0.5])
    with pytest.raises(ValueError, match="checkpoint 1 differs"):
        averager.average_stream(make_checkpoints(1), [1.0], like={"a": np.zeros(2)})


def test_integers_must_be_equal():
    params_K = [{"w": np.ones(2, np.float32), "n": np.array(k)} for k in (1, 1, 2)]
    assert averager.average_stream(params_K[:2], [0.5, 0.5])["n"] == 1
    with pytest.raises(ValueError, match=r"checkpoint 3 differs .* integer leaves.*: 1 leaf: n$"):
        averager.average_stream(params_K, recipes.sma(3))
