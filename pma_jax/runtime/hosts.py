"""Coordination of the processes of a multi-process job: initialization, broadcasts, barriers and exit.

JAX's multi-controller runtime does the work: every process runs the same program over one mesh of all devices. State
outside that program, such as the contents of a directory, may look different to each process. If the processes then
took different branches, they would deadlock in the next collective. Process 0 therefore reads such state and broadcasts
it. In a single process, the functions that communicate (gather, broadcast, barrier) return without communication.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np

# Every public API for the process index and count initialises the backend, and initialising it fixes the device count.
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from pma_jax.config.errors import DamageError, StorageError, UserError, error_line, mendable_line
from pma_jax.runtime.failures import EXIT_TRY_AGAIN, exit_status, is_lost_process, is_temporary
from pma_jax.runtime.signals import StopRequest, record_signals

T = TypeVar("T")

HEARTBEAT_TIMEOUT_SECONDS = 100  # JAX's own default
ENVIRONMENT_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Process 0 hosts the coordination service, and its exit ends the other processes. This delay lets them report their own
# errors first.
_EXIT_DELAY_SECONDS = 2.0
_LOST_PROCESS = "another process was lost or a device failed: run the same command in all processes again"
_abort_handlers: list[object] = []  # keeps the function that C calls


def initialize_distributed(heartbeat_timeout_seconds: int = HEARTBEAT_TIMEOUT_SECONDS) -> None:
    """Join a multi-process job. Call it only in such a job, before any use of a device: it raises UserError otherwise.

    Calls `jax.distributed.initialize`, which waits for all processes of the job. The job is described by the three
    environment variables `ENVIRONMENT_VARIABLES`. If none is set, JAX detects the cluster: Cloud TPU,
    SLURM, Open MPI or Kubernetes (GKE).

    Args:
        heartbeat_timeout_seconds: A process that sends no heartbeat for this long is considered dead, and the others
            stop.

    Raises:
        UserError: There is no multi-process job (the variables are not set and JAX detects no cluster), some of the
            variables are missing, or JAX cannot connect the processes.
    """
    address, count, index = (os.environ.get(name) for name in ENVIRONMENT_VARIABLES)
    _exit_on_abort()
    # An address alone would be joined with the count and the index of whatever cluster JAX detects.
    if len({variable is None for variable in (address, count, index)}) > 1:
        raise UserError(f"set all of {', '.join(ENVIRONMENT_VARIABLES)}, or none to let JAX detect the cluster")
    try:
        jax.distributed.initialize(
            address,
            None if count is None else int(count),
            None if index is None else int(index),
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        reason = error_line(error)[:300]
        raise UserError(
            f"cannot initialise jax.distributed ({reason}): it needs Cloud TPU, SLURM, Open MPI, Kubernetes with "
            f"jax[k8s], or the variables {', '.join(ENVIRONMENT_VARIABLES)}"
        ) from error


def _exit_on_abort() -> None:
    """Let `abort` end the process with one line and `EXIT_TRY_AGAIN`, instead of a signal.

    JAX's coordination service calls `abort`, in a thread of its own, when it learns that another process was lost.
    Handlers of the module `signal` run in the main thread, and so too late: this one is called by C.
    """
    if _abort_handlers:
        return

    def end(_: int) -> None:
        os.write(2, f"error: process {global_state.process_id}: {_LOST_PROCESS}\n".encode())
        os._exit(EXIT_TRY_AGAIN)

    function = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _abort_handlers.append(function(end))
    library = ctypes.CDLL(None)
    library.signal.restype, library.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, function]
    library.signal(signal.SIGABRT, _abort_handlers[0])


def process_index_and_count() -> tuple[int, int]:
    """Return (index of this process, number of processes) without initialising the backend."""
    return global_state.process_id, global_state.num_processes


def is_first_process() -> bool:
    """Return whether this process is the first (process 0), the only one that writes metrics, tables and reports."""
    return global_state.process_id == 0


def all_gather_text(text: str) -> list[str]:
    """Return the text of every process, in the order of their indices.

    With several processes this is a collective, which initialises the backend.
    """
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
        Exception: The error of `read` in process 0; in the others, a `UserError` or `StorageError` with its message.
    """
    if global_state.num_processes == 1:
        return read()
    text, error = "", None
    if is_first_process():
        try:
            text = read()
        except Exception as raised:
            error = raised
    failures = all_gather_text(_describe(error))
    if error is not None:
        raise error
    if failures[0]:
        raise _from_description(failures[0])
    return all_gather_text(text)[0]


