"""The train state: a pytree of everything that a training step reads and updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pma_jax.config import Config
from pma_jax.model.decoder import Params, abstract_params, init_params
from pma_jax.replicas import method
from pma_jax.replicas.workers import Workers, broadcast, mean, select_worker
from pma_jax.runtime.mesh import abstract_arrays, worker_count
from pma_jax.training import averages, optimizer, spikes
from pma_jax.training.averages import BiasCorrectedMean, RunningMean
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
        outer: What the method of `replicas` keeps between two averages; None if it keeps nothing.
        bema: Bias-corrected average of the parameters; None if it is disabled.

    With `replicas`, the leaves of `params`, `optimizer` and `detector` have a leading dim of the workers.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    block: RunningMean | None = None
    detector: Detector | None = None
    ema: RunningMean | None = None
    outer: Any | None = None
    bema: BiasCorrectedMean | None = None


def init_state(config: Config, params: Params) -> TrainState:
    """Return the state before the first step. Requires a mesh set with `jax.set_mesh`; can be jitted."""
    block = averages.empty(params) if "block_mean" in config.checkpoint.kinds else None
    detector = (
        spikes.empty_detector(config.tokens_to_steps(config.spikes.window_tokens)) if config.spikes.detect else None
    )
    ema = averages.empty(params) if config.optimizer.ema_half_life_tokens else None
    opt_state = optimizer.init_opt_state(config.optimizer, params)
    bema = averages.empty_bema(params) if config.optimizer.bema_interval_tokens else None
    state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, block, detector, ema, bema=bema)
    return state if config.replicas.method == "none" else with_workers(config, state)


def with_workers(config: Config, state: TrainState) -> TrainState:
    """Return the state of several workers that all begin with the state of one; can be jitted."""
    replicas, count = config.replicas, worker_count(config, jax.sharding.get_abstract_mesh())
    block = state.block
    if block is not None and not method.has_outer_params(replicas):
        block = dataclasses.replace(block, mean=broadcast(block.mean, count))
    params, opt_state, detector = broadcast((state.params, state.optimizer, state.detector), count)
    outer = method.init(replicas, state.params, count)
    changes = {"params": params, "optimizer": opt_state, "detector": detector, "block": block, "outer": outer}
    return dataclasses.replace(state, **changes)


def init_state_from_seed(config: Config) -> TrainState:
    """Initialize the state from `training.seed`, sharded over the current mesh (`jax.set_mesh`)."""
    # The program that draws takes longest to compile; runs that differ only in other keys share it.
    params = _compiled_init_params(jax.default_backend())(config.model, jax.random.key(config.training.seed))
    return _init_state(config, params)


_init_state = jax.jit(init_state, static_argnums=0)


@functools.cache
def _compiled_init_params(backend: str) -> Callable[..., Params]:
    """Return `init_params`, jitted for a backend.

    On CPU, XLA compiles it without optimisations: it runs once, and optimising it takes seconds even for a small model.
    """
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(init_params, static_argnums=0, compiler_options=fast if backend == "cpu" else None)


def eval_params(config: Config, state: TrainState) -> Params:
    """Return the parameters to evaluate and to save in snapshots, those of all workers together.

    With `replicas`, they are the outer parameters, or the mean of the workers if there are none. Otherwise they are
    the exponential moving average, or the bias-corrected average from its start, if the configuration has one, else the
    evaluation parameters of the optimizer: the average of schedule-free or GPA, or `state.params`. They can share
    arrays with `state`: copy what is needed after the next training step, which donates `state`.
    """
    if config.replicas.method != "none":
        return _shared_params(config.replicas, as_workers(state))
    if state.ema is not None:
        return state.ema.mean
    if state.bema is not None:
        return averages.bema_params(state.bema, state.params, state.step, config.optimizer)
    return optimizer.eval_params(config.optimizer, state.params, state.optimizer)


def params_of_worker(state: TrainState, worker: int) -> Params:
    """Return the parameters that a worker of `replicas` trains, without a dim of workers."""
    return _select_worker(state.params, jnp.int32(worker))


_select_worker = jax.jit(select_worker)
_shared_params = jax.jit(method.shared_params, static_argnums=0)
_mean_over_workers = jax.jit(mean)


def worker_dim(params: Params) -> int:
    """Return the number of workers of the parameters of a state, abstract or not; 0 if they have no dim of workers."""
    shape = params["final_norm_D"].shape  # [D] or [K, D]
    return shape[0] if len(shape) > 1 else 0


def as_workers(state: TrainState) -> Workers:
    """Return what the methods of `replicas` read and change."""
    return Workers(state.params, state.optimizer, state.outer)


def synchronize(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Average the workers as far as it is due after the step that ends at `tokens`; donates `state` if it is."""
    sync = method.sync_after(config, tokens)
    if not sync:
        return state
    workers = method.make_sync(config.replicas, sync, jax.sharding.get_mesh())(as_workers(state), state.step)
    return dataclasses.replace(state, params=workers.params, optimizer=workers.moments, outer=workers.outer)


