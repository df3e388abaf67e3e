"""What each contender costs in training: memory of its state, and time per step.

The steps of all contenders are timed in turn, at the batch of the size's configuration, so that the method differs and
not the batch. The time includes what a method does at intervals: syncs of SNOO, updates of block means and of BEMA.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from contenders import BATCH, BEMA, Rival, horizon_changes

from pma_jax.config import Config
from pma_jax.model.decoder import graph_definition
from pma_jax.runtime.mesh import make_mesh, put_batch
from pma_jax.studies.study import Study
from pma_jax.training.state import abstract_state, init_state_from_seed, synchronize, update_bema, update_block_mean
from pma_jax.training.step import make_train_step

ROUNDS = 15
STEPS = 96  # per round and contender: several intervals of what is done at intervals
FROM_THE_START = "optimizer.bema_start_tokens=0"  # updates of BEMA begin at once, so that they are timed


def costs(study: Study, size: str, rivals: Sequence[Rival], settings: dict[str, list[str]]) -> dict[str, Any]:
    """Measure the cost of every contender at its best setting, except the batch.

    Returns:
        {contender: "state_bytes", "parameter_bytes", and "step_ms": the median and the quartiles of a step}.
    """
    configs = {}
    for rival in rivals:
        setting = [text for text in settings[rival.name] if not text.startswith(f"{BATCH}=")]
        setting += [FROM_THE_START] if rival.name == BEMA else []
        configs[rival.name] = study.trunk_config(size, study.seeds[0], horizon_changes(study, size, rival, setting, 1))
    turns = {name: _step_turn(config) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(ROUNDS + 1):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            seconds[name].append(turns[name]())
    measured = {}
    for name, config in configs.items():
        state = abstract_state(config, make_mesh(config.mesh))
        low, middle, high = statistics.quantiles(seconds[name][1:], n=4)  # the first round compiles
        measured[name] = {
            "state_bytes": _bytes(state),
            "parameter_bytes": _bytes(state.params),
            "step_ms": [round(1e3 * x, 3) for x in (middle, low, high)],
        }
    return measured


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _step_turn(config: Config) -> Callable[[], float]:
    """Return a function that trains `STEPS` steps on random tokens, and returns the seconds per step."""
    mesh = make_mesh(config.mesh)
    shape = (config.training.batch_size_sequences, config.training.sequence_length_tokens + 1)
    rows = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape).astype(np.int32)
    with jax.set_mesh(mesh):
        state = [init_state_from_seed(config)]
        step, batch = make_train_step(config, graph_definition(config.model)), put_batch(mesh, rows)
    done = [0]

    def turn() -> float:
        with jax.set_mesh(mesh):
            began = time.perf_counter()
            for _ in range(STEPS):
                done[0] += config.batch_tokens
                state[0], _ = step(state[0], batch, config.schedule.peak_rate)
                for update in (synchronize, update_bema, update_block_mean):
                    state[0] = update(config, state[0], done[0])
            jax.block_until_ready(state[0])
            return (time.perf_counter() - began) / STEPS

    return turn
