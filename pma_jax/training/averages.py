"""Running means of the weights during training: the block mean of a snapshot interval, and the EMA over every step.

A block mean averages every j-th step since the last token mark. It takes the storage of one snapshot and has less noise
than the weights at one step. Blocks of equal counts average to the exact mean over all their steps, so a window of
block means is a window of dense averaging.

A `RunningMean` holds the mean itself, not a sum: saving it needs no second copy. Every function is element-wise over
pytrees: on a mesh each device updates its own shards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningMean:
    """Mean (float32, shaped and sharded as the parameters) of `count` weights (int32 scalar); undefined at count 0."""

    mean: Any
    count: jax.Array


def empty(params: Any) -> RunningMean:
    """Return a mean of no weights, with the shapes of `params`; traceable."""
    return RunningMean(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), jnp.zeros((), jnp.int32))


def restart(running: RunningMean) -> RunningMean:
    """Set the count to 0, so that the next weights replace the mean. The arrays are kept, not cleared."""
    return dataclasses.replace(running, count=jnp.zeros_like(running.count))


@functools.partial(jax.jit, donate_argnums=0)
def add_to_block_mean(block: RunningMean, params: Any) -> RunningMean:
    """Add the weights `params`, all with equal weight; `block` is donated, `params` is not."""
    count = (block.count + 1).astype(jnp.float32)
    # Equal weights average to themselves exactly. As for a sum, the error is about a quarter of the root of `count`
    # roundings (one after 12 adds, five after 300).
    return _add(block, params, lambda difference: difference / count)


def add_to_ema(ema: RunningMean, params: Any, decay: float) -> RunningMean:
    """Add one step's weights to the exponential moving average; traceable.

    The weights k steps ago have weight (1 - d) d^k divided by the sum of these, as Adam corrects its moments (optax.ema
    with `debias`): after the first step the average is that step's weights.

    Args:
        ema: the average so far.
        params: the weights after this step.
        decay: d in (0, 1), by which the weight of a step shrinks with each later step.
    """
    count = (ema.count + 1).astype(jnp.float32)
    share = (1 - decay) / (1 - jnp.float32(decay) ** count)
    return _add(ema, params, lambda difference: share * difference)


def ema_decay(half_life_tokens: float, batch_tokens: int) -> float:
    """Return the decay d with which the last `half_life_tokens` have half of the total weight."""
    return 0.5 ** (batch_tokens / half_life_tokens)


def block_mean_at_mark(block: RunningMean, params: Any) -> RunningMean:
    """Return the block mean to save at a token mark: `block`, or the weights `params` if it holds no step.

    It holds none where the horizon or a fork cuts an interval short. Waits for the device; `block` may be donated.
    """
    return block if int(block.count) else add_to_block_mean(block, params)


def _add(running: RunningMean, params: Any, scaled: Callable[[jax.Array], jax.Array]) -> RunningMean:
    def blend(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(running.count == 0, p, mean + scaled(p - mean))

    return RunningMean(jax.tree.map(blend, running.mean, params), running.count + 1)
