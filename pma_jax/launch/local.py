"""The local engine: jobs as processes of this machine, some at a time, each on its share of the cores and GPUs.

One thread starts processes and looks at them, because the kernel ends a child with the *thread* that started it. The
signals of a terminal do not reach the children, which have sessions of their own: this process sends them SIGTERM,
after which they save their states, and waits. If this process is killed, the kernel sends it (launch/child.py).
"""

import collections
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from pma_jax.launch.job import (
    FINAL_STATUSES,
    LOG_FILE,
    Failure,
    Job,
    Step,
    claim,
    failure_line,
    format_command,
    record_start,
    record_step,
    steps_left,
)
from pma_jax.launch.shares import Share, divide
from pma_jax.runs import lock
from pma_jax.runtime.formatting import format_duration
from pma_jax.runtime.progress import Progress
from pma_jax.runtime.signals import Stopped, StopRequest, record_signals
from pma_jax.storage.paths import exists, is_bucket

MAX_RETRIES = 3  # after failures that may pass
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 2.0  # before the first retry of a step; doubled before each later one
_HELD_SECONDS = 2.0  # between looks at a run that another process trains
Say = Callable[[str], None]


@dataclasses.dataclass
class _Active:
    """A job whose step runs now."""

    job: Job
    share: Share
    claimed: contextlib.ExitStack
    steps: list[Step]  # the current one first
    process: subprocess.Popen
    log: "_Log"
    started: float  # of the job, by time.monotonic


@dataclasses.dataclass
class _Waiting:
    """A job that does not run now."""

    job: Job
    not_before: float = 0.0
    held_by: str | None = None


def run_jobs(
    jobs: Sequence[Job], parallel: int, say: Say, max_retries: int = MAX_RETRIES, progress: Progress | None = None
) -> dict[str, Failure]:
    """Run jobs, `parallel` at a time, and return how the failed ones failed, by name.

    What is done is skipped. A job that another process works on is not started: it is looked at again until that
    process has ended, and taken over if it is not done then. A step that fails with a status that may pass is repeated
    up to `max_retries` times. A job that fails does not stop the others.

    Args:
        jobs: The jobs, in the order in which to start them.
        parallel: Processes at a time; each has an equal share of the cores, and of the GPUs if there are any.
        say: Called with one line per event.
        max_retries: Of one step.
        progress: Called with the number of jobs that have ended, and of those that were not done before.

    Raises:
        UserError: There are fewer cores or GPUs than `parallel`.
        Stopped: SIGINT or SIGTERM was received; all processes have saved their states and ended.
    """
    engine = LocalEngine(jobs, divide(parallel), say, max_retries, progress)
    with record_signals() as request:
        request.start()
        try:
            engine.run(request)
        finally:
            engine.stop()
    if request.signal is not None:
        raise Stopped(
            request.signal,
            f"stopped by {request.name}: {engine.done} of {len(jobs)} jobs are done, and the states of the "
            "others are saved; repeat the command to continue",
        )
    return engine.failed


