"""The train state: everything that a step reads and updates, as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import Config
from pma_jax.model.decoder import Params, init_params
from pma_jax.runtime.mesh import abstract_arrays
from pma_jax.training import averages, spikes
from pma_jax.training.averages import RunningMean
from pma_jax.training.optimizer import eval_params, init_opt_state, reset_iterates
from pma_jax.training.spikes import Detector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Optimizer steps done (int32 scalar), parameters and optimizer state (float32), and optional parts.

    The block mean, the spike detector and the exponential moving average are None if the configuration has none.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    block: RunningMean | None = None
    detector: Detector | None = None
    ema: RunningMean | None = None


def init_state(config: Config, key: jax.Array) -> TrainState:
    """Return a fresh state; traceable. Call under `jax.set_mesh`."""
    params = init_params(config.model, key)
    block = averages.empty(params) if "block_mean" in config.checkpoint.kinds else None
    detector = (
        spikes.empty_detector(config.tokens_to_steps(config.spikes.window_tokens)) if config.spikes.detect else None
    )
    mean = averages.empty(params) if config.optimizer.ema_half_life_tokens else None
    opt_state = init_opt_state(config.optimizer, params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, block, detector, mean)


def make_state(config: Config) -> TrainState:
    """Make a fresh state from `training.seed` on the devices of the mesh that is set."""
    return jax.jit(lambda key: init_state(config, key))(jax.random.key(config.training.seed))


def snapshot_params(config: Config, state: TrainState) -> Params:
    """Return the parameters that are evaluated and saved in snapshots: the moving average, or the optimizer's model.

    They may be arrays of the state, which the next step donates.
    """
    return eval_params(config.optimizer, state.params, state.optimizer) if state.ema is None else state.ema.mean


def add_to_block(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Add the parameters after the step that ended at `tokens` to the block mean, if it is one of the steps to add."""
    if state.block is None or not config.is_block_mean_step(tokens):
        return state
    block = averages.add_to_block_mean(state.block, snapshot_params(config, state))
    return dataclasses.replace(state, block=block)


def branch_state(config: Config, state: TrainState, params: Params, **changes: Any) -> TrainState:
    """Return the state from which a run branches off with other weights: a fork, a rollback, or imported weights.

    Averages of the old parameters restart. The optimizer's moments are kept, unless they are among the changes.

    Args:
        config: Of the new branch.
        state: The state to branch off from.
        params: The new parameters.
        **changes: Other fields to replace.
    """
    state = dataclasses.replace(state, **changes)
    block, mean = (running and averages.restart(running) for running in (state.block, state.ema))
    opt_state = reset_iterates(config.optimizer, state.optimizer, params)
    return dataclasses.replace(state, params=params, optimizer=opt_state, block=block, ema=mean)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Return the shape, dtype and sharding of every leaf of the state, for restoring and compiling."""
    # The key is made inside the function: outside it would need a device, which ahead-of-time meshes lack.
    return abstract_arrays(mesh, lambda: init_state(config, jax.random.key(0)))
