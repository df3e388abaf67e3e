"""The parts of the methods: rounds of pairs, fragments, the chosen share, and outer gradients in few bits."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pma_jax import config
from pma_jax.config import MeshConfig
from pma_jax.config.errors import UserError
from pma_jax.config.replica_rules import METHODS
from pma_jax.replicas import fragments, method, noloco, periodic, quantize, sparta
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.state import abstract_state, worker_dim


@given(st.integers(1, 16).map(lambda half: 2 * half))
def test_in_the_rounds_every_pair_of_workers_meets_once(count):
    rounds = noloco.round_robin(count)
    assert rounds.shape == (count - 1, count)
    np.testing.assert_array_equal(np.take_along_axis(rounds, rounds, axis=1), [np.arange(count)] * (count - 1))
    met = {(i, int(j)) for partners in rounds for i, j in enumerate(partners)}
    assert met == {(i, j) for i in range(count) for j in range(count) if i != j}


@given(st.integers(1, 9), st.data())
def test_fragments_are_a_partition_of_the_model(layers, data):
    count = data.draw(st.integers(1, layers))
    blocks = np.arange(2.0 * layers).reshape(layers, 2)
    tree = {"blocks": {"w": blocks}, "embedding_VxD": np.full(3, -1.0), "final_norm_D": np.full(2, -2.0)}
    parts = [fragments.take(tree, f, count) for f in range(count)]
    together = np.sort(np.concatenate([leaf.ravel() for part in parts for leaf in part]))
    np.testing.assert_array_equal(together, np.sort(np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])))
    new = jax.tree.map(jnp.zeros_like, tree)
    for f in range(count):
        new = fragments.put(new, [jnp.asarray(leaf) for leaf in parts[f]], f, count)
    jax.tree.map(np.testing.assert_array_equal, new, tree)


@settings(max_examples=4)  # each compiles
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.floats(1e-4, 1.0), st.integers(0, 10**6))
def test_a_share_is_that_many_different_elements(sizes, share, seed):
    for size, chosen in zip(sizes, sparta.choose(jax.random.key(seed), sizes, share), strict=True):
        assert chosen.size == np.ceil(share * size) == np.unique(chosen).size
        assert chosen.min() >= 0 and chosen.max() < size


def test_every_element_is_chosen_about_as_often():
    times, size, share = 2000, 97, 0.1
    keys = jax.random.split(jax.random.key(0), times)
    _, chosen = jax.vmap(lambda key: sparta.choose(key, [50, size], share))(keys)
    counts = np.bincount(np.ravel(chosen), minlength=size)
    # Ranges are of 9 or 10 elements, so that an element is chosen with probability 1/9 or 1/10.
    assert counts.min() > times / 10 * 0.7 and counts.max() < times / 9 * 1.3


def test_an_array_with_more_elements_than_an_index_can_count_is_refused():
    with pytest.raises(UserError, match=r"2,147,483,648 elements of one array.*mesh\.fsdp"):
        sparta.choose(jax.random.key(0), [10, 2**31], 1e-9)


@functools.partial(jax.jit, static_argnums=1)
def send(x, kind):
    """Return the codes of an array, and what arrives."""
    scale = quantize.leaf_scales([x[None]], kind)[0][0]
    codes = quantize.pack(quantize.quantize_leaf(x, scale, kind), kind)
    return codes, quantize.dequantize_leaf(quantize.unpack(codes, kind, x.shape), scale, kind)


@pytest.mark.parametrize("kind", oracles.KINDS)
@settings(max_examples=30)
@given(st.sampled_from([1, 2, 33, 70]), st.integers(0, 100), st.floats(1e-6, 1e6))
def test_what_is_sent_in_few_bits_is_the_nearest_level(kind, size, seed, scale):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=size) * (rng.random(size) < 0.8)).astype(np.float32)
    codes, decoded = send(x, kind)
    assert codes.dtype == jnp.uint8 and codes.size == (size if kind == "int8" else -(-size // 2))
    # Between two levels, float32 may round the other way.
    expected = [oracles.round_to(kind, x.astype(float) * (1 + e)) for e in (-1e-5, 0, 1e-5)]
    close = [np.abs(decoded - one) <= 1e-4 * np.abs(x).max() for one in expected]
    assert np.logical_or.reduce(close).all()
    if kind != "e3m0":
        assert np.abs(decoded - x).max() <= np.abs(x).max() / (254 if kind == "int8" else 14) * 1.001


@pytest.mark.parametrize("shape", [(300, 512), (70_001,)])
def test_the_scale_of_a_large_leaf_is_close_to_its_median(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * (rng.random(shape) < 0.5)
    x[..., ::2] *= 100  # columns differ
    scale = quantize.leaf_scales([jnp.asarray(x[None], jnp.float32)], "e3m0")[0][0]
    share_below = np.mean(np.abs(x[x != 0]) < float(scale))
    assert abs(share_below - 0.5) < 0.07  # three standard errors of a sample of 500


def test_the_only_value_of_a_large_leaf_arrives():
    x = np.zeros(50_000, np.float32)
    x[12_345] = 3e-5
    np.testing.assert_array_equal(send(x, "e3m0")[1], x)


def test_an_outer_gradient_of_zeros_is_sent_as_zeros():
    for kind in oracles.KINDS:
        _, decoded = send(np.zeros((3, 5), np.float32), kind)
        assert not np.any(decoded)


def test_fragments_are_sent_in_turn_and_used_after_the_delay():
    config = oracles.make_config(method="streaming", streaming_fragments=4, streaming_delay_tokens=32)
    syncs = [method.sync_after(config, 16 * step) for step in range(1, 9)]
    assert [sync.sent for sync in syncs] == [1, 2, 3, 0, 1, 2, 3, 0]
    assert [sync.received for sync in syncs] == [None, None, 1, 2, 3, 0, 1, 2]


def test_a_share_is_rounded_up_exactly():
    assert [sparta.share_count(share, 100) for share in (0.07, 0.005, 1.0)] == [7, 1, 100]


def test_periodic_averaging_of_moments_leaves_counts_alone():
    moments = {"mu": np.random.default_rng(0).standard_normal((4, 3, 5)), "count": np.arange(4, dtype=np.int32)}
    with jax.set_mesh(make_mesh(MeshConfig(replica=1, data=1, fsdp=-1))):
        averaged = periodic.average(jax.tree.map(jnp.asarray, moments))
    expected = np.broadcast_to(moments["mu"].mean(0), (4, 3, 5))
    np.testing.assert_allclose(averaged["mu"], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(averaged["count"], moments["count"])


def test_tokens_of_the_last_update():
    diloco = oracles.make_config(method="diloco", interval_tokens=40)
    assert [method.last_update_tokens(diloco, 16 * step) for step in range(1, 7)] == [None, None, 48, 48, 80, 80]
    # Marks from before a fork are not those of its workers.
    assert [method.last_update_tokens(diloco, 16 * step, since=48) for step in range(3, 6)] == [None, None, 80]
    sparta_alone = oracles.make_config(method="sparta")
    assert method.last_update_tokens(sparta_alone, 48) == 48
    # Outer parameters change only by the outer step, and workers by what they receive.
    both = oracles.make_config(method="sparta", sparta_diloco=True, interval_tokens=64)
    assert [method.last_update_tokens(both, 16 * step) for step in range(3, 9)] == [None, 64, 64, 64, 64, 128]
    assert [method.last_update_tokens(both, 16 * step, of_worker=True) for step in (3, 5)] == [48, 80]
    delayed = oracles.make_config(
        method="streaming", interval_tokens=64, streaming_fragments=1, streaming_delay_tokens=16
    )
    assert [method.last_update_tokens(delayed, 16 * step) for step in range(3, 9)] == [None, 64, 64, 64, 64, 128]
    assert [method.last_update_tokens(delayed, 16 * step, of_worker=True) for step in range(3, 7)] == [
        None,
        None,
        80,
        80,
    ]


def test_each_method_has_a_shipped_configuration_whose_state_can_be_made():
    made = {}
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.py")):
        shipped = config.resolve(config.load(path.stem))
        if shipped.replicas.method == "none":
            continue
        here = config.resolve(shipped, ["mesh.replica=1", "mesh.data=-1", "mesh.cpu_devices=0"])
        state = abstract_state(here, make_mesh(here.mesh))
        assert worker_dim(state.params) == shipped.replicas.count
        made[path.stem] = shipped.replicas.method
    assert set(made.values()) == set(METHODS)
    assert config.resolve(config.load("snoo")).replicas.count == 1
