"""The SLURM engine: the jobs of a grid as one array, by submitit.

Each task of the array runs one job as the local engine does, on all that SLURM gives it. When SLURM announces the end
of its time or a preemption (SIGUSR2), the task stops training with its state saved, and asks to be queued again; it
then resumes. The job files of submitit are in ROOT/slurm.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError, error_line
from pma_jax.launch.job import Job, record_submission
from pma_jax.launch.local import LocalEngine
from pma_jax.launch.shares import divide
from pma_jax.runtime.signals import StopRequest

FOLDER = "slurm"  # below the root
_SIGNAL_SECONDS = 120  # from SIGUSR2 to the end, to save a state
_MAX_TIMEOUTS = 1000  # a run may need the time limit of its partition many times


class SlurmTask:
    """One job, as the function that submitit runs on a node and calls `checkpoint` of when it is interrupted."""

    def __init__(self, job: Job):
        self.job = job
        self._engine: LocalEngine | None = None

    def __call__(self) -> None:
        """Run the steps of the job that are left.

        Raises:
            RuntimeError: A step failed, so that SLURM shows the task as failed.
        """
        self._engine = LocalEngine([self.job], divide(1), lambda line: print(line, flush=True))
        try:
            self._engine.run(StopRequest())
        finally:
            self._engine.stop()
        if self._engine.failed:
            raise RuntimeError(self._engine.failed[self.job.name]["line"])

    def checkpoint(self) -> Any:
        """Stop the job with its state saved, and return what to queue again."""
        from submitit.helpers import DelayedSubmission

        if self._engine is not None:
            self._engine.stop()
        return DelayedSubmission(SlurmTask(self.job))


def make_executor(root: Path, name: str, settings: Mapping[str, str], parallel: int | None) -> Any:
    """Return the submitit executor that submits to SLURM.

    Args:
        root: The root of the grid, on a disk that all nodes share.
        name: The name of the array in SLURM.
        settings: Parameters of submitit's executor by name, such as partition, time (minutes), account, gpus_per_node.
        parallel: Tasks at a time; None: as many as SLURM starts.

    Raises:
        UserError: submitit or SLURM is not there, `time` is missing, or a parameter is unknown.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError(f"--engine slurm needs submitit: pip install 'pma-jax[slurm]' ({error})") from None
    if "time" not in settings:
        raise UserError("--engine slurm needs a time limit in minutes: --slurm time=240")
    values: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in settings.items()}
    limit = {} if parallel is None else {"array_parallelism": parallel}
    try:
        executor = submitit.SlurmExecutor(folder=root / FOLDER, max_num_timeout=_MAX_TIMEOUTS)
        executor.update_parameters(
            **{"job_name": name, "signal_delay_s": _SIGNAL_SECONDS, "additional_parameters": {"requeue": True}}
            | limit
            | values
        )
    except RuntimeError:
        raise UserError("srun is not found: --engine slurm submits from a machine of a SLURM cluster") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"--slurm: {error_line(error)}") from None
    return executor


def submit(jobs: Sequence[Job], executor: Any) -> list[str]:
    """Submit jobs as one array, record their ids in their directories, and return the ids.

    Raises:
        UserError: SLURM refuses the array.
    """
    if not jobs:
        return []
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with executor.batch():
            submitted = [executor.submit(SlurmTask(job)) for job in jobs]
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError, OSError) as error:
        raise UserError(f"SLURM refused the array: {error_line(error)}") from None
    for job, task in zip(jobs, submitted, strict=True):
        record_submission(job, task.job_id)
    return [task.job_id for task in submitted]


def queued_ids() -> set[str]:
    """Return the ids of this user's tasks that SLURM has queued or started.

    Raises:
        UserError: SLURM does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except FileNotFoundError:
        raise UserError("squeue is not found: --engine slurm works on a machine of a SLURM cluster") from None
    except subprocess.SubprocessError as error:
        output = (getattr(error, "stderr", None) or "").strip() or error_line(error)
        raise UserError(f"squeue failed: {output.splitlines()[-1]}") from None
    return set(done.stdout.split())
