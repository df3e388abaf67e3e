"""Validation of configuration values: choices, signs, and rules that involve several keys."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from pma_jax.config.errors import UserError
from pma_jax.config.schema import POSITIVE, SNAPSHOT_KINDS, Config

MAX_CONFIRM_STEPS = 30  # the detector keeps one bit per step in an int32, and one spare bit to add the next step
MIN_SPIKE_WINDOW_STEPS = 16  # fewer steps give no meaningful median and spread
_HINTS = {name: get_type_hints(section, include_extras=True) for name, section in get_type_hints(Config).items()}


def validate(config: Config) -> None:
    """Validate a configuration.

    Raises:
        UserError: A rule is violated; the message is one line that names the keys.
    """
    _validate_each_key(config)
    _validate_sizes(config)
    _validate_checkpoint(config)
    _validate_optimizer(config)
    _validate_spikes(config)
    if not 0 < config.data.held_out_percent < 100:
        raise UserError("data.held_out_percent must lie between 0 and 100")
    if any(w < 1 for w in config.preview.windows):
        raise UserError(f"preview.windows must be 1 or more, not {config.preview.windows}")
    schedule, total_tokens = config.schedule, config.training.total_tokens
    if schedule.decay != "none" and not schedule.warmup_tokens <= schedule.decay_start_tokens < total_tokens:
        raise UserError(
            f"schedule.decay_start_tokens ({schedule.decay_start_tokens}) must lie between the end of the warm-up "
            f"({schedule.warmup_tokens}) and training.total_tokens ({total_tokens})"
        )


def _validate_each_key(config: Config) -> None:
    """Check the choices (Literal) and signs (Annotated) in the types of the schema's fields."""
    for section, hints in _HINTS.items():
        for key, hint in hints.items():
            value = getattr(getattr(config, section), key)
            if get_origin(hint) is Literal:
                _check_choice(f"{section}.{key}", value, get_args(hint))
            elif get_origin(hint) is Annotated:
                (sign,) = hint.__metadata__
                if value < 0 or (value == 0 and sign == POSITIVE):
                    raise UserError(f"config key '{section}.{key}' must be {sign}, not {value}")


def _validate_sizes(config: Config) -> None:
    model, training = config.model, config.training
    _check_divides("model.kv_heads", model.kv_heads, "model.heads", model.heads)
    batch_size = training.batch_size_sequences
    _check_divides(
        "training.accumulation_steps", training.accumulation_steps, "training.batch_size_sequences", batch_size
    )
    if model.head_dim % 2:
        raise UserError(f"model.head_dim must be even for rotary positions, not {model.head_dim}")
    if model.experts and model.experts_per_token > model.experts:
        raise UserError(
            f"model.experts_per_token ({model.experts_per_token}) is more than the {model.experts} of model.experts"
        )
    if config.mesh.expert not in (-1, 1) and not model.experts:
        raise UserError(
            f"mesh.expert is {config.mesh.expert}, and the model has no experts: use mesh.fsdp or mesh.data"
        )


def _validate_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.interval_tokens < config.batch_tokens:
        raise UserError(
            f"checkpoint.interval_tokens ({checkpoint.interval_tokens}) is less than one step's "
            f"{config.batch_tokens} tokens: raise it or shrink the batch"
        )
    for kind in checkpoint.kinds:
        _check_choice("checkpoint.kinds", kind, tuple(SNAPSHOT_KINDS))
    if not checkpoint.kinds or len(set(checkpoint.kinds)) < len(checkpoint.kinds):
        raise UserError(f"checkpoint.kinds must name one kind or both, not {checkpoint.kinds}")
    interval_steps = checkpoint.interval_tokens // config.batch_tokens
    if "block_mean" in checkpoint.kinds and checkpoint.block_every_steps > interval_steps:
        raise UserError(
            f"checkpoint.block_every_steps ({checkpoint.block_every_steps}) is more than the {interval_steps} steps of "
            "checkpoint.interval_tokens, so a block mean would be empty: lower it"
        )


def _validate_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.name != "schedule_free_adamw":
        return
    if not 0 < optimizer.b1 < 1:
        raise UserError(f"optimizer.b1 must lie between 0 and 1 for schedule_free_adamw, not {optimizer.b1}")
    if optimizer.ema_half_life_tokens:
        raise UserError("optimizer.ema_half_life_tokens and schedule_free_adamw both average: choose one of them")
    if config.model.experts and config.model.router_bias:
        raise UserError(
            "schedule_free_adamw would treat the update of a router's bias as a gradient step: set "
            "model.router_bias=false"
        )
    if config.spikes.attempts and config.spikes.optimizer != "reset":
        raise UserError(
            f"spikes.optimizer={config.spikes.optimizer} would keep the iterates of schedule_free_adamw that a merge "
            "replaces: set spikes.optimizer=reset"
        )


def _validate_spikes(config: Config) -> None:
    spikes, checkpoint = config.spikes, config.checkpoint
    if spikes.confirm_steps > MAX_CONFIRM_STEPS:
        raise UserError(f"spikes.confirm_steps must be at most {MAX_CONFIRM_STEPS}, not {spikes.confirm_steps}")
    responds_to_spikes = spikes.attempts or spikes.skip_gradient_z
    if responds_to_spikes and not spikes.detect:
        raise UserError("spikes.attempts and spikes.skip_gradient_z need spikes.detect=true to detect spikes")
    if responds_to_spikes and config.tokens_to_steps(spikes.window_tokens) < MIN_SPIKE_WINDOW_STEPS:
        raise UserError(
            f"spikes.window_tokens ({spikes.window_tokens}) is less than {MIN_SPIKE_WINDOW_STEPS} steps of "
            f"{config.batch_tokens} tokens: raise it"
        )
    # A spike is declared irrecoverable about `patience_tokens` after it begins. The snapshots from before it, which a
    # rollback merges, must still exist then.
    snapshots_during_patience = spikes.patience_tokens // checkpoint.interval_tokens + 1
    needed = snapshots_during_patience + spikes.snapshots + max(spikes.attempts - 1, 0)
    kept = checkpoint.keep_windows * checkpoint.window
    if spikes.attempts and 0 < kept < needed:
        raise UserError(
            f"checkpoint.keep_windows * checkpoint.window keeps {kept} snapshots, but a rollback needs {needed} "
            "(spikes.snapshots, one per retry, those saved during spikes.patience_tokens): raise keep_windows"
        )


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"config key {key!r} must be one of {', '.join(choices)}, not {value!r}")


def _check_divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise UserError(f"{small_key} ({small}) must divide {large_key} ({large})")
