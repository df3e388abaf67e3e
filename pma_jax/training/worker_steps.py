"""The train step of several workers: the step of one, mapped over the workers of each device.

Dimensions: K workers, k workers per device along the mesh axis `replica`, B sequences of all workers, M tokens of a
window.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from pma_jax.replicas.workers import AXIS
from pma_jax.runtime.mesh import RULES
from pma_jax.training.state import TrainState

Step = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, Any]]]


def map_over_workers(train_step: Step) -> Step:
    """Map the step of one worker over all workers; each takes its slice of the batch.

    In the mapped step, the leaves of `params`, `optimizer` and `detector` have a leading dim of the workers, and each
    metric too. No collective crosses the mesh axis `replica`: along it, the step is the body of a `shard_map`.
    """

    def mapped_step(state: TrainState, tokens_BxM: jax.Array, rate: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        trained = state.params, state.optimizer, state.detector

        steps = jax.shard_map(
            functools.partial(_step_each, train_step),
            in_specs=(P(AXIS), P(AXIS), P(), P()),
            out_specs=(P(AXIS), P(AXIS)),
            axis_names={AXIS},
            check_vma=False,
        )
        (params, optimizer, detector), metrics = steps(trained, tokens_BxM, state.step, rate)
        changes = {"params": params, "optimizer": optimizer, "detector": detector}
        return dataclasses.replace(state, step=state.step + 1, **changes), metrics

    return mapped_step


# Wraps the function of the train step that computes gradients, so that the workers of a device compute them one after
# the other: activations are those of one worker, and on CPU it is faster than all at once. The rest of the step, such
# as the optimizer, is element-wise, and runs for all workers at once: no worker's moments are copied out and back.
compute_in_turn = jax.custom_batching.sequential_vmap


def _step_each(
    train_step: Step, trained: Any, tokens_BxM: jax.Array, step: jax.Array, rate: jax.Array
) -> tuple[Any, dict[str, Any]]:
    """Train the workers of this device; `compute_in_turn` says what they do one after the other."""
    k = jax.tree.leaves(trained)[0].shape[0]
    rows = (k, tokens_BxM.shape[0] // k, tokens_BxM.shape[1])
    tokens_kxbxM = jnp.reshape(tokens_BxM, rows, out_sharding=RULES.spec(None, "batch", None))

    def one(worker: Any) -> tuple[Any, dict[str, Any]]:
        (params, optimizer, detector), tokens_bxM = worker
        state, metrics = train_step(TrainState(step, params, optimizer, None, detector), tokens_bxM, rate)
        return (state.params, state.optimizer, state.detector), metrics

    if k > 1:
        return jax.vmap(one)((trained, tokens_kxbxM))
    alone = one(jax.tree.map(lambda leaf: leaf[0], (trained, tokens_kxbxM)))
    return jax.tree.map(lambda leaf: leaf[None], alone)
