"""Start a command that ends with its parent: `python -m pma_jax.launch.child CORES PARENT COMMAND …`.

The process binds itself to cores, asks the kernel for SIGTERM when its parent ends (also by SIGKILL), and becomes the
command, which then saves its state and stops. CORES are numbers separated by commas, PARENT is a process ID.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Prepare this process and replace it by the command."""
    cores, parent, *command = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has ended already
            sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to all processes of a job; the parent handles it
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
