"""Compile the real programs for a TPU topology on a machine that has no TPU, and read what the compiler says of them.

libtpu holds the compiler. It needs no device: a topology's devices can be compiled for, not run on.
"""

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from pma_jax.config import Config
from pma_jax.merging.averager import abstract_totals, add_weighted
from pma_jax.model.decoder import graph_definition
from pma_jax.model.loss import evaluation_step
from pma_jax.planning import hlo
from pma_jax.planning.cost import CHIPS, Chip, known_topologies
from pma_jax.runtime.mesh import RULES, check_mesh
from pma_jax.training.state import abstract_state
from pma_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of a slice of TPUs, or of several, to compile for."""

    name: str  # such as v5p:4x4x8, or 2*v5p:4x4x8
    chip: Chip
    devices: tuple[jax.Device, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Chips of all slices; some have two devices."""
        return len(self.devices) // self.chip.devices


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler made of one program; bytes and FLOPs are a device's. Where it does not fit, only why."""

    seconds: float  # that compiling took
    refusal: str | None  # what the compiler said when the program does not fit; None: it compiled
    argument_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0  # outputs in the memory of arguments
    temporary_bytes: int = 0
    code_bytes: int = 0
    text: str = dataclasses.field(default="", repr=False)
    program: hlo.Program | None = dataclasses.field(default=None, repr=False)
    compiler_flops: float | None = None  # its cost analysis, where the body of a loop counts once
    compiler_bytes: float | None = None  # the same, bytes read and written anywhere
    kernel_flops: float = 0.0  # what the model needs of its hand-written kernels

    @property
    def bytes(self) -> int:
        """Memory of a device while it runs: arguments, outputs that are not in their place, temporaries, code."""
        fresh = self.output_bytes - self.aliased_bytes
        return self.argument_bytes + fresh + self.temporary_bytes + self.code_bytes


def tpu_topology(name: str) -> Topology:
    """The devices of a slice such as `v5p:4x4x8`, or of two as `2*v5p:4x4x8`; nothing is started.

    Raises ValueError where libtpu is not installed, and for a name that it does not know.
    """
    parts = re.fullmatch(r"(?:([1-9]\d*)\*)?([^:*]+):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    chip = CHIPS.get(parts[2]) if parts else None
    if parts is None or chip is None:
        raise ValueError(
            f"unknown topology {name!r}: give a chip and a shape, one of {known_topologies()}; of several slices how "
            "many first, such as 2*v5e:4x4"
        )
    slices, one_slice = int(parts[1] or 1), f"{parts[2]}:{parts[3]}"
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError("compiling for TPU needs its compiler, which is not installed: pip install 'pma-jax[plan]'")
    # No TPU is looked for, none is claimed, and another process may do the same.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # Without these libtpu writes that it cannot find them to the terminal.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
    options: dict[str, Any] = {}
    if chip.config:
        options["chip_config_name"] = chip.config
    if slices > 1:
        options["num_slices"] = slices
    if all(size == "1" for size in parts[3].split("x")):
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=one_slice, **options)
    except Exception as error:
        known = known_topologies(parts[2])
        raise ValueError(f"libtpu knows no topology {name!r} ({_first_line(error)}): give one of {known}") from error
    return Topology(name, chip, tuple(found.devices), slices)


def programs(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """The programs of a run by name, lowered when called: a train step, an evaluation step, one checkpoint of a merge.

    They are the ones that training, evaluation and merging run, at the sizes of `config`, for the devices of `mesh`.
    Raises ValueError that names a size which does not divide over the mesh.
    """
    check_mesh(config, mesh)
    state = abstract_state(config, mesh)
    with jax.set_mesh(mesh):
        graph = graph_definition(config.model)

    def tokens(sequences: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, RULES.spec("batch", None))
        shape = (sequences, config.training.sequence_length_tokens + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def train_step() -> jax.stages.Lowered:
        step: Any = make_train_step(config, graph)
        return step.lower(state, tokens(config.training.batch_size_sequences), 0.0)

    def evaluation() -> jax.stages.Lowered:
        return evaluation_step.lower(graph, state.params, tokens(config.evaluation.batch_size_sequences))

    def merge() -> jax.stages.Lowered:
        return add_weighted.lower(abstract_totals(state.params), [state.params], np.ones(1, np.float32))

    return {"train_step": train_step, "evaluation_step": evaluation, "merge": merge}


def compile_program(lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.Mesh) -> Report:
    """Lower and compile one of `programs`; that it does not fit is a report too, every other failure an error."""
    start = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Report(time.perf_counter() - start, _first_line(error))
    seconds = time.perf_counter() - start
    memory, costs, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    assert memory is not None and text is not None
    return Report(
        seconds,
        None,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        text,
        hlo.parse(text),
        costs.get("flops"),
        costs.get("bytes accessed"),
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).strip().split("\n")[0].split())
