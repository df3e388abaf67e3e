"""The exponential moving average of the weights over every step: averaging online, against merging snapshots.

After the first step it is that step's weights, and nothing else decides it: the weight (1 - d) d^k of the weights k
steps ago is divided by the sum of those there are (as Adam corrects its moments; optax.ema with `debias`). Element-wise
over pytrees: on a mesh each device adds its own shards.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ema:
    """Mean (float32, shaped and sharded as the parameters) of `count` steps (int32 scalar); at 0 it means nothing."""

    mean: Any
    count: jax.Array


def empty(params: Any) -> Ema:
    """A mean of nothing yet, for weights such as `params`; traceable."""
    return Ema(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), jnp.zeros((), jnp.int32))


def add(ema: Ema, params: Any, decay: float) -> Ema:
    """The mean with one more step's weights; `decay` d in (0, 1) is what is left of a step's weight after the next."""
    count = ema.count + 1
    share = (1 - decay) / (1 - jnp.float32(decay) ** count.astype(jnp.float32))

    def added(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(ema.count == 0, p, mean + share * (p - mean))

    return Ema(jax.tree.map(added, ema.mean, params), count)


def decay_of(half_life_tokens: float, batch_tokens: int) -> float:
    """d, such that the last `half_life_tokens` have half of the weight."""
    return 0.5 ** (batch_tokens / half_life_tokens)
