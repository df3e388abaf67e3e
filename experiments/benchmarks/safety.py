"""Cost of safety (digests, lock, checks for finite values, signals), as a share of training time.

Command:   python experiments/benchmarks/safety.py [--rounds 200] [--starts 5]
Bar:       under 1% of a step, at the demo's intervals of snapshots and states.

Training steps of the demo's model and the parts alternate, and each is timed until its result is ready. The cost of a
part that runs once per snapshot or state is divided by the steps between two of them. `--starts` also measures the time
to the first step of a fresh run and of a resumed one, from the command to its first line of metrics, in alternating
processes. Both use a warm compilation cache, as a restart on the same machine does.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from spread import describe

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.decoder import graph_definition
from pma_jax.runs import integrity, lock
from pma_jax.runtime import hosts, signals
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import step_records
from pma_jax.training.state import init_state_from_seed
from pma_jax.training.step import make_train_step


def main() -> None:
    """Print milliseconds and shares of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="timings of each part")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind to time; 0: none")
    options = parser.parse_args()
    keep_freed_memory()
    config = configuration.resolve(configuration.load("demo"))
    _time_steps(config, options.rounds)
    if options.starts:
        _time_starts(options.starts)


def _time_steps(config: Config, rounds: int) -> None:
    mesh = make_mesh(config.mesh)
    shape = (config.training.batch_size_sequences, config.training.sequence_length_tokens + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    keep, batch_tokens = config.checkpoint, config.batch_tokens
    steps_per_snapshot = keep.interval_tokens / batch_tokens / len(keep.kinds)
    steps_per_state = keep.state_interval_tokens / batch_tokens
    record = {"step": 1, "tokens": batch_tokens}
    numbers = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1.0}
    with jax.set_mesh(mesh), signals.record_signals() as notice:
        notice.start()
        state, step = init_state_from_seed(config), make_train_step(config, graph_definition(config.model))
        batch = put_batch(mesh, tokens_BxM)
        parts: dict[str, tuple[float, Callable[[], Any]]] = {  # name -> steps per call, function
            "finite check of a snapshot": (steps_per_snapshot, lambda: integrity.non_finite_leaves(state.params)),
            "digests of a snapshot": (steps_per_snapshot, lambda: integrity.tree_digests(state.params)),
            "finite check of a state": (steps_per_state, lambda: integrity.non_finite_leaves(state.params)),
            "digests of a state": (steps_per_state, lambda: integrity.tree_digests(state)),
            "finite check of loss and gradient": (1, lambda: step_records.check_finite(record, numbers, state.params)),
            "check for signals": (1, lambda: hosts.is_stop_requested(notice, 1)),
        }
        steps: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(rounds):
            started = time.perf_counter()
            state = jax.block_until_ready(step(state, batch, 1e-3))[0]
            steps.append(time.perf_counter() - started)
            for name, (_, call) in parts.items():
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
    step_s = statistics.median(steps)
    print(f"a step takes {describe(steps, 2)}")
    total = 0.0
    for name, (interval, _) in parts.items():
        seconds = statistics.median(times[name])
        total += seconds / interval
        share = f"{seconds / interval / step_s:.4%} of a step"
        print(f"{name}: {describe(times[name], 4)}, every {interval:g} steps: {share}")
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with lock.hold(epath.Path(folder)):
            seconds = time.perf_counter() - started
    horizon = config.training.total_tokens / batch_tokens
    total += seconds / horizon
    print(f"lock: {seconds * 1e3:.4f} ms, once in {horizon:g} steps: {seconds / horizon / step_s:.4%} of a step")
    print(f"total: {total / step_s:.3%} of a step (bar: under 1%)")


def _time_starts(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        _seconds_to_first_step(Path(folder, "first"), environment)  # compiles, and prepares the data
        times: dict[str, list[float]] = {"fresh": [], "resumed": []}
        for turn in range(count):
            run = Path(folder, str(turn))
            times["fresh"].append(_seconds_to_first_step(run, environment))
            times["resumed"].append(_seconds_to_first_step(run, environment))
            shutil.rmtree(run)
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    for kind, seconds in times.items():
        print(f"{kind} run: first step after {medians[kind]:.2f} s, median of {', '.join(f'{s:.2f}' for s in seconds)}")
    print(f"resumed over fresh: {medians['resumed'] / medians['fresh']:.3f}")


def _seconds_to_first_step(run: Path, environment: dict[str, str]) -> float:
    """Time a command until its first new line of metrics; then stop it by SIGTERM, so that it saves its state."""
    metrics, keys = run / "metrics.jsonl", ["training.log_interval_tokens=2048", "checkpoint.keep_states=2"]
    last_step = _newest_step(metrics)
    command = [sys.executable, "-m", "pma_jax.cli", "train", "--config", "demo", "--workdir", str(run)]
    started = time.perf_counter()
    words = [*command, *(f"--config.{key}" for key in keys)]
    process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    while process.poll() is None and _newest_step(metrics) <= last_step:
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    process.terminate()
    if process.wait() != 143:
        raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}, not 143")
    return seconds


def _newest_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


if __name__ == "__main__":
    main()
