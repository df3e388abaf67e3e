"""Compile the programs of a run for a TPU topology on a machine without a TPU, and collect the compiler's statistics.

libtpu contains the compiler and needs no TPU to compile for one.
"""

import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from pma_jax.config import Config
from pma_jax.config.errors import UserError, first_line
from pma_jax.merging.averager import abstract_totals, add_weighted
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.model.loss import evaluation_step
from pma_jax.planning import hlo
from pma_jax.planning.cost import CHIPS, CHIPS_PER_HOST, Chip, format_known_topologies, parse_topology
from pma_jax.replicas import method
from pma_jax.runtime.mesh import RULES, check_mesh
from pma_jax.training.state import abstract_state, as_workers
from pma_jax.training.step import make_train_step

# Key of `CompileReport.memory` -> attribute of JAX's CompiledMemoryStats. Aliased outputs reuse the arguments' memory.
MEMORY_FIELDS = {
    "argument_bytes": "argument_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of one or more TPU slices for which programs are compiled."""

    name: str  # such as v5p:4x4x8, or 2*v5p:4x4x8
    chip: Chip
    devices: tuple[jax.Device, ...]
    slice_count: int = 1

    @property
    def chip_count(self) -> int:
        """Number of chips in all slices; each chip has `chip.devices` JAX devices, 1 or 2."""
        return len(self.devices) // self.chip.devices

    @property
    def host_count(self) -> int:
        """Number of hosts of all slices."""
        return self.slice_count * -(-self.chip_count // self.slice_count // CHIPS_PER_HOST)


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Compiler statistics of one program, per device.

    Attributes:
        seconds: Compile time.
        out_of_memory_message: The compiler's message if the program does not fit in memory, else None. If it is set,
            the fields below are empty.
        program: The parsed HLO text.
        memory: Sizes in bytes. The keys are those of `MEMORY_FIELDS` and, for the total memory that the program needs,
            `bytes`: arguments, outputs that are not aliased, temporaries and code.
        costs: `flops` and `bytes_accessed` (in all memory spaces) from XLA's cost analysis, which counts the body of a
            loop once.
    """

    seconds: float
    out_of_memory_message: str | None
    program: hlo.Program | None = dataclasses.field(default=None, repr=False)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    costs: dict[str, float | None] = dataclasses.field(default_factory=dict)


def tpu_topology(name: str) -> Topology:
    """Look up the devices of a slice such as `v5p:4x4x8`, or of two slices as `2*v5p:4x4x8`.

    Sets environment variables of libtpu in this process, unless they are set.

    Raises:
        UserError: The package libtpu is not installed, or the name is not that of a topology.
    """
    slice_count, chip_name, shape = parse_topology(name)
    chip, one_slice = CHIPS[chip_name], name.partition("*")[2] or name
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise UserError("compiling for TPU needs its compiler, which is not installed: pip install 'pma-jax[plan]'")
    # libtpu must not search for a TPU or lock it, so that several processes can compile at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # libtpu prints warnings if these two are not set.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
    options: dict[str, Any] = {}
    if chip.libtpu_config:
        options["chip_config_name"] = chip.libtpu_config
    if slice_count > 1:
        options["num_slices"] = slice_count
    if set(shape) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=one_slice, **options)
    except (RuntimeError, ValueError) as error:  # of libtpu and of JAX
        known = format_known_topologies(chip_name)
        raise UserError(
            f"libtpu does not support the topology {name!r} ({first_line(error)}): give one of {known}"
        ) from error
    return Topology(name, chip, tuple(description.devices), slice_count)


def program_lowerings(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return a dict from the name of each program to a function that lowers it for `mesh`, with shapes from `config`.

    The programs are `train_step`, `evaluation_step`, `merge`, which adds one weighted checkpoint to the running total
    of a merge in device memory, and those of `replicas.method.syncs`.

    Raises:
        UserError: A size is not divisible by the size of the mesh axis that shards it; the message names the size.
    """
    check_mesh(config, mesh)
    state, params = abstract_state(config, mesh), abstract_params(config.model, mesh)
    with jax.set_mesh(mesh):
        graph = graph_definition(config.model)

    def abstract_tokens(sequences: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, RULES.spec("batch", None))
        shape = (sequences, config.training.sequence_length_tokens + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def lower_train_step() -> jax.stages.Lowered:
        step: Any = make_train_step(config, graph)
        return step.lower(state, abstract_tokens(config.training.batch_size_sequences), 0.0)

    def lower_evaluation_step() -> jax.stages.Lowered:
        return evaluation_step.lower(graph, params, abstract_tokens(config.evaluation.batch_size_sequences))

    def lower_merge() -> jax.stages.Lowered:
        return add_weighted.lower(abstract_totals(params), [params], np.ones(1, np.float32))

    def lower_sync(sync: method.Sync) -> jax.stages.Lowered:
        apply: Any = method.make_sync(config.replicas, sync, mesh)
        return apply.lower(as_workers(state), state.step)

    named = {"train_step": lower_train_step, "evaluation_step": lower_evaluation_step, "merge": lower_merge}
    return named | {name: functools.partial(lower_sync, sync) for name, (sync, _) in method.syncs(config).items()}


def compile_program(lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.Mesh) -> CompileReport:
    """Lower and compile a program of `program_lowerings`.

    If the program does not fit in memory, return a report with the compiler's message. Other compiler errors propagate.
    """
    start = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompileReport(time.perf_counter() - start, first_line(error))
    seconds = time.perf_counter() - start
    stats, analysis, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    assert stats is not None and text is not None
    memory = {name: getattr(stats, attribute) for name, attribute in MEMORY_FIELDS.items()}
    unaliased_bytes = memory["output_bytes"] - memory["aliased_bytes"]
    memory["bytes"] = memory["argument_bytes"] + unaliased_bytes + memory["temporary_bytes"] + memory["code_bytes"]
    costs = {"flops": analysis.get("flops"), "bytes_accessed": analysis.get("bytes accessed")}
    return CompileReport(seconds, None, hlo.parse_hlo(text), memory, costs)
