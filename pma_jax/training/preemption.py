"""Stopping a run at a step boundary when a signal requests it: a state is saved, and no step is lost."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from pma_jax.runs.states import Progress
from pma_jax.runtime.signals import Stopped, StopRequest, catch_signals


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, record a SIGTERM or SIGINT for `is_stop_requested` instead of ending the process.

    Several processes must stop at the same step: they leave SIGTERM to JAX's coordination service.
    """
    if jax.process_count() > 1:
        yield StopRequest()
        return
    with catch_signals(interrupts=False) as notice:
        yield notice


def is_stop_requested(notice: StopRequest, step: int) -> bool:
    """Return whether to stop after `step`, the same in all processes; call it once for each step."""
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return notice.signal is not None


def stopped(notice: StopRequest, progress: Progress | None) -> Stopped:
    """Return the exception to raise at a stop; `progress` is the state's that is being saved, None if there is none."""
    by = notice.name or "a preemption"
    done = (
        f"the state at step {progress.step:,} ({progress.tokens:,} tokens) is saved" if progress else "no step was done"
    )
    return Stopped(notice.signal or 15, f"stopped by {by}: {done}; repeat the command to continue from there")
