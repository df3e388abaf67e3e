"""AdamW with global-norm clipping; weight decay on matrices only. The rate is applied by the step, in tokens."""

import jax
import optax

from pma_jax.config import OptimizerConfig
from pma_jax.model.decoder import Params
from pma_jax.model.moe import BIAS


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip, Adam's direction, decoupled weight decay (arXiv 1711.05101); what is left is to multiply by -rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def decays(params: Params) -> Params:
    """True for each leaf that weight decay applies to: all but the scales of norms and the router's bias."""

    def is_matrix(path, _) -> bool:
        name = path[-1].key
        return "norm" not in name and name != BIAS

    return jax.tree_util.tree_map_with_path(is_matrix, params)
