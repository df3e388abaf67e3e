"""The block mean: the mean of the weights since the last token mark (dense averaging, at a snapshot's storage).

A snapshot of the weights is one noisy point; the mean of every j-th step of its interval costs the same to store and
has less noise. Blocks of equal counts average to the exact mean over all their steps, so a window of block means is a
window of dense averaging. Every function is element-wise over pytrees: on a mesh each device adds its own shards.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """Mean (float32, shaped and sharded as the parameters) of `count` weights (int32 scalar); at 0 it means nothing."""

    mean: Any
    count: jax.Array


def empty(params: Any) -> Block:
    """A block of nothing yet, for weights such as `params`; traceable."""
    return Block(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, donate_argnums=0)
def add(block: Block, params: Any) -> Block:
    """The block with the weights `params` added; the block is donated, the parameters are not."""
    count = block.count + 1

    # A running mean, not a sum: it is the mean at any time, so that a mark needs no division into a second copy, and
    # equal weights average to themselves exactly. Like a sum it is off by about a quarter of the root of `count`
    # roundings (one after 12 adds, five after 300). The first weights replace what is there: a mark clears nothing.
    def added(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(block.count == 0, p, mean + (p - mean) / count.astype(jnp.float32))

    return Block(jax.tree.map(added, block.mean, params), count)


def at_mark(block: Block, params: Any) -> Block:
    """The block to save at a mark: where no step was added since the last one, of the weights `params` alone.

    That happens when the horizon or a fork cuts an interval short. Waits for the device; the block may be donated.
    """
    return block if int(block.count) else add(block, params)


def restarted(block: Block) -> Block:
    """The block after its mark was saved: the next add begins a new mean. The mean is kept as it lies, not cleared."""
    return dataclasses.replace(block, count=jnp.zeros_like(block.count))
