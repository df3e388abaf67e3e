"""Handling of SIGTERM (preemption) and SIGINT (Ctrl-C). Exit statuses follow the shell: 143 and 130.

No handler raises an exception: one that is raised while a library is imported, or inside a callback of C++ or a
finalizer, is printed, swallowed or crashes the process. A thread reads each signal from a pipe and acts on it, also
while the main thread is in C code, such as a compilation. What it does depends on the phase of the command:

1. From `end_process_on_signals`, called in the first line of `main`: the process ends at once. Everything on disk is
   complete or under a temporary name, as after SIGKILL.
2. From `StopRequest.start`, called when there is a training step to save: the first signal is recorded, and the
   training loop saves a state and stops. The second ends the process at once.
3. From `finish`, called when the verb has ended: the process ends at once with the status of the verb.

A signal that is ignored when the process starts (`nohup`, a background job of a shell script) stays ignored.
"""

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # a progress bar hides it

# The innermost policy is called with the number of each signal, in the thread that reads the pipe.
_policies: list[Callable[[int], None]] = []
# Called before a signal ends the process, the latest first.
_callbacks: list[Callable[[], None]] = []
_is_ending = threading.Event()


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the training loop. The text says what was saved; `status` is the exit status."""

    def __init__(self, signal_number: int, text: str = ""):
        super().__init__(text)
        self.status = 128 + signal_number


class StopRequest:
    """A request to stop: the first signal received since `start`, if any. Poll `signal`, which is None until then."""

    def __init__(self, start: Callable[["StopRequest"], None] = lambda _: None) -> None:
        self.signal: int | None = None  # number of the signal
        self._start, self._is_started = start, False

    @property
    def name(self) -> str:
        """Name of the signal, such as "SIGTERM"; empty if none was received."""
        return signal.Signals(self.signal).name if self.signal else ""

    def start(self) -> None:
        """Record signals from now on. Only the first call has an effect."""
        if not self._is_started:
            self._is_started = True
            self._start(self)

    def record(self, number: int) -> None:
        """Record the first signal; at the second, end the process immediately, without any cleanup."""
        if self.signal is not None:
            _end_process(128 + number, "stopped at once: published checkpoints are intact")
        self.signal = number


@contextlib.contextmanager
def record_signals() -> Iterator[StopRequest]:
    """Yield a request that records the signals from its `start` to the end of the block.

    Outside the main thread, where Python cannot install handlers, nothing is recorded.
    """
    with contextlib.ExitStack() as stack:
        yield StopRequest(lambda request: stack.enter_context(_apply(request.record)))


def end_process_on_signals(describe: Callable[[], str]) -> None:
    """From now on, end the process at SIGINT or SIGTERM with one line on standard error and status 130 or 143.

    Call it once per process, in the main thread.

    Args:
        describe: Returns the line. It is called in another thread, and must neither import nor wait for a lock.
    """
    # The first function that is registered is called last. From then on, no thread reads the pipe.
    atexit.register(_ignore_signals)
    _policies.append(lambda number: _end_process(128 + number, describe()))
    _install()


def finish(status: int) -> None:
    """Let the next signal end the process with `status`, which the verb has returned, instead of 130 or 143."""
    _policies.append(lambda _: _end_process(status))


def install_again() -> None:
    """Install the handlers again, if they were installed, because a library may have replaced them."""
    if _policies and threading.current_thread() is threading.main_thread():
        for number in _handled_signals():
            signal.signal(number, _handle)


def wait_if_ending() -> None:
    """Wait for the end of the process if a signal is ending it: what happens meanwhile is not worth reporting."""
    if _is_ending.is_set():
        threading.Event().wait()


@contextlib.contextmanager
def before_end(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` if a signal ends the process within the block, where no `finally` is executed.

    It is called in another thread while the others go on. It must neither import nor wait for a lock. Its errors are
    ignored.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@contextlib.contextmanager
def _apply(policy: Callable[[int], None]) -> Iterator[None]:
    """Apply a policy to the signals within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_outermost = not _policies
    _policies.append(policy)
    if not is_outermost:
        install_again()
    uninstall = _install() if is_outermost else None
    try:
        yield
    finally:
        if uninstall is not None:
            uninstall()
        _policies.remove(policy)


def _install() -> Callable[[], None]:
    """Install the handlers, the pipe and the thread that reads it; return a function that removes them."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _handle) for number in _handled_signals()}
    threading.Thread(target=_read_signals, args=(read_end,), name="signals", daemon=True).start()

    def uninstall() -> None:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(write_end)

    return uninstall


def _handled_signals() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _handle(number: int, frame: Any) -> None:
    """Do nothing: the thread acts on the signal. Python writes the number into the pipe because this handler exists."""
    del number, frame


def _read_signals(read_end: int) -> None:
    """Apply the innermost policy to each signal that arrives in the pipe; return when the pipe is closed."""
    while numbers := os.read(read_end, 16):
        for number in numbers:
            if number in SIGNALS and _policies:
                _policies[-1](number)
    os.close(read_end)


def _end_process(status: int, line: str = "") -> None:
    _is_ending.set()
    for callback in reversed(_callbacks):
        with contextlib.suppress(Exception):  # nothing may keep the process from ending
            callback()
    if line:
        with contextlib.suppress(OSError):
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + line.encode(errors="backslashreplace") + b"\n")
    os._exit(status)


def _ignore_signals() -> None:
    for number in _handled_signals():
        signal.signal(number, signal.SIG_IGN)


def _reset_in_child() -> None:
    # A forked child has no thread that reads the pipe, which is also its parent's.
    if _policies:
        signal.set_wakeup_fd(-1)
        for number in _handled_signals():
            signal.signal(number, signal.SIG_DFL)
        _policies.clear()
        _callbacks.clear()


os.register_at_fork(after_in_child=_reset_in_child)
