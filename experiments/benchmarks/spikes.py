"""What the detector of spikes adds to a training step of the demo's model, and how often it is wrong on clean traces.

Command:   python experiments/benchmarks/spikes.py [--rounds 200] [--steps 1000000]

The two programs, with and without the detector, are timed in turn, each waited for, and the metrics fetched as the
loop fetches them; on a busy machine the difference is noise, so the detector is timed alone too (fastest of five
loops, beside the fastest step). Clean traces fall as a run's do and have independent noise of normal and of Student's t
tails (5 and 3 degrees of freedom); planted ones leave by 0.8 to 4 nats within 5 steps, half of them for good.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.decoder import graph_definition
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import spikes
from pma_jax.training.state import make_state
from pma_jax.training.step import make_train_step

ALONE_STEPS = 5000
TAILS = {"normal": 0, "t5": 5, "t3": 3}  # name -> degrees of freedom; 0: normal


def main() -> None:
    """Print the overhead, then false alarms and planted spikes found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1_000_000, help="clean steps, over all kinds of noise")
    parser.add_argument("--planted", type=int, default=200)
    options = parser.parse_args()
    keep_freed_memory()
    config = configuration.resolve(configuration.load("demo"))
    overhead(config, options.rounds)
    alarms, steps = 0, 0
    for seed, degrees in enumerate(TAILS.values()):
        losses, norms = trace(options.steps // len(TAILS), seed, degrees)
        readings = scan(config, jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32))
        alarms, steps = alarms + onsets(readings).size, steps + losses.size
    print(f"false alarms: {alarms} in {steps:,} clean steps (bar: 1 in 100,000)")
    found = [planted(config, seed) for seed in range(options.planted)]
    print(f"planted spikes found within 5 steps: {sum(f for f, _ in found)} of {len(found)}")
    print(f"told rightly whether they pass: {sum(told for _, told in found)} of {len(found)}")


def overhead(config: Config, rounds: int) -> None:
    """Time a step with and without the detector, in turn."""
    mesh = make_mesh(config.mesh)
    shape = (config.training.batch_size_sequences, config.training.sequence_length_tokens + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    without = dataclasses.replace(config, spikes=dataclasses.replace(config.spikes, detect=False))
    with jax.set_mesh(mesh):
        batch, graph = put_batch(mesh, tokens_BxM), graph_definition(config.model)
        runs: list[list[Any]] = [[make_state(c), make_train_step(c, graph), []] for c in (without, config)]
        for i in range(rounds):
            for run in runs if i % 2 else reversed(runs):
                begin = time.perf_counter()
                run[0], metrics = run[1](run[0], batch, 1e-3)
                jax.device_get(metrics)
                run[2].append(time.perf_counter() - begin)
    plain, watched = (statistics.median(times[5:]) for _, _, times in runs)
    paired = statistics.median(b - a for a, b in zip(runs[0][2][5:], runs[1][2][5:], strict=True))
    print(f"step {plain * 1e3:.2f} ms, with the detector {watched * 1e3:.2f} ms")
    print(f"median of the differences: {paired / plain:+.2%} of a step (bar: under 1%)")
    losses, norms = (jnp.asarray(x, jnp.float32) for x in trace(ALONE_STEPS, 0, 0))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(scan(config, losses, norms))
        times.append((time.perf_counter() - begin) / ALONE_STEPS)
    print(f"the detector alone, in a loop: {min(times) * 1e6:.0f} us, {min(times) / min(runs[0][2]):.2%} of a step")


@functools.partial(jax.jit, static_argnums=0)
def scan(config: Config, losses: jax.Array, norms: jax.Array) -> spikes.Reading:
    """Every reading of a trace."""

    def one(detector: spikes.Detector, x: Any) -> tuple[spikes.Detector, spikes.Reading]:
        return spikes.observe(detector, config, *x)

    empty = spikes.empty(config.steps(config.spikes.window_tokens))
    return jax.lax.scan(one, empty, (jnp.arange(1, losses.size + 1), losses, norms))[1]


def onsets(readings: spikes.Reading) -> np.ndarray:
    """First steps of all spikes that were noticed."""
    return np.unique(np.asarray(readings.onset)[np.asarray(readings.code) != spikes.CALM])


def trace(steps: int, seed: int, degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Loss and gradient norm of a clean run."""
    rng, t = np.random.default_rng(seed), np.arange(1, steps + 1)

    def noise() -> np.ndarray:
        return rng.standard_t(degrees, steps) if degrees else rng.standard_normal(steps)

    losses = 2.0 + 3.5 * np.exp(-t / 200) + 0.8 / np.sqrt(1 + t / 1000) + 0.04 * noise()
    return losses, (0.5 + 6 * np.exp(-t / 50)) * np.exp(0.25 * noise())


def planted(config: Config, seed: int) -> tuple[bool, bool]:
    """(found within 5 steps, told rightly whether it passes) of one spike in a trace of 2,000 steps."""
    rng = np.random.default_rng(1000 + seed)
    losses, norms = trace(2000, seed, list(TAILS.values())[seed % len(TAILS)])
    begin, height, passes = int(rng.integers(500, 1200)), rng.uniform(0.8, 4), bool(seed % 2)
    t = np.arange(2000 - begin)
    shape = np.minimum((t + 1) / 5, 1) * (0.5 ** (np.maximum(t - 5, 0) / 4) if passes else 1)
    losses[begin:] += height * shape
    norms[begin : begin + 10] *= 20
    readings = scan(config, jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32))
    found = onsets(readings)
    lost = bool((np.asarray(readings.code) == spikes.IRRECOVERABLE).any())
    return bool(found.size and abs(found[0] - begin - 1) <= 5), lost != passes


if __name__ == "__main__":
    main()
