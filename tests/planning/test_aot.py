import dataclasses
import importlib.util
import re

import jax
import numpy as np
import pytest

from pma_jax.config import Config, EvaluationConfig, MeshConfig, ModelConfig, TrainingConfig
from pma_jax.planning import aot, cost, counts, disk, hlo
from pma_jax.runtime.mesh import AXES, make_mesh, mesh_from_devices, platform_of
from pma_jax.training.state import abstract_state

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")

MODEL = ModelConfig(vocabulary_size=512, width=128, layers=3, heads=4, kv_heads=4, head_dim=32, hidden=256)
TRAINING = TrainingConfig(sequence_length_tokens=128, batch_size_sequences=64)
CONFIG = Config(model=MODEL, training=TRAINING)


def largest_shard_bytes(params):
    return max(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))


def assert_merge_adds_in_place(config, mesh):
    """Assert no collective, at most one leaf of temporary memory, and accumulator leaves that alias the output."""
    report = aot.compile_program(aot.program_lowerings(config, mesh)["merge"], mesh)
    params = abstract_state(config, mesh).params
    assert report.out_of_memory_message is None
    assert not re.search(r"\b(all-|reduce-scatter|collective-|send|recv)[\w-]*\(", report.program.text)
    assert counts.collectives(report.program) == []
    assert report.memory["temporary_bytes"] <= largest_shard_bytes(params)
    assert report.program.aliased_output_count == len(jax.tree.leaves(params))
    return report


@pytest.mark.mesh
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)])
def test_merge_on_eight_devices_adds_in_place_without_a_collective(sizes):
    mesh = make_mesh(MeshConfig(*sizes))
    report = assert_merge_adds_in_place(CONFIG, mesh)
    totals = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(abstract_state(CONFIG, mesh).params)
    )
    assert report.memory["aliased_bytes"] == totals
    # Total and checkpoint in, total out.
    assert counts.memory_traffic_bytes(report.program) == pytest.approx(3 * totals, rel=0.01)


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_merge_on_tpu_adds_in_place_without_a_collective(name):
    mesh = mesh_from_devices(aot.tpu_topology(name).devices, MeshConfig(1, 4, 2))
    report = assert_merge_adds_in_place(CONFIG, mesh)
    assert platform_of(mesh) == "tpu" and "T(8,128)" in report.program.text


@needs_libtpu
@pytest.mark.parametrize("head_dim", [96, 128])
def test_train_and_evaluation_steps_compile_for_tpu(head_dim):
    mesh = mesh_from_devices(aot.tpu_topology("v5e:2x4").devices, MeshConfig(2, 2, 2))
    # Small, because compiling for TPU is slow, but of complete tiles (8 x 128).
    model = ModelConfig(
        vocabulary_size=512,
        width=256,
        layers=2,
        heads=2,
        kv_heads=2,
        head_dim=head_dim,
        hidden=256,
        compute_dtype="bfloat16",
    )
    training = TrainingConfig(sequence_length_tokens=128, batch_size_sequences=8)
    config = Config(model=model, training=training, evaluation=EvaluationConfig(batch_size_sequences=8))
    reports = {name: aot.compile_program(lower, mesh) for name, lower in aot.program_lowerings(config, mesh).items()}
    step, evaluation = reports["train_step"], reports["evaluation_step"]
    assert step.out_of_memory_message is None and evaluation.out_of_memory_message is None
    state = abstract_state(config, mesh)
    assert step.program.aliased_output_count == len(jax.tree.leaves(state))
    assert hlo.loop_trip_counts(step.program) == [2, 2] and hlo.loop_trip_counts(evaluation.program) == [2]
    assert {c.kind for c in counts.collectives(step.program)} >= {"all-gather", "all-reduce", "reduce-scatter"}
    if head_dim == 128:  # Splash supports it.
        assert all("splash" in report.program.text for report in (step, evaluation))
        assert counts.count_kernels(step.program).undeclared_kernels == 2
        return
    single = jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])
    for name, report in (("train_step", step), ("evaluation_step", evaluation)):
        on_cpu = aot.compile_program(aot.program_lowerings(config, single)[name], single)
        complete = counts.matmul_flops(on_cpu.program)
        assert 8 * counts.matmul_flops(report.program) == pytest.approx(complete, rel=0.02), name


@needs_libtpu
def test_compiler_decides_whether_a_program_fits():
    mesh = mesh_from_devices(aot.tpu_topology("v5e:1x1").devices, MeshConfig())
    large = dataclasses.replace(MODEL, width=8192, hidden=65_536, layers=4, vocabulary_size=131_072)
    report = aot.compile_program(aot.program_lowerings(dataclasses.replace(CONFIG, model=large), mesh)["merge"], mesh)
    assert report.program is None and report.out_of_memory_message is not None
    assert "available HBM" in report.out_of_memory_message and "\n" not in report.out_of_memory_message


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [("v4:2x2x1", 4, 4), ("v5e:1x1", 1, 1), ("v5p:4x4x8", 128, 128), ("tpu7x:2x2x1", 4, 8)],
)
def test_topologies_have_chips_and_devices(name, chips, devices):
    actual = aot.tpu_topology(name)
    assert (actual.chip_count, len(actual.devices)) == (chips, devices)


