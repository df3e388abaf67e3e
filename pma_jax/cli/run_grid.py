"""`pma grid`: from the options to the runs of a grid, their jobs and an engine; and the grid as text.

An engine is a module of `pma_jax.launch`, a name in `grid_options.ENGINES`, and a case in `start`.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError, shorten
from pma_jax.launch import combinations, local, slurm
from pma_jax.launch.combinations import GridRun, grid_name
from pma_jax.launch.job import Job, format_command, holder_of, make_job, read_record, steps_left, then_words
from pma_jax.launch.progress import RunProgress, read_progress
from pma_jax.storage.paths import absolute_path, is_bucket


def plan(options: argparse.Namespace) -> tuple[list[GridRun], list[Job]]:
    """Return the runs that the options describe, and the job of each.

    Raises:
        UserError: An override, a verb of --then or the root is wrong.
    """
    rows = combinations.read_overrides_file(options.overrides_file) if options.overrides_file else []
    combined = combinations.combine(options.vary, options.zip, rows)
    runs = combinations.make_runs(options.config, options.root, combined, options.overrides)
    if options.slurm and options.engine != "slurm":
        raise UserError("--slurm needs --engine slurm: leave it out, or name the engine")
    for text in options.then:
        _check_then(text, options.parse)
    return runs, [make_job(run, options.config, options.then) for run in runs]


def start(options: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs with the engine that the options name, or submit them; return the failed ones, with their lines."""
    if options.engine == "slurm":
        _submit_to_slurm(options, jobs)
        return {}
    return local.run_jobs(jobs, options.parallel, lambda line: print(line, file=sys.stderr, flush=True))


def describe(runs: Sequence[GridRun], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Describe the jobs: the commands that are left to run for each."""
    return [
        {"run": run.name, "job": run.job_name, "commands": [format_command(step) for step in steps_left(job)]}
        for run, job in zip(runs, jobs, strict=True)
    ]


def format_description(description: Sequence[dict[str, Any]]) -> str:
    """Format the result of `describe` as lines for a shell."""
    lines = []
    for job in description:
        lines += [f"# {job['run']} ({job['job']})" + ("" if job["commands"] else ": done"), *job["commands"]]
    return "\n".join(lines)


def describe_failures(failed: Mapping[str, str]) -> str:
    """Name the jobs that failed, with the line of the first."""
    return f"{', '.join(failed)} ({next(iter(failed.values()))}); the same command tries them again"


def rows(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> list[RunProgress]:
    """Read how far the runs are."""
    queued = slurm.queued_ids() if options.engine == "slurm" else set()
    return [read_progress(run, job, queued) for run, job in zip(runs, jobs, strict=True)]


def _submit_to_slurm(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Submit the jobs that are not done, queued or worked on as one array."""
    root = absolute_path(options.root)
    if is_bucket(root):
        raise UserError("--engine slurm writes its job files into --root: give a directory on a disk that nodes share")
    parallel = options.parallel if "parallel" in getattr(options, "given", ()) else None
    executor = slurm.make_executor(Path(root), grid_name(root), dict(options.slurm), parallel)
    queued = slurm.queued_ids()
    new = [
        job
        for job in jobs
        if job.directory is not None
        and steps_left(job)
        and read_record(job.directory).get("submitted") not in queued
        and not holder_of(job.directory)
    ]
    ids = slurm.submit(new, executor)
    text = f"submitted {len(new)} of {len(jobs)} runs" + (f" as {ids[0].partition('_')[0]}" if ids else "")
    print(f"{text}; the others are done, queued or running", file=sys.stderr)


def _check_then(text: str, parse: Callable[[Sequence[str]], argparse.Namespace]) -> None:
    """Raise UserError if a verb of --then has options that its parser refuses."""
    words, errors = then_words(text, "RUN"), io.StringIO()
    plain = [word for word in words if not word.startswith("--config.")]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        try:
            options = parse(plain)
        except SystemExit:
            lines = errors.getvalue().strip().splitlines()
            raise UserError(f"--then {shorten(text)}: {lines[-1].removeprefix('error: ')}") from None
    if len(words) > len(plain) and not options.takes_config:
        raise UserError(f"--then {shorten(text)}: `pma {options.verb}` does not accept --config.SECTION.KEY=VALUE")
