"""Start several real processes of one job on this machine: CPU devices, gloo between them, their own port."""

import atexit
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEARTBEAT_SECONDS = 10
KILLED_AFTER_STEPS = """
import itertools, os, signal, sys
from pma_jax import cli
from pma_jax.training import loop
place, calls, last = loop.put_batch, itertools.count(1), int(sys.argv[1])
def place_or_die(mesh, batch):
    if next(calls) > last:
        os.kill(os.getpid(), signal.SIGKILL)
    return place(mesh, batch)
loop.put_batch = place_or_die
sys.exit(cli.main(sys.argv[2:]))
"""
# Gloo writes lines about its connections to file descriptor 1, in pieces: as in `pma`, they go to standard error.
_OWN_STANDARD_OUTPUT = """
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
"""


@dataclasses.dataclass
class Job:
    """Processes started together; their output goes to files, so that none blocks on a full pipe."""

    folder: Path
    processes: list[subprocess.Popen]

    def wait(self, seconds: float = 500) -> list[int]:
        """Wait for all processes and return their exit statuses; kill them after `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def out(self, index: int) -> str:
        """Return the standard output of one process."""
        return (self.folder / f"out-{index}").read_text()

    def error(self, index: int) -> str:
        """Return the standard error of one process."""
        return (self.folder / f"error-{index}").read_text()

    def check(self, seconds: float = 500) -> "Job":
        """Wait for all processes and assert that each one exited with status 0."""
        statuses = self.wait(seconds)
        assert not any(statuses), "\n".join(f"{p}: {s}\n{self.error(p)[-3000:]}" for p, s in enumerate(statuses))
        return self


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def xla_flags(devices: int) -> str:
    """Return the session's XLA_FLAGS (see conftest.py) with another number of simulated devices.

    Benchmarks call it outside a session, where the flags may be unset.
    """
    flags = os.environ.get("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", flags)


def start(
    arguments: list[str], count: int, devices: int = 2, environments: Sequence[Mapping[str, str]] | None = None
) -> Job:
    """Start `count` processes of one command (its arguments after `python`) with `devices` devices each.

    Args:
        arguments: What follows `python`.
        count: Number of processes.
        devices: Number of devices of each.
        environments: Further variables of each process.
    """
    address = f"127.0.0.1:{free_port()}"
    job = Job(Path(tempfile.mkdtemp(prefix="pma-processes-")), [])
    atexit.register(shutil.rmtree, job.folder, ignore_errors=True)
    for index in range(count):
        environment = (
            os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": xla_flags(devices),
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            }
            | dict(environments[index] if environments else {})
        )
        with (job.folder / f"out-{index}").open("w") as out, (job.folder / f"error-{index}").open("w") as error:
            job.processes.append(
                subprocess.Popen([sys.executable, *map(str, arguments)], stdout=out, stderr=error, env=environment)
            )
    return job


def pma(
    arguments: list[str], count: int, devices: int = 2, environments: Sequence[Mapping[str, str]] | None = None
) -> Job:
    """Start `count` processes of `pma` with these arguments and --distributed."""
    main = "import sys; from pma_jax.cli import main; sys.exit(main())"
    heartbeat = [] if "--heartbeat-seconds" in arguments else ["--heartbeat-seconds", HEARTBEAT_SECONDS]
    return start(["-c", main, *arguments, "--distributed", *heartbeat], count, devices, environments)


def script(text: str, arguments: list[str], count: int, devices: int = 2) -> Job:
    """Start `count` processes of a script that first joins the distributed job."""
    joined = f"from pma_jax.runtime import hosts\nhosts.initialize_distributed({HEARTBEAT_SECONDS})\n"
    return start(["-c", _OWN_STANDARD_OUTPUT + joined + text, *arguments], count, devices)


def kill_after_steps(count: int, arguments: list[Any]) -> None:
    """Run `pma` with the arguments of a training in a process that is killed when it has made `count` steps."""
    command = [sys.executable, "-c", KILLED_AFTER_STEPS, str(count), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
