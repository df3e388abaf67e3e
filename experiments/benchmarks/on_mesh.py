"""Cost of `pma merge --on mesh` by two processes with four devices each, relative to one process with eight devices.

    python experiments/benchmarks/on_mesh.py SCRATCH                    the mean of ten checkpoints of 1 GB: 11 GB
    python experiments/benchmarks/on_mesh.py SCRATCH --megabytes 64

The host engine merges the same checkpoints first; the digests of all three merges must be equal. Each process reports
the bytes that it read and wrote during the merge (of files, as the kernel counts them), its CPU seconds, from its start
and of the merge alone, and by how much its peak resident memory exceeded that before the merge. The bars: half of the
bytes within 5%, 0.55 of the CPU seconds, and the memory of its share of the float32 sums and of two checkpoints. The
script removes its files at the end, and prints one JSON object with the medians of its rounds.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

CHECKPOINTS, LEAVES, COLUMNS = 10, 16, 2048


def write_checkpoints(folder: Path, megabytes: int, dtype: str) -> None:
    """Write checkpoints of random numbers, of `LEAVES` matrices each."""
    rng = np.random.default_rng(0)
    to = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    rows = megabytes * 10**6 // (LEAVES * COLUMNS * to.itemsize)
    for step in range(1, CHECKPOINTS + 1):
        path = folder / f"step-{step * 100}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        tree = {f"layer{i}": rng.standard_normal((rows, COLUMNS), np.float32).astype(to) for i in range(LEAVES)}
        save_file(tree, path)


def kernel_counts() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


def resident_bytes(field: str) -> int:
    """Return the resident memory of this process now ("VmRSS") or at its peak ("VmHWM").

    getrusage's peak is not used: it includes that of the process which started this one.
    """
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def work(checkpoints: str, out: str) -> None:
    """Merge in this process, one of a job, and print what it took as JSON."""
    import jax

    from pma_jax.merging import from_storage, gather, on_mesh
    from pma_jax.runtime import hosts

    if os.environ.get("JAX_NUM_PROCESSES"):
        hosts.initialize_distributed()
    index, count = hosts.process_index_and_count()
    series = gather.open_checkpoints([checkpoints])
    plan, _ = from_storage.plan_merge(series, ["sma"], format="orbax", writers=count)
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    hosts.barrier("start")
    before, resident = kernel_counts(), resident_bytes("VmRSS")
    began_cpu, began = time.process_time(), time.perf_counter()
    result = on_mesh.merge(plan, [out])
    after = kernel_counts()
    measured = {
        "process": index,
        "wall_seconds": time.perf_counter() - began,
        "merge_cpu_seconds": time.process_time() - began_cpu,
        "cpu_seconds": time.process_time(),
        "leaf_share": result.read_bytes / plan.read_bytes,
        "read_share": (after[0] - before[0]) / plan.read_bytes,
        "written_bytes": after[1] - before[1],
        "memory_bytes": resident_bytes("VmHWM") - resident,
        "memory_bar_bytes": on_mesh.memory_bytes(plan, count),
    }
    print(json.dumps(measured), file=sys.stderr)


def run(checkpoints: Path, out: Path, processes: int, devices: int) -> list[dict[str, Any]]:
    """Merge by this many processes; return what each measured."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    job = []
    for index in range(processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        if processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
            environment |= {"JAX_PROCESS_ID": str(index)}
        command = [sys.executable, __file__, str(checkpoints), "--worker", str(out)]
        job.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    measured = []
    for process in job:
        text = process.communicate()[1]
        assert process.returncode == 0, text
        measured.append(json.loads(next(line for line in text.splitlines() if line.startswith("{"))))
    return measured


def measure(scratch: Path, megabytes: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Measure all merges in turn, and compare their digests."""
    write_checkpoints(scratch / "models", megabytes, dtype)
    pma = [sys.executable, "-m", "pma_jax.cli", "merge", str(scratch / "models"), "--format", "orbax"]
    subprocess.run([*pma, "--out", str(scratch / "host")], check=True, stdout=subprocess.DEVNULL)
    digests = {"host": json.loads((scratch / "host" / "provenance.json").read_text())["digest"]}
    alone, together = [], []
    for _ in range(rounds):
        for name, processes, devices, results in (("one", 1, 8, alone), ("two", 2, 4, together)):
            results += run(scratch / "models", scratch / name, processes, devices)
            digests[name] = json.loads((scratch / name / "provenance.json").read_text())["digest"]
            shutil.rmtree(scratch / name)
            assert len(set(digests.values())) == 1, digests

    def median(results: list[dict[str, Any]], key: str) -> float:
        return statistics.median(entry[key] for entry in results)

    cpu, merge_cpu = median(alone, "cpu_seconds"), median(alone, "merge_cpu_seconds")
    return {
        "megabytes": megabytes,
        "dtype": dtype,
        "wall_seconds": {"one": median(alone, "wall_seconds"), "two": median(together, "wall_seconds")},
        "cpu_seconds_of_one": cpu,
        "cpu_seconds_of_one_range": [f(entry["cpu_seconds"] for entry in alone) for f in (min, max)],
        "cpu_seconds_of_each_range": [f(entry["cpu_seconds"] for entry in together) for f in (min, max)],
        "cpu_of_each_over_one": max(median([e for e in together if e["process"] == p], "cpu_seconds") for p in (0, 1))
        / cpu,
        "merge_cpu_of_each_over_one": max(
            median([e for e in together if e["process"] == p], "merge_cpu_seconds") for p in (0, 1)
        )
        / merge_cpu,
        **{key: [min(e[key] for e in together), max(e[key] for e in together)] for key in ("leaf_share", "read_share")},
        "written_share": [f(e["written_bytes"] for e in together) / median(alone, "written_bytes") for f in (min, max)],
        "memory_over_bar": max(e["memory_bytes"] / e["memory_bar_bytes"] for e in together),
        "memory_over_bar_of_one": max(e["memory_bytes"] / e["memory_bar_bytes"] for e in alone),
    }


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(str(options.scratch), options.worker)
        return
    folder = options.scratch / "on_mesh"
    folder.mkdir(parents=True)
    try:
        print(json.dumps(measure(folder, options.megabytes, options.dtype, options.rounds), indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
