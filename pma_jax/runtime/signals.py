"""What SIGTERM (a preemption) and SIGINT (Ctrl-C) do: the first asks to stop, a second ends the process at once.

Exit statuses are the shell's own for these signals: 130 for SIGINT, 143 for SIGTERM, so that a scheduler tells
"stopped" from "done" (0), "could not" (1) and "called wrongly" (2).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal stopped the work; the text says what is left. In Python code it is a KeyboardInterrupt."""

    def __init__(self, signal_number: int, text: str = ""):
        super().__init__(text)
        self.status = 128 + signal_number


class Notice:
    """The signal that has asked to stop, if one has."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def name(self) -> str:
        """Of the signal, such as SIGTERM."""
        return signal.Signals(self.signal).name if self.signal else ""


@contextlib.contextmanager
def noticed(interrupts: bool) -> Iterator[Notice]:
    """Within the block, note the first SIGINT or SIGTERM; a second leaves at once, with the status of that signal.

    Leaving at once is what SIGKILL does, and everything on disk is safe from that. It works while the main thread is
    deep in a compilation too, because another thread sees the signals. Where the main thread does not run this, nothing
    changes.

    Args:
        interrupts: raise `Stopped` in the main thread at the first signal; otherwise the block has to look.
    """
    notice = Notice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return

    def handle(number: int, frame: Any) -> None:
        del frame
        if interrupts:
            raise Stopped(number)

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reads, notice), name="signals", daemon=True).start()
    try:
        yield notice
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writes)


def _watch(reads: int, notice: Notice) -> None:
    while numbers := os.read(reads, 16):
        for number in numbers:
            if number not in SIGNALS:
                continue
            if notice.signal is not None:
                os.write(2, b"stopped at once: what was published before is whole\n")
                os._exit(128 + number)
            notice.signal = number
    os.close(reads)
