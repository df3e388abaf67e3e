"""The memory traffic of a program by line of source code."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny

from pma_jax.model.decoder import graph_definition
from pma_jax.planning import counts, hlo, memory_traffic
from pma_jax.planning.aot import program_lowerings
from pma_jax.runtime.mesh import MeshConfig, make_mesh

SIDE = 512


def loss(x, w):
    return ((x @ w) ** 2).sum()


@pytest.fixture
def lines_of_this_file():
    """Compile again what JAX's cache has from an earlier version of this file, whose lines are others."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.mark.usefixtures("lines_of_this_file")
def test_products_count_for_their_line_and_pass():
    text = jax.jit(jax.grad(loss)).lower(jnp.ones((SIDE, SIDE)), jnp.ones((SIDE, SIDE))).compile().as_text()
    lines = [
        one for one in memory_traffic.heaviest_operations(hlo.parse_hlo(text), 99) if "dot_general" in one.operation
    ]
    line = inspect.getsourcelines(loss)[1] + 1
    assert {one.source for one in lines} == {f"{Path(__file__).name}:{line}"}
    assert {one.pass_name for one in lines} == {"forward", "backward"}
    product = 3 * SIDE * SIDE * 4  # reads two matrices and writes one
    assert {one.pass_name: one.bytes for one in lines} == {"forward": product, "backward": product}


def test_operations_add_up_to_the_traffic_of_a_train_step(workspace):
    config = tiny.config(workspace)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        graph_definition(config.model)
        program = hlo.parse_hlo(program_lowerings(config, mesh)["train_step"]().compile().as_text())
    listed = memory_traffic.heaviest_operations(program, 10**6)
    assert sum(one.bytes for one in listed) == counts.memory_traffic_bytes(program)
    assert [one.bytes for one in listed] == sorted((one.bytes for one in listed), reverse=True)
    assert {one.pass_name for one in listed} >= {"forward", "backward", ""}
    assert any(one.source.startswith("model/") for one in listed)
