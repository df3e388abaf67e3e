"""Validation of configuration values: choices, ranges, and rules that involve several keys.

Everything is checked before anything is read or allocated, so that a mistyped number is a message that names its key.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pma_jax.config.bounds import NON_EMPTY, Range
from pma_jax.config.choices import SNAPSHOT_KINDS, WORKER_SNAPSHOTS
from pma_jax.config.errors import UserError, shorten
from pma_jax.config.optimizer_rules import validate_optimizer
from pma_jax.config.replica_rules import validate_replicas
from pma_jax.config.schema import Config

MAX_STEPS = 2**31 - 1  # steps are counted in an int32
MAX_BATCH_TOKENS = 2**30  # 4 GiB of token ids
MAX_PARAMETERS = 2**45
MAX_PADDED_SEQUENCES = 4096  # an evaluation batch may hold this many although fewer are evaluated
MAX_SPIKE_WINDOW_STEPS = 2**19  # each step reads the window tens of times
MAX_DEVICES = 2**20
MAX_LIST_ITEMS = 10_000
MAX_TEXT_CHARACTERS = 4096
MIN_SPIKE_WINDOW_STEPS = 16  # fewer steps give no meaningful median and spread
_HINTS = {name: get_type_hints(section, include_extras=True) for name, section in get_type_hints(Config).items()}


def validate(config: Config) -> None:
    """Validate a configuration.

    Raises:
        UserError: A rule is violated; the message is one line that names the keys.
    """
    _validate_each_key(config)
    _validate_sizes(config)
    _validate_limits(config)
    _validate_checkpoint(config)
    validate_optimizer(config)
    _validate_spikes(config)
    validate_replicas(config)
    schedule, total_tokens = config.schedule, config.training.total_tokens
    if schedule.decay != "none" and not schedule.warmup_tokens <= schedule.decay_start_tokens < total_tokens:
        raise UserError(
            f"schedule.decay_start_tokens ({schedule.decay_start_tokens}) must lie between the end of the warm-up "
            f"({schedule.warmup_tokens}) and training.total_tokens ({total_tokens})"
        )
    if schedule.decay == "inverse_sqrt" and not schedule.decay_start_tokens:
        raise UserError(
            "schedule.decay=inverse_sqrt needs schedule.decay_start_tokens above 0: the rate is constant before"
        )
    if schedule.decay == "inverse_sqrt" and schedule.final_rate:
        raise UserError(
            f"schedule.final_rate ({schedule.final_rate:g}) has no effect with schedule.decay=inverse_sqrt, which does "
            "not end: set it to 0"
        )


def _validate_each_key(config: Config) -> None:
    """Check each value against the type of its field: choices (Literal), ranges (Annotated), texts and lists."""
    for section, hints in _HINTS.items():
        for key, hint in hints.items():
            _check_value(f"{section}.{key}", getattr(getattr(config, section), key), hint)


def _check_value(key: str, value: Any, hint: Any) -> None:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        _check_choice(key, value, arguments)
    elif origin is tuple:
        if len(value) > MAX_LIST_ITEMS:
            raise UserError(f"config key {key!r} must have at most {MAX_LIST_ITEMS:,} items, not {len(value):,}")
        for item in value:
            _check_value(key, item, arguments[0])
    elif isinstance(value, str):
        _check_text(key, value, may_be_empty=NON_EMPTY not in getattr(hint, "__metadata__", ()))
    elif origin is Annotated and isinstance(hint.__metadata__[0], Range) and value not in hint.__metadata__[0]:
        raise UserError(f"config key {key!r} must be {hint.__metadata__[0]}, not {shorten(value)}")


def _check_text(key: str, text: str, may_be_empty: bool) -> None:
    if not text and not may_be_empty:
        raise UserError(f"config key {key!r} must not be empty")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UserError(f"config key {key!r} must have at most {MAX_TEXT_CHARACTERS:,} characters, not {len(text):,}")
    if not text.isprintable():
        raise UserError(f"config key {key!r} must be printable text, without line breaks or NUL, not {shorten(text)}")


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
    if model.experts and model.norm_position != "before":
        raise UserError(f"model.norm_position={model.norm_position} is for dense models, and model.experts is not 0")
    if model.qk_norm_over != "head" and not model.qk_norm:
        raise UserError(f"model.qk_norm_over={model.qk_norm_over} needs model.qk_norm=true")
    if model.no_rope_interval > model.layers:
        raise UserError(
            f"model.no_rope_interval ({model.no_rope_interval}) is more than model.layers ({model.layers}), so that "
            "all blocks would have rotary positions: set it to 0"
        )
    if config.mesh.expert not in (-1, 1) and not model.experts:
        raise UserError(
            f"mesh.expert is {config.mesh.expert}, and the model has no experts: use mesh.fsdp or mesh.data"
        )


def _validate_limits(config: Config) -> None:
    """Check products of keys against limits that no real run reaches."""
    training, evaluation, batch_tokens = config.training, config.evaluation, config.batch_tokens
    length = training.sequence_length_tokens
    products = {
        "training.batch_size_sequences * training.sequence_length_tokens": (batch_tokens, MAX_BATCH_TOKENS),
        "evaluation.batch_size_sequences * training.sequence_length_tokens": (
            evaluation.batch_size_sequences * length,
            MAX_BATCH_TOKENS,
        ),
        "training.total_tokens in steps": (training.total_tokens // batch_tokens, MAX_STEPS),
        "spikes.patience_tokens in steps": (config.spikes.patience_tokens // batch_tokens, MAX_STEPS),
        "the devices of the axes of mesh": (_count_devices(config), MAX_DEVICES),
        "the parameters of model": (_count_parameters(config), MAX_PARAMETERS),
    }
    for name, (product, limit) in products.items():
        if product > limit:
            raise UserError(f"{name}: {product:,} is more than the limit of {limit:,}: check these keys")
    for name in ("replica", "data", "fsdp", "tensor", "expert"):
        if getattr(config.mesh, name) == 0:
            raise UserError(f"mesh.{name} must be 1 or more, or -1 for all remaining devices, not 0")
    evaluated = -(-evaluation.tokens // length)
    most = max(evaluated, MAX_PADDED_SEQUENCES, _count_devices(config))
    if evaluation.batch_size_sequences > most:
        raise UserError(
            f"evaluation.batch_size_sequences ({evaluation.batch_size_sequences:,}) must be at most {most:,}: "
            f"evaluation.tokens is {evaluated:,} sequences"
        )


def _count_devices(config: Config) -> int:
    """Return the number of devices that the axes of the mesh need; an axis of -1 counts as one."""
    mesh = config.mesh
    return math.prod(max(size, 1) for size in (mesh.replica, mesh.data, mesh.fsdp, mesh.tensor, mesh.expert))


def _count_parameters(config: Config) -> int:
    """Return the number of parameters in matrices, which are nearly all."""
    model = config.model
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    experts = model.experts * model.expert_hidden + model.unrouted_hidden
    embeddings = model.vocabulary_size * (1 if model.tie_embeddings else 2)
    return model.width * (model.layers * (attention + 3 * experts + model.experts) + embeddings)


def _validate_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.interval_tokens < config.batch_tokens:
        raise UserError(
            f"checkpoint.interval_tokens ({checkpoint.interval_tokens}) is less than one step's "
            f"{config.batch_tokens} tokens: raise it or shrink the batch"
        )
    for kind in checkpoint.kinds:
        _check_choice("checkpoint.kinds", kind, (*SNAPSHOT_KINDS, WORKER_SNAPSHOTS))
    if not checkpoint.kinds or len(set(checkpoint.kinds)) < len(checkpoint.kinds):
        raise UserError(f"checkpoint.kinds must name each kind at most once, and at least one, not {checkpoint.kinds}")
    if checkpoint.kinds[0] == WORKER_SNAPSHOTS:
        raise UserError(
            f"checkpoint.kinds begins with {WORKER_SNAPSHOTS}: begin with the kind that previews merge, point or "
            "block_mean"
        )
    interval_steps = checkpoint.interval_tokens // config.batch_tokens
    if "block_mean" in checkpoint.kinds and checkpoint.block_every_steps > interval_steps:
        raise UserError(
            f"checkpoint.block_every_steps ({checkpoint.block_every_steps}) is more than the {interval_steps} steps of "
            "checkpoint.interval_tokens, so a block mean would be empty: lower it"
        )


def _validate_spikes(config: Config) -> None:
    spikes, checkpoint = config.spikes, config.checkpoint
    window_steps = config.tokens_to_steps(spikes.window_tokens)
    if spikes.detect and window_steps > MAX_SPIKE_WINDOW_STEPS:
        raise UserError(
            f"spikes.window_tokens ({spikes.window_tokens:,}) is {window_steps:,} steps of {config.batch_tokens:,} "
            f"tokens, more than the limit of {MAX_SPIKE_WINDOW_STEPS:,}: lower it"
        )
    responds_to_spikes = spikes.attempts or spikes.skip_gradient_z
    if responds_to_spikes and not spikes.detect:
        raise UserError("spikes.attempts and spikes.skip_gradient_z need spikes.detect=true to detect spikes")
    if responds_to_spikes and window_steps < MIN_SPIKE_WINDOW_STEPS:
        raise UserError(
            f"spikes.window_tokens ({spikes.window_tokens}) is less than {MIN_SPIKE_WINDOW_STEPS} steps of "
            f"{config.batch_tokens} tokens: raise it"
        )
    needed = config.snapshots_to_roll_back
    kept = checkpoint.keep_windows * checkpoint.window
    if 0 < kept < needed:
        raise UserError(
            f"checkpoint.keep_windows * checkpoint.window keeps {kept} snapshots, but a rollback needs {needed} "
            "(spikes.snapshots, one per retry, those saved during spikes.patience_tokens): raise keep_windows"
        )


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"config key {key!r} must be one of {', '.join(choices)}, not {shorten(value)}")


def _check_divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise UserError(f"{small_key} ({small}) must divide {large_key} ({large})")