class LocalEngine:
    """The jobs that wait and those that run."""

    def __init__(
        self,
        jobs: Sequence[Job],
        shares: list[Share],
        say: Say,
        max_retries: int = MAX_RETRIES,
        progress: Progress | None = None,
    ):
        self.failed: dict[str, Failure] = {}  # by the name of the job
        self.done = self._skipped = 0  # jobs; those that were done before count as both
        self._progress = progress
        self._count, self._number = len(jobs), {job.name: number for number, job in enumerate(jobs, start=1)}
        self._shares, self._say, self._max_retries = shares, say, max_retries
        self._waiting = collections.deque(_Waiting(job) for job in jobs)
        self._retries: collections.Counter[tuple[str, str]] = collections.Counter()
        self._active: list[_Active] = []

    def run(self, request: StopRequest) -> None:
        """Run all jobs; return early if a signal arrives."""
        while (self._waiting or self._active) and request.signal is None:
            self._start_jobs()
            for active in list(self._active):
                status = active.process.poll()
                if status is not None:
                    self._end_step(active, status)
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Send SIGTERM to all processes, and wait until they have saved their states and ended."""
        stopped, self._active = self._active, []
        for active in stopped:
            active.process.terminate()
        for active in stopped:
            if active.process.wait() == 0:
                record_step(active.job, active.steps[0])
                self.done += len(active.steps) == 1
            active.log.close()
            active.claimed.close()

    def _start_jobs(self) -> None:
        """Start waiting jobs while there is a share for one."""
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if not self._shares or time.monotonic() < waiting.not_before or not self._start_job(waiting):
                self._waiting.append(waiting)

    def _start_job(self, waiting: _Waiting) -> bool:
        """Start a job, unless it is done; return False if another process works on it."""
        job = waiting.job
        if not steps_left(job):
            self._skip(job)
            return True
        claimed = contextlib.ExitStack()
        holder = claimed.enter_context(claim(job))
        if holder:
            claimed.close()
            if holder != waiting.held_by:
                self._tell(job, f"is not started, because {holder} works on it")
            waiting.held_by, waiting.not_before = holder, time.monotonic() + _HELD_SECONDS
            return False
        if not (steps := steps_left(job)):  # another process has finished it in the meantime
            claimed.close()
            self._skip(job)
            return True
        record_start(job)
        self._begin(job, self._shares.pop(0), claimed, steps, time.monotonic())
        return True

    def _begin(self, job: Job, share: Share, claimed: contextlib.ExitStack, steps: list[Step], started: float) -> None:
        """Start the process of the first of `steps`."""
        log = _Log(job)
        log.write(f"$ {format_command(steps[0])}\n")
        process = start_process(steps[0], share, log.file)
        self._active.append(_Active(job, share, claimed, steps, process, log, started))
        self._tell(job, steps[0].text.partition(" ")[0] + (f", log in {log.path}" if log.path else ""))

    def _end_step(self, active: _Active, status: int) -> None:
        """Record a step that has ended with `status`; start the next one, or free the share of the job."""
        job, step = active.job, active.steps[0]
        self._active.remove(active)
        output = active.log.close()
        if status == 0:
            record_step(job, step)
            if len(active.steps) > 1:
                self._begin(job, active.share, active.claimed, active.steps[1:], active.started)
                return
            self.done += 1
            self._tell(job, f"done in {format_duration(time.monotonic() - active.started)}")
            self._show_progress()
        else:
            self._end_failed_step(job, step, status, output)
        self._shares.append(active.share)
        active.claimed.close()

    def _end_failed_step(self, job: Job, step: Step, status: int, output: str) -> None:
        """Put the job back among those that wait if trying again may help; else record the failure."""
        line = failure_line(output)
        if job.directory is not None and (holder := lock.holder_of(job.directory)):
            self._tell(job, f"is not trained here, because {holder} trains it")
            self._waiting.append(_Waiting(job, time.monotonic() + _HELD_SECONDS, held_by=holder))
            return
        retries = self._retries[job.name, step.text]
        if status not in FINAL_STATUSES and retries < self._max_retries:
            self._retries[job.name, step.text] += 1
            self._tell(job, f"tried again ({retries + 1} of {self._max_retries}) after {_describe(status)}: {line}")
            self._waiting.append(_Waiting(job, time.monotonic() + _RETRY_SECONDS * 2**retries))
            return
        self.failed[job.name] = failure = Failure(step=step.text, status=status, line=line)
        self._tell(job, f"failed with {_describe(status)}: {line}")
        record_step(job, step, failure)
        self._show_progress()

    def _skip(self, job: Job) -> None:
        """Count a job that is done already."""
        self._tell(job, "is done")
        self.done += 1
        self._skipped += 1
        self._show_progress()

    def _show_progress(self) -> None:
        if self._progress is not None:
            self._progress(self.done + len(self.failed) - self._skipped, self._count - self._skipped)

    def _tell(self, job: Job, text: str) -> None:
        self._say(f"[{self._number[job.name]} of {self._count}] {job.name}: {text}")


def start_process(step: Step, share: Share, output: IO[Any] | None) -> subprocess.Popen:
    """Start the command of a step on its share of this machine; it ends when this process does."""
    environment = os.environ | step.environment
    if share.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    prefix = [sys.executable, "-m", "pma_jax.launch.child", ",".join(map(str, share.cores)), str(os.getpid())]
    errors = None if output is None else subprocess.STDOUT
    return subprocess.Popen(
        [*prefix, *step.command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )


class _Log:
    """The log of a job's step: appended to RUN/job.log; without a directory, the output of this process."""

    def __init__(self, job: Job):
        self.path = None if job.directory is None else job.directory / LOG_FILE
        self.file: IO[bytes] | None = None
        if self.path is None:
            return
        # Objects in a bucket cannot grow: the output is collected on the disk.
        if is_bucket(self.path):
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            self.file = Path(self.path).open("a+b")  # noqa: SIM115
        self._start = self.file.seek(0, os.SEEK_END)

    def write(self, text: str) -> None:
        """Write a line before those of the process."""
        if self.file is not None:
            self.file.write(text.encode(errors="backslashreplace"))
            self.file.flush()

    def close(self) -> str:
        """Close the log, and return its last part."""
        if self.file is None or self.path is None:
            return ""
        with self.file as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, end - 2**20))
            text = file.read()
        if is_bucket(self.path):
            self.path.write_bytes((self.path.read_bytes() if exists(self.path) else b"") + text)
        return text.decode(errors="replace")


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
