"""Several real processes of one job on this machine: CPU devices, gloo between them, a port of their own."""

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEARTBEAT_SECONDS = 10


@dataclasses.dataclass
class Job:
    """Processes that were started together; what they print goes to files, so that none waits for a reader."""

    folder: Path
    processes: list[subprocess.Popen]

    def wait(self, seconds: float = 500) -> list[int]:
        """Wait for all; returns their exit statuses. Ends them when it takes longer."""
        end = time.monotonic() + seconds
        try:
            return [p.wait(max(end - time.monotonic(), 0.1)) for p in self.processes]
        finally:
            self.end()

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()

    def out(self, index: int) -> str:
        """What a process printed."""
        return (self.folder / f"out-{index}").read_text()

    def error(self, index: int) -> str:
        """What a process printed on standard error."""
        return (self.folder / f"error-{index}").read_text()

    def check(self, seconds: float = 500) -> "Job":
        """Wait for all, and see that each did its work."""
        statuses = self.wait(seconds)
        assert not any(statuses), "\n".join(f"{p}: {s}\n{self.error(p)[-3000:]}" for p, s in enumerate(statuses))
        return self


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(words: list[str], count: int, devices: int = 2) -> Job:
    """Start `count` processes of one command (its words after `python`), each with so many devices."""
    address = f"127.0.0.1:{free_port()}"
    job = Job(Path(tempfile.mkdtemp(prefix="pma-processes-")), [])
    for index in range(count):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        with (job.folder / f"out-{index}").open("w") as out, (job.folder / f"error-{index}").open("w") as error:
            job.processes.append(
                subprocess.Popen([sys.executable, *map(str, words)], stdout=out, stderr=error, env=environment)
            )
    return job


def pma(words: list[str], count: int, devices: int = 2) -> Job:
    """Start `count` processes of `pma` with these words and --distributed."""
    main = "import sys; from pma_jax.cli import main; sys.exit(main())"
    return start(["-c", main, *words, "--distributed", "--heartbeat-seconds", str(HEARTBEAT_SECONDS)], count, devices)


def script(text: str, words: list[str], count: int, devices: int = 2) -> Job:
    """Start `count` processes of a script that has joined the others."""
    joined = f"from pma_jax.runtime import hosts\nhosts.join({HEARTBEAT_SECONDS})\n"
    return start(["-c", joined + text, *words], count, devices)
