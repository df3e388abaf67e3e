import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from pma_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainingConfig
from pma_jax.model.decoder import apply, graph_definition
from pma_jax.runtime.mesh import AXES, make_mesh, put_batch
from pma_jax.training.optimizer import decay_mask
from pma_jax.training.state import abstract_state, init_state_from_seed
from pma_jax.training.step import make_train_step

V, L, B = 32, 16, 16
MODEL = ModelConfig(vocabulary_size=V, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, qk_norm=True)
OPTIMIZER = OptimizerConfig(b1=0.8, b2=0.9, epsilon=1e-6, weight_decay=0.3, clip_norm=0.5)
RATES = [1e-2, 2e-2, 5e-3]


def make_config(mesh=None, optimizer=OPTIMIZER, **training):
    sizes = TrainingConfig(sequence_length_tokens=L, batch_size_sequences=B, **training)
    return Config(model=MODEL, optimizer=optimizer, training=sizes, mesh=mesh or MeshConfig())


def batch(seed, ragged=True):
    """Return random tokens [B, L + 1]; if ragged, rows are padded with -1 from a random position, one row entirely."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (B, L + 1), dtype=np.int32)
    if ragged:
        tokens[np.arange(L + 1) > rng.integers(1, L + 1, (B, 1))] = -1
        tokens[3, 1:] = -1
    return tokens


def steps(config, mesh=None, batches=(0, 1, 2), ragged=True):
    """Train on these batches; return the last state as numpy arrays and the metrics of every step."""
    mesh = mesh or make_mesh(config.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        # The initial state is compiled once; another test checks that every mesh makes the same one.
        state = jax.device_put(fresh_state(config.training.seed), shardings)
        train_step = make_train_step(config, graph_definition(config.model))
        result = []
        for seed, rate in zip(batches, RATES, strict=False):
            state, metrics = train_step(state, put_batch(mesh, batch(seed, ragged)), rate)
            result.append({name: float(value) for name, value in metrics.items() if name != "spike"})
        return jax.tree.map(np.asarray, state), result


def submesh(data, fsdp, tensor, expert=1):
    """Return a mesh over the first devices only."""
    count = data * fsdp * tensor * expert
    return jax.make_mesh((1, data, fsdp, tensor, expert), AXES, devices=jax.devices()[:count])


@functools.cache
def fresh_state(seed):
    with jax.set_mesh(submesh(1, 1, 1)):
        return jax.tree.map(np.asarray, init_state_from_seed(make_config(seed=seed)))


@functools.cache
def on_one_device():
    return steps(make_config(), submesh(1, 1, 1))


def mean_objective(graph, params, tokens, z_loss_weight):
    """Return the mean over the counted tokens, computed with optax's cross-entropy."""
    # On one device: without its mesh in their types, optax's gathers need no output sharding.
    logits = jax.reshard(apply(graph, params, jnp.maximum(tokens[:, :-1], 0)), jax.P())
    targets = tokens[:, 1:]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    z = jax.scipy.special.logsumexp(logits, axis=-1)
    counted = targets >= 0
    mean = jnp.sum(jnp.where(counted, nats, 0)) / jnp.sum(counted)
    return mean + z_loss_weight * jnp.sum(jnp.where(counted, z**2, 0)) / jnp.sum(counted), mean


def reference(config, optimizer, batches=(0, 1, 2)):
    """Run the same steps on one device with an optax optimizer built from its rate."""
    with jax.set_mesh(submesh(1, 1, 1)):
        graph = graph_definition(config.model)
        params = jax.device_put(fresh_state(0).params)
        objective = functools.partial(mean_objective, graph)
        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=2)
        moments, result = jax.jit(optimizer(1.0).init)(params), []

        @jax.jit
        def update(rate, gradients, moments, params):
            updates, moments = optimizer(rate).update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        for seed, rate in zip(batches, RATES, strict=False):
            (_, loss), gradients = gradient(params, batch(seed), config.training.z_loss_weight)
            params, moments = update(rate, gradients, moments, params)
            norms = [np.linalg.norm(np.asarray(g, np.float64)) for g in jax.tree.leaves(gradients)]
            result.append({"loss": float(loss), "gradient_norm": float(np.linalg.norm(norms))})
        return jax.tree.map(np.asarray, params), result


def assert_metrics_close(actual, expected, rtol=1e-5):
    for a, e in zip(actual, expected, strict=True):
        for name in e:
            assert a[name] == pytest.approx(e[name], rel=rtol), name


def adamw(rate, config=OPTIMIZER):
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(rate, config.b1, config.b2, config.epsilon, weight_decay=config.weight_decay, mask=decay_mask),
    )


def test_steps_equal_optax_adamw_with_mask_and_clip():
    state, metrics = on_one_device()
    params, expected = reference(make_config(), adamw)
    tiny.assert_close(state.params, params, rtol=1e-4, atol=2e-6)
    assert_metrics_close(metrics, expected)
    assert all(m["gradient_norm"] > OPTIMIZER.clip_norm for m in metrics), "gradients were clipped"
    assert state.step == len(RATES)


def test_weight_decay_skips_norm_scales():
    state, _ = on_one_device()
    mask = tiny.named(decay_mask(state.params))
    assert {name for name, decayed in mask.items() if not decayed} == {
        "final_norm_D",
        "blocks/attention_norm_D",
        "blocks/mlp_norm_D",
        "blocks/query_norm_H",
        "blocks/key_norm_H",
    }


