"""Plan every size of the ladder on a TPU slice that it fits, without a TPU; `README.md` has the table.

Command:   python experiments/plan_ladder/plan_ladder.py                 (all sizes; up-to-date results are kept)
           python experiments/plan_ladder/plan_ladder.py dense_8b --again
           python experiments/plan_ladder/plan_ladder.py --table-only     (README.md from the results, nothing compiled)

Sizes are planned one after the other, each by `pma plan` in a process of its own that writes `results/SIZE.json`. A
size is planned again when its configuration, its slice or a version (pma-jax, jax, libtpu) has changed.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pma_jax import config as configuration
from pma_jax.model import ladder
from pma_jax.planning.run_plan import package_versions
from pma_jax.runtime import formatting
from pma_jax.studies import pages

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
START, END = "<!-- the table: written by plan_ladder.py -->", "<!-- end of the table -->"


@dataclasses.dataclass(frozen=True)
class Slice:
    """The TPU slice that a size is planned for: topology, mesh, and the number of microbatches that fits."""

    topology: str
    fsdp: int
    tensor: int = 1
    expert: int = 1
    accumulation_steps: int = 1

    def overrides(self) -> list[str]:
        """Return the overrides of the size's configuration, as `section.key=value`."""
        batch_parts = self.fsdp * self.expert
        keys = {
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "mesh.expert": self.expert,
            "training.accumulation_steps": self.accumulation_steps,
            "evaluation.batch_size_sequences": max(64, batch_parts),  # at least one sequence per device
        }
        return [f"{key}={value}" for key, value in keys.items()]


# Parameters, moments and gradients take 16 bytes per parameter, split over all devices. With microbatches of 16 to 64
# thousand tokens per device, the activations that blocks keep for the backward pass (2 bytes per token and width) fit.
# Fewer microbatches than fit are not always better: of dense_125m, 2, 4 and 8 have bounds of 49%, 53% and 67% MFU.
SLICES = {
    "dense_125m": Slice("v5e:2x2", fsdp=4, accumulation_steps=8),
    "dense_411m": Slice("v5e:4x4", fsdp=16, accumulation_steps=4),
    "dense_1b": Slice("v6e:4x4", fsdp=16, accumulation_steps=4),
    "dense_2b": Slice("v6e:4x4", fsdp=16, accumulation_steps=8),
    "dense_8b": Slice("v5p:4x4x4", fsdp=64, accumulation_steps=2),
    "dense_70b": Slice("v5p:4x4x8", fsdp=32, tensor=4, accumulation_steps=64),
    "moe_125m_650m": Slice("v5e:4x4", fsdp=4, expert=4, accumulation_steps=4),
    "moe_330m_3b": Slice("v5e:4x4", fsdp=4, expert=4, accumulation_steps=8),
    "moe_1b_5b": Slice("v5e:4x8", fsdp=8, expert=4, accumulation_steps=16),
    "moe_700m_7b": Slice("v6e:4x4", fsdp=4, expert=4, accumulation_steps=8),
    "moe_1b3_13b": Slice("v6e:4x8", fsdp=4, expert=8, accumulation_steps=8),
    "moe_3b_30b": Slice("v5p:4x4x4", fsdp=8, expert=8, accumulation_steps=4),
    "moe_10b_100b": Slice("v5p:4x4x8", fsdp=16, expert=8, accumulation_steps=8),
    "moe_15b_150b": Slice("v5p:4x8x8", fsdp=16, expert=16, accumulation_steps=8),
    "moe_20b_200b": Slice("v5p:8x8x8", fsdp=32, expert=16, accumulation_steps=4),
}


def planned_config(name: str) -> configuration.Config:
    """Return the configuration of a size with the overrides of its slice."""
    raw = configuration.load(name)
    configuration.override(raw, SLICES[name].overrides())
    return configuration.resolve(raw)


def identity(name: str) -> dict[str, Any]:
    """Return the inputs of a size's plan; a result with other inputs is out of date."""
    config = planned_config(name)
    return {
        "config_digest": configuration.digest(config),
        "topology": SLICES[name].topology,
        "overrides": SLICES[name].overrides(),
        "versions": package_versions(),
    }


def read_results() -> dict[str, dict[str, Any]]:
    """Read the stored results by size, in the ladder's order."""
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    return {name: results[name] for name in SLICES if name in results}


def plan_size(name: str, limit_minutes: float) -> dict[str, Any]:
    """Plan one size with `pma plan`; return its plan, or the reason for a failure."""
    words = ["--config", name, "--topology", SLICES[name].topology]
    words += [f"--config.{override}" for override in SLICES[name].overrides()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        start, before = time.perf_counter(), os.times()
        command = [sys.executable, "-m", "pma_jax.cli", "plan", *words, "--out", str(out)]
        try:
            process = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60 * limit_minutes)
            failure = f"pma plan ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"not compiled within {limit_minutes:g} minutes"
        after = os.times()
        plan = json.loads(out.read_text()) if out.exists() else None
    return {
        "identity": identity(name),
        "command": " ".join(["pma", "plan", *words]),
        "wall_seconds": time.perf_counter() - start,
        "cpu_seconds": sum(after[2:4]) - sum(before[2:4]),  # user and system time of the children
        "failed": None if plan else failure,
        "plan": plan,
    }


