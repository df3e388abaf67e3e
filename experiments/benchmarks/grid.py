"""Cost of `pma sweep CHECKPOINTS --score 'echo 1'` over reading the inputs once per end and writing all merges.

    python experiments/benchmarks/grid.py SCRATCH              ten checkpoints of 300 MB, 30 merges: 10 GB, minutes
    python experiments/benchmarks/grid.py SCRATCH --megabytes 20 --ends 2

The reference reads each input once per end, and writes as many files as the sweep makes merges (with the raw checkpoint
of each end), one after the other, each flushed to the disk. Every round measures both, in turn. The script removes its
files at the end, and prints one JSON object: medians of wall seconds with their ranges, and their ratio.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CHECKPOINTS, RECIPES, WINDOWS = 10, "sma,wma,ema:alpha=0.1,ema:alpha=0.2,ema:alpha=0.3", "2,3,4,5,6,10"
BLOCK_BYTES = 2**23


def write_checkpoints(folder: Path, megabytes: int) -> list[Path]:
    """Write checkpoints of random float32 numbers, ten tensors each; return their files."""
    rng, files = np.random.default_rng(0), []
    for number in range(1, CHECKPOINTS + 1):
        path = folder / f"step-{number * 100}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        elements = megabytes * 10**6 // 40
        save_file({f"layer{i}": rng.standard_normal(elements, np.float32) for i in range(10)}, path)
        files.append(path)
    return files


def read_and_write(inputs: list[Path], folder: Path, ends: int, files: int, file_bytes: int) -> float:
    """Read the inputs once per end, and write and flush files of the size of a merge; return the seconds."""
    block = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    for path in inputs * ends:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    folder.mkdir()
    for number in range(files):
        with (folder / str(number)).open("wb", buffering=0) as file:
            for start in range(0, file_bytes, BLOCK_BYTES):
                file.write(memoryview(block)[: min(BLOCK_BYTES, file_bytes - start)])
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def sweep(folder: Path, out: Path, ends: str) -> tuple[float, int]:
    """Run the sweep as a process; return its seconds and the number of merges that it scored."""
    words = ["sweep", folder, "--score", "echo 1", "--recipes", RECIPES, "--windows", WINDOWS, "--ends", ends]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pma_jax.cli", *map(str, words), "--out", str(out), "--json"],
        check=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - began
    content = json.loads((out / "sweep.json").read_text())
    rows = [*content["rows"], *content["raw"]]
    if any(row["score"] != 1 for row in rows):
        raise RuntimeError("a merge has no score")
    shutil.rmtree(out)
    return seconds, len(rows)


def main() -> None:
    """Measure, print, and remove the files."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("scratch", type=Path, help="a directory on the disk to measure")
    options.add_argument("--megabytes", type=int, default=300, help="size of a checkpoint (default 300)")
    options.add_argument("--ends", type=int, default=1, choices=(1, 2), help="number of end points (default 1)")
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    folder = arguments.scratch / "grid-benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    inputs = write_checkpoints(folder / "checkpoints", arguments.megabytes)
    ends = ",".join(["100%", "90%"][: arguments.ends])
    seconds: dict[str, list[float]] = {"sweep": [], "reference": []}
    merges = 0
    for _ in range(arguments.rounds):
        duration, merges = sweep(folder / "checkpoints", folder / "out", ends)
        seconds["sweep"].append(duration)
        size = inputs[0].stat().st_size
        seconds["reference"].append(read_and_write(inputs, folder / "reference", arguments.ends, merges, size))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    shutil.rmtree(folder)
    result = {"merges": merges, "megabytes": arguments.megabytes, "ends": arguments.ends, "seconds": medians}
    result["range"] = {name: [min(values), max(values)] for name, values in seconds.items()}
    print(json.dumps(result | {"ratio": medians["sweep"] / medians["reference"]}, indent=1))


if __name__ == "__main__":
    main()
