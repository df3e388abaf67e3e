"""Cost of block means, relative to a training step of the demo's model.

Command:   python experiments/benchmarks/block_mean.py [--rounds 200]
Floor:     read the weights and the mean, write the mean: the bytes of three models.

Steps and additions to the block mean alternate, and each is timed until its result is ready. A run adds at every
`checkpoint.block_every_steps`-th step.
"""

import argparse
import statistics
import time

import jax
import numpy as np
from spread import describe

from pma_jax import config as configuration
from pma_jax.model.decoder import graph_definition, parameter_count
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training import averages
from pma_jax.training.state import init_state_from_seed
from pma_jax.training.step import make_train_step


def main() -> None:
    """Print the milliseconds of a step and of an addition, and the share of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    keep_freed_memory()
    config = configuration.resolve(configuration.load("demo"))
    mesh = make_mesh(config.mesh)
    shape = (config.training.batch_size_sequences, config.training.sequence_length_tokens + 1)
    tokens_BxM = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    with jax.set_mesh(mesh):
        state, step = init_state_from_seed(config), make_train_step(config, graph_definition(config.model))
        block, batch = averages.empty(state.params), put_batch(mesh, tokens_BxM)
        steps, adds = [], []
        for _ in range(options.rounds):
            started = time.perf_counter()
            state = jax.block_until_ready(step(state, batch, 1e-3))[0]
            stepped = time.perf_counter()
            block = jax.block_until_ready(averages.add_to_block_mean(block, state.params))
            steps.append(stepped - started)
            adds.append(time.perf_counter() - stepped)
    step_s, add_s = statistics.median(steps), statistics.median(adds)
    every = config.checkpoint.block_every_steps
    model_bytes = parameter_count(state.params) * 4
    rate = f"{3 * model_bytes / add_s / 1e9:.1f} GB/s"
    print(f"step {describe(steps, 2)}, addition {describe(adds, 3)} ({rate})")
    print(f"one addition every {every} steps: {add_s / every / step_s:.2%} of a step (bar: at most 1%)")


if __name__ == "__main__":
    main()
