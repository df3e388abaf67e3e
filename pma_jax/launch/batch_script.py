"""A job of many nodes as a batch script of SLURM, which starts itself again when that helps. Does not import JAX.

The exit status of `pma` says what a failure means: 1 and 2 would come again, so the job fails; after any other (75: a
peer was lost; 143: stopped before the time limit, with a state saved) the job is queued again, and the command resumes.
"""

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from pma_jax.config.errors import UserError

# Options that the script sets itself.
_OWN_OPTIONS = ("job-name", "nodes", "gpus-per-node", "ntasks-per-node", "signal", "requeue", "output", "open-mode")
# srun(1): "srun will return the highest exit code of all tasks run". An error of one task (1 or 2) must win over the 75
# with which the others end, so it becomes 201 or 202. The trap lets the shell outlive the SIGTERM that `pma` gets too.
_TASK = """
    trap : TERM INT
    "$@"
    status=$?
    case $status in 1 | 2) exit $((200 + status)) ;; *) exit "$status" ;; esac"""
# The tasks end by themselves when one is lost (75); --wait ends those that do not. 253 is SLURM's "out of memory".
# A job that was cancelled, or that SLURM requeues itself, is not running any more.
_SCRIPT = """#!/usr/bin/env bash
{options}

export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}} # since SLURM 22.05, srun no longer takes it from sbatch

srun --kill-on-bad-exit=0 --wait=300 bash -c '{task}' pma \\
    {command}
status=$?

case $status in
    0) exit 0 ;;
    201 | 202) exit $((status - 200)) ;;
    253) exit 253 ;;
esac
state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")
if [[ $state == RUNNING && ${{SLURM_RESTART_COUNT:-0}} -lt {max_restarts} ]]; then
    echo "status $status: the job is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclasses.dataclass(frozen=True)
class BatchSetting:
    """What SLURM needs to know of a job, besides its command.

    Attributes:
        name: Name of the job.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node, with one task for each; 0: one task for each node, on CPU.
        options: More options of sbatch, by name without dashes in front, such as time and partition.
        max_restarts: How often the job may be queued again.
    """

    name: str
    nodes: int
    gpus_per_node: int
    options: Mapping[str, str]
    max_restarts: int

    @property
    def tasks(self) -> int:
        """Number of processes."""
        return self.nodes * max(self.gpus_per_node, 1)


def make_script(setting: BatchSetting, command: Sequence[str]) -> str:
    """Return the script that runs `command` in every task.

    Raises:
        UserError: An option is one that the script sets itself, its text is not one word, or the time limit is missing.
    """
    for key, value in setting.options.items():
        if key in _OWN_OPTIONS:
            raise UserError(f"--slurm {key}: the script sets it; use the options of pma launch")
        if not re.fullmatch(r"[a-z][a-z-]*", key) or not re.fullmatch(r"[^\s'\"\\$`#]+", value):
            raise UserError(f"--slurm {key}={value!r} is not an option of sbatch and one word, such as partition=gpu")
    if "time" not in setting.options:
        raise UserError("--engine slurm needs a time limit in minutes: --slurm time=240")
    tasks = setting.tasks // setting.nodes
    # All tasks of a node see all its GPUs, and JAX takes the one with the task's index: no --gpus-per-task.
    gpus = {"gpus-per-node": str(setting.gpus_per_node)} if setting.gpus_per_node else {}
    own = {"job-name": setting.name, "nodes": str(setting.nodes), **gpus, "ntasks-per-node": str(tasks)}
    # SIGTERM before the time limit, to the tasks only: they save a state.
    own |= {"signal": "TERM@300", "output": "%x-%j.log", "open-mode": "append"}
    lines = [f"#SBATCH --{key}={value}" for key, value in (own | dict(setting.options)).items()]
    return _SCRIPT.format(
        options="\n".join([*lines, "#SBATCH --requeue"]),
        task=_TASK,
        command=shlex.join(command),
        max_restarts=setting.max_restarts,
    )


def submit(script: str, name: str) -> str:
    """Submit a script, whose name no job of the user may have, so that nothing is started twice; return the job's id.

    Raises:
        UserError: SLURM is not there, a job of this name is queued or runs, or SLURM refuses the script.
    """
    if waiting := _run(["squeue", "--me", "--noheader", "--format=%i", f"--name={name}"]):
        raise UserError(f"job {waiting.split()[0]} has the name {name}: it waits or runs, or cancel it with scancel")
    return _run(["sbatch", "--parsable"], script).partition(";")[0]


def _run(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not found: --engine slurm works on a machine of a SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} does not answer: try again") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(f"SLURM refused the job: {lines[-1]}")
    return done.stdout.strip()
