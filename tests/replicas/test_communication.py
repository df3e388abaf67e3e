"""What is sent between replicas, counted in the compiled text: nothing by a step, and by a sync what the paper says."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pma_jax.config import Config
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.planning import counts, hlo
from pma_jax.replicas import fragments, method
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.state import abstract_state, as_workers
from pma_jax.training.step import make_train_step

pytestmark = pytest.mark.mesh
REPLICAS = 4
MIXTURE = {"model__experts": 4, "model__experts_per_token": 2, "model__expert_hidden": 16}
METHODS = {
    "periodic": {},
    "diloco": {},
    "streaming": {
        "streaming_fragments": 2,
        "streaming_dtype": "int4",
        "streaming_delay_tokens": 256,
        "streaming_mixing": 0.5,
    },
    "sparta": {"sparta_share": 0.01},
    "noloco": {},
}


def make_config(workspace, name, **changes) -> Config:
    keys = {f"replicas__{key}": value for key, value in METHODS.get(name, {}).items()}
    if name != "sparta":
        keys["replicas__interval_tokens"] = 1024
    meshes = {"mesh__replica": REPLICAS, "mesh__data": 1, "mesh__fsdp": 2}
    return tiny.config(workspace, replicas__method=name, **keys | meshes | changes)


def crossing(lowered, parts=REPLICAS):
    """Return the collectives between replicas of a lowered program."""
    return counts.crossing(hlo.parse_hlo(lowered.compile().as_text()), parts)


@pytest.mark.parametrize(
    "axis", ["fsdp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("data", "tensor", "expert"))]
)
@pytest.mark.parametrize("model", [{}, pytest.param(MIXTURE, marks=pytest.mark.slow)], ids=["dense", "mixture"])
def test_a_step_has_no_collective_between_replicas(workspace, model, axis):
    if axis == "expert" and not model:
        pytest.skip("a dense model has no experts")
    sizes = {"mesh__fsdp": 1} | {f"mesh__{axis}": 2}
    config = make_config(workspace, "diloco", **model | sizes)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        step = make_train_step(config, graph_definition(config.model))
        tokens = jax.ShapeDtypeStruct(
            (8, 33), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(("replica", "data", "fsdp", "expert"), None))
        )
        lowered = step.lower(abstract_state(config, mesh), tokens, 0.0)
        program = hlo.parse_hlo(lowered.compile().as_text())
    assert counts.crossing(program, REPLICAS) == []
    assert counts.collectives(program), "the devices of a replica communicate"


def lower_sync(config, sync):
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=state.step.sharding)
        return method.make_sync(config.replicas, sync, mesh).lower(as_workers(state), step)


def sent_elements(config, leaves=None):
    """Return how many elements of each leaf one of the two devices of a replica holds."""
    leaves = jax.tree.leaves(abstract_params(config.model, make_mesh(config.mesh))) if leaves is None else leaves
    return [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]


@pytest.mark.parametrize("model", [{}, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", ["periodic", "diloco", "noloco"])
def test_a_sync_sends_the_parameters_once(workspace, name, model):
    config = make_config(workspace, name, **model)
    sent = crossing(lower_sync(config, method.Sync(outer=True)))
    assert {collective.kind for collective in sent} == {"collective-permute" if name == "noloco" else "all-reduce"}
    assert sum(c.executions * c.payload_bytes for c in sent) == 4 * sum(sent_elements(config))


def test_sparta_sends_its_share_of_each_leaf(workspace):
    config = make_config(workspace, "sparta")
    (sent,) = crossing(lower_sync(config, method.Sync(share=True)))
    assert sent.kind == "all-reduce"
    assert sent.payload_bytes == 4 * sum(math.ceil(0.01 * n) for n in sent_elements(config))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float32", 32),
        pytest.param("int8", 8, marks=pytest.mark.slow),
        ("int4", 4),
        pytest.param("e3m0", 4, marks=pytest.mark.slow),
    ],
)
def test_a_fragment_is_sent_in_the_bits_of_its_type(workspace, dtype, bits):
    config = make_config(workspace, "streaming", replicas__streaming_dtype=dtype)
    params = abstract_params(config.model, make_mesh(config.mesh))
    for fragment in range(2):
        shapes = jax.eval_shape(lambda tree, f=fragment: fragments.take(tree, f, 2), params)
        sizes = sent_elements(config, shapes)
        sent = crossing(lower_sync(config, method.Sync(sent=fragment)))
        expected = sum(4 * n for n in sizes) if bits == 32 else sum(-(-n * bits // 8) + 4 for n in sizes)
        operands = [c.payload_bytes // (c.group_devices if c.kind == "all-gather" else 1) for c in sent]
        assert sum(operands) == expected
        assert {c.kind for c in sent} == {"all-reduce" if bits == 32 else "all-gather"}


def test_using_a_fragment_sends_nothing(workspace):
    config = make_config(workspace, "streaming")
    assert crossing(lower_sync(config, method.Sync(received=0))) == []


@pytest.mark.parametrize(
    "name", [name if name == "diloco" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_workers_of_one_device_train_as_workers_of_several(workspace, name):
    """A step and a sync of four workers on 4 x 2 devices equal those on one replica of eight devices."""
    keys = {} if name == "sparta" else {"replicas__interval_tokens": 4096}
    keys["optimizer__epsilon"] = 1e-3  # so that AdamW does not amplify the rounding of gradients near 0
    if name == "streaming":
        keys["replicas__streaming_delay_tokens"] = 1024
    config = make_config(workspace, name, replicas__count=4, training__batch_size_sequences=32, **keys)
    results = []
    for sizes in ({"replica": 4, "data": 2, "fsdp": 1}, {"replica": 1, "data": 2, "fsdp": 4}):
        if name == "streaming":  # its rounding depends on how leaves are split
            config = dataclasses.replace(
                config, replicas=dataclasses.replace(config.replicas, streaming_dtype="float32")
            )
        if name == "sparta" and sizes["replica"] == 1:
            sizes = {"replica": 1, "data": 8, "fsdp": 1}
        results.append(step_and_sync(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def step_and_sync(config):
    from pma_jax.runtime.mesh import put_batch
    from pma_jax.training.state import init_state_from_seed, synchronize

    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = init_state_from_seed(config)
        step = make_train_step(config, graph_definition(config.model))
        rows = np.random.default_rng(0).integers(0, 256, (config.training.batch_size_sequences, 33)).astype(np.int32)
        for number in range(1, 5):
            state, _ = step(state, put_batch(mesh, rows), 1e-2)
            state = synchronize(config, state, number * config.batch_tokens)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
