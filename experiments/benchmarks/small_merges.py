"""Merges whose time is not that of their bytes: a few small checkpoints, and checkpoints of very many small tensors.

    python experiments/benchmarks/small_merges.py SCRATCH
    python experiments/benchmarks/small_merges.py SCRATCH --tensors 1000000 --rounds 1

Each merge is `pma merge` as a complete process, of ten safetensors files in the page cache. Printed are the medians of
wall seconds, the peak resident memory, and the seconds of a plain Python process that reads the files and writes one of
them. Bars: 0.35 s for ten checkpoints of 1 MB; 20 s for ten of 100,000 tensors.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CHECKPOINTS = 10
PLAIN = """
import sys
for path in sys.argv[2:]:
    data = open(path, "rb").read()
with open(sys.argv[1], "wb") as file:
    file.write(data)
"""


def main() -> None:
    """Measure both merges and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="directory for the checkpoints; what is written there is removed")
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the second merge's checkpoints")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for name, tensors, elements, rounds in (
        ("ten of 1 MB", 10, 25_000, options.rounds),
        (f"ten of {options.tensors:,} tensors", options.tensors, 16, -(-options.rounds // 3)),
    ):
        folder = options.scratch / f"tensors-{tensors}"
        try:
            report(name, write_checkpoints(folder, tensors, elements), folder / "merged", rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_checkpoints(folder: Path, tensors: int, elements: int) -> list[Path]:
    """Write float32 checkpoints of `tensors` tensors; return their directories."""
    paths = [folder / f"step_{k:02}" for k in range(CHECKPOINTS)]
    for k, path in enumerate(paths):
        path.mkdir(parents=True)
        values = np.random.default_rng(k).standard_normal((tensors, elements), np.float32)
        save_file({f"model.blocks.{n}.weight": row for n, row in enumerate(values)}, path / "model.safetensors")
    return paths


def report(name: str, inputs: list[Path], out: Path, rounds: int) -> None:
    """Run the merge and the plain reader in turn, and print their medians."""
    files = [str(path / "model.safetensors") for path in inputs]
    merge = [sys.executable, "-m", "pma_jax.cli", "merge", *map(str, inputs), "--out", str(out)]
    plain = [sys.executable, "-c", PLAIN, str(out.with_name("copy")), *files]
    timings: dict[str, list[tuple[float, float]]] = {"merge": [], "plain": []}
    for _ in range(rounds):
        timings["merge"].append(run(merge))
        shutil.rmtree(out)
        timings["plain"].append(run(plain))
    (merged, memory), (read, _) = (
        [statistics.median(values) for values in zip(*timings[kind], strict=True)] for kind in ("merge", "plain")
    )
    spread = "{:.2f} to {:.2f}".format(*(f(seconds for seconds, _ in timings["merge"]) for f in (min, max)))
    print(
        f"{name}: {merged:.2f} s ({spread} in {rounds} rounds), {memory / 2**20:.0f} MiB; "
        f"plain read and write {read:.2f} s",
        flush=True,
    )


def run(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall seconds and its peak resident bytes."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command[:5])} … ended with status {status}")
    return seconds, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