def update_block_mean(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Add the parameters to the block mean if `config.is_block_mean_step(tokens)`, else return `state` unchanged.

    Workers without outer parameters have a block mean each, so that they need not communicate; see `block_mean`.
    """
    if state.block is None or not config.is_block_mean_step(tokens):
        return state
    return dataclasses.replace(state, block=averages.add_to_block_mean(state.block, _block_params(config, state)))


def begin_bema(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Begin the bias-corrected average if training starts or resumes at `tokens`, after its start, and it is empty.

    It is empty in a new run, in a fork that enables it or replaces the parameters, and after a rollback. An average of
    a fork's parent is emptied if that of the fork begins later.
    """
    if state.bema is None or (tokens >= config.optimizer.bema_start_tokens and int(state.bema.mean.count)):
        return state
    state = dataclasses.replace(state, bema=averages.restart_bema(state.bema))
    return _add_to_bema(config, state) if tokens >= config.optimizer.bema_start_tokens else state


def update_bema(config: Config, state: TrainState, tokens: int) -> TrainState:
    """Add the parameters to the bias-corrected average if `config.is_bema_step(tokens)`, else return `state`."""
    return state if state.bema is None or not config.is_bema_step(tokens) else _add_to_bema(config, state)


def _add_to_bema(config: Config, state: TrainState) -> TrainState:
    assert state.bema is not None
    bema = averages.add_to_bema(state.bema, state.params, state.step, config.optimizer)
    return dataclasses.replace(state, bema=bema)


def block_mean(config: Config, state: TrainState) -> tuple[Params, TrainState]:
    """Return the block mean to save, the mean over the workers, and the state with an empty one.

    If no step was added, because the end of the run or a fork cuts the interval short, it is the parameters alone.
    """
    assert state.block is not None
    block = averages.block_mean_or_params(state.block, _block_params(config, state))
    shared = _mean_over_workers(block.mean) if _has_block_of_each_worker(config) else block.mean
    return shared, dataclasses.replace(state, block=averages.restart(block))


def _block_params(config: Config, state: TrainState) -> Params:
    if _has_block_of_each_worker(config):
        return method.worker_params(config.replicas, as_workers(state))
    return eval_params(config, state)


def _has_block_of_each_worker(config: Config) -> bool:
    return config.replicas.method != "none" and not method.has_outer_params(config.replicas)


def replace_params(config: Config, state: TrainState, params: Params, **changes: Any) -> TrainState:
    """Return a state with new parameters, for a fork, a rollback, or a run from imported weights.

    The block mean and the moving averages are emptied. All other fields of `state` are kept, including the optimizer
    state with its moments, unless `changes` replaces them. The iterate z of schedule-free or GPA is set to `params`.

    Args:
        config: Only the section `optimizer` is used, which must be that of the optimizer state.
        state: The state whose parameters are replaced.
        params: The new parameters.
        **changes: Other fields of the state to replace.
    """
    state = dataclasses.replace(state, **changes)
    if config.replicas.method != "none":
        return _replace_params_of_workers(config, state, params)
    block = None if state.block is None else averages.restart(state.block)
    ema = None if state.ema is None else averages.restart(state.ema)
    bema = None if state.bema is None else averages.restart_bema(state.bema)
    opt_state = optimizer.reset_iterates(config.optimizer, state.optimizer, params)
    return dataclasses.replace(state, params=params, optimizer=opt_state, block=block, ema=ema, bema=bema)


def _replace_params_of_workers(config: Config, state: TrainState, params: Params) -> TrainState:
    """Start all workers from `params`, with the moments that they have, and the method from its start."""
    count = worker_dim(state.params)

    def start(params: Params) -> tuple[Params, Any]:
        return broadcast(params, count), method.init(config.replicas, params, count)

    block = None if state.block is None else averages.restart(state.block)
    workers, outer = jax.jit(start)(params)
    return dataclasses.replace(state, params=workers, outer=outer, block=block)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Return the state as a tree of ShapeDtypeStructs with shardings, for restoring and ahead-of-time compilation."""
    return abstract_arrays(mesh, functools.partial(init_state, config), abstract_params(config.model, mesh))
