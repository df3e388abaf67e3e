"""AdamW, or schedule-free AdamW, with global-norm clipping; weight decay on matrices only.

The rate comes from outside, in tokens (schedule.py). AdamW's parameters are the model. Schedule-free's are y, where
gradients are taken, between the iterates z and their average x, which is the model (Defazio et al., arXiv 2405.15682).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from pma_jax.config import OptimizerConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import ROUTER_BIAS

Moments = Any  # an optax.OptState: of schedule-free a pair, the clipping's and a ScheduleFreeState


def initial_moments(config: OptimizerConfig, params: Params) -> Moments:
    """What the optimizer remembers before its first step from `params`; traceable."""
    return _optimizer(config, 0.0).init(params)


def apply_update(
    config: OptimizerConfig, gradients: Params, moments: Moments, params: Params, rate: jax.Array
) -> tuple[Params, Moments]:
    """The parameters and moments after a step with this learning rate; traceable."""
    updates, moments = _optimizer(config, rate).update(gradients, moments, params)
    if config.name == "schedule_free_adamw":
        return jax.tree.map(jnp.add, params, updates), moments
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), moments


def eval_params(config: OptimizerConfig, params: Params, moments: Moments) -> Params:
    """The model that the optimizer stands for: the parameters, or schedule-free's x. The same arrays for AdamW."""
    if config.name == "adamw":
        return params
    return _model(moments[1], params)


def reset_iterates(config: OptimizerConfig, moments: Moments, params: Params) -> Moments:
    """The moments where the parameters were set to these: schedule-free's iterates and average go along."""
    if config.name == "adamw":
        return moments
    clip, free = moments
    # Copies: a step takes over the parameters and the iterates, each for itself.
    return clip, free._replace(z=jax.tree.map(jnp.copy, params))


# From two trees of float32 a third: compiled, and the others stay.
_model = jax.jit(optax.contrib.schedule_free_eval_params)


def _optimizer(config: OptimizerConfig, rate: jax.Array | float) -> optax.GradientTransformation:
    """AdamW without its rate (clip, Adam's direction, decoupled decay, arXiv 1711.05101), or schedule-free with it."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.name == "adamw":
        return optax.chain(clip, optax.scale_by_adam(config.b1, config.b2, config.epsilon), decay)
    # optax.contrib.schedule_free_adamw, whose decay has no mask and whose rate counts steps.
    second = optax.scale_by_rms(config.b2, config.epsilon, eps_in_sqrt=False, bias_correction=True)
    base = optax.chain(second, decay, optax.scale(-rate))
    return optax.chain(clip, optax.contrib.schedule_free(base, rate, b1=config.b1))


def decay_mask(params: Params) -> Params:
    """True for each leaf that weight decay applies to: all but the scales of norms and the router's bias."""

    def is_matrix(path, _) -> bool:
        name = path[-1].key
        return "norm" not in name and name != ROUTER_BIAS

    return jax.tree_util.tree_map_with_path(is_matrix, params)
