"""A mean of the weights, kept while training goes on: what a block mean and the EMA of every step have in common.

At any time it is the mean itself, no sum: a snapshot of it needs no division into a second copy. Every function is
element-wise over pytrees: on a mesh each device has and adds its own shards.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningMean:
    """Mean (float32, shaped and sharded as the parameters) of `count` weights (int32 scalar); at 0 it means nothing."""

    mean: Any
    count: jax.Array


def empty(params: Any) -> RunningMean:
    """A mean of nothing yet, for weights such as `params`; traceable."""
    return RunningMean(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), jnp.zeros((), jnp.int32))


def restarted(running: RunningMean) -> RunningMean:
    """The next add begins a new mean. The old one is kept as it lies, not cleared."""
    return dataclasses.replace(running, count=jnp.zeros_like(running.count))
