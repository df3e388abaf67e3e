"""AdamW, or schedule-free AdamW, with global-norm clipping; no weight decay on norm scales and the router bias.

The caller passes the learning rate of each step; schedule.py computes it from the token count.

Schedule-free AdamW (Defazio et al., arXiv 2405.15682) has three sets of parameters: the iterates z, their running
average x (the parameters to evaluate and save), and the interpolation y of z and x, at which gradients are computed.
The train state holds y (its `params`) and z (in its optimizer state).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from pma_jax.config import OptimizerConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import ROUTER_BIAS

OptState = Any  # an optax.OptState; for schedule-free AdamW, (clipping state, ScheduleFreeState)


def init_opt_state(config: OptimizerConfig, params: Params) -> OptState:
    """Initialize the optimizer state for `params`. Can be called under `jax.jit`."""
    return _optimizer(config, 0.0).init(params)


def update_params(
    config: OptimizerConfig, gradients: Params, opt_state: OptState, params: Params, learning_rate: jax.Array
) -> tuple[Params, OptState]:
    """Take one optimizer step and return the new parameters and optimizer state. Can be called under `jax.jit`."""
    updates, opt_state = _optimizer(config, learning_rate).update(gradients, opt_state, params)
    if config.name == "schedule_free_adamw":
        return jax.tree.map(jnp.add, params, updates), opt_state
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), opt_state


def eval_params(config: OptimizerConfig, params: Params, opt_state: OptState) -> Params:
    """Return the parameters to evaluate and save: schedule-free's x, or `params` itself for AdamW."""
    if config.name == "adamw":
        return params
    return _schedule_free_params(opt_state[1], params)


def reset_iterates(config: OptimizerConfig, opt_state: OptState, params: Params) -> OptState:
    """Return `opt_state` with schedule-free's z replaced by `params`; AdamW's is returned unchanged.

    If the parameters y of the train state are also set to `params`, the average x equals `params` too.
    """
    if config.name == "adamw":
        return opt_state
    clipping_state, schedule_free_state = opt_state
    # Copy: the train step donates both the parameters and z, and one buffer cannot be donated twice.
    return clipping_state, schedule_free_state._replace(z=jax.tree.map(jnp.copy, params))


# Jitted: one fused pass over the two trees.
_schedule_free_params = jax.jit(optax.contrib.schedule_free_eval_params)


def _optimizer(config: OptimizerConfig, learning_rate: jax.Array | float) -> optax.GradientTransformation:
    """Return the gradient transformation, with clipping.

    AdamW's updates (decoupled weight decay, arXiv 1711.05101) are unscaled: `update_params` multiplies them by
    -`learning_rate`. Schedule-free AdamW's updates are already scaled.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.name == "adamw":
        return optax.chain(clip, optax.scale_by_adam(config.b1, config.b2, config.epsilon), decay)
    # Not optax.contrib.schedule_free_adamw: its decay has no mask, and its learning rate is a function of steps.
    scale_by_rms = optax.scale_by_rms(config.b2, config.epsilon, eps_in_sqrt=False, bias_correction=True)
    base = optax.chain(scale_by_rms, decay, optax.scale(-learning_rate))
    return optax.chain(clip, optax.contrib.schedule_free(base, learning_rate, b1=config.b1))


def decay_mask(params: Params) -> Params:
    """Return a pytree of booleans: True for parameters with weight decay: all but norm scales, router bias."""

    def has_decay(path, _) -> bool:
        name = path[-1].key
        return "norm" not in name and name != ROUTER_BIAS

    return jax.tree_util.tree_map_with_path(has_decay, params)
