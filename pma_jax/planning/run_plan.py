"""`pma plan`: memory, FLOPs, step time and storage of a run on a topology, estimated without the hardware."""

import dataclasses
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax

from pma_jax import config as configuration
from pma_jax.config import Config, ModelConfig
from pma_jax.model import experts
from pma_jax.model.decoder import abstract_params, activated_parameter_count, parameter_count
from pma_jax.planning import aot, cost, counts, disk, hlo, memory_traffic
from pma_jax.replicas import method
from pma_jax.runtime.mesh import mesh_from_devices, worker_count
from pma_jax.training.state import abstract_state

SECONDS_PER_DAY = 86_400


def plan_run(
    config: Config,
    topology: aot.Topology,
    *,
    storage_bytes_per_second: float,
    host_bytes_per_second: float,
    annealing_share: float,
    heaviest_operations: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compile the programs of a run for a topology, and add up what they and its checkpoints need.

    Args:
        config: The run's configuration.
        topology: The devices, from `aot.tpu_topology`.
        storage_bytes_per_second: Bandwidth of the checkpoint storage, for all hosts together.
        host_bytes_per_second: Bandwidth between one host and the storage.
        annealing_share: Tokens of the annealing that merging would replace, as a fraction of the run's tokens.
        heaviest_operations: Number of operations with the most memory traffic to list for each program.
        log: Called with one line before each program is compiled.

    Returns:
        A dict that can be written as JSON. `programs` has an entry for each of `train_step`, `evaluation_step`, `merge`
        and the syncs of `replicas`: `compiled` is false if the compiler reports that the program does not fit in device
        memory (`refusal` is its message), and the entry then has no estimates of work and time. `training` and
        `annealing` have times only if the train step compiled.

    Raises:
        UserError: A dimension is not divisible by its mesh axis, or the mesh and the topology have different numbers
            of devices.
    """
    mesh = mesh_from_devices(topology.devices, dataclasses.replace(config.mesh, cpu_devices=0))
    state, params = abstract_state(config, mesh), abstract_params(config.model, mesh)
    programs = {}
    for name, lower in aot.program_lowerings(config, mesh).items():
        log(f"compiling the {name.replace('_', ' ')} for {topology.name}")
        programs[name] = _plan_program(config, topology, mesh, name, lower, heaviest_operations)
    step_seconds = programs["train_step"]["roofline"]["seconds"] if programs["train_step"]["compiled"] else None
    leaves = jax.tree.leaves(params)
    return {
        "config_digest": configuration.digest(config),
        "versions": package_versions(),
        "topology": _topology_numbers(topology),
        "mesh": dict(mesh.shape),
        "parameters": parameter_count(params),
        "activated_parameters": activated_parameter_count(params, config.model),
        "parameter_leaves": len(leaves),
        "largest_leaf_bytes_per_device": max(map(disk.bytes_per_device, leaves)),
        "programs": programs,
        "workers": worker_count(config, mesh) if config.replicas.method != "none" else 0,
        "far_traffic": _far_traffic(config, programs, mesh, step_seconds) if _far_parts(mesh, topology) > 1 else None,
        "training": _training_numbers(config, topology, step_seconds),
        "storage": disk.estimate_storage_bytes(config, state),
        "storage_times": disk.estimate_write_and_merge_seconds(
            config, state, topology.host_count, storage_bytes_per_second, host_bytes_per_second
        ),
        "annealing": _annealing_numbers(config, topology, step_seconds, annealing_share),
    }


def plan_train_step(config: Config, topology: aot.Topology) -> dict[str, Any]:
    """Compile only the train step; return its entry of `programs`, with the MFU that its bound allows."""
    mesh = mesh_from_devices(topology.devices, dataclasses.replace(config.mesh, cpu_devices=0))
    numbers = _plan_program(config, topology, mesh, "train_step", aot.program_lowerings(config, mesh)["train_step"])
    if not numbers["compiled"]:
        return numbers
    key = "model_flops_utilization_at_most"
    return numbers | {key: _training_numbers(config, topology, numbers["roofline"]["seconds"])[key]}


def _plan_program(
    config: Config,
    topology: aot.Topology,
    mesh: jax.sharding.Mesh,
    name: str,
    lower: Callable[[], jax.stages.Lowered],
    heaviest_operations: int = 0,
) -> dict[str, Any]:
    """Compile a program, and return its entry of `programs`."""
    report = aot.compile_program(lower, mesh)
    kernel_flops = _kernel_flops(config, mesh, name, report.program)
    numbers = _program_numbers(report, mesh, topology, kernel_flops)
    if report.program and heaviest_operations:
        found = memory_traffic.heaviest_operations(report.program, heaviest_operations)
        numbers["heaviest_operations"] = [dataclasses.asdict(one) for one in found]
    return numbers


def out_of_memory_messages(numbers: dict[str, Any]) -> list[str]:
    """List the programs of a plan that do not fit in memory, each with the compiler's message."""
    programs = numbers["programs"].items()
    return [f"the {name.replace('_', ' ')}: {p['refusal']}" for name, p in programs if not p["compiled"]]


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a plan depends on."""
    names = ["pma-jax", "jax", "jaxlib", *(["libtpu"] if importlib.util.find_spec("libtpu") else [])]
    return {name: importlib.metadata.version(name) for name in names}


def _topology_numbers(topology: aot.Topology) -> dict[str, Any]:
    chip = dataclasses.asdict(topology.chip)
    return {
        "name": topology.name,
        "slices": topology.slice_count,
        "chips": topology.chip_count,
        "hosts": topology.host_count,
        "devices": len(topology.devices),
        "device_memory_bytes": topology.chip.memory_bytes // topology.chip.devices,
        "figures": {key: value for key, value in chip.items() if key not in ("topologies", "libtpu_config")},
    }


def _kernel_flops(config: Config, mesh: jax.sharding.Mesh, name: str, program: hlo.Program | None) -> float:
    """Estimate the FLOPs per device that a program needs in hand-written kernels.

    Attention kernels declare no FLOPs, so theirs are computed from the model, without rematerialization. Expert kernels
    declare the FLOPs of a full buffer, which are scaled by the share of rows that a balanced router fills.
    """
    if program is None or name not in ("train_step", "evaluation_step"):
        return 0.0
    length, devices = config.training.sequence_length_tokens, mesh.size
    passes, sequences, microbatches = {
        "train_step": (3, config.training.batch_size_sequences, config.training.accumulation_steps),
        "evaluation_step": (1, config.evaluation.batch_size_sequences, 1),
    }[name]
    kernels = counts.count_kernels(program)
    attention = cost.forward_flops_per_token(config.model, length)["attention"] if kernels.undeclared_kernels else 0.0
    tokens = sequences // microbatches * length * mesh.shape["tensor"] // devices
    filled = _filled_share(config.model, tokens, mesh.shape["expert"])
    return passes * attention * sequences * length / devices + kernels.declared_flops * filled


def _filled_share(model: ModelConfig, tokens: int, devices: int) -> float:
    """Return the share of an all-to-all buffer that a balanced router fills, with `tokens` on each of `devices`."""
    if not model.experts or devices == 1:
        return 1.0
    balanced = tokens * model.experts_per_token / devices
    return balanced / experts.rows_per_device_pair(tokens, model.experts_per_token, model.experts // devices, devices)


def _far_parts(mesh: jax.sharding.Mesh, topology: aot.Topology) -> int:
    """Return the number of parts of the devices between which the network is slow: replicas, or else slices."""
    return mesh.shape["replica"] if mesh.shape["replica"] > 1 else topology.slice_count


def _program_numbers(
    report: aot.CompileReport, mesh: jax.sharding.Mesh, topology: aot.Topology, kernel_flops: float
) -> dict[str, Any]:
    """Return the numbers of one program; only those of the compilation if it does not fit in memory."""
    compilation = {
        "compiled": report.out_of_memory_message is None,
        "refusal": report.out_of_memory_message,
        "compile_seconds": report.seconds,
    }
    if report.program is None:
        return compilation
    collectives: dict[str, dict[str, float]] = {}
    for collective in counts.collectives(report.program):
        total = collectives.setdefault(collective.kind, {"count": 0, "payload_bytes": 0, "sent_bytes": 0.0})
        total["count"] += collective.executions
        total["payload_bytes"] += collective.executions * collective.payload_bytes
        total["sent_bytes"] += collective.executions * collective.sent_bytes_per_execution
    chip = topology.chip
    roofline = cost.roofline(report.program, chip, kernel_flops)
    kernels = counts.count_kernels(report.program)
    device_memory_bytes = chip.memory_bytes / chip.devices
    return compilation | {
        "memory": report.memory | {"share_of_memory": report.memory["bytes"] / device_memory_bytes},
        "product_flops": counts.matmul_flops(report.program),
        "kernels": {"declared_flops": kernels.declared_flops, "silent": kernels.undeclared_kernels},
        "kernel_flops": kernel_flops,
        "bytes_moved": counts.memory_traffic_bytes(report.program),
        "cost_analysis_loops_once": report.costs,
        "loop_trips": hlo.loop_trip_counts(report.program),
        "aliased_outputs": report.program.aliased_output_count,
        "collectives": collectives,
        "slice_bytes": counts.inter_slice_sent_bytes(report.program),
        "far_bytes": far_bytes(report.program, mesh, topology),
        "roofline": dataclasses.asdict(roofline) | {"seconds": roofline.seconds, "limit": roofline.limit},
    }


def far_bytes(program: hlo.Program, mesh: jax.sharding.Mesh, topology: aot.Topology) -> float:
    """Return the bytes that a device sends to other replicas or slices per execution of a program.

    Collectives are rings, between slices and, within a slice, between its replicas. A program for several slices is
    that of one slice: its collectives name the devices of the slice.
    """
    replicas_of_program = max(_far_parts(mesh, topology) * program.devices // mesh.size, 1)
    between = sum(c.executions * c.sent_bytes_per_execution for c in counts.crossing(program, replicas_of_program))
    return between + counts.inter_slice_sent_bytes(program)


def _far_traffic(
    config: Config, programs: dict[str, Any], mesh: jax.sharding.Mesh, step_seconds: float | None
) -> dict[str, Any]:
    """Return what is sent between replicas or slices: by each step and each sync, and by all of them per step.

    Training waits for the network if sending takes longer than the steps: `bytes_per_second` is the bandwidth of a
    device below which that is so; None if the time of a step is unknown.
    """
    every = {"train_step": 1} | {
        name: config.tokens_to_steps(tokens) for name, (_, tokens) in method.syncs(config).items()
    }
    sent = [
        {"program": name, "every_steps": steps, "bytes": programs[name]["far_bytes"]}
        for name, steps in every.items()
        if programs[name]["compiled"]
    ]
    bytes_per_step = sum(one["bytes"] / one["every_steps"] for one in sent)
    return {
        "between": f"{mesh.shape['replica']} replicas" if mesh.shape["replica"] > 1 else "slices",
        "programs": sent,
        "bytes_per_step": bytes_per_step,
        "bytes_per_second": bytes_per_step / step_seconds if step_seconds else None,
    }


def _training_numbers(config: Config, topology: aot.Topology, step_seconds: float | None) -> dict[str, Any]:
    """Return steps and FLOPs of the run, and bounds on its speed if the minimum time of a step is known."""
    length = config.training.sequence_length_tokens
    flops_per_token = cost.training_flops_per_token(config.model, length)
    step_flops = flops_per_token * config.batch_tokens / len(topology.devices)
    numbers: dict[str, Any] = {
        "batch_tokens": config.batch_tokens,
        "steps": math.ceil(config.training.total_tokens / config.batch_tokens),
        "forward_flops_per_token": cost.forward_flops_per_token(config.model, length),
        "training_flops_per_token": flops_per_token,
        "step_flops_per_device": step_flops,
    }
    if step_seconds is None:
        return numbers
    peak = topology.chip.flops_per_second / topology.chip.devices
    return numbers | {
        "step_seconds_at_least": step_seconds,
        "model_flops_utilization_at_most": step_flops / step_seconds / peak,
        "tokens_per_day_at_most": config.batch_tokens * SECONDS_PER_DAY / step_seconds,
    }


def _annealing_numbers(
    config: Config, topology: aot.Topology, step_seconds: float | None, share: float
) -> dict[str, Any]:
    """Return the cost of the annealing that merging would replace, in time too if the minimum step time is known."""
    tokens = share * config.training.total_tokens
    steps = math.ceil(tokens / config.batch_tokens)
    flops_per_token = cost.training_flops_per_token(config.model, config.training.sequence_length_tokens)
    numbers: dict[str, Any] = {
        "share_of_tokens": share,
        "tokens": tokens,
        "steps": steps,
        "flops": steps * config.batch_tokens * flops_per_token,
    }
    if step_seconds is None:
        return numbers
    hours = steps * step_seconds / 3600
    return numbers | {"hours_at_least": hours, "chip_hours_at_least": hours * topology.chip_count}
