"""The exponential moving average of the weights over every step: averaging online, against merging snapshots.

After the first step it is that step's weights, and nothing else decides it: the weight (1 - d) d^k of the weights k
steps ago is divided by the sum of those there are (as Adam corrects its moments; optax.ema with `debias`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pma_jax.training.running_mean import RunningMean


def add(ema: RunningMean, params: Any, decay: float) -> RunningMean:
    """The mean with one more step's weights; `decay` d in (0, 1) is what is left of a step's weight after the next."""
    count = ema.count + 1
    share = (1 - decay) / (1 - jnp.float32(decay) ** count.astype(jnp.float32))

    def added(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(ema.count == 0, p, mean + share * (p - mean))

    return RunningMean(jax.tree.map(added, ema.mean, params), count)


def decay_of(half_life_tokens: float, batch_tokens: int) -> float:
    """d, such that the last `half_life_tokens` have half of the weight."""
    return 0.5 ** (batch_tokens / half_life_tokens)
