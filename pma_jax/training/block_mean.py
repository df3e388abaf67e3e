"""The block mean: the mean of the weights since the last token mark (dense averaging, at a snapshot's storage).

A snapshot of the weights is one noisy point; the mean of every j-th step of its interval costs the same to store and
has less noise. Blocks of equal counts average to the exact mean over all their steps, so a window of block means is a
window of dense averaging.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pma_jax.training.running_mean import RunningMean


@functools.partial(jax.jit, donate_argnums=0)
def add(block: RunningMean, params: Any) -> RunningMean:
    """The block with the weights `params` added; the block is donated, the parameters are not."""
    count = block.count + 1

    # Equal weights average to themselves exactly. Like a sum it is off by about a quarter of the root of `count`
    # roundings (one after 12 adds, five after 300). The first weights replace what is there: a mark clears nothing.
    def added(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(block.count == 0, p, mean + (p - mean) / count.astype(jnp.float32))

    return RunningMean(jax.tree.map(added, block.mean, params), count)


def at_mark(block: RunningMean, params: Any) -> RunningMean:
    """The block to save at a mark: where no step was added since the last one, of the weights `params` alone.

    That happens when the horizon or a fork cuts an interval short. Waits for the device; the block may be donated.
    """
    return block if int(block.count) else add(block, params)
