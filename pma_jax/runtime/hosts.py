"""Several processes that work as one: joining them, agreeing on what only one has seen, and leaving together.

JAX's own multi-controller runtime does the work: every process runs the same program over one mesh of all their
devices. What lies outside of a program, such as what a directory holds, each process could see differently, and then
they would wait for each other for ever: there, process 0 looks and tells the others. Alone, every function here does
nothing but what it wraps.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # jax.process_index() would start the devices, and with them settle them
from jax.experimental import multihost_utils

from pma_jax.runtime.errors import error_line

T = TypeVar("T")

HEARTBEAT_SECONDS = 100  # JAX's own default
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Process 0 keeps the others' connections: it goes last, so that they can say their own errors.
_LAST_WORDS_SECONDS = 2.0


def join(heartbeat_seconds: int = HEARTBEAT_SECONDS) -> None:
    """Join the other processes of this job; comes before anything that uses a device, and waits until all are there.

    Where they are is what the environment's `VARIABLES` say, all three; else what JAX finds out by itself, on Cloud
    TPU, SLURM, Open MPI and Kubernetes (GKE).

    Args:
        heartbeat_seconds: a process that was not heard of for so long is taken for dead, and the others stop.

    Raises:
        ValueError: the variables are wrong, or nothing says what the job is.
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
        said = error_line(error)[:300]
        raise ValueError(
            f"cannot join the processes of a job: {said}: --distributed is for Cloud TPU, SLURM, Open MPI, Kubernetes "
            f"with jax[k8s], or with {', '.join(VARIABLES)} set"
        ) from error


def process_index_and_count() -> tuple[int, int]:
    """(this process, number of processes); starts no device. (0, 1) alone."""
    return global_state.process_id, global_state.num_processes


def is_first() -> bool:
    """Whether this process is the one that writes what there is one of: metrics, tables, reports."""
    return global_state.process_id == 0


def gather(text: str) -> list[str]:
    """Every process's text, by process; waits for all of them. Starts the devices where there are several."""
    if global_state.num_processes == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).reshape(-1)
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [rows[p, :size].tobytes().decode() for p, size in enumerate(sizes.tolist())]


def broadcast_from_first(look: Callable[[], str]) -> str:
    """What `look` returns in process 0, in all processes; it is not called in the others.

    Raises:
        ValueError: in all processes, where it raises in process 0.
    """
    return _first(look)[0]


def run_on_first_then_rest(work: Callable[[], T]) -> T:
    """What `work` returns: process 0 does it, then the others do what is left of it.

    Raises:
        ValueError: in all processes, where it raises in process 0.
    """
    made: list[T] = []

    def by_first() -> str:
        made.append(work())
        return ""

    _first(by_first)
    return made[0] if made else work()


def barrier(name: str) -> None:
    """Wait until all processes have come here, which `name` says, the same in all."""
    if global_state.num_processes > 1:
        multihost_utils.sync_global_devices(f"pma_jax.{name}")


def raise_if_any_failed(error: Exception | None) -> None:
    """Wait for all processes; raise ValueError in all of them where one has an error, naming the first that has."""
    said = gather("" if error is None else error_line(error))
    failed = [p for p, line in enumerate(said) if line]
    if error is not None:
        raise error
    if failed:
        raise ValueError(f"process {failed[0]} could not: {said[failed[0]]}")


def enter_on_first(stack: contextlib.ExitStack, make: Callable[[], AbstractContextManager[T]]) -> T | None:
    """What a context manager gives process 0, which alone enters it, into its `stack`; None in the others.

    Raises:
        ValueError: in all processes, where process 0 cannot enter it.
    """
    value, problem = None, None
    if is_first():
        try:
            value = stack.enter_context(make())
        except (ValueError, OSError) as error:
            problem = error
    raise_if_any_failed(problem)
    return value


def _first(look: Callable[[], str]) -> tuple[str]:
    if global_state.num_processes == 1:
        return (look(),)
    text, error = "", ""
    if is_first():
        try:
            text = look()
        except (ValueError, OSError) as raised:
            error = error_line(raised)
    text, error = gather(text)[0], gather(error)[0]
    if error:
        raise ValueError(error)
    return (text,)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Where there are several processes, an error inside (or Ctrl-C) ends this one at once, with its line.

    Closing files in order would wait for the others, who wait for this one; that it is gone is what tells them. A stop
    that all have agreed on, which says what is saved, goes its way.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        is_agreed = isinstance(error, KeyboardInterrupt) and bool(str(error))
        if global_state.num_processes > 1 and not is_agreed:
            exit_with_error(error)
        raise


def exit_with_error(error: BaseException) -> None:
    """Say an error in one line, with the process that has it, and end this process now: status 1, 130 for Ctrl-C."""
    index, count = process_index_and_count()
    line = error_line(error)
    if isinstance(error, KeyboardInterrupt):
        line = "stopped, and with it the others; the same command on all goes on from what is saved"
    elif isinstance(error, jax.errors.JaxRuntimeError):
        line = f"another process has gone, or the devices failed: start the same command on all again ({line[:300]})"
    elif not isinstance(error, (ValueError, OSError)):
        sys.excepthook(type(error), error, error.__traceback__)
    print(f"error: process {index} of {count}: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if index == 0:
        time.sleep(_LAST_WORDS_SECONDS)
    os._exit(getattr(error, "status", 130) if isinstance(error, KeyboardInterrupt) else 1)
