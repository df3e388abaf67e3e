"""Rules of the section `replicas`: which keys belong to which method, and what does not go together."""

import dataclasses

from pma_jax.config.choices import WORKER_SNAPSHOTS
from pma_jax.config.errors import UserError
from pma_jax.config.replicas_schema import ReplicasConfig
from pma_jax.config.schema import Config

METHODS = ("periodic", "diloco", "streaming", "sparta", "noloco")


def validate_replicas(config: Config) -> None:
    """Validate `replicas`, and what other sections must be with it.

    Raises:
        UserError: A rule is violated; the message is one line that names the keys.
    """
    replicas = config.replicas
    _reject_keys_of_other_methods(replicas)
    if replicas.method == "none":
        if config.mesh.replica != 1:
            raise UserError(
                f"mesh.replica is {config.mesh.replica}, and replicas.method is none: choose a method, or use mesh.data"
            )
        if WORKER_SNAPSHOTS in config.checkpoint.kinds:
            raise UserError(
                f"checkpoint.kinds has {WORKER_SNAPSHOTS}, and replicas.method is none: there are no workers to save"
            )
        return
    _validate_workers(config)
    _validate_interval(config)
    _validate_other_sections(config)


def _reject_keys_of_other_methods(replicas: ReplicasConfig) -> None:
    """Raise UserError if a key is set that the method does not read."""
    shared = {"method", "count"} if replicas.method != "none" else set()
    if shared and (replicas.method != "sparta" or replicas.sparta_diloco):
        shared.add("interval_tokens")
    for field in dataclasses.fields(replicas):
        value, owner = getattr(replicas, field.name), field.name.partition("_")[0]
        if value == field.default or field.name in shared:
            continue
        if owner == replicas.method or (owner == "diloco" and replicas.sparta_diloco):
            continue
        owners = f"a key of replicas.method={owner}" if owner in METHODS else "without effect"
        raise UserError(
            f"replicas.{field.name} is {owners}, and replicas.method is {replicas.method}: leave it out or change the "
            "method"
        )


def _validate_workers(config: Config) -> None:
    count, batch = config.replicas.count, config.training.batch_size_sequences
    microbatches = max(count, 1) * config.training.accumulation_steps
    if batch % microbatches:
        raise UserError(
            f"replicas.count ({count}) workers, each with training.accumulation_steps "
            f"({config.training.accumulation_steps}), must divide training.batch_size_sequences ({batch})"
        )
    if count and config.mesh.replica > 0 and count % config.mesh.replica:
        raise UserError(f"mesh.replica ({config.mesh.replica}) must divide replicas.count ({count})")
    if config.replicas.method == "noloco" and count % 2:
        raise UserError(f"replicas.method=noloco averages pairs of workers: replicas.count must be even, not {count}")


def _validate_interval(config: Config) -> None:
    replicas = config.replicas
    interval, fragments = replicas.interval_tokens, replicas.streaming_fragments
    if replicas.method == "sparta" and not replicas.sparta_diloco:
        return
    if interval < config.batch_tokens:
        raise UserError(
            f"replicas.interval_tokens ({interval:,}) is less than one step's {config.batch_tokens:,} tokens: raise it "
            "or shrink the batch"
        )
    if replicas.method != "streaming":
        return
    if fragments > config.model.layers:
        raise UserError(
            f"replicas.streaming_fragments ({fragments}) is more than the {config.model.layers} of model.layers: a "
            "fragment is a range of layers"
        )
    if interval < fragments * config.batch_tokens:
        raise UserError(
            f"replicas.interval_tokens ({interval:,}) is less than replicas.streaming_fragments ({fragments}) steps of "
            f"{config.batch_tokens:,} tokens: raise it or use fewer fragments"
        )
    resend_tokens = interval // config.batch_tokens * config.batch_tokens  # the fewest between two sends of a fragment
    if replicas.streaming_delay_tokens >= resend_tokens:
        raise UserError(
            f"replicas.streaming_delay_tokens ({replicas.streaming_delay_tokens:,}) must be less than the complete "
            f"steps of replicas.interval_tokens ({resend_tokens:,} tokens): a fragment is used before it is sent again"
        )
    if 0 < replicas.streaming_delay_tokens < config.batch_tokens:
        raise UserError(
            f"replicas.streaming_delay_tokens ({replicas.streaming_delay_tokens:,}) must be 0 or at least one step "
            f"({config.batch_tokens:,} tokens)"
        )
    if replicas.streaming_error_feedback and replicas.streaming_dtype == "float32":
        raise UserError(
            "replicas.streaming_error_feedback is for outer gradients that are rounded: choose another "
            "replicas.streaming_dtype"
        )


def _validate_other_sections(config: Config) -> None:
    method, optimizer = config.replicas.method, config.optimizer
    if optimizer.name != "adamw":
        raise UserError(
            f"optimizer.name={optimizer.name} averages the parameters itself, which replicas.method={method} does not "
            "combine with: use adamw"
        )
    for key in ("ema_half_life_tokens", "bema_interval_tokens"):
        if getattr(optimizer, key):
            raise UserError(
                f"optimizer.{key} does not combine with replicas.method={method}: average snapshots instead"
            )
    if config.spikes.attempts:
        raise UserError(f"spikes.attempts does not combine with replicas.method={method}: set it to 0")