def run_on_first(work: Callable[[], object]) -> None:
    """Run `work` in process 0 while the others wait; if it fails, raise in all processes as `broadcast_from_first`."""

    def run() -> str:
        work()
        return ""

    broadcast_from_first(run)


def run_on_first_then_rest(work: Callable[[], T]) -> T:
    """Run `work` in process 0 and then in the other processes, and return this process's result.

    The other processes see the side effects of process 0, such as a filled cache.

    Raises:
        UserError: `work` failed in process 0; see `broadcast_from_first`. An error in another process propagates only
            there.
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


def run_in_all(work: Callable[[], T]) -> T:
    """Run `work` in all processes; if it fails in one, raise in all. `work` must not communicate.

    Raises:
        Exception: See `raise_if_any_failed`.
    """
    try:
        result = work()
    except Exception as error:
        raise_if_any_failed(error)
        raise
    raise_if_any_failed(None)
    return result


def raise_if_any_failed(error: Exception | None) -> None:
    """Wait for all processes, then raise if any of them has an error.

    All processes raise an error of the same meaning: `DamageError` only if every process that failed raised it. If one
    found damage and another could not read, no process takes the data for damaged.

    Raises:
        Exception: This process's own error.
        UserError: Another process failed; the message names the failed process with the lowest index. It is a
            `DamageError` or `StorageError` if that process raised one, or a failure that may pass.
    """
    failures = all_gather_text(_describe(error))
    decisive = [f for f in failures if f and not f.startswith(_DAMAGE)] or [f for f in failures if f]
    if not decisive:
        return
    if error is not None and _describe(error) in decisive:
        raise error
    raise _from_description(decisive[0], f"process {failures.index(decisive[0])} failed: ") from error


# What `raise_if_any_failed` and `broadcast_from_first` tell the other processes about an error, before its message.
_DAMAGE, _TEMPORARY, _STORAGE, _OTHER = "damage:", "temporary:", "storage:", "other:"


def _describe(error: Exception | None) -> str:
    if error is None:
        return ""
    kind = _STORAGE if isinstance(error, OSError) else _DAMAGE if isinstance(error, DamageError) else _OTHER
    return (_TEMPORARY if is_temporary(error) else kind) + error_line(error)


def _from_description(text: str, prefix: str = "") -> Exception:
    kind, _, line = text.partition(":")
    message = prefix + line
    match f"{kind}:":
        case "damage:":
            return DamageError(message)
        case "other:":
            return UserError(message)
        case _:
            return StorageError(message, is_temporary=f"{kind}:" == _TEMPORARY)


@contextlib.contextmanager
def record_stop_signals() -> Iterator[StopRequest]:
    """Record SIGTERM and SIGINT from `StopRequest.start` to the end of the block; `is_stop_requested` reads the record.

    With several processes, record nothing: JAX's coordination service catches SIGTERM and chooses the step at which all
    processes stop.
    """
    if global_state.num_processes > 1:
        yield StopRequest()
        return
    with record_signals() as request:
        yield request


def is_stop_requested(request: StopRequest, step: int) -> bool:
    """Return whether to stop after `step`: the same answer in all processes. Call it once per step in each process."""
    if global_state.num_processes > 1:
        return multihost_utils.reached_preemption_sync_point(step)
    return request.signal is not None


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """If there are several processes, exit this one immediately on an error or Ctrl-C inside the block.

    A normal exit would deadlock: at shutdown this process would wait for the others, and they wait for it in a
    collective. After an immediate exit, the coordination service stops the others. A coordinated stop (a
    KeyboardInterrupt with a message, raised in all processes at the same step) propagates normally.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        is_coordinated_stop = isinstance(error, KeyboardInterrupt) and bool(str(error))
        if global_state.num_processes > 1 and not is_coordinated_stop:
            exit_with_error(error)
        raise


def exit_with_error(error: BaseException) -> None:
    """Print an error in one line with this process's index, and exit immediately.

    The exit status is 75 if another process was lost or the failure may pass, and otherwise 1; for a KeyboardInterrupt,
    its `status` attribute if it has one, otherwise 130.
    """
    index, count = process_index_and_count()
    line, status = mendable_line(error) or error_line(error), exit_status(error)
    if isinstance(error, KeyboardInterrupt):
        line = "stopped; the other processes stop too: run the same command in all of them to resume"
        status = getattr(error, "status", 130)
    elif is_lost_process(error):
        line = f"{_LOST_PROCESS} ({line[:300]})"
        status = EXIT_TRY_AGAIN
    elif mendable_line(error) is None:
        sys.excepthook(type(error), error, error.__traceback__)
    print(f"error: process {index} of {count}: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if index == 0:
        time.sleep(_EXIT_DELAY_SECONDS)
    os._exit(status)
