"""What a run's configuration may hold, beyond the type of each key: names, signs, and keys that must fit each other."""

from pma_jax.config.schema import SNAPSHOT_KINDS, Config

SOURCES = ("packaged", "files", "hub")
TASKS = ("text", "functions")
OPTIMIZERS = ("adamw", "schedule_free_adamw")
DECAYS = ("none", "cosine", "linear", "minus_sqrt")
ROUTER_SCORES = ("softmax", "sigmoid")
REMAT_POLICIES = ("none", "full", "dots")
DTYPES = ("float32", "bfloat16")

OPTIMIZERS_AFTER_SPIKE = ("reset", "keep", "restore")
MOST_CONFIRM_STEPS = 30  # the detector keeps a bit a step
LEAST_SPIKE_WINDOW_STEPS = 16  # a median and a spread of fewer steps say little
_POSITIVE = {
    "data": ("pair_bytes",),
    "model": (
        "vocabulary_size",
        "width",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "hidden",
        "experts_per_token",
        "expert_hidden",
        "logits_chunk_tokens",
    ),
    "training": (
        "total_tokens",
        "sequence_length_tokens",
        "batch_size_sequences",
        "accumulation_steps",
        "log_interval_tokens",
    ),
    "checkpoint": ("interval_tokens", "block_every_steps", "window", "state_interval_tokens", "keep_states"),
    "evaluation": ("tokens", "batch_size_sequences"),
    "schedule": ("peak_rate",),
    "spikes": ("window_tokens", "loss_z", "gradient_z", "confirm_steps", "patience_tokens", "snapshots"),
}


def validate(config: Config) -> None:
    """Raise ValueError, one line that names the keys, where `config` breaks a rule."""
    model, training, checkpoint = config.model, config.training, config.checkpoint
    _one_of("data.source", config.data.source, SOURCES)
    _one_of("data.task", config.data.task, TASKS)
    _one_of("optimizer.name", config.optimizer.name, OPTIMIZERS)
    _one_of("schedule.decay", config.schedule.decay, DECAYS)
    _one_of("model.remat", model.remat, REMAT_POLICIES)
    _one_of("model.compute_dtype", model.compute_dtype, DTYPES)
    _one_of("model.router_scores", model.router_scores, ROUTER_SCORES)
    for section, keys in _POSITIVE.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if value <= 0:
                raise ValueError(f"config key '{section}.{key}' must be above 0, not {value}")
    _divides("model.kv_heads", model.kv_heads, "model.heads", model.heads)
    _divides(
        "training.accumulation_steps",
        training.accumulation_steps,
        "training.batch_size_sequences",
        training.batch_size_sequences,
    )
    _validate_optimizer(config)
    _validate_experts(config)
    _validate_spikes(config)
    if model.head_dim % 2:
        raise ValueError(f"model.head_dim must be even for rotary positions, not {model.head_dim}")
    if model.attention_window_tokens < 0:
        raise ValueError(f"model.attention_window_tokens must be 0 or more, not {model.attention_window_tokens}")
    if not 0 < config.data.held_out_percent < 100:
        raise ValueError("data.held_out_percent must lie between 0 and 100")
    if checkpoint.interval_tokens < config.batch_tokens:
        raise ValueError(
            f"checkpoint.interval_tokens ({checkpoint.interval_tokens}) is less than one step's "
            f"{config.batch_tokens} tokens: raise it or shrink the batch"
        )
    for kind in checkpoint.kinds:
        _one_of("checkpoint.kinds", kind, tuple(SNAPSHOT_KINDS))
    if not checkpoint.kinds or len(set(checkpoint.kinds)) < len(checkpoint.kinds):
        raise ValueError(f"checkpoint.kinds must name one kind or both, not {checkpoint.kinds}")
    interval_steps = checkpoint.interval_tokens // config.batch_tokens
    if "block_mean" in checkpoint.kinds and checkpoint.block_every_steps > interval_steps:
        raise ValueError(
            f"checkpoint.block_every_steps ({checkpoint.block_every_steps}) is more than the {interval_steps} steps of "
            "checkpoint.interval_tokens: a block mean would be of nothing; lower it"
        )
    if config.mesh.cpu_devices < 0:
        raise ValueError(f"mesh.cpu_devices must be 0 or more, not {config.mesh.cpu_devices}")
    if any(w < 1 for w in config.preview.windows):
        raise ValueError(f"preview.windows must be 1 or more, not {config.preview.windows}")
    schedule = config.schedule
    if schedule.decay != "none" and not (schedule.warmup_tokens <= schedule.decay_start_tokens < training.total_tokens):
        raise ValueError(
            f"schedule.decay_start_tokens ({schedule.decay_start_tokens}) must lie between the end of the warm-up "
            f"({schedule.warmup_tokens}) and training.total_tokens ({training.total_tokens})"
        )


