"""What does the local engine of `pma grid` cost over the same commands by hand?

Runs of the demo's model, six by default, train two at a time: by `pma grid --parallel 2`, and as `pma train` commands
of which two run at any time, without the grid's binding to cores. Bar: the grid takes at most 1.05 times as long.
Rounds alternate, and the first is discarded, as it compiles what later ones read from JAX's compilation cache. The CPU
seconds of all processes are printed too: on a machine with other work, they say more than the time.

Command:   python experiments/benchmarks/grid_engine.py SCRATCH

    --tokens 409600   of each run
    --rounds 3        in turn, after the discarded one
    --runs 6          of each kind
"""

import argparse
import concurrent.futures
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

PARALLEL = 2


def main() -> None:
    """Measure and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--tokens", type=int, default=409_600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args()
    common = [f"--config.training.total_tokens={options.tokens}", "--config.mesh.cpu_devices=1"]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(options.scratch.resolve() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    seconds: dict[str, list[float]] = {"grid": [], "hand": []}
    for number in range(options.rounds + 1):
        for name, run in {"hand": by_hand, "grid": by_grid}.items():
            folder = options.scratch / name
            shutil.rmtree(folder, ignore_errors=True)
            started, cpu = time.perf_counter(), cpu_seconds()
            run(folder, options.runs, common, environment)
            if number:
                seconds[name].append(time.perf_counter() - started)
                print(f"round {number}: {name} {seconds[name][-1]:.1f} s, CPU {cpu_seconds() - cpu:.1f} s", flush=True)
    grid, hand = (statistics.median(seconds[name]) for name in ("grid", "hand"))
    print(f"grid {grid:.1f} s, by hand {hand:.1f} s: {grid / hand:.3f}x (bar 1.05x)")


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def by_grid(folder: Path, runs: int, common: list[str], environment: dict[str, str]) -> None:
    """Train all runs by the grid."""
    vary = f"training.seed={','.join(map(str, range(runs)))}"
    words = ["grid", "--config", "demo", "--root", str(folder), "--vary", vary, "--parallel", str(PARALLEL)]
    call([*words, *common], environment)


def by_hand(folder: Path, runs: int, common: list[str], environment: dict[str, str]) -> None:
    """Train all runs by commands of their own."""

    def train(seed: int) -> None:
        workdir = str(folder / str(seed))
        call(
            ["train", "--config", "demo", "--workdir", workdir, f"--config.training.seed={seed}", *common], environment
        )

    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(train, range(runs)))


def call(words: list[str], environment: dict[str, str]) -> None:
    """Run `pma` and raise if it fails."""
    subprocess.run([sys.executable, "-m", "pma_jax.cli", *words], check=True, capture_output=True, env=environment)


if __name__ == "__main__":
    main()
