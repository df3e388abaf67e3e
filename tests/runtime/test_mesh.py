import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import P

from pma_jax.config import MeshConfig, resolve
from pma_jax.runtime.mesh import (
    AXES,
    RULES,
    Rules,
    abstract_arrays,
    check_mesh,
    data_parallel_mesh,
    make_mesh,
    replicated_sharding,
)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((-1, 1, 1), (8, 1, 1, 1)),
        ((8, 1, 1), (8, 1, 1, 1)),
        ((-1, 2, 2), (2, 2, 2, 1)),
        ((1, -1, 1), (1, 8, 1, 1)),
        ((1, 2, -1), (1, 2, 4, 1)),
        ((2, 4, 1), (2, 4, 1, 1)),
        ((2, 1, 1, 4), (2, 1, 1, 4)),
        ((1, 2, 1, -1), (1, 2, 1, 4)),
    ],
)
def test_sizes_multiply_to_the_device_count(sizes, shape):
    mesh = make_mesh(MeshConfig(*sizes))
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, (1, *shape), strict=True))
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 1, 1), "needs 4 devices, and 8 are available"),
        ((16, 1, 1), "needs 16"),
        ((-1, 3, 1), "8 are available"),
        ((-1, 16, 1), "needs 16"),
        ((-1, -1, 1), "at most one is -1"),
        ((0, 1, 1), "1 or more"),
        ((-2, 1, 1), "1 or more"),
    ],
)
def test_sizes_that_do_not_match_the_device_count_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshConfig(*sizes))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"training": {"batch_size_sequences": 10}},
            r"accumulation_steps is 10, and replica x data x fsdp x expert splits it in 4",
        ),
        (
            {"training": {"accumulation_steps": 8}},
            r"accumulation_steps is 2, and replica x data x fsdp x expert splits it in 4",
        ),
        ({"evaluation": {"batch_size_sequences": 6}}, r"evaluation\.batch_size_sequences is 6"),
        ({"model": {"kv_heads": 1}}, r"model\.kv_heads is 1, and tensor splits it in 2"),
        ({"model": {"vocabulary_size": 257}}, r"model\.vocabulary_size is 257"),
        ({"model": {"width": 129}}, r"model\.width is 129, and fsdp splits it in 2"),
    ],
)
def test_sizes_that_do_not_divide_over_the_mesh_are_named(sizes, message):
    mesh = make_mesh(MeshConfig(2, 2, 2))
    check_mesh(resolve({}), mesh)
    with pytest.raises(ValueError, match=message):
        check_mesh(resolve(sizes), mesh)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"experts": 6}, r"model\.experts is 6, and expert splits it in 4"),
        ({"expert_hidden": 127}, r"model\.expert_hidden is 127, and tensor splits it in 2"),
    ],
)
def test_experts_that_do_not_divide_over_the_mesh_are_named(model, message):
    mesh = make_mesh(MeshConfig(1, 1, 2, 4))
    # A mixture has no dense MLP, so the value of its key is irrelevant.
    check_mesh(resolve({"model": {"experts": 8, "hidden": 127}}), mesh)
    with pytest.raises(ValueError, match=message):
        check_mesh(resolve({"model": {"experts": 8} | model}), mesh)


def test_rules_map_dims_to_axes():
    assert RULES.spec("batch", None, "heads", None) == P(("replica", "data", "fsdp", "expert"), None, "tensor", None)
    assert RULES.spec("width", "hidden") == P("fsdp", "tensor")


@pytest.mark.parametrize("dims", [("heads", "hidden"), ("batch", "width"), ("width", "width")])
def test_two_dims_on_one_axis_are_refused(dims):
    with pytest.raises(ValueError, match="both split by mesh axis"):
        RULES.spec(*dims)


def test_rules_can_be_overridden():
    assert Rules(heads=None).spec("heads", "hidden") == P(None, "tensor")


@pytest.mark.mesh
def test_abstract_leaves_match_real_leaves():
    mesh = make_mesh(MeshConfig(2, 2, 2))

    def make():
        split = jnp.zeros((4, 8), jnp.bfloat16, out_sharding=RULES.spec("width", "hidden"))
        return {"split": split, "whole": jnp.zeros((), jnp.int32)}

    abstract = abstract_arrays(mesh, make)
    with jax.set_mesh(mesh):
        made = jax.jit(make)()
    for name in made:
        assert (abstract[name].shape, abstract[name].dtype) == (made[name].shape, made[name].dtype)
        assert abstract[name].sharding.is_equivalent_to(made[name].sharding, made[name].ndim)
    assert made["split"].addressable_shards[0].data.shape == (2, 4)


@pytest.mark.mesh
def test_data_parallel_mesh_has_every_device_on_the_data_axis():
    assert dict(data_parallel_mesh().shape) == {"replica": 1, "data": 8, "fsdp": 1, "tensor": 1, "expert": 1}
    assert len(jax.device_put(jnp.ones(3), replicated_sharding(data_parallel_mesh())).addressable_shards) == 8


def test_fresh_process_simulates_the_requested_cpu_devices():
    code = """
import jax
from pma_jax.config import MeshConfig
from pma_jax.runtime.mesh import make_mesh
print(dict(make_mesh(MeshConfig(fsdp=3, cpu_devices=6)).shape), jax.device_count())
make_mesh(MeshConfig(cpu_devices=6))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'replica': 1, 'data': 2, 'fsdp': 3, 'tensor': 1, 'expert': 1} 6\n"


@pytest.mark.mesh
def test_training_refuses_a_cpu_device_count_set_too_late():
    config = resolve({"mesh": {"cpu_devices": 3}})
    mesh = make_mesh(config.mesh)
    assert mesh.size == 8
    with pytest.raises(ValueError, match=r"mesh\.cpu_devices is 3, and JAX already runs with 8"):
        check_mesh(config, mesh)
    check_mesh(resolve({"mesh": {"cpu_devices": 8}, "evaluation": {"batch_size_sequences": 8}}), mesh)


@pytest.mark.mesh
def test_shard_map_leaves_out_its_own_axes():
    seen = []

    def part(x):
        seen.append((RULES.spec("batch", None, "heads"), RULES.spec("width")))
        return x

    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        jax.shard_map(part, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(jnp.ones(4))
    assert seen[0] == (P(("replica", "fsdp", "expert"), None, "tensor"), P("fsdp"))
