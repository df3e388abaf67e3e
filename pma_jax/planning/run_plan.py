"""`pma plan`: one run on one topology, as numbers and as a page of text. Every bound says whose it is."""

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
from pma_jax.model.decoder import activated_parameter_count, parameter_count
from pma_jax.planning import aot, cost, counts, disk, hlo, units
from pma_jax.runtime.mesh import mesh_from_devices
from pma_jax.training.state import abstract_state

DAY = 86_400  # seconds


def plan(
    config: Config,
    topology: aot.Topology,
    *,
    storage_bytes_per_second: float,
    annealing_share: float,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compile the run's programs for a topology, and add up what they and its checkpoints need.

    Args:
      config: of the run.
      topology: as from `aot.tpu_topology`.
      storage_bytes_per_second: what storage reads or writes, for all devices together.
      annealing_share: the annealing that merging replaces, as a share of the run's tokens.
      say: is told what is being compiled.

    Returns:
      A tree that JSON can hold. A program fits only where `compiled` is true: the compiler said so.

    Raises:
      ValueError: a size does not divide over the mesh, or the mesh does not have as many devices as the topology.
    """
    mesh = mesh_from_devices(topology.devices, dataclasses.replace(config.mesh, cpu_devices=0))
    state = abstract_state(config, mesh)
    reports = {}
    for name, lower in aot.programs(config, mesh).items():
        say(f"compiling the {name.replace('_', ' ')} for {topology.name}")
        report = aot.compile_program(lower, mesh)
        reports[name] = dataclasses.replace(report, kernel_flops=_kernel_flops(config, mesh, name, report))
    stored = disk.storage(config, state)
    return {
        "config_digest": configuration.digest(config),
        "versions": versions(),
        "topology": {
            "name": topology.name,
            "slices": topology.slices,
            "chips": topology.chips,
            "devices": len(topology.devices),
            "device_memory_bytes": topology.chip.memory_bytes // topology.chip.devices,
            "figures": {
                key: value
                for key, value in dataclasses.asdict(topology.chip).items()
                if key not in ("shapes", "config")
            },
        },
        "mesh": dict(mesh.shape),
        "parameters": parameter_count(state.params),
        "activated_parameters": activated_parameter_count(state.params, config.model),
        "parameter_leaves": len(jax.tree.leaves(state.params)),
        "largest_leaf_bytes_per_device": max(map(disk.device_bytes, jax.tree.leaves(state.params))),
        "programs": {name: _program(report, topology.chip) for name, report in reports.items()},
        "training": _training(config, topology, reports["train_step"]),
        "storage": stored,
        "storage_times": disk.times(config, state, storage_bytes_per_second),
        "annealing": _annealing(config, topology, reports["train_step"], annealing_share),
    }


def _kernel_flops(config: Config, mesh: jax.sharding.Mesh, name: str, report: aot.Report) -> float:
    """What a device needs of its hand-written kernels.

    Attention's declare nothing: what the model needs, without what they recompute. Those of experts declare the product
    of all rows that their buffers hold: of these, what the rows of a balanced router fill.
    """
    if report.program is None or name == "merge":
        return 0.0
    length, devices = config.training.sequence_length_tokens, mesh.size
    passes, sequences, microbatches = {
        "train_step": (3, config.training.batch_size_sequences, config.training.accumulation_steps),
        "evaluation_step": (1, config.evaluation.batch_size_sequences, 1),
    }[name]
    kernels = counts.kernels(report.program)
    attention = cost.forward_flops(config.model, length)["attention"] if kernels.silent else 0.0
    tokens = sequences // microbatches * length * mesh.shape["tensor"] // devices
    filled = _filled_share(config.model, tokens, mesh.shape["expert"])
    return passes * attention * sequences * length / devices + kernels.declared_flops * filled


def _filled_share(model: ModelConfig, tokens: int, parts: int) -> float:
    """Of the rows of an exchange between `parts` devices, the share that `tokens` on each of them fill."""
    if not model.experts or parts == 1:
        return 1.0
    even = tokens * model.experts_per_token / parts
    return even / experts.exchange_capacity(tokens, model.experts_per_token, model.experts // parts, parts)


def refusals(numbers: dict[str, Any]) -> list[str]:
    """What does not fit, and what the compiler said of it; empty where everything compiled."""
    programs = numbers["programs"].items()
    return [f"the {name.replace('_', ' ')}: {p['refusal']}" for name, p in programs if not p["compiled"]]


def versions() -> dict[str, str]:
    """Of what a plan depends on."""
    names = ["pma-jax", "jax", "jaxlib", *(["libtpu"] if importlib.util.find_spec("libtpu") else [])]
    return {name: importlib.metadata.version(name) for name in names}


def _program(report: aot.Report, chip: cost.Chip) -> dict[str, Any]:
    found: dict[str, Any] = {
        "compiled": report.refusal is None,
        "refusal": report.refusal,
        "compile_seconds": report.seconds,
    }
    if report.program is None:
        return found
    kinds: dict[str, dict[str, float]] = {}
    for collective in counts.collectives(report.program):
        of_kind = kinds.setdefault(collective.kind, {"count": 0, "payload_bytes": 0, "sent_bytes": 0.0})
        of_kind["count"] += collective.times
        of_kind["payload_bytes"] += collective.times * collective.payload_bytes
        of_kind["sent_bytes"] += collective.times * collective.sent_bytes
    memory = {
        "argument_bytes": report.argument_bytes,
        "temporary_bytes": report.temporary_bytes,
        "output_bytes": report.output_bytes,
        "aliased_bytes": report.aliased_bytes,
        "code_bytes": report.code_bytes,
        "bytes": report.bytes,
        "share_of_memory": report.bytes / (chip.memory_bytes / chip.devices),
    }
    bound = cost.roofline(report.program, chip, report.kernel_flops)
    return found | {
        "memory": memory,
        "product_flops": counts.product_flops(report.program),
        "kernels": dataclasses.asdict(counts.kernels(report.program)),
        "kernel_flops": report.kernel_flops,
        "bytes_moved": counts.bytes_moved(report.program),
        "cost_analysis_loops_once": {"flops": report.compiler_flops, "bytes_accessed": report.compiler_bytes},
        "loop_trips": hlo.loops(report.program),
        "aliased_outputs": report.program.aliased_outputs,
        "collectives": kinds,
        "slice_bytes": counts.slice_bytes(report.program),
        "roofline": dataclasses.asdict(bound) | {"seconds": bound.seconds, "limit": bound.limit},
    }


def _training(config: Config, topology: aot.Topology, report: aot.Report) -> dict[str, Any]:
    length = config.training.sequence_length_tokens
    token = cost.training_flops(config.model, length)
    needed = token * config.batch_tokens / len(topology.devices)
    found: dict[str, Any] = {
        "batch_tokens": config.batch_tokens,
        "steps": math.ceil(config.training.total_tokens / config.batch_tokens),
        "forward_flops_per_token": cost.forward_flops(config.model, length),
        "training_flops_per_token": token,
        "step_flops_per_device": needed,
    }
    if report.program is None:
        return found
    seconds = cost.roofline(report.program, topology.chip, report.kernel_flops).seconds
    return found | {
        "step_seconds_at_least": seconds,
        "model_flops_utilization_at_most": needed / seconds / _device_flops(topology),
        "tokens_per_day_at_most": config.batch_tokens * DAY / seconds,
    }


def _annealing(config: Config, topology: aot.Topology, report: aot.Report, share: float) -> dict[str, Any]:
    tokens = share * config.training.total_tokens
    steps = math.ceil(tokens / config.batch_tokens)
    found: dict[str, Any] = {
        "share_of_tokens": share,
        "tokens": tokens,
        "steps": steps,
        "flops": steps
        * config.batch_tokens
        * cost.training_flops(config.model, config.training.sequence_length_tokens),
    }
    if report.program is None:
        return found
    hours = steps * cost.roofline(report.program, topology.chip, report.kernel_flops).seconds / 3600
    return found | {"hours_at_least": hours, "chip_hours_at_least": hours * topology.chips}


def _device_flops(topology: aot.Topology) -> float:
    return topology.chip.flops_per_second / topology.chip.devices


# --- As text ----------------------------------------------------------------------------------------------------------


def as_text(numbers: dict[str, Any]) -> str:
    """The plan for a reader: a column a program, then the run."""
    where, programs = numbers["topology"], numbers["programs"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in numbers["mesh"].items())
    title = (
        f"{_parameters(numbers)} on {where['name']}: {where['chips']} chips, "
        f"{where['devices']} devices with {units.memory(where['device_memory_bytes'])} each, mesh {mesh}"
    )
    rows = [["a device's share of", *[name.replace("_", " ") for name in programs]]]
    for label, cell in _CELLS.items():
        rows.append([label, *[cell(p) if p["compiled"] or label == "compiled" else "-" for p in programs.values()]])
    return "\n".join([title, "", units.align_columns(rows), "", *_run_lines(numbers), *_notes(programs)])


_CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "compiled": lambda p: f"yes, {p['compile_seconds']:.1f} s" if p["compiled"] else "no: does not fit",
    "arguments": lambda p: units.memory(p["memory"]["argument_bytes"]),
    "temporaries": lambda p: units.memory(p["memory"]["temporary_bytes"]),
    "outputs": lambda p: units.memory(p["memory"]["output_bytes"]),
    "  of them in place": lambda p: units.memory(p["memory"]["aliased_bytes"]),
    "memory, with code": lambda p: f"{units.memory(p['memory']['bytes'])} ({p['memory']['share_of_memory']:.0%})",
    "products": lambda p: f"{units.count(p['product_flops'] + p['kernel_flops'])} FLOP",
    "memory traffic": lambda p: units.data(p["bytes_moved"]),
    "roofline": lambda p: f"{units.duration(p['roofline']['seconds'])} ({p['roofline']['limit']})",
}


def _parameters(numbers: dict[str, Any]) -> str:
    total, activated = numbers["parameters"], numbers["activated_parameters"]
    return f"{units.count(total)} parameters" + (f", {units.count(activated)} a token," if activated < total else "")


def _run_lines(numbers: dict[str, Any]) -> list[str]:
    return [
        *[_collectives_line(name, p) for name, p in numbers["programs"].items() if p["compiled"]],
        *_training_lines(numbers["training"]),
        *_storage_lines(numbers),
        _annealing_line(numbers["annealing"]),
    ]


def _notes(programs: dict[str, Any]) -> list[str]:
    notes = []
    for name, program in programs.items():
        name = name.replace("_", " ")
        if None in program.get("loop_trips", []):
            notes.append(f"note: a loop of the {name} counts once: its text does not tell how often it runs")
        if program.get("slice_bytes") and not program["roofline"]["slice_network_seconds"]:
            notes.append(f"note: how fast slices of this chip talk is not known: no bound of the {name} has it")
        kernels = program.get("kernels", {"silent": 0, "declared_flops": 0})
        if kernels["silent"]:
            notes.append(
                f"note: {kernels['silent']} kernels of the {name} do not say how many FLOPs they are: "
                "what attention needs counts"
            )
        if kernels["declared_flops"]:
            notes.append(
                f"note: the experts' kernels of the {name} declare {units.count(kernels['declared_flops'])} FLOP for "
                "their buffers: what a balanced router fills counts, and one round of exchange"
            )
    return notes


def _collectives_line(name: str, program: dict[str, Any]) -> str:
    kinds = [
        f"{of['count']} {kind} of {units.data(of['payload_bytes'])}" for kind, of in program["collectives"].items()
    ]
    between = f"; {units.data(program['slice_bytes'])} to other slices" if program["slice_bytes"] else ""
    return f"collectives of the {name.replace('_', ' ')}: {', '.join(kinds) or 'none'}{between}"


def _training_lines(run: dict[str, Any]) -> list[str]:
    parts = run["forward_flops_per_token"].items()
    listed = ", ".join(f"{name.replace('_', ' ')} {units.count(3 * flops)}" for name, flops in parts)
    lines = [
        f"training needs {units.count(run['training_flops_per_token'])} FLOP a token ({listed}), "
        f"{units.count(run['step_flops_per_device'])} FLOP a step and device"
    ]
    if "step_seconds_at_least" in run:
        lines.append(
            f"a step of {run['batch_tokens']:,} tokens takes at least {units.duration(run['step_seconds_at_least'])}: "
            f"MFU at most {run['model_flops_utilization_at_most']:.1%}, "
            f"at most {units.count(run['tokens_per_day_at_most'])} tokens a day"
        )
    return lines


def _storage_lines(numbers: dict[str, Any]) -> list[str]:
    stored, took = numbers["storage"], numbers["storage_times"]
    lines = [
        f"a snapshot is {units.data(stored['snapshot_bytes'])}, a state {units.data(stored['state_bytes'])}; "
        f"a window of N = {stored['window']} snapshots {units.data(stored['window_bytes'])}",
        f"one of {' and '.join(stored['kinds'])} every V = {units.count(stored['interval_tokens'])} tokens: "
        f"{stored['snapshots_saved_of_each_kind']} saved, {stored['snapshots_kept_of_each_kind']} kept of each kind, "
        f"and {stored['states_kept']} of {stored['states_saved']} states: "
        f"{units.data(stored['bytes_at_the_end'])} at the end, {units.data(stored['bytes_at_most'])} at most",
        f"at {units.data(took['bytes_per_second'])}/s of storage: {units.duration(took['write_snapshot_seconds'])} to "
        f"write a snapshot, {units.duration(took['write_state_seconds'])} a state, "
        f"{units.duration(took['merge_window_seconds'])} to merge a window",
    ]
    if stored["block_mean_bytes_per_device"]:
        lines.append(
            f"block means take {units.memory(stored['block_mean_bytes_per_device'])} of each device's arguments"
        )
    return lines


def _annealing_line(annealing: dict[str, Any]) -> str:
    what = f"an annealing over {annealing['share_of_tokens']:.0%} of the tokens ({units.count(annealing['tokens'])})"
    price = f"{units.count(annealing['flops'])} FLOP"
    if "chip_hours_at_least" in annealing:
        hours = f"{annealing['hours_at_least']:.4g} hours of this slice"
        price = f"at least {annealing['chip_hours_at_least']:.4g} chip hours ({hours}, {price})"
    return f"{what}, which merging replaces, costs {price}"
