"""AdamW, or schedule-free AdamW, with global-norm clipping; weight decay on matrices only.

The learning rate is an argument, a function of tokens (schedule.py). AdamW trains the parameters of the model itself.
Schedule-free AdamW trains y, where gradients are taken, between the iterates z and their average x, which is the model
(Defazio et al., arXiv 2405.15682).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from pma_jax.config import OptimizerConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import ROUTER_BIAS

Moments = Any  # an optax.OptState; schedule-free: (state of the clipping, ScheduleFreeState)


def initial_moments(config: OptimizerConfig, params: Params) -> Moments:
    """Return the optimizer state before the first step from `params`; traceable."""
    return _optimizer(config, 0.0).init(params)


def apply_update(
    config: OptimizerConfig, gradients: Params, moments: Moments, params: Params, rate: jax.Array
) -> tuple[Params, Moments]:
    """Return the parameters and moments after one step with learning rate `rate`; traceable."""
    updates, moments = _optimizer(config, rate).update(gradients, moments, params)
    if config.name == "schedule_free_adamw":
        return jax.tree.map(jnp.add, params, updates), moments
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), moments


def eval_params(config: OptimizerConfig, params: Params, moments: Moments) -> Params:
    """Return the parameters to evaluate and save: schedule-free's x, or `params` itself for AdamW."""
    if config.name == "adamw":
        return params
    return _schedule_free_params(moments[1], params)


def reset_iterates(config: OptimizerConfig, moments: Moments, params: Params) -> Moments:
    """Return the moments for new parameters: schedule-free's iterates, and so their average, are set to `params`."""
    if config.name == "adamw":
        return moments
    clip, free = moments
    # Copies, because a step donates the parameters and the iterates separately.
    return clip, free._replace(z=jax.tree.map(jnp.copy, params))


# Jitted: one fused pass over the two trees.
_schedule_free_params = jax.jit(optax.contrib.schedule_free_eval_params)


def _optimizer(config: OptimizerConfig, rate: jax.Array | float) -> optax.GradientTransformation:
    """Return schedule-free AdamW, or AdamW (decoupled decay, arXiv 1711.05101) without its rate; both with clipping."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.name == "adamw":
        return optax.chain(clip, optax.scale_by_adam(config.b1, config.b2, config.epsilon), decay)
    # Not optax.contrib.schedule_free_adamw: its decay has no mask, and its rate is a function of steps.
    second = optax.scale_by_rms(config.b2, config.epsilon, eps_in_sqrt=False, bias_correction=True)
    base = optax.chain(second, decay, optax.scale(-rate))
    return optax.chain(clip, optax.contrib.schedule_free(base, rate, b1=config.b1))


def decay_mask(params: Params) -> Params:
    """Return True for each leaf that weight decay applies to: all but the scales of norms and the router's bias."""

    def is_matrix(path, _) -> bool:
        name = path[-1].key
        return "norm" not in name and name != ROUTER_BIAS

    return jax.tree_util.tree_map_with_path(is_matrix, params)