@pytest.mark.slow
def test_z_loss_affects_the_gradient_but_not_the_reported_loss_and_null_disables_the_clip():
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=0.0)
    config = make_config(optimizer=optimizer, z_loss_weight=0.1)
    state, metrics = steps(config, submesh(1, 1, 1))
    free = dataclasses.replace(OPTIMIZER, clip_norm=1e9)
    params, expected = reference(config, functools.partial(adamw, config=free))
    tiny.assert_close(state.params, params, rtol=1e-4, atol=2e-6)
    assert_metrics_close(metrics, expected)
    _, plain_metrics = on_one_device()
    assert metrics[0]["loss"] == plain_metrics[0]["loss"]
    assert metrics[0]["gradient_norm"] != pytest.approx(plain_metrics[0]["gradient_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4])
def test_accumulation_over_ragged_microbatches_equals_one_batch(microbatches):
    state, metrics = steps(make_config(accumulation_steps=microbatches), submesh(1, 1, 1))
    expected, expected_metrics = on_one_device()
    tiny.assert_close(state, expected, rtol=1e-4, atol=2e-6)
    assert_metrics_close(metrics, expected_metrics)
    counted = [int((batch(seed)[:, 1:] >= 0).sum()) for seed in range(3)]
    assert [m["count"] for m in metrics] == counted and len(set(counted)) == 3


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("data", "fsdp", "tensor", "microbatches"),
    [(2, 2, 2, 2), *(pytest.param(*s, marks=pytest.mark.slow) for s in [(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 2, 1)])],
)
def test_step_on_any_mesh_equals_one_device(data, fsdp, tensor, microbatches):
    state, metrics = steps(make_config(accumulation_steps=microbatches), submesh(data, fsdp, tensor))
    expected, expected_metrics = on_one_device()
    tiny.assert_close(state, expected, rtol=2e-4, atol=5e-6)
    assert_metrics_close(metrics, expected_metrics)


@pytest.mark.mesh
@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_few_kv_heads_train_on_any_mesh(kv_heads):
    config = make_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, heads=4, kv_heads=kv_heads))
    expected, _ = steps(config, submesh(1, 1, 1))
    for sizes in ((8, 1, 1), (2, 4, 1)):
        tiny.assert_close(steps(config, submesh(*sizes))[0], expected, rtol=2e-4, atol=5e-6)


@pytest.mark.mesh
@pytest.mark.slow
def test_step_is_bitwise_reproducible():
    mesh = MeshConfig(2, 2, 2)
    first, second = steps(make_config(mesh)), steps(make_config(mesh))
    tiny.assert_equal(first[0], second[0])
    assert first[1] == second[1]


@pytest.mark.mesh
def test_initial_parameters_depend_on_the_seed_and_not_on_the_mesh():
    config = make_config(MeshConfig(2, 2, 2))
    with jax.set_mesh(make_mesh(config.mesh)):
        tiny.assert_equal(init_state_from_seed(config), fresh_state(0))
    assert not np.array_equal(fresh_state(1).params["embedding_VxD"], fresh_state(0).params["embedding_VxD"])


@pytest.mark.mesh
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_data_parallel_step_has_one_all_reduce(microbatches):
    config = make_config(MeshConfig(data=8), accumulation_steps=microbatches)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        train_step = make_train_step(config, graph_definition(config.model))
        state = abstract_state(config, mesh)
        tokens = jax.ShapeDtypeStruct((B, L + 1), np.int32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        hlo = train_step.lower(state, tokens, 1e-3).compile().as_text()
    # The one sum of all gradients: the devices synchronise nowhere else, and never inside the loop.
    assert len(re.findall(r" all-reduce(?:-start)?\(", hlo)) == 1
    assert not re.search(r" (all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(", hlo)


@pytest.mark.slow
@pytest.mark.mesh
def test_state_is_donated():
    config = make_config(MeshConfig(2, 2, 2))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state, tokens = init_state_from_seed(config), put_batch(mesh, batch(0))
        train_step = make_train_step(config, graph_definition(config.model))
        compiled = train_step.lower(state, tokens, RATES[0]).compile()
        pointers = {
            name: shard.data.unsafe_buffer_pointer()
            for name, leaf in leaves(state)
            for shard in leaf.addressable_shards[:1]
        }
        new, _ = train_step(state, tokens, RATES[0])
        assert all(leaf.is_deleted() for _, leaf in leaves(state))
        moved = [n for n, leaf in leaves(new) if leaf.addressable_shards[0].data.unsafe_buffer_pointer() != pointers[n]]
    # Each output leaf aliases its input leaf: parameters are the first outputs and the first inputs.
    header = compiled.as_text().partition("\n")[0]
    assert header.count("may-alias") + header.count("must-alias") == len(pointers), header
    shard_bytes = sum(leaf.addressable_shards[0].data.nbytes for _, leaf in leaves(new))
    assert compiled.memory_analysis().alias_size_in_bytes >= shard_bytes
    assert not moved, "the new state reuses the buffers of the old one"


def leaves(tree):
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.mesh
def test_abstract_state_matches_a_real_state():
    config = make_config(MeshConfig(2, 2, 2))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = init_state_from_seed(config)
    abstract = abstract_state(config, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for (name, made), (_, described) in zip(leaves(state), leaves(abstract), strict=True):
        assert (made.shape, made.dtype) == (described.shape, described.dtype), name
        assert made.sharding.is_equivalent_to(described.sharding, made.ndim), name
    split = [n for n, leaf in leaves(state) if leaf.addressable_shards[0].data.size < leaf.size]
    assert any("optimizer" in name for name in split), "moments are sharded like their parameters"