def _validate_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.ema_half_life_tokens < 0:
        raise ValueError(f"optimizer.ema_half_life_tokens must be 0 or more, not {optimizer.ema_half_life_tokens}")
    if optimizer.name != "schedule_free_adamw":
        return
    if not 0 < optimizer.b1 < 1:
        raise ValueError(f"optimizer.b1 must lie between 0 and 1 for schedule_free_adamw, not {optimizer.b1}")
    if optimizer.ema_half_life_tokens:
        raise ValueError("optimizer.ema_half_life_tokens and schedule_free_adamw both average: choose one of them")
    if config.model.experts and config.model.router_bias:
        raise ValueError(
            "schedule_free_adamw takes what moves a router's bias for a gradient step: set model.router_bias=false"
        )
    if config.spikes.attempts and config.spikes.optimizer != "reset":
        raise ValueError(
            f"spikes.optimizer={config.spikes.optimizer} would keep the iterates of schedule_free_adamw that a merge "
            "replaces: set spikes.optimizer=reset"
        )


def _validate_experts(config: Config) -> None:
    model, training = config.model, config.training
    for key in ("experts", "shared_experts"):
        if getattr(model, key) < 0:
            raise ValueError(f"model.{key} must be 0 or more, not {getattr(model, key)}")
    for key in ("router_bias_rate", "balance_loss_weight", "router_z_loss_weight"):
        if getattr(training, key) < 0:
            raise ValueError(f"training.{key} must be 0 or more, not {getattr(training, key)}")
    if model.experts and model.experts_per_token > model.experts:
        raise ValueError(
            f"model.experts_per_token ({model.experts_per_token}) is more than the {model.experts} of model.experts"
        )
    if config.mesh.expert not in (-1, 1) and not model.experts:
        raise ValueError(
            f"mesh.expert is {config.mesh.expert}, and the model has no experts: use mesh.fsdp or mesh.data"
        )


def _validate_spikes(config: Config) -> None:
    spikes, checkpoint = config.spikes, config.checkpoint
    _one_of("spikes.optimizer", spikes.optimizer, OPTIMIZERS_AFTER_SPIKE)
    for key in ("minimum_rise_nats", "skip_gradient_z", "attempts", "warmup_tokens"):
        if getattr(spikes, key) < 0:
            raise ValueError(f"spikes.{key} must be 0 or more, not {getattr(spikes, key)}")
    if spikes.confirm_steps > MOST_CONFIRM_STEPS:
        raise ValueError(f"spikes.confirm_steps must be at most {MOST_CONFIRM_STEPS}, not {spikes.confirm_steps}")
    if not spikes.detect and (spikes.attempts or spikes.skip_gradient_z):
        raise ValueError("spikes.attempts and spikes.skip_gradient_z need spikes.detect=true: nothing would be seen")
    acts = spikes.attempts or spikes.skip_gradient_z
    if acts and config.steps(spikes.window_tokens) < LEAST_SPIKE_WINDOW_STEPS:
        raise ValueError(
            f"spikes.window_tokens ({spikes.window_tokens}) is less than {LEAST_SPIKE_WINDOW_STEPS} steps of "
            f"{config.batch_tokens} tokens: raise it"
        )
    # A spike is declared so many snapshots after it began, at most; retention must not have taken what a merge needs.
    passed = spikes.patience_tokens // checkpoint.interval_tokens + 1
    needed = passed + spikes.snapshots + max(spikes.attempts - 1, 0)
    kept = checkpoint.keep_windows * checkpoint.window
    if spikes.attempts and 0 < kept < needed:
        raise ValueError(
            f"checkpoint.keep_windows * checkpoint.window keeps {kept} snapshots, and going back to before a spike "
            f"needs {needed} (spikes.snapshots, attempts, and patience_tokens of them): raise keep_windows"
        )


def _one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"config key {key!r} is one of {', '.join(valid)}, not {value!r}")


def _divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise ValueError(f"{small_key} ({small}) must divide {large_key} ({large})")
