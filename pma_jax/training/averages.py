"""Running means of the parameters during training: block means of snapshot intervals, EMA over every step, and BEMA.

A block mean averages the parameters after every j-th step of one snapshot interval (`checkpoint.block_every_steps`). It
takes the storage of one snapshot and has less noise than the parameters after one step. The mean of several block means
with equal counts is the exact mean over all steps in these blocks ("dense averaging").

BEMA (arXiv 2508.00180, Algorithm 1) corrects the lag of an average that began at theta_0 after step tau. With theta_t
the parameters after step t of the run (not counted from tau, as in the authors' code, TRL's BEMACallback):

    alpha_t = (rho + gamma t)^-eta,  beta_t = (rho + gamma t)^-kappa
    mu <- (1 - beta_t) mu + beta_t theta_t         after every phi tokens, from mu = theta_0
    model = mu + alpha_t (theta_t - theta_0)       at any t >= tau; before, the model is theta_t

A `RunningMean` contains the mean itself, not a sum, so that it can be saved without a second copy. Every function is
element-wise over pytrees, so on a mesh each device updates its own shards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pma_jax.config import OptimizerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningMean:
    """The mean of a sequence of parameter trees.

    Attributes:
        mean: Tree with the shapes and shardings of the parameters, float32; undefined if `count` is 0.
        count: Number of parameter trees added so far, int32 scalar.
    """

    mean: Any
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BiasCorrectedMean:
    """BEMA's average.

    Attributes:
        origin: theta_0, the first parameters of the mean, float32; undefined if `mean.count` is 0.
        mean: mu.
    """

    origin: Any
    mean: RunningMean


def empty(params: Any) -> RunningMean:
    """Return a mean with count 0 and the shapes of `params`; traceable."""
    return RunningMean(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), jnp.zeros((), jnp.int32))


def empty_bema(params: Any) -> BiasCorrectedMean:
    """Return a bias-corrected average that has not begun, with the shapes of `params`; traceable."""
    return BiasCorrectedMean(empty(params).mean, empty(params))


def restart(running: RunningMean) -> RunningMean:
    """Return `running` with count 0, so that the next parameters replace the mean. The arrays are kept, not cleared."""
    return dataclasses.replace(running, count=jnp.zeros_like(running.count))


def restart_bema(bema: BiasCorrectedMean) -> BiasCorrectedMean:
    """Return `bema` with count 0, so that it begins again with the next parameters."""
    return dataclasses.replace(bema, mean=restart(bema.mean))


@functools.partial(jax.jit, donate_argnums=0)
def add_to_block_mean(block: RunningMean, params: Any) -> RunningMean:
    """Add `params` to the arithmetic mean; `block` is donated, `params` is not."""
    count = (block.count + 1).astype(jnp.float32)
    # The mean of equal parameters is exactly these parameters. Otherwise the rounding error grows as it does for a sum:
    # about sqrt(count) / 4 units in the last place (one after 12 adds, five after 300).
    return _add(block, params, lambda difference: difference / count)


def add_to_ema(ema: RunningMean, params: Any, decay: float) -> RunningMean:
    """Add the parameters after one step to the exponential moving average; traceable.

    The parameters of k steps ago have the coefficient (1 - d) d^k, divided by the sum of all coefficients. This is the
    bias correction of Adam's moments (optax.ema with `debias`): after the first step the average is that step's
    parameters.

    Args:
        ema: The average so far.
        params: The parameters after this step.
        decay: D in (0, 1), the factor by which each later step reduces a step's coefficient.
    """
    count = (ema.count + 1).astype(jnp.float32)
    share = (1 - decay) / (1 - jnp.float32(decay) ** count)
    return _add(ema, params, lambda difference: share * difference)


def ema_decay(half_life_tokens: float, batch_tokens: int) -> float:
    """Return the decay d at which the steps of the last `half_life_tokens` have half of the sum of coefficients."""
    return 0.5 ** (batch_tokens / half_life_tokens)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def add_to_bema(bema: BiasCorrectedMean, params: Any, step: jax.Array, config: OptimizerConfig) -> BiasCorrectedMean:
    """Add the parameters after `step` to BEMA's average, or begin with them if it is empty; `bema` is donated."""
    is_empty = bema.mean.count == 0
    origin = jax.tree.map(lambda o, p: jnp.where(is_empty, p.astype(jnp.float32), o), bema.origin, params)
    beta = (config.bema_lag + config.bema_multiplier * step) ** -config.bema_ema_power
    return BiasCorrectedMean(origin, _add(bema.mean, params, lambda difference: beta * difference))


@functools.partial(jax.jit, static_argnums=3)
def bema_params(bema: BiasCorrectedMean, params: Any, step: jax.Array, config: OptimizerConfig) -> Any:
    """Return BEMA's model at `step`, whose parameters are `params`; these, if its average has not begun."""
    alpha = (config.bema_lag + config.bema_multiplier * step) ** -config.bema_bias_power

    def correct(mu: jax.Array, p: jax.Array, origin: jax.Array) -> jax.Array:
        return jnp.where(bema.mean.count == 0, p, mu + alpha * (p - origin))

    return jax.tree.map(correct, bema.mean.mean, params, bema.origin)


def interpolate(old: Any, new: Any, share: float) -> Any:
    """Return (1 - share) old + share new; traceable."""
    # Not optax.incremental_update: 1 - share and share, each rounded, do not add up to 1, which repeated with a small
    # share moves the result by 3e-8 / share.
    return jax.tree.map(lambda o, n: o + share * (n - o), old, new)


def block_mean_or_params(block: RunningMean, params: Any) -> RunningMean:
    """Return the block mean to save: `block`, or a mean of `params` alone if no step was added to `block`.

    No step was added if the end of the run or a fork cuts an interval short. Blocks until `block.count` is computed,
    and may donate `block`.
    """
    return block if int(block.count) else add_to_block_mean(block, params)


def _add(running: RunningMean, params: Any, scale: Callable[[jax.Array], jax.Array]) -> RunningMean:
    def blend(mean: jax.Array, p: jax.Array) -> jax.Array:
        p = p.astype(jnp.float32)
        return jnp.where(running.count == 0, p, mean + scale(p - mean))

    return RunningMean(jax.tree.map(blend, running.mean, params), running.count + 1)
