"""Compile the programs of a run for a TPU topology on a machine without a TPU, and collect what the compiler reports.

libtpu contains the compiler and needs no device: programs can be compiled for a topology's devices, not run on them.
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
from pma_jax.planning.cost import CHIPS, Chip, format_known_topologies
from pma_jax.runtime.errors import first_line
from pma_jax.runtime.mesh import RULES, check_mesh
from pma_jax.training.state import abstract_state
from pma_jax.training.step import make_train_step

# Name in `CompileReport.memory` -> attribute of jax's CompiledMemoryStats. Aliased: the part of the outputs that reuses
# the arguments' memory.
MEMORY_FIELDS = {
    "argument_bytes": "argument_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of one or more TPU slices, to compile for."""

    name: str  # such as v5p:4x4x8, or 2*v5p:4x4x8
    chip: Chip
    devices: tuple[jax.Device, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Number of chips in all slices; some chips have two devices."""
        return len(self.devices) // self.chip.devices


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Compiler statistics of one program, per device.

    Attributes:
        seconds: Compile time.
        refusal: The compiler's message if the program does not fit in memory; all fields below are then unset.
        program: The parsed HLO text.
        memory: Bytes by the names of `MEMORY_FIELDS`, and as `bytes` the peak memory while the program runs: arguments,
            outputs that are not aliased, temporaries, code.
        costs: XLA's cost analysis, which counts a loop's body once: `flops`, and `bytes_accessed` in any memory.
    """

    seconds: float
    refusal: str | None
    program: hlo.Program | None = dataclasses.field(default=None, repr=False)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    costs: dict[str, float | None] = dataclasses.field(default_factory=dict)


def tpu_topology(name: str) -> Topology:
    """Look up the devices of a slice such as `v5p:4x4x8`, or of two slices as `2*v5p:4x4x8`.

    Raises:
        ValueError: The package libtpu is not installed, or does not know the name.
    """
    parts = re.fullmatch(r"(?:([1-9]\d*)\*)?([^:*]+):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    chip = CHIPS.get(parts[2]) if parts else None
    if parts is None or chip is None:
        raise ValueError(
            f"unknown topology {name!r}: give a chip and a shape, one of {format_known_topologies()}; for several "
            "slices their number first, such as 2*v5e:4x4"
        )
    slices, one_slice = int(parts[1] or 1), f"{parts[2]}:{parts[3]}"
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError("compiling for TPU needs its compiler, which is not installed: pip install 'pma-jax[plan]'")
    # libtpu must not search for a TPU or lock it, so that several processes can compile at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # Without these two libtpu prints warnings.
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
        description = topologies.get_topology_desc(platform="tpu", topology_name=one_slice, **options)
    except Exception as error:
        known = format_known_topologies(parts[2])
        raise ValueError(f"libtpu knows no topology {name!r} ({first_line(error)}): give one of {known}") from error
    return Topology(name, chip, tuple(description.devices), slices)


def program_lowerings(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return functions that lower the programs of a run: `train_step`, `evaluation_step` and `merge`.

    These are the programs that training and evaluation run, and the one that adds a checkpoint to a merge on the mesh,
    at the sizes of `config`, for the devices of `mesh`.

    Raises:
        ValueError: A size, which is named, does not divide over the mesh.
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


def compile_program(lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.Mesh) -> CompileReport:
    """Lower and compile one of `program_lowerings`; a program that does not fit in memory is reported, not raised."""
    start = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompileReport(time.perf_counter() - start, first_line(error))
    seconds = time.perf_counter() - start
    stats, costs, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    assert stats is not None and text is not None
    memory = {name: getattr(stats, attribute) for name, attribute in MEMORY_FIELDS.items()}
    fresh = memory["output_bytes"] - memory["aliased_bytes"]
    memory["bytes"] = memory["argument_bytes"] + fresh + memory["temporary_bytes"] + memory["code_bytes"]
    costs = {"flops": costs.get("flops"), "bytes_accessed": costs.get("bytes accessed")}
    return CompileReport(seconds, None, hlo.parse_hlo(text), memory, costs)
