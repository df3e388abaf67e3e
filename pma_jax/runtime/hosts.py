"""Coordination of the processes of one multi-process job: join, agree on what only one of them knows, exit.

JAX's multi-controller runtime does the work: every process runs the same program over one mesh of all devices. State
outside that program, such as the contents of a directory, may look different to each process; if they then took
different branches, they would deadlock in the next collective. Process 0 therefore reads such state and broadcasts it.
In a single process every function here only calls what it wraps.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np

# There is no public way to read these without initialising the backend, which fixes the device count.
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from pma_jax.runtime.errors import error_line
from pma_jax.runtime.signals import StopRequest, catch_signals

T = TypeVar("T")

HEARTBEAT_SECONDS = 100  # JAX's own default
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Process 0 hosts the coordination service, so it exits last, after the others have reported their own errors.
_EXIT_DELAY_SECONDS = 2.0


def join(heartbeat_seconds: int = HEARTBEAT_SECONDS) -> None:
    """Join the other processes of this job. Call it before any use of a device; it waits until all have joined.

    The environment's `VARIABLES` (all three) describe the job; without them JAX detects it, on Cloud TPU, SLURM, Open
    MPI and Kubernetes (GKE).

    Args:
        heartbeat_seconds: A process without a heartbeat for this long is considered dead, and the others stop.

    Raises:
        ValueError: The variables are inconsistent, or no job is detected.
    """
    address, count, index = (os.environ.get(name) for name in VARIABLES)
    if (count is None) != (index is None) or (count is not None and address is None):
        raise ValueError(f"of {', '.join(VARIABLES)} some are set: set all three, or leave the job to JAX's detection")
    try:
        jax.distributed.initialize(
            address,
            None if count is None else int(count),
            None if index is None else int(index),
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except (ValueError, RuntimeError) as error:
        reason = error_line(error)[:300]
        raise ValueError(
            f"cannot join the processes of a job: {reason}: --distributed is for Cloud TPU, SLURM, Open MPI, "
            f"Kubernetes with jax[k8s], or with {', '.join(VARIABLES)} set"
        ) from error


def process_index_and_count() -> tuple[int, int]:
    """Return (index of this process, number of processes) without initialising the backend."""
    return global_state.process_id, global_state.num_processes


def is_first() -> bool:
    """Whether this process is process 0, which writes what exists once: metrics, tables, reports."""
    return global_state.process_id == 0


def gather(text: str) -> list[str]:
    """All-gather one text per process, in order; with several processes, wait for all and initialise the backend."""
    if global_state.num_processes == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).reshape(-1)
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [rows[p, :size].tobytes().decode() for p, size in enumerate(sizes.tolist())]


def broadcast_from_first(read: Callable[[], str]) -> str:
    """Call `read` in process 0 only, and return its result in all processes.

    Raises:
        ValueError: In all processes, if `read` raises ValueError or OSError.
    """
    if global_state.num_processes == 1:
        return read()
    text, error = "", ""
    if is_first():
        try:
            text = read()
        except (ValueError, OSError) as raised:
            error = error_line(raised)
    text, error = gather(text)[0], gather(error)[0]
    if error:
        raise ValueError(error)
    return text


def run_on_first_then_rest(work: Callable[[], T]) -> T:
    """Run `work` in process 0, then in all others, which find its side effects done. Return this process's result.

    Raises:
        ValueError: In all processes, if `work` raises ValueError or OSError in process 0.
    """
    results: list[T] = []

    def run_on_first() -> str:
        results.append(work())
        return ""

    broadcast_from_first(run_on_first)
    return results[0] if results else work()


def barrier(name: str) -> None:
    """Wait until all processes reach the barrier of this name."""
    if global_state.num_processes > 1:
        multihost_utils.sync_global_devices(f"pma_jax.{name}")


def raise_if_any_failed(error: Exception | None) -> None:
    """Wait for all processes, then raise if any of them has an error.

    Raises:
        Exception: This process's own error.
        ValueError: Another process failed; the message names the first.
    """
    errors = gather("" if error is None else error_line(error))
    if error is not None:
        raise error
    for process, line in enumerate(errors):
        if line:
            raise ValueError(f"process {process} failed: {line}")


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, record a SIGTERM or SIGINT for `is_stop_requested` instead of ending the process.

    Several processes must stop at the same step: they leave SIGTERM to JAX's coordination service.
    """
    if global_state.num_processes > 1:
        yield StopRequest()
        return
    with catch_signals(raises_stopped=False) as request:
        yield request


def is_stop_requested(request: StopRequest, step: int) -> bool:
    """Return whether to stop after `step`, the same in all processes; call it once for each step."""
    if global_state.num_processes > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return request.signal is not None


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End this process at once on an error (or Ctrl-C) inside the block, if there are several processes.

    An orderly exit would wait in collectives for the others, while they wait for this process; they notice that it is
    gone. A stop that all processes agreed on (a KeyboardInterrupt with a text) propagates normally.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        is_agreed = isinstance(error, KeyboardInterrupt) and bool(str(error))
        if global_state.num_processes > 1 and not is_agreed:
            exit_with_error(error)
        raise


def exit_with_error(error: BaseException) -> None:
    """Print an error in one line with this process's index, and exit at once: status 1, or 130 for Ctrl-C."""
    index, count = process_index_and_count()
    line = error_line(error)
    if isinstance(error, KeyboardInterrupt):
        line = "stopped, and the others with it: run the same command on all to resume from the last saved state"
    elif isinstance(error, jax.errors.JaxRuntimeError):
        line = f"another process has gone, or the devices failed: start the same command on all again ({line[:300]})"
    elif not isinstance(error, (ValueError, OSError)):
        sys.excepthook(type(error), error, error.__traceback__)
    print(f"error: process {index} of {count}: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if index == 0:
        time.sleep(_EXIT_DELAY_SECONDS)
    os._exit(getattr(error, "status", 130) if isinstance(error, KeyboardInterrupt) else 1)