@needs_libtpu
@pytest.mark.parametrize("sizes", [(1, 32, 4), (1, 64, 2), (2, 16, 4), (128, 1, 1)])
def test_mesh_axis_may_span_a_part_of_the_torus(sizes):
    mesh = mesh_from_devices(aot.tpu_topology("v5p:4x4x8").devices, MeshConfig(*sizes))
    assert tuple(mesh.shape.values()) == (1, *sizes, 1)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


@needs_libtpu
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (1, 2, 2, 2, 1)),
        ({"data": -1, "fsdp": 4}, (1, 2, 4, 1, 1)),
        ({"data": 4, "expert": 2}, (1, 4, 1, 1, 2)),
        ({"replica": 2, "data": 2, "fsdp": 2}, (2, 2, 2, 1, 1)),
        ({"replica": 4, "data": 1, "fsdp": 2}, (4, 1, 2, 1, 1)),
    ],
)
def test_each_part_of_the_batch_is_within_one_slice(sizes, shape):
    topology = aot.tpu_topology("2*v5e:2x2")
    assert (topology.slice_count, topology.chip_count, len(topology.devices)) == (2, 8, 8)
    mesh = mesh_from_devices(topology.devices, MeshConfig(**sizes))
    assert mesh.devices.shape == shape and {d.id for d in mesh.devices.flat} == {d.id for d in topology.devices}
    # Across slices goes `replica` if there are replicas, else `data`.
    parts = mesh.devices if shape[0] > 1 else mesh.devices[0]
    slices = [{d.slice_index for d in part.flat} for part in parts]
    assert all(len(of_part) == 1 for of_part in slices)
    assert [index for (index,) in slices] == sorted([0, 1] * (len(parts) // 2))


@needs_libtpu
@pytest.mark.parametrize("sizes", [(1, -1, 1), (1, 4, 2), (3, 4, 1)])
def test_replica_across_several_slices_is_one_clear_error(sizes):
    devices = aot.tpu_topology("2*v5e:2x2").devices
    message = (
        r"mesh.* needs 12 devices, and 8 are available"
        if sizes[0] == 3
        else r"mesh\.data is 1, and there are 2 slices of 4 devices"
    )
    with pytest.raises(ValueError, match=message) as raised:
        mesh_from_devices(devices, MeshConfig(*sizes))
    assert "\n" not in str(raised.value)


@needs_libtpu
def test_only_gradients_cross_slices_once_per_step():
    mesh = mesh_from_devices(aot.tpu_topology("2*v5e:2x2").devices, MeshConfig(2, 4))
    model = dataclasses.replace(MODEL, width=256, layers=1, head_dim=128, heads=2, kv_heads=2, compute_dtype="bfloat16")
    training = dataclasses.replace(TRAINING, batch_size_sequences=16, accumulation_steps=2)
    config = Config(model=model, training=training)
    report = aot.compile_program(aot.program_lowerings(config, mesh)["train_step"], mesh)
    gradients = disk.bytes_per_device(abstract_state(config, mesh).params)
    assert gradients <= counts.inter_slice_sent_bytes(report.program) <= 1.02 * gradients
    assert max(c.group_devices for c in counts.collectives(report.program)) == 4
    bound = cost.roofline(report.program, cost.CHIPS["v5e"])
    assert bound.slice_network_seconds == counts.inter_slice_sent_bytes(report.program) / 3.125e9
    assert_merge_adds_in_place(config, mesh)


@pytest.mark.parametrize(
    "name",
    [
        "0*v5e:2x2",
        "2*",
        "*v5e:2x2",
        "2v5e:2x2",
        "v9:2x2",
        "v5p",
        "v5p:",
        "v5p:axb",
        "h100:8",
        "",
        "v5e:4x4x4x4",
        "v5e:0x0",
    ],
)
def test_unknown_topology_lists_the_known_ones_in_one_line(name):
    with pytest.raises(ValueError, match=r"v4:\{2x2x1,.*v5e:\{1x1,.*v5p:.*v6e:") as raised:
        aot.tpu_topology(name)
    assert "\n" not in str(raised.value) and repr(name) in str(raised.value)


@needs_libtpu
def test_shape_not_offered_for_the_chip_lists_its_shapes():
    with pytest.raises(ValueError, match=r"v5p:3x3x3.*one of v5p:\{2x2x1,.*16x16x24\}$") as raised:
        aot.tpu_topology("v5p:3x3x3")
    assert "\n" not in str(raised.value)


def test_missing_libtpu_is_one_line_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match=r"^[^\n]*pip install 'pma-jax\[plan\]'$"):
        aot.tpu_topology("v5e:2x2")


@pytest.mark.mesh
def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"model\.heads is 4, and tensor splits it in 8"):
        aot.program_lowerings(CONFIG, make_mesh(MeshConfig(1, 1, 8)))
