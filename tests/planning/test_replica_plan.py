"""What `pma plan` says about replicas: the bytes of each step and sync, on simulated devices and for slices of TPU."""

import importlib.util
import json
import math

import jax
import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.model.decoder import abstract_params
from pma_jax.planning import aot, cost, disk, plan_text, run_plan
from pma_jax.replicas import fragments
from pma_jax.runtime.mesh import make_mesh, mesh_from_devices

METHODS = {
    "periodic": {"interval_tokens": 2048},
    "diloco": {"interval_tokens": 2048},
    "streaming": {"interval_tokens": 2048, "streaming_fragments": 2},
    "sparta": {"sparta_share": 0.25},
    "sparta, diloco": {"sparta_share": 0.25, "sparta_diloco": True, "interval_tokens": 2048},
    "noloco": {"interval_tokens": 2048},
}
MARKS = {"diloco": (), "streaming": pytest.mark.slow, "sparta": pytest.mark.slow}  # of all others: long
needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")


def plan(workspace, name):
    """Return the plan of a tiny run on eight simulated devices, as if each were a chip, with four workers."""
    keys = {f"replicas__{key}": value for key, value in METHODS[name].items()}
    keys |= {"mesh__replica": 4, "mesh__data": 2, "training__batch_size_sequences": 8}
    config = tiny.config(workspace, replicas__method=name.split(",")[0], replicas__count=4, **keys)
    topology = aot.Topology("8 CPU devices", cost.CHIPS["v5e"], tuple(jax.devices()))
    options = {"storage_bytes_per_second": 1e6, "host_bytes_per_second": 1e6, "annealing_share": 0.25}
    return config, run_plan.plan_run(config, topology, **options)


@pytest.mark.mesh
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in METHODS])
def test_plan_has_the_bytes_of_each_sync(workspace, name):
    config, numbers = plan(workspace, name)
    traffic = json.loads(json.dumps(numbers["far_traffic"]))
    step, *syncs = traffic["programs"]
    assert step == {"program": "train_step", "every_steps": 1, "bytes": 0}
    sent = {one["program"]: (one["every_steps"], one["bytes"]) for one in syncs}
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config.model, make_mesh(config.mesh)))]
    ring = 2 * 3 / 4  # of four workers: a device sends three quarters of a sum, and three quarters of the result
    everything, share = 4 * sum(sizes), 4 * sum(math.ceil(0.25 * size) for size in sizes)
    if name == "streaming":
        assert [every for every, _ in sent.values()] == [8, 8]
        assert sum(size for _, size in sent.values()) == ring * everything
    else:
        sync = everything if name == "noloco" else ring * everything  # one model to the partner
        expected = {"sync_share": (1, ring * share)} if "sparta" in name else {}
        assert sent == expected | ({} if name == "sparta" else {"sync": (8, sync)})
    assert traffic["bytes_per_step"] == pytest.approx(sum(size / every for every, size in sent.values()))
    assert numbers["storage"]["snapshot_bytes"] == everything


@pytest.mark.mesh
def test_plan_says_below_which_bandwidth_the_network_decides(workspace):
    _, numbers = plan(workspace, "diloco")
    traffic = numbers["far_traffic"]
    _, sync = traffic["programs"]
    assert traffic["bytes_per_step"] == sync["bytes"] / 8
    seconds = numbers["training"]["step_seconds_at_least"]
    assert traffic["bytes_per_second"] * seconds == pytest.approx(traffic["bytes_per_step"])
    text = plan_text.format_plan(numbers)
    assert "between 4 replicas, the train step sends 0 B per device, a step" in text
    assert "the sync sends" in text and "every 8 steps" in text and "in all: the network decides below" in text


# Sizes at which the tiles of memory to which leaves are padded are small.
DENSE = {"width": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "hidden": 2048}
MIXTURE = {"width": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "experts": 128, "expert_hidden": 128, "layers": 2}


def configure_slices(name, model, replicas=2, **keys):
    """Return the configuration of a run on TPU, and the topology of its two slices."""
    raw = configuration.load("tiny_moe" if model is MIXTURE else "demo")
    keys = {"method": name, "count": replicas} | keys
    if name != "sparta":
        keys["interval_tokens"] = 80_000
    mesh = {"replica": replicas, "data": 1, "fsdp": 8 // replicas, "cpu_devices": 0}
    sections = {"replicas": keys, "mesh": mesh, "model": model, "training": {"batch_size_sequences": 64}}
    changes = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]
    configuration.override(raw, changes)
    return configuration.resolve(raw), aot.tpu_topology("2*v5e:2x2")


@needs_libtpu
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_step_on_slices_of_tpu_sends_nothing_to_other_workers(model, replicas):
    """With one worker per slice, a step sends nothing to the other slice; with two, nothing to the other worker."""
    config, topology = configure_slices("diloco", model, replicas)
    mesh = mesh_from_devices(topology.devices, config.mesh)
    step = aot.compile_program(aot.program_lowerings(config, mesh)["train_step"], mesh).program
    assert run_plan.far_bytes(step, mesh, topology) == 0


def fragment_shapes(params, fragment):
    return jax.eval_shape(lambda tree: fragments.take(tree, fragment, 2), params)


@needs_libtpu
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", ["periodic", "diloco", "noloco", "sparta", "float32", "int8", "int4", "e3m0"])
def test_a_sync_on_slices_of_tpu_sends_its_bytes_once(name, model):
    is_method = name in ("periodic", "diloco", "noloco", "sparta")
    keys = {} if is_method else {"streaming_fragments": 2, "streaming_dtype": name}
    if name == "sparta":
        keys["sparta_share"] = 0.05  # so that the elements of a leaf fill tiles
    config, topology = configure_slices(name if is_method else "streaming", model, **keys)
    mesh = mesh_from_devices(topology.devices, config.mesh)
    params = abstract_params(config.model, mesh)
    lowerings = aot.program_lowerings(config, mesh)
    syncs = [lower for program, lower in lowerings.items() if program.startswith("sync")]
    sent = sum(run_plan.far_bytes(aot.compile_program(lower, mesh).program, mesh, topology) for lower in syncs)
    expected = 0
    for part in [params] if is_method else [fragment_shapes(params, f) for f in range(2)]:
        for size in (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(part)):
            expected += {
                "sparta": 4 * math.ceil(config.replicas.sparta_share * size),
                "int8": size + 4,
                "int4": math.ceil(size / 2) + 4,
                "e3m0": math.ceil(size / 2) + 4,
            }.get(name, 4 * size)
    assert expected <= sent <= 1.01 * expected


@needs_libtpu
def test_workers_of_one_slice_first_add_their_models():
    """Two workers of a slice add their halves, of which each sends one to the other slice."""
    config, topology = configure_slices("diloco", DENSE, replicas=4)
    mesh = mesh_from_devices(topology.devices, config.mesh)
    sync = aot.compile_program(aot.program_lowerings(config, mesh)["sync"], mesh).program
    once = sum(disk.bytes_per_device(leaf) for leaf in jax.tree.leaves(abstract_params(config.model, mesh)))
    assert once <= run_plan.far_bytes(sync, mesh, topology) <= 1.01 * 2 * once
