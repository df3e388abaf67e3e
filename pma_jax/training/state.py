"""The train state: what a step reads and replaces, as one plain pytree."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import Config
from pma_jax.model.decoder import Params, init_params
from pma_jax.runtime.mesh import abstract_arrays
from pma_jax.training import averages, spikes
from pma_jax.training.averages import RunningMean
from pma_jax.training.optimizer import eval_params, initial_moments, reset_iterates
from pma_jax.training.spikes import Detector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer moments (float32), the optimizer steps done (int32 scalar), and what is optional.

    The running block mean, the detector of spikes and the moving average are None, and cost nothing, where the
    configuration has none.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    block: RunningMean | None = None
    detector: Detector | None = None
    ema: RunningMean | None = None


def init_state(config: Config, key: jax.Array) -> TrainState:
    """A fresh state; traceable. Call under `jax.set_mesh`."""
    params = init_params(config.model, key)
    block = averages.empty(params) if "block_mean" in config.checkpoint.kinds else None
    detector = spikes.empty(config.steps(config.spikes.window_tokens)) if config.spikes.detect else None
    mean = averages.empty(params) if config.optimizer.ema_half_life_tokens else None
    moments = initial_moments(config.optimizer, params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, block, detector, mean)


def make_state(config: Config) -> TrainState:
    """A fresh state from `training.seed`, made on the devices of the mesh that is set."""
    return jax.jit(lambda key: init_state(config, key))(jax.random.key(config.training.seed))


def snapshot_params(config: Config, state: TrainState) -> Params:
    """The weights that snapshots hold and evaluation sees: the optimizer's model, or the moving average of it.

    Arrays of the state itself, which the next step takes over, or new ones.
    """
    return eval_params(config.optimizer, state.params, state.optimizer) if state.ema is None else state.ema.mean


def with_params(config: Config, state: TrainState, params: Params) -> TrainState:
    """`state` with these weights in place of its own. Averages of the old ones are forgotten, moments are not."""
    mean = state.ema and averages.restart(state.ema)
    moments = reset_iterates(config.optimizer, state.optimizer, params)
    return dataclasses.replace(state, params=params, optimizer=moments, ema=mean)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shape, dtype and sharding of every leaf: the one description that restoring and compiling read."""
    # The key is made inside: outside it would need a device, and ahead-of-time meshes have none.
    return abstract_arrays(mesh, lambda: init_state(config, jax.random.key(0)))
