"""A state that was saved with another number of workers, or with none, becomes one of those of the configuration.

The workers that there were go on as they were. New ones begin with the parameters that stand for all workers: the outer
ones, or the mean. Worker k gets the moments of worker k modulo the old number. A single model begins with the
parameters that stand for all, and the mean of the moments.

Dimensions: J workers when the state was saved, K now; 0 means a state without a dim of workers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from pma_jax.config import Config
from pma_jax.replicas import method
from pma_jax.replicas.workers import Tree
from pma_jax.runs import restore, states
from pma_jax.runs.integrity import named_leaves
from pma_jax.runs.states import SavedState
from pma_jax.runtime import hosts
from pma_jax.training.state import TrainState, worker_dim


def restore_state(config: Config, saved: SavedState, abstract: TrainState) -> TrainState:
    """Restore a training state, and change the number of its workers to that of `abstract`.

    Raises as `states.restore_state` does.
    """
    as_saved = abstract_as_saved(saved, abstract)
    state = states.restore_state(saved, as_saved)
    if as_saved == abstract:
        return state
    there, here = (worker_dim(tree.params) for tree in (as_saved, abstract))
    convert = functools.partial(_convert, config, there, here)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, dataclasses.replace(abstract, block=None))
    state = jax.jit(convert, out_shardings=shardings)(state)
    # The mean of the interval so far is lost: it was that of other workers.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), abstract.block)
    return dataclasses.replace(state, block=zeros)


def abstract_as_saved(saved: SavedState, abstract: TrainState) -> TrainState:
    """Return `abstract`, or what it would be with the number of workers and the method with which a state was saved."""
    stored = hosts.run_in_all(lambda: restore.read_array_metadata(saved.path)).items
    there = _saved_count(stored.get("state"))
    outer_matches = not restore.shape_differences(stored.get("outer") or {}, abstract.outer or {})
    if there == worker_dim(abstract.params) and outer_matches:
        return abstract
    return dataclasses.replace(_with_count(abstract, there), outer=_outer_as_saved(stored.get("outer"), abstract))


def describe_change(config: Config, saved: SavedState, abstract: TrainState) -> str:
    """Return a line that says how the number of workers changes with the restored state; empty if it does not."""
    there, here = (worker_dim(tree.params) for tree in (abstract_as_saved(saved, abstract), abstract))
    if there == here:
        return ""
    old, new = (f"{count} workers" if count else "a single model" for count in (there, here))
    source = "outer parameters" if method.has_outer_params(config.replicas) else "mean of the workers"
    how = f"; new workers start from the {source}" if here > there else ""
    return f"the state was saved with {old}, and goes on with {new}{how}"


def _saved_count(stored: Any) -> int:
    params = (stored or {}).get("params")
    return worker_dim(params) if params else 0


def _with_count(abstract: TrainState, count: int) -> TrainState:
    """Return an abstract state with another number of workers, which no axis of the mesh splits."""
    here = worker_dim(abstract.params)

    def resized(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, jax.NamedSharding)
        shape, spec = leaf.shape[bool(here) :], leaf.sharding.spec[bool(here) :]
        shape, spec = ((count, *shape), P(None, *spec)) if count else (shape, spec)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=jax.NamedSharding(leaf.sharding.mesh, P(*spec)))

    params, optimizer, detector = jax.tree.map(resized, (abstract.params, abstract.optimizer, abstract.detector))
    return dataclasses.replace(abstract, params=params, optimizer=optimizer, detector=detector, block=None)


def _outer_as_saved(stored: Any, abstract: TrainState) -> Any:
    """Return what a method had kept as abstract arrays: its trees have the names of the parameters."""
    if not stored:
        return None
    specs = {
        name: leaf.sharding.spec[1:] if worker_dim(abstract.params) else leaf.sharding.spec
        for name, leaf in named_leaves(abstract.params).items()
    }
    assert isinstance(abstract.step.sharding, jax.NamedSharding)
    mesh = abstract.step.sharding.mesh

    def describe(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = specs[jax.tree_util.keystr(path[1:], simple=True, separator=".")]
        extra = len(leaf.shape) - len(spec)
        sharding = jax.NamedSharding(mesh, P(*[None] * extra, *spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(describe, stored)


def _convert(config: Config, there: int, here: int, state: TrainState) -> TrainState:
    """Return the state of K workers from that of J; traced."""
    theta = None if state.outer is None else state.outer["params"]
    if theta is None:
        theta = state.params
    shared = _mean(theta) if worker_dim(theta) else theta
    params = _resize(state.params, there, here, shared) if here else shared
    rest = state.optimizer, state.detector
    if not here:
        optimizer, detector = _mean(state.optimizer), jax.tree.map(lambda leaf: leaf[0], state.detector)
    else:
        optimizer, detector = jax.tree.map(lambda leaf: _rows(leaf, there, here), rest)
    outer = None
    if here:
        outer = method.init(config.replicas, shared, here)
        kept = state.outer or {}
        for name in (outer or {}).keys() & kept.keys():
            saved = kept[name]
            fill = jax.tree.map(jnp.zeros_like, shared) if name != "params" else shared
            is_each, was_each = worker_dim(outer[name]), worker_dim(saved)
            if is_each and was_each:
                outer[name] = _resize(saved, was_each, here, fill)
            elif not is_each and not was_each:
                outer[name] = saved
    return dataclasses.replace(state, params=params, optimizer=optimizer, detector=detector, outer=outer)


def _resize(tree: Tree, there: int, here: int, fill: Tree) -> Tree:
    """Return the leaves [K, ...] of K workers: those of the J that there were, then `fill`."""

    def resize(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if not there:
            return jnp.stack([new] * here)
        return jnp.concatenate([leaf[:here], *[new[None]] * (here - there)])

    return jax.tree.map(resize, tree, fill)


def _rows(leaf: jax.Array, there: int, here: int) -> jax.Array:
    return leaf[jnp.arange(here) % there] if there else jnp.stack([leaf] * here)


def _mean(tree: Tree) -> Tree:
    """Average over the workers; integers, such as step counts, are equal."""
    return jax.tree.map(lambda leaf: leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0], tree)
