"""Rules of the section `optimizer`: which keys belong to which average, and what does not go together."""

from pma_jax.config.errors import UserError
from pma_jax.config.optimizer_schema import OptimizerConfig
from pma_jax.config.schema import Config


def validate_optimizer(config: Config) -> None:
    """Validate `optimizer`, and what other sections must be with it.

    Raises:
        UserError: A rule is violated; the message is one line that names the keys.
    """
    optimizer = config.optimizer
    _reject_unused_keys(optimizer)
    averages = [f"optimizer.name={optimizer.name}"] if optimizer.name != "adamw" else []
    averages += [f"optimizer.{k}" for k in ("ema_half_life_tokens", "bema_interval_tokens") if getattr(optimizer, k)]
    if len(averages) > 1:
        raise UserError(f"{' and '.join(averages)} each average the parameters: choose one of them")
    if optimizer.name != "adamw" and config.model.experts and config.model.router_bias:
        raise UserError(
            f"{optimizer.name} would treat the update of a router's bias as a gradient step: set "
            "model.router_bias=false"
        )
    if optimizer.name == "schedule_free_adamw":
        _validate_schedule_free(config)
    if optimizer.bema_interval_tokens:
        _validate_bema(config)


def _reject_unused_keys(optimizer: OptimizerConfig) -> None:
    """Raise UserError if a key is set of an average that is not chosen."""
    for key, value in optimizer.unused_keys.items():
        if value != getattr(OptimizerConfig(), key):
            choice = "optimizer.name=gpa_adamw" if key.startswith("gpa_") else "optimizer.bema_interval_tokens"
            raise UserError(f"optimizer.{key} is without effect: leave it out or set {choice}")


def _validate_schedule_free(config: Config) -> None:
    if not 0 < config.optimizer.b1 < 1:
        raise UserError(f"optimizer.b1 must lie between 0 and 1 for schedule_free_adamw, not {config.optimizer.b1}")
    if config.spikes.attempts and config.spikes.optimizer != "reset":
        raise UserError(
            f"spikes.optimizer={config.spikes.optimizer} would keep the iterates of schedule_free_adamw that a merge "
            "replaces: set spikes.optimizer=reset"
        )


def _validate_bema(config: Config) -> None:
    optimizer, total_tokens = config.optimizer, config.training.total_tokens
    if optimizer.bema_interval_tokens < config.batch_tokens:
        raise UserError(
            f"optimizer.bema_interval_tokens ({optimizer.bema_interval_tokens:,}) is less than one step's "
            f"{config.batch_tokens:,} tokens: raise it or shrink the batch"
        )
    if optimizer.bema_start_tokens >= total_tokens:
        raise UserError(
            f"optimizer.bema_start_tokens ({optimizer.bema_start_tokens:,}) must be less than training.total_tokens "
            f"({total_tokens:,})"
        )