# --- The table --------------------------------------------------------------------------------------------------------

HEADINGS = (
    "size",
    "parameters",
    "active per token",
    "context",
    "slice",
    "mesh",
    "microbatches",
    "memory of the step, of HBM",
    "step at least",
    "limited by",
    "MFU at most",
    "tokens per day at most",
    "collectives per step and device",
    "snapshot",
    "state",
    "V x N",
    "merge of N",
    "merge: collectives, temporaries, in place",
    "compiled in (CPU time)",
)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format the Markdown table: one row per size, also for sizes without a result."""
    return pages.format_table(HEADINGS, [_row(name, results.get(name)) for name in SLICES])


def _row(name: str, result: dict[str, Any] | None) -> list[str]:
    size = ladder.SIZES[name]
    head = [f"`{name}`"]
    if result is None or result["plan"] is None:
        reason = "not planned yet" if result is None else result["failed"]
        return [*head, reason, *[""] * (len(HEADINGS) - 2)]
    plan, run = result["plan"], result["plan"]["training"]
    step, merge, stored = plan["programs"]["train_step"], plan["programs"]["merge"], plan["storage"]
    mesh = " x ".join(f"{axis} {count}" for axis, count in plan["mesh"].items() if count > 1)
    head += [
        formatting.format_count(plan["parameters"], digits=3),
        formatting.format_count(plan["activated_parameters"], digits=3),
        f"{size.sequence_length_tokens}",
    ]
    head += [plan["topology"]["name"], mesh, f"{SLICES[name].accumulation_steps}"]
    refused = [key for key, program in plan["programs"].items() if not program["compiled"]]
    if refused:
        refusal = f"does not fit: the {', '.join(refused).replace('_', ' ')}"
        return [*head, refusal, *[""] * (len(HEADINGS) - len(head) - 1)]
    memory = f"{step['memory']['bytes'] / 2**30:.1f} of {plan['topology']['device_memory_bytes'] / 2**30:.0f} GiB"
    payload_bytes = sum(kind["payload_bytes"] for kind in step["collectives"].values())
    merge_collectives = sum(kind["count"] for kind in merge["collectives"].values())
    temporary_bytes = merge["memory"]["temporary_bytes"]
    return [
        *head,
        f"{memory} ({step['memory']['share_of_memory']:.0%})",
        formatting.format_duration(run["step_seconds_at_least"], digits=2),
        step["roofline"]["limit"],
        f"{run['model_flops_utilization_at_most']:.0%}",
        formatting.format_count(run["tokens_per_day_at_most"], digits=3),
        f"{formatting.format_storage_bytes(payload_bytes, digits=3)} ({', '.join(sorted(step['collectives']))})",
        formatting.format_storage_bytes(stored["snapshot_bytes"], digits=3),
        formatting.format_storage_bytes(stored["state_bytes"], digits=3),
        f"{formatting.format_count(stored['interval_tokens'], digits=3)} x {stored['window']}",
        formatting.format_duration(plan["storage_times"]["merge_window_seconds"], digits=2),
        f"{merge_collectives}, {temporary_bytes} B, {merge['aliased_outputs']} of {plan['parameter_leaves']} leaves",
        f"{result['wall_seconds']:.0f} s ({result['cpu_seconds']:.0f} s)",
    ]


def write_table() -> None:
    """Write the table of the results into README.md."""
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{START}\n{table(read_results())}\n{END}{after}")


def main() -> None:
    """Plan the sizes whose results are missing or out of date, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", default=list(SLICES), help="sizes, such as dense_8b (default: all)")
    parser.add_argument("--again", action="store_true", help="also plan sizes whose results are up to date")
    parser.add_argument("--limit-minutes", type=float, default=20.0, help="time limit per size (default 20)")
    parser.add_argument("--table-only", action="store_true", help="only write README.md from the results")
    options = parser.parse_args()
    unknown = [name for name in options.sizes if name not in SLICES]
    if unknown:
        parser.error(f"unknown size {', '.join(unknown)}: choose from {', '.join(SLICES)}")
    RESULTS.mkdir(exist_ok=True)
    for name in [] if options.table_only else options.sizes:
        old = read_results().get(name)
        if old and old["plan"] and old["identity"] == identity(name) and not options.again:
            print(f"{name}: up to date", flush=True)
            continue
        print(f"{name} on {SLICES[name].topology}", flush=True)
        result = plan_size(name, options.limit_minutes)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name}: {result['failed'] or 'planned'} in {result['wall_seconds']:.0f} s", flush=True)
        write_table()
    write_table()


if __name__ == "__main__":
    main()
