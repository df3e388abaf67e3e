"""The job of a run: train it, then run other verbs on it; and what its directory records of that.

    RUN/job.json     the steps that are done, and the one that failed, with its line
    RUN/job.log      the output of all steps
    RUN/job.lock     held by the engine that works on the run: also between its steps, and before training locks the run

A step is a command. An engine runs the steps that are left, in order, and records each when it has ended. There is no
other state, so another engine, on another machine, goes on where one has stopped.
"""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

from etils import epath

from pma_jax.config.errors import UserError, error_line
from pma_jax.launch.combinations import GridRun
from pma_jax.runs import lock
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json
from pma_jax.storage.paths import as_path, exists

RECORD_FILE, LOG_FILE, LOCK_FILE = "job.json", "job.log", "job.lock"
TRAIN = "train"
# Verbs that work on one run; its directory follows the verb.
THEN_VERBS = ("evaluate", "export", "fork", "inspect", "merge", "report", "sweep", "watch")
# A status after which the same command would fail again (docs/hosts.md); any other may pass.
FINAL_STATUSES = (1, 2)


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a job; its text identifies it in the record."""

    text: str
    command: tuple[str, ...]
    is_shared: bool = False  # whether all hosts of the job run it together
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variables, besides those of the engine


@dataclasses.dataclass(frozen=True)
class Job:
    """Commands that are run one after the other; with a directory, what is done is recorded there."""

    name: str
    steps: tuple[Step, ...]
    directory: epath.Path | None = None


class Failure(TypedDict):
    """The step of a job that failed, its exit status (negative: a signal), and the line that says why."""

    step: str
    status: int
    line: str


class JobRecord(TypedDict):
    """Contents of RUN/job.json."""

    done: list[str]
    failed: NotRequired[Failure | None]
    submitted: NotRequired[str | None]  # the scheduler's id of the job


def make_job(run: GridRun, config_name: str, then: Sequence[str]) -> Job:
    """Return the job that trains a run and then runs the verbs of `then`, such as `sweep --windows 3,6`."""
    words = [("train", "--config", config_name, "--workdir", str(run.path), *_config_words(run))]
    texts = [TRAIN, *then]
    words += [then_words(text, str(run.path)) for text in then]
    steps = (Step(text, (*_PMA, *command)) for text, command in zip(texts, words, strict=True))
    return Job(run.name, tuple(steps), run.path)


def share_job(job: Job, shared: Collection[str], is_first_host: bool) -> Job:
    """Return what one of several hosts does of a job that `make_job` has made.

    All hosts run training and the steps `shared` together, as processes of one computation. The first host runs the
    other steps, without the accelerators, which a part of the hosts cannot use. Only the first host records.

    Args:
        job: The job of a run.
        shared: Texts of the steps after the training whose verbs take `--distributed`.
        is_first_host: Whether this is the first host.

    Raises:
        UserError: A shared step comes after one of the first host, for which the others would wait.
    """
    steps = []
    for step in job.steps:
        if step.text == TRAIN or step.text in shared:
            if steps and not steps[-1].is_shared:
                raise UserError(
                    f"--then {step.text!r} runs on all hosts, and {steps[-1].text!r} before it on the first only: "
                    "put the verbs that all hosts run first"
                )
            steps.append(dataclasses.replace(step, command=(*step.command, "--distributed"), is_shared=True))
        else:
            steps.append(dataclasses.replace(step, environment={"JAX_PLATFORMS": "cpu"}))
    whole = dataclasses.replace(job, steps=tuple(steps))
    if is_first_host:
        return whole
    return Job(job.name, tuple(step for step in steps_left(whole) if step.is_shared))


_PMA = (sys.executable, "-m", "pma_jax.cli")


def then_words(text: str, run: str) -> tuple[str, ...]:
    """Return the words after `pma` of a verb on a run: `{}` is the run, which follows the verb unless a word is `{}`.

    Raises:
        UserError: The text is not one of `THEN_VERBS` with options.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--then {text!r}: {error_line(error)}: correct the quotes") from None
    if not words or words[0] not in THEN_VERBS:
        raise UserError(f"--then {text!r} is not a verb on a run: begin with one of {', '.join(THEN_VERBS)}")
    if "{}" not in words:
        words.insert(1, "{}")
    return tuple(word.replace("{}", run) for word in words)


def format_command(step: Step) -> str:
    """Format a step as a line for a shell."""
    is_pma = step.command[: len(_PMA)] == _PMA
    return shlex.join(["pma", *step.command[len(_PMA) :]] if is_pma else step.command)


def read_record(directory: epath.Path) -> JobRecord:
    """Read RUN/job.json; without one, nothing is done."""
    path = as_path(directory / RECORD_FILE)
    return read_json(path, JobRecord) if exists(path) else {"done": []}


def steps_left(job: Job) -> list[Step]:
    """Return the steps that are not recorded as done: all after the first of them too."""
    done = read_record(job.directory)["done"] if job.directory else []
    first = next((i for i, step in enumerate(job.steps) if step.text not in done), len(job.steps))
    return list(job.steps[first:])


def record_step(job: Job, step: Step, failure: Failure | None = None) -> None:
    """Record that a step is done, or how it failed."""
    if job.directory is None:
        return
    record = read_record(job.directory)
    if failure is None and step.text not in record["done"]:
        record["done"].append(step.text)
    record["failed"] = failure
    _write(job.directory, record)


def record_start(job: Job) -> None:
    """Forget the failure of an earlier attempt."""
    if job.directory is not None and (record := read_record(job.directory)).get("failed"):
        record["failed"] = None
        _write(job.directory, record)


def record_submission(job: Job, identifier: str) -> None:
    """Record the id that a scheduler gave to the job."""
    assert job.directory is not None
    job.directory.mkdir(parents=True, exist_ok=True)
    record = read_record(job.directory)
    record["submitted"], record["failed"] = identifier, None
    _write(job.directory, record)


def holder_of(directory: epath.Path) -> str | None:
    """Name the process that works on a run or trains it; None if none does, and in a bucket, where nobody can tell."""
    return lock.holder_of(directory) or lock.holder_of(directory, LOCK_FILE)


@contextlib.contextmanager
def claim(job: Job) -> Iterator[str | None]:
    """Hold the lock of a job for the block; yield None, or if another process works on the run, its name."""
    if job.directory is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.hold(job.directory, file_name=LOCK_FILE))
            holder = lock.holder_of(job.directory)
        except lock.InUseError:
            holder = holder_of(job.directory) or "another process"
        yield holder


def failure_line(output: str) -> str:
    """Return the line of a command's output that says why it failed: its last error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["its output says why"])[-1][:500]


def _config_words(run: GridRun) -> Iterator[str]:
    return (f"--config.{override}" for override in run.overrides)


def _write(directory: epath.Path, record: JobRecord) -> None:
    atomic.write_text(directory / RECORD_FILE, json.dumps(record, indent=1) + "\n")
