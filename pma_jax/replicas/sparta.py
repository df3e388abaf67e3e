"""SPARTA: at every step, the workers average a small random share of their parameters.

    S random, |S| = ceil(p n) of the n elements of each leaf, the same in all workers
    theta_k[S] <- (1/K) sum_j theta_j[S]

Moments are not averaged. On each device, the elements of a leaf's shard are divided into ceil(p n) ranges of equal
length, and one element of each is chosen, so that none is chosen twice and only what is averaged is sent. If a leaf is
split over devices, the same positions are chosen in each part. A given element waits about 1/p steps. With p = 1 it is
periodic averaging at each step. `replicas.sparta_diloco` adds DiLoCo's outer step every `replicas.interval_tokens`.

Source: Baioumy and Cheema, Sparse Parameter Averaging (2025), with p from 0.0005 to 0.005, and its public code (exo
gym), with p = 0.005, which draws each element with probability p in one worker and sends the mask to the others; with
DiLoCo too, SPARTA goes first in a step. Its key sparta_interval is never read.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from pma_jax.config.errors import UserError
from pma_jax.replicas.workers import IN_BOUNDS, Tree, axis_size, on_shards, sum_over_devices

SEED = 0  # of the choice; it is the same in all workers and runs


def average_share(params: Tree, share: float, step: jax.Array) -> Tree:
    """Average a random share of the parameters [K, ...] over the workers.

    Args:
        params: Parameters of each worker.
        share: The share p, above 0 and at most 1.
        step: Number of the step, int32 scalar; it decides which elements are chosen.
    """

    def average(shards: list[jax.Array], step: list[jax.Array]) -> list[jax.Array]:
        flat = [x.reshape(x.shape[0], -1) for x in shards]
        key = jax.random.fold_in(jax.random.key(SEED), step[0])
        chosen = choose(key, [x.shape[1] for x in flat], share)
        sums = [x.at[:, index].get(**IN_BOUNDS).sum(0) for x, index in zip(flat, chosen, strict=True)]
        count = flat[0].shape[0] * axis_size()
        means = sum_over_devices(jnp.concatenate(sums)) / count  # one message for all leaves
        ends = np.cumsum([index.size for index in chosen])[:-1]
        return [
            x.at[:, index].set(m, unique_indices=True, **IN_BOUNDS).reshape(shard.shape)
            for x, index, m, shard in zip(flat, chosen, jnp.split(means, ends), shards, strict=True)
        ]

    return on_shards(average, params, [jax.reshard(step, P())])


def share_count(share: float, size: int) -> int:
    """Return ceil(share * size), exactly: 7 for 0.07 of 100, whose product is above 7 in float64."""
    return math.ceil(Fraction(str(share)) * size)


def choose(key: jax.Array, sizes: Sequence[int], share: float) -> list[jax.Array]:
    """Choose ceil(share * n) of the numbers from 0 to n - 1, for each n of `sizes`: one of each range of equal length.

    Draw once for all leaves, because a draw for each is several small programs.

    Raises:
        UserError: A number is too large for the int32 of an index.
    """
    if max(sizes) > 2**31 - 1:
        raise UserError(
            f"replicas.method=sparta: a device holds {max(sizes):,} elements of one array, and can choose among "
            "2,147,483,647: split it over more devices by mesh.fsdp"
        )
    counts = [share_count(share, size) for size in sizes]
    bounds = [np.arange(count + 1, dtype=np.int64) * size // count for count, size in zip(counts, sizes, strict=True)]
    low = np.concatenate([one[:-1] for one in bounds]).astype(np.uint32)
    length = np.concatenate([np.diff(one) for one in bounds]).astype(np.uint32)
    # `randint` would draw twice. A remainder of 32 random bits favours some elements, by at most length / 2^32.
    chosen = (jnp.asarray(low) + jax.random.bits(key, low.shape) % length).astype(jnp.int32)
    return jnp.split(chosen, np.cumsum(counts)[:-1])
