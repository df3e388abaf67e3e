"""Stopping a run at a step boundary when a signal asks for it: a state is saved, and no step is lost."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from pma_jax.runtime.signals import Stopped, StopRequest, catch_signals


@contextlib.contextmanager
def watched() -> Iterator[StopRequest]:
    """Within the block SIGTERM and SIGINT ask the loop to stop.

    Several processes must agree on the step: they leave SIGTERM to JAX, whose coordination service does that.
    """
    if jax.process_count() > 1:
        yield StopRequest()
        return
    with catch_signals(interrupts=False) as notice:
        yield notice


def asked(notice: StopRequest, step: int) -> bool:
    """Whether to stop before the step after `step`; the same in all processes. Each step is asked about once."""
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return notice.signal is not None


def stopped(notice: StopRequest, step: int, tokens: int, is_saved: bool) -> Stopped:
    """What to raise once the state is being saved; it is told when the writers have published it."""
    by = notice.name or "a preemption"
    what = f"the state at step {step:,} ({tokens:,} tokens) is saved" if is_saved else "no step was done"
    return Stopped(notice.signal or 15, f"stopped by {by}: {what}; the same command goes on from there")
