"""`pma grid`: from the options to the runs of a grid, their jobs and an engine; and the grid as text.

An engine is a module of `pma_jax.launch`, a name in `grid_options.ENGINES`, and a case in `start`.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pma_jax.cli import run_gke_grid, run_launch
from pma_jax.cli.launch_options import OWN_OPTIONS
from pma_jax.config.errors import UserError, shorten
from pma_jax.launch import combinations, local, slurm
from pma_jax.launch.combinations import GridRun, grid_name
from pma_jax.launch.job import (
    Failure,
    Job,
    format_command,
    holder_of,
    make_job,
    read_record,
    share_job,
    steps_left,
    then_words,
)
from pma_jax.launch.progress import QUEUED, RunProgress, read_progress
from pma_jax.runtime.progress import show_progress
from pma_jax.storage.paths import absolute_path, is_bucket


def plan(options: argparse.Namespace) -> tuple[list[GridRun], list[Job]]:
    """Return the runs that the options describe, and the job of each.

    Raises:
        UserError: An override, a verb of --then or the root is wrong.
    """
    rows = combinations.read_overrides_file(options.overrides_file) if options.overrides_file else []
    combined = combinations.combine(options.vary, options.zip, rows)
    runs = combinations.make_runs(options.config, options.root, combined, options.overrides)
    _check_engine_options(options)
    shared = [text for text in options.then if _parse_then(text, options.parse)]
    jobs = [make_job(run, options.config, options.then) for run in runs]
    if options.host is not None:
        jobs = [share_job(job, shared, is_first_host=set(options.host) <= {0}) for job in jobs]
    elif options.engine == "gke":
        run_gke_grid.check(options, runs)
        if run_launch.machines_of(options).hosts > 1:
            share_job(jobs[0], shared, is_first_host=True)  # raises if the order of --then is wrong
    return runs, jobs


def start(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> dict[str, Failure]:
    """Run the jobs with the engine that the options name, or submit them; return how the failed ones failed."""
    if options.engine == "slurm":
        _submit_to_slurm(options, jobs)
        return {}
    if options.engine == "gke":
        run_gke_grid.submit(options, runs, jobs)
        return {}
    # One of several hosts cannot try again alone: the scheduler starts all of them.
    retries = local.MAX_RETRIES if options.host is None else 0
    with show_progress("runs", is_shown=options.host is None) as progress:
        return local.run_jobs(
            jobs, options.parallel, lambda line: print(line, file=sys.stderr, flush=True), retries, progress
        )


def dry_run(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> str:
    """Return what would run: commands, or manifests of Kubernetes."""
    if options.engine == "gke" and not options.json:
        return run_gke_grid.format_manifests(options, runs, jobs)
    description = describe(runs, jobs)
    return json.dumps(description, indent=2) if options.json else format_description(description)


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


def rows(options: argparse.Namespace, runs: Sequence[GridRun], jobs: Sequence[Job]) -> list[RunProgress]:
    """Read how far the runs are."""
    scheduled: dict[str, tuple[str, str]] = {}  # by the name of the run
    if options.engine == "slurm":
        queued = slurm.queued_ids()
        ids = {run.name: read_record(run.path).get("submitted") for run in runs}
        scheduled = {name: (QUEUED, identifier) for name, identifier in ids.items() if identifier in queued}
    elif options.engine == "gke":
        scheduled = run_gke_grid.states(options, runs)
    return [read_progress(run, job, scheduled.get(run.name)) for run, job in zip(runs, jobs, strict=True)]


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


def _check_engine_options(options: argparse.Namespace) -> None:
    """Raise UserError if an option is for another engine than the one that is named."""
    if options.slurm and options.engine != "slurm":
        raise UserError("--slurm needs --engine slurm: leave it out, or name the engine")
    given = next((name for name in OWN_OPTIONS["gke"] if getattr(options, name)), None)
    if given and options.engine != "gke":
        raise UserError(f"--{given.replace('_', '-')} needs --engine gke: leave it out, or name the engine")
    if options.host is not None and options.engine != "local":
        raise UserError("--host is for the processes of a job on several hosts: leave it out")


def _parse_then(text: str, parse: Callable[[Sequence[str]], argparse.Namespace]) -> bool:
    """Check the options of a verb of --then, and return whether several hosts can run it together.

    Raises:
        UserError: Its parser refuses them.
    """
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
    return hasattr(options, "distributed")
