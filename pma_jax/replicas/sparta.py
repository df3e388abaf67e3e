"""SPARTA: at every step, the workers average a small random share of their parameters.

    S random, |S| = ceil(p n) of the n elements of each leaf, the same in all workers
    theta_k[S] <- (1/K) sum_j theta_j[S]

Moments are not averaged. On each device, the elements of a leaf's shard are divided into ceil(p n) ranges of equal
length, and one element of each is chosen, so that none is chosen twice and only what is averaged is sent. A given
element waits about 1/p steps. With p = 1 it is periodic averaging at each step. `replicas.sparta_diloco` adds DiLoCo's
outer step every `replicas.interval_tokens`.

Source: Baioumy and Cheema, Sparse Parameter Averaging (2025), with p from 0.0005 to 0.005, and its public code (exo
gym), with p = 0.005, which draws each element with probability p in one worker and sends the mask to the others; with
DiLoCo too, SPARTA goes first in a step. Its key sparta_interval is never read.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from pma_jax.replicas.workers import Tree, axis_size, on_shards, sum_over_devices
from pma_jax.runtime.mesh import axes_of

SEED = 0  # of the choice; it is the same in all workers and runs


def average_share(params: Tree, share: float, step: jax.Array) -> Tree:
    """Average a random share of the parameters [K, ...] over the workers.

    Args:
        params: Parameters of each worker.
        share: The share p, above 0 and at most 1.
        step: Number of the step, int32 scalar; it decides which elements are chosen.
    """
    # A leaf that several devices hold in full has the same elements chosen there, one that is split other ones.
    specs = [jax.typeof(leaf).sharding.spec[1:] for leaf in jax.tree.leaves(params)]  # without the dim of workers
    split_axes = [tuple(axis for entry in spec for axis in axes_of(entry)) for spec in specs]

    def average(shards: list[jax.Array], step: list[jax.Array]) -> list[jax.Array]:
        key = jax.random.fold_in(jax.random.key(SEED), step[0])
        flat = [x.reshape(x.shape[0], -1) for x in shards]
        chosen = []
        for i, (x, axes) in enumerate(zip(flat, split_axes, strict=True)):
            place = jax.lax.axis_index(axes) if axes else 0
            chosen.append(choose(jax.random.fold_in(jax.random.fold_in(key, i), place), x.shape[1], share))
        sums = [x[:, index].sum(0) for x, index in zip(flat, chosen, strict=True)]
        count = flat[0].shape[0] * axis_size()
        means = sum_over_devices(jnp.concatenate(sums)) / count  # one message for all leaves
        ends = np.cumsum([index.size for index in chosen])[:-1]
        return [
            x.at[:, index].set(m, unique_indices=True).reshape(shard.shape)
            for x, index, m, shard in zip(flat, chosen, jnp.split(means, ends), shards, strict=True)
        ]

    return on_shards(average, params, [jax.reshard(step, P())])


def share_count(share: float, size: int) -> int:
    """Return ceil(share * size), exactly: 7 for 0.07 of 100, whose product is above 7 in float64."""
    return math.ceil(Fraction(str(share)) * size)


def choose(key: jax.Array, size: int, share: float) -> jax.Array:
    """Choose ceil(share * size) of the numbers from 0 to size - 1: one of each range of equal length, int32."""
    count = share_count(share, size)
    bounds = np.arange(count + 1, dtype=np.int64) * size // count
    low, length = bounds[:-1].astype(np.int32), np.diff(bounds).astype(np.int32)
    return jnp.asarray(low) + jax.random.randint(key, (count,), 0, length, jnp.int32)
