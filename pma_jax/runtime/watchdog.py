"""End a process that has failed, even if threads of libraries wait forever."""

import os
import threading
import time

GRACE_SECONDS = 5.0


def end_process_soon(status: int) -> None:
    """End the process with `status` after `GRACE_SECONDS`, unless it has ended by itself.

    For a process that is about to exit because of an error. The interpreter waits for threads at exit, and after a
    failed write Orbax's threads wait for files that are never created.
    """

    def end() -> None:
        time.sleep(GRACE_SECONDS)
        os._exit(status)

    threading.Thread(target=end, name="end of the process", daemon=True).start()
