"""A sweep of 24 merges over 15 snapshots, relative to one read of the snapshots and 24 evaluations.

Command:   python experiments/benchmarks/sweep.py SCRATCH [--rounds 5]
Floor:     restore each of the 15 newest snapshots, and evaluate one of them 24 times.

The sweep is that of `pma sweep RUN --recipes …` without its start: it plans the merges, samples the held-out text,
places it on the devices, reads each snapshot once, adds it to all merges, and evaluates them. The floor has the text
placed already. Both run in one process, in turn, after a round of each in which programs are compiled. The snapshots
are those of a run of the demo's model with one step per snapshot, in the page cache.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from pma_jax import config as configuration
from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.evaluation.sweep import Cell, evaluate_cells
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train

RECIPES = ("sma", "wma", "ema:alpha=0.1", "ema:alpha=0.2", "ema:alpha=0.3", "lagfree")
WINDOWS = (3, 6, 10, 15)
SNAPSHOTS = max(WINDOWS)


def main() -> None:
    """Print the seconds of the sweep and of the floor, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="a directory on a disk; what is written is removed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        measure(train_steps(folder), options.rounds)


def train_steps(folder: str) -> Run:
    """Train the demo's model for a step per snapshot."""
    raw = configuration.load("demo")
    step = raw.training.batch_size_sequences * raw.training.sequence_length_tokens
    keys = {
        "training.total_tokens": SNAPSHOTS * step,
        "schedule.warmup_tokens": step,
        "checkpoint.interval_tokens": step,
        "checkpoint.kinds": "point",
        "checkpoint.keep_states_at_tokens": "",
        "preview.windows": "",
    }
    configuration.override(raw, [f"{key}={value}" for key, value in keys.items()])
    return train(configuration.resolve(raw), f"{folder}/run")


def measure(run: Run, rounds: int) -> None:
    """Time the sweep and the floor in turn, and print both."""
    snapshots = run.snapshots[-SNAPSHOTS:]
    mesh = make_mesh(run.config.mesh)
    abstract, evaluator = abstract_params(run.config.model, mesh), make_evaluator(run.config, mesh, SELECT)
    tokens = snapshots[-1].tokens
    cells = [(Cell(recipe, window), tokens) for recipe, window in itertools.product(RECIPES, WINDOWS)]

    def sweep() -> None:
        evaluate_cells(run.config, {"point": snapshots}, cells, SELECT)

    def floor() -> None:
        params = [restore_params(snapshot, abstract) for snapshot in snapshots][-1]
        for _ in cells:
            evaluator.sum_by_document(params)

    seconds: dict[str, list[float]] = {"sweep": [], "floor": []}
    for turn in range(rounds + 1):
        for name, function in (("sweep", sweep), ("floor", floor)):
            started = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.2f} s of {', '.join(f'{x:.2f}' for x in values)}")
    ratio = statistics.median(seconds["sweep"]) / statistics.median(seconds["floor"])
    print(
        f"{len(cells)} merges of {len(snapshots)} snapshots, {run.config.evaluation.tokens:,} held-out tokens: "
        f"{ratio:.2f}x one read and {len(cells)} evaluations (bar: at most 1.1x)"
    )


if __name__ == "__main__":
    main()
