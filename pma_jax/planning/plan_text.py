"""Formatting of a run's plan as text for `pma plan`."""

from collections.abc import Callable
from typing import Any

from pma_jax.runtime.formatting import (
    align_columns,
    format_count,
    format_duration,
    format_memory_bytes,
    format_storage_bytes,
)


def format_plan(numbers: dict[str, Any]) -> str:
    """Format the result of `run_plan.plan_run`: a table with one column per program, then lines about the run."""
    topology, programs = numbers["topology"], numbers["programs"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in numbers["mesh"].items())
    total, activated = numbers["parameters"], numbers["activated_parameters"]
    per_token = f", {format_count(activated)} per token," if activated < total else ""
    title = (
        f"{format_count(total)} parameters{per_token} on {topology['name']}: {topology['chips']} chips, "
        f"{topology['devices']} devices with {format_memory_bytes(topology['device_memory_bytes'])} each, mesh {mesh}"
    )
    rows = [["per device", *map(_spaced, programs)]]
    for label, cell in _ROWS.items():
        rows.append([label, *[cell(p) if p["compiled"] or label == "compiled" else "-" for p in programs.values()]])
    run = [
        *[_collectives_line(name, p) for name, p in programs.items() if p["compiled"]],
        *_far_lines(numbers["far_traffic"]),
        *_training_lines(numbers["training"]),
        *_storage_lines(numbers["storage"], numbers["storage_times"]),
        _annealing_line(numbers["annealing"]),
    ]
    heaviest = [line for name, p in programs.items() if p.get("heaviest_operations") for line in _heaviest(name, p)]
    return "\n".join([title, "", align_columns(rows), "", *run, *_notes(programs), *heaviest])


# Label of a row -> function that formats its cell for one program.
_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "compiled": lambda p: f"yes, {p['compile_seconds']:.1f} s" if p["compiled"] else "no: does not fit",
    "arguments": lambda p: format_memory_bytes(p["memory"]["argument_bytes"]),
    "temporaries": lambda p: format_memory_bytes(p["memory"]["temporary_bytes"]),
    "outputs": lambda p: format_memory_bytes(p["memory"]["output_bytes"]),
    "  of them in place": lambda p: format_memory_bytes(p["memory"]["aliased_bytes"]),
    "memory, with code": lambda p: (
        f"{format_memory_bytes(p['memory']['bytes'])} ({p['memory']['share_of_memory']:.0%})"
    ),
    "products": lambda p: f"{format_count(p['product_flops'] + p['kernel_flops'])} FLOP",
    "memory traffic": lambda p: format_storage_bytes(p["bytes_moved"]),
    "roofline": lambda p: f"{format_duration(p['roofline']['seconds'])} ({p['roofline']['limit']})",
}


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _notes(programs: dict[str, Any]) -> list[str]:
    notes = []
    for name, program in programs.items():
        name = _spaced(name)
        if None in program.get("loop_trips", []):
            notes.append(
                f"note: a loop of the {name} counts once: its number of iterations is not in the compiled text"
            )
        if program.get("slice_bytes") and not program["roofline"]["slice_network_seconds"]:
            notes.append(
                f"note: the bandwidth between slices of this chip is unknown: no bound of the {name} includes it"
            )
        kernels = program.get("kernels", {"silent": 0, "declared_flops": 0})
        if kernels["silent"]:
            notes.append(
                f"note: {kernels['silent']} kernels of the {name} declare no FLOPs: the FLOPs that attention needs are "
                "counted instead"
            )
        if kernels["declared_flops"]:
            notes.append(
                f"note: the experts' kernels of the {name} declare {format_count(kernels['declared_flops'])} FLOP for "
                "their full buffers: only the share that a balanced router fills is counted, in one round of exchange"
            )
    return notes


def _collectives_line(name: str, program: dict[str, Any]) -> str:
    kinds = [
        f"{total['count']} {kind} of {format_storage_bytes(total['payload_bytes'])}"
        for kind, total in program["collectives"].items()
    ]
    between = f"; {format_storage_bytes(program['slice_bytes'])} to other slices" if program["slice_bytes"] else ""
    return f"collectives of the {_spaced(name)}: {', '.join(kinds) or 'none'}{between}"


