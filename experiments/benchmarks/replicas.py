"""Cost of workers on one device: their step over that of one worker, and their average over a pass of memory.

Command:   python experiments/benchmarks/replicas.py [--config demo] [--count 4] [--rounds 15] [--set KEY=VALUE ...]
Floor:     K workers do K times the work of one worker on its share of the batch. An average reads and writes what it
           changes once: the parameters of all workers, and the outer parameters and their momentum if there are any.

In each round, all are timed in turn, in an order that is reversed every second round; medians count. The floor of an
average is one element-wise program over the same arrays, in place; of SPARTA, which changes a share of them, one that
changes as many elements at fixed places.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from spread import describe

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.model.decoder import graph_definition
from pma_jax.replicas import method
from pma_jax.replicas.sparta import share_count
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.training.state import as_workers, init_state_from_seed
from pma_jax.training.step import make_train_step

# Name -> the overrides that make it. With one fragment, Streaming DiLoCo sends all parameters at once.
METHODS = {
    "periodic": ("replicas.method=periodic",),
    "diloco": ("replicas.method=diloco",),
    "streaming": ("replicas.method=streaming", "replicas.streaming_fragments=1"),
    "streaming, int4": ("replicas.method=streaming", "replicas.streaming_fragments=1", "replicas.streaming_dtype=int4"),
    "streaming, e3m0": ("replicas.method=streaming", "replicas.streaming_fragments=1", "replicas.streaming_dtype=e3m0"),
    "sparta": ("replicas.method=sparta",),
    "noloco": ("replicas.method=noloco",),
}
STEPS = 4  # per turn
Turn = Callable[[], float]  # runs once, and returns its seconds


def main() -> None:
    """Print the ratio of the step and of the sync of each method to its floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="demo", help="the model and the batch of all workers")
    parser.add_argument("--count", type=int, default=4, help="workers")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of the configuration"
    )
    options = parser.parse_args()
    keep_freed_memory()  # as `pma train` does
    turns: dict[str, Turn] = {}
    one = load(options, "none")
    turns["one worker's step"] = step_turn(one)
    turns["step of all workers"] = step_turn(load(options, "periodic"))
    for name in METHODS:
        turns[f"{name}: sync"], turns[f"{name}: floor"] = sync_turns(load(options, name))
    seconds = time_in_turn(turns, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    alone = options.count * medians["one worker's step"]
    print(
        f"step of {options.count} workers over {options.count} steps of one worker on its share of the batch: ", end=""
    )
    print(f"{medians['step of all workers'] / alone:.3f} ({describe(seconds['step of all workers'])})")
    for name in METHODS:
        ratio = medians[f"{name}: sync"] / medians[f"{name}: floor"]
        print(f"{name}: sync over a pass through its memory: {ratio:.2f} ({describe(seconds[f'{name}: sync'])})")


def load(options: argparse.Namespace, name: str) -> Config:
    """Return the configuration of all workers with a method, or with `none` of one worker on its share of the batch."""
    overrides = {"mesh.cpu_devices": "1", "mesh.data": "1", "mesh.replica": "1", "checkpoint.kinds": "point"}
    shipped = configuration.resolve(configuration.load(options.config), options.set)
    if name == "none":
        overrides["training.batch_size_sequences"] = str(shipped.training.batch_size_sequences // options.count)
    else:
        overrides["replicas.count"] = str(options.count)
    method_keys = METHODS.get(name, ())
    return configuration.resolve(shipped, [*(f"{key}={value}" for key, value in overrides.items()), *method_keys])


def step_turn(config: Config) -> Turn:
    """Return a turn of train steps; it returns the seconds per step."""
    mesh = make_mesh(config.mesh)
    training = config.training
    with jax.set_mesh(mesh):
        state = [init_state_from_seed(config)]
        shape = (training.batch_size_sequences, training.sequence_length_tokens + 1)
        rows = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
        batch = put_batch(mesh, rows)
        step = make_train_step(config, graph_definition(config.model))

    def turn() -> float:
        with jax.set_mesh(mesh):
            start = time.perf_counter()
            for _ in range(STEPS):
                state[0], _ = step(state[0], batch, 1e-3)
            jax.block_until_ready(state[0])
            return (time.perf_counter() - start) / STEPS

    return turn


def sync_turns(config: Config) -> tuple[Turn, Turn]:
    """Return a turn of the sync of a method, and one of its floor."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = init_state_from_seed(config)
        sync, _ = next(iter(method.syncs(config).values()))
        apply = method.make_sync(config.replicas, sync, mesh)
        workers = [as_workers(state)]
        copies = jax.tree.map(lambda leaf: leaf + 0.0, (workers[0].params, workers[0].outer))
    # Without the mesh's axes, which `reshape` would have to name.
    arrays = [jax.device_put(copies, jax.sharding.SingleDeviceSharding(jax.devices()[0]))]
    share = config.replicas.sparta_share if config.replicas.method == "sparta" else 1.0
    touch = jax.jit(functools.partial(jax.tree.map, functools.partial(touch_share, share=share)), donate_argnums=0)

    def sync_turn() -> float:
        with jax.set_mesh(mesh):
            start = time.perf_counter()
            workers[0] = apply(workers[0], state.step)
            jax.block_until_ready(workers[0])
            return time.perf_counter() - start

    def floor_turn() -> float:
        start = time.perf_counter()
        arrays[0] = touch(arrays[0])
        jax.block_until_ready(arrays[0])
        return time.perf_counter() - start

    return sync_turn, floor_turn


def touch_share(leaf: jax.Array, share: float) -> jax.Array:
    """Multiply a share of the elements of each worker, at equal distances, by a constant."""
    if share == 1:
        return leaf * 0.999
    flat = leaf.reshape(leaf.shape[0], -1)
    index = np.linspace(0, flat.shape[1] - 1, share_count(share, flat.shape[1])).astype(np.int32)
    return flat.at[:, index].multiply(0.999, unique_indices=True).reshape(leaf.shape)


def time_in_turn(turns: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Time each turn in every round, after one round that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(rounds + 1):
        for name in list(turns)[:: 1 if i % 2 else -1]:
            spent = turns[name]()
            if i:
                seconds[name].append(spent)
    return seconds


if __name__ == "__main__":
    main()
