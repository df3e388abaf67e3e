"""`pma grid`: from the options to the runs of a grid, their jobs and an engine; and the grid as text.

An engine is a module of `pma_jax.launch`, a name in `grid_options.ENGINES`, and a case in `start`.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pma_jax.config.errors import UserError, shorten
from pma_jax.launch import combinations, local
from pma_jax.launch.combinations import GridRun
from pma_jax.launch.job import Job, format_command, make_job, steps_left, then_words
from pma_jax.launch.progress import RunProgress, read_progress


def plan(options: argparse.Namespace) -> tuple[list[GridRun], list[Job]]:
    """Return the runs that the options describe, and the job of each.

    Raises:
        UserError: An override, a verb of --then or the root is wrong.
    """
    rows = combinations.read_overrides_file(options.overrides_file) if options.overrides_file else []
    combined = combinations.combine(options.vary, options.zip, rows)
    runs = combinations.make_runs(options.config, options.root, combined, options.overrides)
    for text in options.then:
        _check_then(text, options.parse)
    return runs, [make_job(run, options.config, options.then) for run in runs]


def start(options: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs with the engine that the options name; return the failed ones, with their lines."""
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


def rows(runs: Sequence[GridRun], jobs: Sequence[Job]) -> list[RunProgress]:
    """Read how far the runs are."""
    return [read_progress(run, job) for run, job in zip(runs, jobs, strict=True)]


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
