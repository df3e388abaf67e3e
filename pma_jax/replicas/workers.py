"""Workers: what each of them trains, as a leading dim of every leaf, and the mean over them.

The first dim of each leaf is that of the workers. The mesh axis `replica` splits it, and the train step is mapped over
the workers of each device. The functions of this package are traced, under `jax.set_mesh`. They
compute on the shards of each device in a `shard_map` over all axes of the mesh, so that the only collectives are those
that they name.

Dimensions: K workers, k = K / (size of the axis `replica`) workers per device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

AXIS = "replica"
# Options of gathers and scatters whose indices are sorted and inside the array, so that XLA need not check them.
IN_BOUNDS = {"mode": "promise_in_bounds", "wrap_negative_indices": False, "indices_are_sorted": True}
Tree = Any  # a pytree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workers:
    """What the workers train, and what they share.

    Attributes:
        params: Parameters of each worker, float32 [K, ...].
        moments: Optimizer state of each worker, [K, ...].
        outer: What an algorithm keeps between its averages, such as the outer parameters; None if it keeps nothing.
    """

    params: Tree
    moments: Tree
    outer: Tree = None


def broadcast(tree: Tree, count: int) -> Tree:
    """Return a copy of `tree` for each of `count` workers: [...] to [K, ...]."""

    def copies(leaf: jax.Array) -> jax.Array:
        spec = P(AXIS, *_spec(leaf))
        return jnp.broadcast_to(leaf, (count, *leaf.shape), out_sharding=spec)

    return jax.tree.map(copies, tree)


def select_worker(tree: Tree, worker: jax.Array) -> Tree:
    """Return what one worker has, on all devices: [K, ...] to [...]. Each leaf is sent once.

    Args:
        tree: What each worker has.
        worker: Its number, int32 scalar.
    """

    def pick(shards: list[jax.Array], number: list[jax.Array]) -> list[jax.Array]:
        per_device = shards[0].shape[0]
        k = number[0] - (jax.lax.axis_index(AXIS) * per_device if axis_size() > 1 else 0)
        is_here = (k >= 0) & (k < per_device)
        return [sum_over_devices(jnp.where(is_here, x[jnp.clip(k, 0, per_device - 1)], 0)) for x in shards]

    return on_shards(pick, tree, [jax.reshard(worker, P())], drops_workers=True)


def mean(tree: Tree) -> Tree:
    """Average over the workers: [K, ...] to [...]. Each leaf is sent once."""
    return on_shards(lambda leaves: [worker_mean(leaf) for leaf in leaves], tree, drops_workers=True)


def worker_mean(shard: jax.Array) -> jax.Array:
    """Average the shards [k, ...] of a leaf over the workers of all devices; call it in `on_shards`."""
    k = shard.shape[0]
    # A sum of slices, not a reduction: XLA fuses it with what is done to the mean, in one pass through memory.
    return sum_over_devices(functools.reduce(jnp.add, (shard[i] for i in range(k)))) / (k * axis_size())


def sum_over_devices(x: jax.Array) -> jax.Array:
    """Sum arrays over the devices along `replica`; call it in `on_shards`."""
    return jax.lax.psum(x, AXIS) if axis_size() > 1 else x


def axis_size() -> int:
    """Return the number of devices along `replica`."""
    return jax.sharding.get_abstract_mesh().shape[AXIS]


def on_shards(function: Callable[..., list[jax.Array]], tree: Tree, *others: Tree, drops_workers: bool = False) -> Tree:
    """Call `function` with the shards of trees on each device, in a `shard_map` over all axes of the mesh.

    Args:
        function: From a list of the shards of `tree`, and one of each of `others`, to new shards for `tree`.
        tree: The first tree.
        *others: Trees of the same structure, or arrays that are equal on all devices.
        drops_workers: Whether the new shards lack the dim of the workers.

    Returns:
        The new tree, with the shardings of `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    given = [jax.tree.leaves(other) for other in others]
    in_specs = [[_spec(leaf) for leaf in one] for one in (leaves, *given)]
    out_specs = [P(*spec[1:]) for spec in in_specs[0]] if drops_workers else in_specs[0]
    # check_vma=False: it does not know that what psum and all_gather return is equal on all devices.
    mapped = jax.shard_map(function, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    return jax.tree.unflatten(structure, mapped(leaves, *given))


def _spec(leaf: jax.Array) -> P:
    """Return the partition spec of an array, with an entry for each of its dims."""
    spec = jax.typeof(leaf).sharding.spec
    return P(*spec, *[None] * (leaf.ndim - len(spec)))
