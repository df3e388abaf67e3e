"""Cost of the spike detector relative to a training step of the demo's model, and its errors on synthetic traces.

Command:   python experiments/benchmarks/spikes.py [--rounds 200] [--steps 1000000]

Steps with and without the detector alternate, and each is timed until its metrics are fetched, as in the training loop.
On a busy machine the difference is noise, so the detector is also timed alone (the fastest of five loops, relative to
the fastest step). Clean traces decrease like those of a run, with independent noise that is normal or has Student's t
tails (5 and 3 degrees of freedom). Planted spikes rise by 0.8 to 4 nats within 5 steps; half of them do not recover.
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
from spread import describe

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.decoder import graph_definition
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import spikes
from pma_jax.training.state import init_state_from_seed
from pma_jax.training.step import make_train_step

ALONE_STEPS = 5000
TAILS = {"normal": 0, "t5": 5, "t3": 3}  # name -> degrees of freedom; 0: normal


def main() -> None:
    """Print the overhead, the false alarms, and the planted spikes that are detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="timed steps of each kind")
    parser.add_argument("--steps", type=int, default=1_000_000, help="clean steps, over all kinds of noise")
    parser.add_argument("--planted", type=int, default=200, help="traces with a planted spike")
    options = parser.parse_args()
    keep_freed_memory()
    config = configuration.resolve(configuration.load("demo"))
    measure_overhead(config, options.rounds)
    alarms, steps = 0, 0
    for seed, degrees in enumerate(TAILS.values()):
        losses, norms = clean_trace(options.steps // len(TAILS), seed, degrees)
        readings = scan(config, jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32))
        alarms, steps = alarms + onsets(readings).size, steps + losses.size
    print(f"false alarms: {alarms} in {steps:,} clean steps (bar: 1 in 100,000)")
    verdicts = [detect_planted(config, seed) for seed in range(options.planted)]
    print(f"planted spikes detected within 5 steps: {sum(on_time for on_time, _ in verdicts)} of {len(verdicts)}")
    print(f"correctly classified as recovered or not: {sum(correct for _, correct in verdicts)} of {len(verdicts)}")


def measure_overhead(config: Config, rounds: int) -> None:
    """Time steps with and without the detector alternately, and the detector alone."""
    mesh = make_mesh(config.mesh)
    shape = (config.training.batch_size_sequences, config.training.sequence_length_tokens + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    without = dataclasses.replace(config, spikes=dataclasses.replace(config.spikes, detect=False))
    with jax.set_mesh(mesh):
        batch, graph = put_batch(mesh, tokens_BxM), graph_definition(config.model)
        runs: list[list[Any]] = [[init_state_from_seed(c), make_train_step(c, graph), []] for c in (without, config)]
        for i in range(rounds):
            for run in runs if i % 2 else reversed(runs):
                started = time.perf_counter()
                run[0], metrics = run[1](run[0], batch, 1e-3)
                jax.device_get(metrics)
                run[2].append(time.perf_counter() - started)
    plain, detecting = (times[5:] for _, _, times in runs)
    print(f"step {describe(plain, 2)}, with the detector {describe(detecting, 2)}")
    differences = np.subtract(detecting, plain) / statistics.median(plain)
    low, middle, high = np.percentile(differences, [25, 50, 75])
    print(f"median of the differences: {middle:+.2%}, {low:+.2%} to {high:+.2%} of a step (bar: under 1%)")
    losses, norms = (jnp.asarray(x, jnp.float32) for x in clean_trace(ALONE_STEPS, 0, 0))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(scan(config, losses, norms))
        times.append((time.perf_counter() - started) / ALONE_STEPS)
    alone = f"{min(times) * 1e6:.0f} us, {min(times) / min(plain):.2%} of a step"
    print(f"the detector alone, in a loop: {alone}; the fastest of 5, at most {max(times) * 1e6:.0f} us")


@functools.partial(jax.jit, static_argnums=0)
def scan(config: Config, losses: jax.Array, norms: jax.Array) -> spikes.Reading:
    """Return the detector's reading at every step of a trace."""

    def one(detector: spikes.Detector, x: Any) -> tuple[spikes.Detector, spikes.Reading]:
        return spikes.observe(detector, config, *x)

    empty = spikes.empty_detector(config.tokens_to_steps(config.spikes.window_tokens))
    return jax.lax.scan(one, empty, (jnp.arange(1, losses.size + 1), losses, norms))[1]


def onsets(readings: spikes.Reading) -> np.ndarray:
    """Return the first steps of all detected spikes."""
    return np.unique(np.asarray(readings.onset)[np.asarray(readings.status) != spikes.CALM])


def clean_trace(steps: int, seed: int, degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic losses and gradient norms without spikes; `degrees` of freedom of the noise, 0: normal."""
    rng, t = np.random.default_rng(seed), np.arange(1, steps + 1)

    def noise() -> np.ndarray:
        return rng.standard_t(degrees, steps) if degrees else rng.standard_normal(steps)

    losses = 2.0 + 3.5 * np.exp(-t / 200) + 0.8 / np.sqrt(1 + t / 1000) + 0.04 * noise()
    return losses, (0.5 + 6 * np.exp(-t / 50)) * np.exp(0.25 * noise())


def detect_planted(config: Config, seed: int) -> tuple[bool, bool]:
    """Return whether one planted spike is detected within 5 steps, and whether it is classified correctly."""
    rng = np.random.default_rng(1000 + seed)
    losses, norms = clean_trace(2000, seed, list(TAILS.values())[seed % len(TAILS)])
    onset, height, recovers = int(rng.integers(500, 1200)), rng.uniform(0.8, 4), bool(seed % 2)
    t = np.arange(2000 - onset)
    shape = np.minimum((t + 1) / 5, 1) * (0.5 ** (np.maximum(t - 5, 0) / 4) if recovers else 1)
    losses[onset:] += height * shape
    norms[onset : onset + 10] *= 20
    readings = scan(config, jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32))
    detected = onsets(readings)
    irrecoverable = bool((np.asarray(readings.status) == spikes.IRRECOVERABLE).any())
    return bool(detected.size and abs(detected[0] - onset - 1) <= 5), irrecoverable != recovers


if __name__ == "__main__":
    main()