def _far_lines(traffic: dict[str, Any] | None) -> list[str]:
    if traffic is None:
        return []
    lines = []
    for one in traffic["programs"]:
        every = "a step" if one["every_steps"] == 1 else f"every {one['every_steps']:,} steps"
        sent = format_storage_bytes(one["bytes"])
        lines.append(f"between {traffic['between']}, the {_spaced(one['program'])} sends {sent} per device, {every}")
    if traffic["bytes_per_step"] and traffic["bytes_per_second"]:
        sent, rate = (format_storage_bytes(traffic[key]) for key in ("bytes_per_step", "bytes_per_second"))
        lines.append(
            f"between {traffic['between']}, a device sends {sent} per step in all: the network decides below {rate}/s"
        )
    return lines


def _heaviest(name: str, program: dict[str, Any]) -> list[str]:
    """Format the operations of a program with the most memory traffic."""
    rows = [["share", "bytes", "executions", "source", "pass", "operation", "its largest instruction"]]
    for one in program["heaviest_operations"]:
        share = f"{one['bytes'] / program['bytes_moved']:.1%}"
        size, source, pass_name = format_storage_bytes(one["bytes"]), one["source"] or "-", one["pass_name"] or "-"
        rows.append([share, size, f"{one['executions']:,}", source, pass_name, one["operation"], one["largest"]])
    return ["", f"memory traffic of the {_spaced(name)}, by operation:", align_columns(rows)]


def _training_lines(run: dict[str, Any]) -> list[str]:
    parts = run["forward_flops_per_token"].items()
    listed = ", ".join(f"{_spaced(name)} {format_count(3 * flops)}" for name, flops in parts)
    lines = [
        f"training needs {format_count(run['training_flops_per_token'])} FLOP per token ({listed}), "
        f"{format_count(run['step_flops_per_device'])} FLOP per step and device"
    ]
    if "step_seconds_at_least" in run:
        lines.append(
            f"a step of {run['batch_tokens']:,} tokens takes at least {format_duration(run['step_seconds_at_least'])}: "
            f"MFU at most {run['model_flops_utilization_at_most']:.1%}, "
            f"at most {format_count(run['tokens_per_day_at_most'])} tokens per day"
        )
    return lines


def _storage_lines(stored: dict[str, Any], times: dict[str, float]) -> list[str]:
    size = {key: format_storage_bytes(value) for key, value in stored.items() if "bytes" in key}
    duration = {key: format_duration(value) for key, value in times.items() if key.endswith("seconds")}
    lines = [
        f"a snapshot is {size['snapshot_bytes']}, a state {size['state_bytes']}; "
        f"a window of N = {stored['window']} snapshots {size['window_bytes']}",
        f"one of {' and '.join(stored['kinds'])} every V = {format_count(stored['interval_tokens'])} tokens: "
        f"{stored['snapshots_saved_of_each_kind']} saved, {stored['snapshots_kept_of_each_kind']} kept of each kind, "
        f"and {stored['states_kept']} of {stored['states_saved']} states: "
        f"{size['bytes_at_the_end']} at the end, {size['bytes_at_most']} at most",
        f"at {format_storage_bytes(times['bytes_per_second'])}/s of storage and "
        f"{format_storage_bytes(times['host_bytes_per_second'])}/s of each host: {duration['write_snapshot_seconds']} "
        f"to write a snapshot, {duration['write_state_seconds']} a state; {duration['merge_window_seconds']} to merge "
        f"a window on one host, {duration['merge_window_on_mesh_seconds']} on the mesh of {times['hosts']}",
    ]
    if stored["block_mean_bytes_per_device"]:
        memory = format_memory_bytes(stored["block_mean_bytes_per_device"])
        lines.append(f"block means take {memory} of each device's arguments")
    return lines


def _annealing_line(annealing: dict[str, Any]) -> str:
    what = f"an annealing over {annealing['share_of_tokens']:.0%} of the tokens ({format_count(annealing['tokens'])})"
    price = f"{format_count(annealing['flops'])} FLOP"
    if "chip_hours_at_least" in annealing:
        hours = f"{annealing['hours_at_least']:.4g} hours of this slice"
        price = f"at least {annealing['chip_hours_at_least']:.4g} chip hours ({hours}, {price})"
    return f"{what}, which merging replaces, costs {price}"
