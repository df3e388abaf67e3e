"""The train state: a pytree of everything that a training step reads and updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import Config
from pma_jax.model.decoder import Params, init_params
from pma_jax.runtime.mesh import abstract_arrays
from pma_jax.training import averages, optimizer, spikes
from pma_jax.training.averages import RunningMean
from pma_jax.training.spikes import Detector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training after a step.

    Attributes:
        step: Number of completed optimizer steps, int32 scalar.
        params: Parameters that the optimizer updates, float32.
        optimizer: The state of the optax optimizer, with float32 moments.
        block: Running mean of the parameters since the last snapshot (block mean); None if no block means are saved.
        detector: State of the spike detector; None if spikes are not detected.
        ema: Exponential moving average of the parameters; None if it is disabled.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    block: RunningMean | None = None
    detector: Detector | None = None
    ema: RunningMean | None = None


def init_state(config: Config, key: jax.Array) -> TrainState:
    """Initialize the state from a PRNG key. Requires a mesh set with `jax.set_mesh`; can be jitted."""
    params = init_params(config.model, key)
    block = averages.empty(params) if "block_mean" in config.checkpoint.kinds else None
    detector = (
        spikes.empty_detector(config.tokens_to_steps(config.spikes.window_tokens)) if config.spikes.detect else None
    )
    ema = averages.empty(params) if config.optimizer.ema_half_life_tokens else None
    opt_state = optimizer.init_opt_state(config.optimizer, params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, block, detector, ema)


def init_state_from_seed(config: Config) -> TrainState:
    """Initialize the state from `training.seed`, sharded over the current mesh (`jax.set_mesh`)."""
    return jax.jit(lambda key: init_state(config, key))(jax.random.key(config.training.seed))


def eval_params(config: Config, state: TrainState) -> Params:
    """Return the parameters to evaluate and to save in snapshots.

    They are the exponential moving average if the configuration has one, else the evaluation parameters of the
    optimizer: the average of schedule-free, or `state.params`. They can share arrays with `state`: copy what is needed
    after the next training step, which donates `state`.
    """
    if state.ema is not None:
        return state.ema.mean
    return optimizer.eval_params(config.optimizer, state.params, state.optimizer)


def update_block_mean(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Add `eval_params` to the block mean if `config.is_block_mean_step(tokens)`, else return `state` unchanged."""
    if state.block is None or not config.is_block_mean_step(tokens):
        return state
    block = averages.add_to_block_mean(state.block, eval_params(config, state))
    return dataclasses.replace(state, block=block)


def replace_params(config: Config, state: TrainState, params: Params, **changes: Any) -> TrainState:
    """Return a state with new parameters, for a fork, a rollback, or a run from imported weights.

    The block mean and the moving average are emptied. All other fields of `state` are kept, including the optimizer
    state with its moments, unless `changes` replaces them. With schedule-free, its iterate z is set to `params`.

    Args:
        config: Only the section `optimizer` is used, which must be that of the optimizer state.
        state: The state whose parameters are replaced.
        params: The new parameters.
        **changes: Other fields of the state to replace.
    """
    state = dataclasses.replace(state, **changes)
    block = None if state.block is None else averages.restart(state.block)
    ema = None if state.ema is None else averages.restart(state.ema)
    opt_state = optimizer.reset_iterates(config.optimizer, state.optimizer, params)
    return dataclasses.replace(state, params=params, optimizer=opt_state, block=block, ema=ema)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Return the state as a tree of ShapeDtypeStructs with shardings, for restoring and ahead-of-time compilation."""
    # Create the key inside the traced function. Outside, it would run on a device, but the devices of a mesh for
    # ahead-of-time compilation cannot run anything.
    return abstract_arrays(mesh, lambda: init_state(config, jax.random.key(0)))
