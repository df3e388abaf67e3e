"""Whether parameters of one model mean the same in another: the keys of `ModelConfig` that must agree for that."""

import dataclasses
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.config.schema import ModelConfig

# Keys that do not change the role of any parameter.
_WITHOUT_EFFECT = frozenset({"compute_dtype", "remat", "scan_layers", "logits_chunk_tokens", "separator_token"})
# Keys that are used only by dense models, or only by mixtures of experts.
_DENSE_ONLY = frozenset({"hidden"})
_MOE_ONLY = frozenset(
    {"experts_per_token", "expert_hidden", "shared_experts", "router_scores", "router_normalized", "router_bias"}
)


def model_differences(model: ModelConfig, other: ModelConfig) -> dict[str, Any]:
    """Return the keys, with their values in `model`, in which two models differ that affect what a parameter means."""
    ignored = _WITHOUT_EFFECT | (_DENSE_ONLY if model.experts else _MOE_ONLY)
    values, others = dataclasses.asdict(model), dataclasses.asdict(other)
    return {key: value for key, value in values.items() if key not in ignored and value != others[key]}


def check_one_model(models: dict[str, ModelConfig]) -> None:
    """Check that the parameters of snapshots may be averaged.

    Args:
        models: Path of each snapshot -> its model.

    Raises:
        UserError: The models differ; the message names two snapshots and the keys.
    """
    (first_path, first), *others = models.items()
    for path, model in others:
        if different := model_differences(first, model):
            keys = [f"model.{key} is {value} and {getattr(model, key)}" for key, value in different.items()]
            raise UserError(f"{first_path} and {path} are different models: {', '.join(keys)}; merge them apart")
