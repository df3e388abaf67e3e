"""What does a device send between slices of a TPU, by each step and each sync? (The table in docs/replicas.md)

Compiles the train step of data-parallel training and of workers, and the syncs of every method, for two and four
slices, and counts what the programs send to other slices. Needs libtpu (`pip install 'pma-jax[plan]'`) and no TPU;
takes tens of minutes. With `--redraw`, only the table is written again, from traffic.json.

Command:   python experiments/replicas/traffic.py
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from sent_bytes import leaf_bytes, sync_bytes

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.decoder import abstract_params
from pma_jax.planning import aot, cost, counts
from pma_jax.planning.run_plan import far_bytes
from pma_jax.replicas import method
from pma_jax.runtime.formatting import format_storage_bytes
from pma_jax.runtime.mesh import mesh_from_devices
from pma_jax.studies import pages

SIZES = ("dense_1b", "dense_8b")
SLICES = (2, 4)
SLICE = "v5p:2x4x4"  # 32 chips
INTERVAL_STEPS = 500  # from one average of a worker to the next
WORKERS = "workers, between syncs"
METHODS: dict[str, dict[str, Any]] = {
    "data-parallel": {"method": "none"},
    "periodic averaging": {"method": "periodic"},
    "DiLoCo": {"method": "diloco"},
    "NoLoCo": {"method": "noloco"},
    "Streaming DiLoCo, 4 fragments, float32": {"method": "streaming", "streaming_fragments": 4},
    # E3M0 has as many bits.
    "Streaming DiLoCo, 4 fragments, int4": {"method": "streaming", "streaming_fragments": 4, "streaming_dtype": "int4"},
    "SPARTA, 0.5% per step": {"method": "sparta", "sparta_share": 0.005},
}
FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "replicas.md"


def make_config(size: str, slices: int, name: str, devices: int) -> Config:
    """Return the configuration of a method on slices: one worker per slice, or data-parallel training."""
    keys = dict(METHODS[name])
    raw = configuration.load(size)
    tokens = raw.training.batch_size_sequences * raw.training.sequence_length_tokens
    if keys["method"] != "none":
        keys["count"] = slices
    if keys["method"] not in ("none", "sparta"):  # SPARTA averages its share after every step
        keys["interval_tokens"] = INTERVAL_STEPS * tokens
    axis = "data" if keys["method"] == "none" else "replica"
    mesh = {"data": 1, "replica": 1, "fsdp": devices // slices, "tensor": 1} | {axis: slices}
    changes = [f"mesh.{key}={value}" for key, value in mesh.items()]
    changes.append(f"evaluation.batch_size_sequences={devices}")  # divisible by the mesh; not compiled here
    return configuration.resolve(raw, [*changes, *(f"replicas.{key}={value}" for key, value in keys.items())])


def measure(size: str, slices: int) -> list[dict[str, Any]]:
    """Compile the programs of every method, and return what each sends, in bytes per device."""
    topology = aot.tpu_topology(f"{slices}*{SLICE}")
    rows = []
    for name, keys in METHODS.items():
        config = make_config(size, slices, name, len(topology.devices))
        mesh = mesh_from_devices(topology.devices, dataclasses.replace(config.mesh, cpu_devices=0))
        params, share = abstract_params(config.model, mesh), slices / len(topology.devices)
        programs: dict[str, tuple[int, float]] = {}  # name -> steps from one execution to the next, expected bytes
        if keys["method"] == "none":
            programs["train_step"] = (1, leaf_bytes(params) * share)
        elif keys["method"] == "diloco":  # the train step is the same for all methods with workers
            programs["train_step"] = (1, 0.0)
        for sync_name, (sync, tokens) in method.syncs(config).items():
            expected = sync_bytes(config.replicas, sync, params) * share
            programs[sync_name] = (config.tokens_to_steps(tokens), expected)
        lowerings = aot.program_lowerings(config, mesh)
        for program, (steps, expected) in programs.items():
            report = aot.compile_program(lowerings[program], mesh)
            assert report.program is not None, report.out_of_memory_message
            row = {"size": size, "slices": slices, "method": name, "program": program, "every_steps": steps}
            row |= {"bytes": counts.inter_slice_operand_bytes(report.program), "expected_bytes": expected}
            row["sent_bytes"] = far_bytes(report.program, mesh, topology)
            if program == "train_step":
                row["method"] = name if keys["method"] == "none" else WORKERS
                row["seconds"] = cost.roofline(report.program, topology.chip, 0.0).seconds
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Format the table of docs/replicas.md: one row per method, one column per size and number of slices."""
    cases = list(dict.fromkeys((row["size"], row["slices"]) for row in rows))
    header = ["a device sends", *(f"{size}, {slices} slices" for size, slices in cases)]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for case in cases:
            chosen = [row for row in rows if (row["size"], row["slices"]) == case and row["method"] == name]
            step = next(r["seconds"] for r in rows if (r["size"], r["slices"]) == case and r["method"] == WORKERS)
            per_step, sent = (sum(r[key] / r["every_steps"] for r in chosen) for key in ("bytes", "sent_bytes"))
            largest = max(row["bytes"] for row in chosen)
            cells.append(
                ", ".join(
                    (
                        f"{format_storage_bytes(largest, 3)} at once",
                        f"{format_storage_bytes(per_step, 3)} per step",
                        f"{format_storage_bytes(sent / step, 3)}/s",
                    )
                )
                if largest
                else "nothing"
            )
        lines.append([name, *cells])
    return pages.format_table(header, lines)


def main() -> None:
    """Measure or read traffic.json, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redraw", action="store_true", help="only write the table, from traffic.json")
    options = parser.parse_args()
    path = FOLDER / "traffic.json"
    if not options.redraw:
        rows = [row for size in SIZES for slices in SLICES for row in measure(size, slices)]
        path.write_text(json.dumps({"slice": SLICE, "interval_steps": INTERVAL_STEPS, "rows": rows}, indent=1) + "\n")
    section = format_rows(json.loads(path.read_text())["rows"])
    PAGE.write_text(pages.replace_results(PAGE.read_text(), section))


if __name__ == "__main__":
    main()
