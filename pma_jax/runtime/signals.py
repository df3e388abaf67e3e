"""Handling of SIGTERM (preemption) and SIGINT (Ctrl-C): the first requests a stop, the second ends the process.

Exit statuses follow the shell: 130 for SIGINT, 143 for SIGTERM, so that a scheduler can distinguish "stopped" from
"done" (0), "failed" (1) and "called wrongly" (2).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the command. The text, if any, says what was saved; `status` is the exit status."""

    def __init__(self, signal_number: int, text: str = ""):
        super().__init__(text)
        self.status = 128 + signal_number


class StopRequest:
    """A request to stop: the first signal received, if any. Poll `signal`, which is None until then.

    The handler sets it in the main thread, as soon as that runs Python code again.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # number of the signal

    @property
    def name(self) -> str:
        """Name of the signal, such as "SIGTERM"; empty if none was received."""
        return signal.Signals(self.signal).name if self.signal else ""


@contextlib.contextmanager
def catch_signals(raises_stopped: bool) -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM within the block; the second ends the process immediately, with its status.

    At the second signal no cleanup runs, as after SIGKILL, but published files stay intact. This works even while a
    compilation blocks Python signal handlers in the main thread, because a background thread reads the wakeup pipe, to
    which each signal is written. Outside the main thread this context manager does nothing.

    Args:
        raises_stopped: Whether the first signal raises `Stopped` in the main thread. If False, the block must poll the
            request.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: Any) -> None:
        del frame
        request.signal = request.signal or number
        if raises_stopped:
            raise Stopped(number)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    handlers = {number: signal.signal(number, handle) for number in SIGNALS}
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_read_signals, args=(read_end,), name="signals", daemon=True).start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(write_end)


def _read_signals(read_end: int) -> None:
    """End the process at the second of SIGNALS that arrives on the wakeup pipe; return when the pipe is closed."""
    is_first = True
    while numbers := os.read(read_end, 16):
        for number in numbers:
            if number not in SIGNALS:
                continue
            if not is_first:
                os.write(2, b"stopped at once: published checkpoints are intact\n")
                os._exit(128 + number)
            is_first = False
    os.close(read_end)
