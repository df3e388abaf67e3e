"""AdamW, alone, schedule-free or with GPA, with global-norm clipping; no decay of norm scales and the router bias.

The caller passes the learning rate of each step; schedule.py computes it from the token count.

Schedule-free AdamW (Defazio et al., arXiv 2405.15682) has three sets of parameters: the iterates z, their running
average x (the parameters to evaluate and save), and the interpolation y of z and x, at which gradients are computed.
The train state holds y (its `params`) and z (in its optimizer state).

GPA, generalized primal averaging (arXiv 2512.17131), has the same three sets, an average x with a constant half-life,
and AdamW with its first moment. With d AdamW's direction at y, with bias-corrected moments:

    y = mu_y x + (1 - mu_y) z
    z <- (1 - rate * decay) z - rate * d
    x <- mu_x x + (1 - mu_x) z

They start from the same parameters. The train state holds x (its `params`) and z; y is computed in each step. The
authors' code (GPAAdamW of facebookresearch/optimizers) stores y instead of x. It decays z but not the stored y, so that
with weight decay its iterates differ from these, which are the paper's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from pma_jax.config import OptimizerConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import ROUTER_BIAS
from pma_jax.training import averages

OptState = Any  # an optax.OptState; for schedule-free AdamW, (clipping state, ScheduleFreeState); for GPA, a GpaState
PUBLISHED_GPA_DECAY = 0.9 ** (1 / 32)  # mu_x of arXiv 2512.17131, 0.9967


class GpaState(NamedTuple):
    """GPA's iterates z, and the optax state of AdamW, whose moments are of the gradients at y."""

    z: Params
    adamw: optax.OptState


def init_opt_state(config: OptimizerConfig, params: Params) -> OptState:
    """Initialize the optimizer state for `params`. Can be called under `jax.jit`."""
    opt_state = _optimizer(config, 0.0).init(params)
    return GpaState(jax.tree.map(jnp.copy, params), opt_state) if config.name == "gpa_adamw" else opt_state


def gradient_params(config: OptimizerConfig, params: Params, opt_state: OptState) -> Params:
    """Return the parameters at which to compute gradients: GPA's y, or else `params` itself."""
    if config.name != "gpa_adamw":
        return params
    return averages.interpolate(params, opt_state.z, 1 - config.gpa_interpolation)


def update_params(
    config: OptimizerConfig,
    gradients: Params,
    opt_state: OptState,
    params: Params,
    learning_rate: jax.Array,
    batch_tokens: int,
) -> tuple[Params, OptState]:
    """Take one optimizer step of `batch_tokens` and return the new parameters and optimizer state; traceable."""
    if config.name == "gpa_adamw":
        updates, adamw = _optimizer(config, learning_rate).update(gradients, opt_state.adamw, opt_state.z)
        z = jax.tree.map(lambda z, u: z - learning_rate * u, opt_state.z, updates)
        half_life_tokens = config.gpa_half_life_tokens
        decay = averages.ema_decay(half_life_tokens, batch_tokens) if half_life_tokens else PUBLISHED_GPA_DECAY
        return averages.interpolate(params, z, 1 - decay), GpaState(z, adamw)
    updates, opt_state = _optimizer(config, learning_rate).update(gradients, opt_state, params)
    if config.name == "schedule_free_adamw":
        return jax.tree.map(jnp.add, params, updates), opt_state
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), opt_state


def eval_params(config: OptimizerConfig, params: Params, opt_state: OptState) -> Params:
    """Return the parameters to evaluate and save: schedule-free's x, or `params` itself (for GPA, its x)."""
    if config.name != "schedule_free_adamw":
        return params
    return _schedule_free_params(opt_state[1], params)


def reset_iterates(config: OptimizerConfig, opt_state: OptState, params: Params) -> OptState:
    """Return `opt_state` with the z of schedule-free or GPA replaced by `params`; AdamW's is returned unchanged.

    If the parameters of the train state (y or x) are also set to `params`, the third set of parameters equals them too.
    """
    if config.name == "adamw":
        return opt_state
    # Copy: the train step donates both the parameters and z, and one buffer cannot be donated twice.
    z = jax.tree.map(jnp.copy, params)
    if config.name == "gpa_adamw":
        return opt_state._replace(z=z)
    clipping_state, schedule_free_state = opt_state
    return clipping_state, schedule_free_state._replace(z=z)


# Jitted: one fused pass over the two trees.
_schedule_free_params = jax.jit(optax.contrib.schedule_free_eval_params)


def _optimizer(config: OptimizerConfig, learning_rate: jax.Array | float) -> optax.GradientTransformation:
    """Return the gradient transformation, with clipping.

    AdamW's updates (decoupled weight decay, arXiv 1711.05101), and so GPA's, are unscaled: `update_params` multiplies
    them by -`learning_rate`. Schedule-free AdamW's updates are already scaled.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.name != "schedule_free_adamw":
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
