"""The methods by name: what they keep, when their workers average, and which parameters stand for all workers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from pma_jax.config import Config, ReplicasConfig
from pma_jax.replicas import diloco, noloco, periodic, sparta, streaming
from pma_jax.replicas.workers import Tree, Workers, mean
from pma_jax.runtime.mesh import platform_of

# XLA's default schedule on CPU computes the means of all leaves first, when those of the first are in no cache any more
# and all take memory at a time. This one finishes each leaf in turn.
CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


class Sync(NamedTuple):
    """What is done after a step: all of it in one program."""

    outer: bool = False  # the outer step of the method, on all parameters
    share: bool = False  # SPARTA's average of a share of the parameters
    sent: int | None = None  # Streaming DiLoCo: the fragment to send
    received: int | None = None  # Streaming DiLoCo: the fragment to use

    def __bool__(self) -> bool:
        return self != Sync()


def has_outer_params(config: ReplicasConfig) -> bool:
    """Return whether there are outer parameters, which are the same for all workers."""
    return config.method in ("diloco", "streaming") or config.sparta_diloco


def init(config: ReplicasConfig, params: Tree, count: int) -> Tree:
    """Return what a method keeps between two averages, at its start.

    Args:
        config: The method.
        params: The parameters from which all workers start, without a dim of workers.
        count: Number of workers.
    """
    if config.method == "streaming":
        return streaming.init(config, params, count)
    if config.method == "noloco":
        return noloco.init(config, params, count)
    return diloco.init(config, params) if has_outer_params(config) else periodic.init(config, params)


def sync_after(config: Config, tokens: int) -> Sync:
    """Return what is done after the step that ends at `tokens`."""
    replicas = config.replicas
    if replicas.method == "none":
        return Sync()
    if replicas.method == "streaming":
        delay = replicas.streaming_delay_tokens // config.batch_tokens * config.batch_tokens
        return Sync(sent=_fragment_sent(config, tokens), received=_fragment_sent(config, tokens - delay))
    is_due = config.is_mark(tokens, replicas.interval_tokens)
    if replicas.method == "sparta":
        return Sync(outer=is_due and replicas.sparta_diloco, share=True)
    return Sync(outer=is_due)


def syncs(config: Config) -> dict[str, tuple[Sync, int]]:
    """Return what a run does between steps, by name: each sync that sends, and the tokens from one to the next."""
    replicas = config.replicas
    interval = replicas.interval_tokens
    if replicas.method == "none":
        return {}
    if replicas.method == "streaming":
        return {f"sync_fragment_{f}": (Sync(sent=f), interval) for f in range(replicas.streaming_fragments)}
    share = {"sync_share": (Sync(share=True), config.batch_tokens)} if replicas.method == "sparta" else {}
    has_outer_step = replicas.method != "sparta" or replicas.sparta_diloco
    return share | ({"sync": (Sync(outer=True), interval)} if has_outer_step else {})


def _fragment_sent(config: Config, tokens: int) -> int | None:
    """Return the fragment that is sent after the step that ends at `tokens`; None if none is.

    There are P marks per interval, at equal distances; at the n-th, fragment n modulo P is sent.
    """
    count, interval = config.replicas.streaming_fragments, config.replicas.interval_tokens
    mark = tokens * count // interval
    is_new = mark > (tokens - config.batch_tokens) * count // interval
    return mark % count if is_new and mark > 0 else None


def last_update_tokens(config: Config, tokens: int, since: int = 0, of_worker: bool = False) -> int | None:
    """Return the tokens at the last average of the workers that parameters at `tokens` contain.

    Args:
        config: The configuration of the run.
        tokens: Tokens of the parameters.
        since: Tokens at which the run starts: 0, or those of the state from which it was forked.
        of_worker: Whether the parameters are those of a worker, not those that stand for all workers.

    Returns:
        The tokens; None before the first average of the run, and without `replicas`.
    """

    def is_update(sync: Sync) -> bool:
        if of_worker:
            return sync.outer or sync.share or sync.received is not None
        if has_outer_params(config.replicas):
            return sync.outer or sync.sent is not None
        return bool(sync)

    if config.replicas.method == "none":
        return None
    step_ends = range(tokens, since, -config.batch_tokens)
    return next((end for end in step_ends if is_update(sync_after(config, end))), None)


@functools.lru_cache(maxsize=64)
def make_sync(config: ReplicasConfig, sync: Sync, mesh: jax.sharding.Mesh) -> Callable[[Workers, jax.Array], Workers]:
    """Return the jitted function from the workers, which it donates, and the number of the step to the new workers.

    It is traced for the current mesh, which must be `mesh`.
    """

    def apply(workers: Workers, step: jax.Array) -> Workers:
        if sync.share:
            params = sparta.average_share(workers.params, config.sparta_share, step)
            workers = dataclasses.replace(workers, params=params)
        if sync.received is not None and sync.received != sync.sent:
            workers = streaming.receive(config, workers, sync.received)
        if sync.sent is not None:
            workers = streaming.send(config, workers, sync.sent)
        if sync.received is not None and sync.received == sync.sent:  # without a delay
            workers = streaming.receive(config, workers, sync.received)
        if sync.outer and config.method == "noloco":
            return noloco.sync(config, workers, step)
        if sync.outer and has_outer_params(config):
            return diloco.sync(config, workers)
        return periodic.sync(config, workers) if sync.outer else workers

    return jax.jit(apply, donate_argnums=0, compiler_options=CPU_OPTIONS if platform_of(mesh) == "cpu" else None)


def worker_params(config: ReplicasConfig, workers: Workers) -> Tree:
    """Return the parameters of each worker, [K, ...]: those that a method without shared outer parameters averages."""
    return workers.outer["params"] if config.method == "noloco" else workers.params


def shared_params(config: ReplicasConfig, workers: Workers) -> Tree:
    """Return the parameters that stand for all workers: the outer ones, or the mean; without a dim of workers."""
    if has_outer_params(config):
        return workers.outer["params"]
    return mean(worker_params(config, workers))
