"""The verb `grid` and its options. Does not import JAX."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pma_jax.cli import launch_options, values
from pma_jax.config.errors import TemporaryError, UserError

ENGINES = ("local", "slurm", "gke")


def grid(options: argparse.Namespace) -> None:
    r"""Train many runs from one configuration, each in a directory named by its overrides; continue what is not done.

    Example:
        pma grid --config demo --root runs/grid --vary schedule.peak_rate=1e-3,2e-3 --vary training.seed=0,1 \
            --parallel 2 --then 'sweep --windows 3,6,10'
    """
    from pma_jax.cli import run_grid
    from pma_jax.launch import progress

    runs, jobs = run_grid.plan(options)
    if options.dry_run:
        print(run_grid.dry_run(options, runs, jobs))
        return
    failed = {} if options.status else run_grid.start(options, runs, jobs)
    if options.host is not None:
        _raise_if_failed(failed, len(jobs))
        return
    rows = run_grid.rows(options, runs, jobs)
    if options.json:
        print(json.dumps(list(map(progress.as_json, rows)), indent=2))
    else:
        print(progress.format_progress(rows))
    _raise_if_failed(failed, len(jobs))


def _raise_if_failed(failed: Mapping[str, Any], count: int) -> None:
    """Raise the error of a grid with `count` runs, of which some failed; one that may pass if all of these may."""
    from pma_jax.launch.job import FINAL_STATUSES

    if failed:
        first = next(iter(failed.values()))["line"]
        is_final = any(failure["status"] in FINAL_STATUSES for failure in failed.values())
        raise (UserError if is_final else TemporaryError)(
            f"{len(failed)} of {count} runs failed: {', '.join(failed)} ({first}); the same command tries them again"
        )


def add_options(
    verb: argparse.ArgumentParser,
    config_help: str,
    append_once: type[argparse.Action],
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> None:
    """Add the options of `pma grid` to its parser; `parse` parses the words after `pma`, to check --then."""
    verb.set_defaults(parse=parse)
    verb.add_argument("--config", required=True, help=config_help)
    verb.add_argument("--root", required=True, metavar="DIR", help="the directory of the runs, one below it for each")
    for name, text in {
        "--vary": "values of a key; with several of these, every combination; (3,6),(10) are lists",
        "--zip": "values that go together with those of the other --zip, the first with the first",
    }.items():
        verb.add_argument(name, action=append_once, default=(), metavar="KEY=A,B", help=f"{text}; may be repeated")
    verb.add_argument(
        "--overrides-file", metavar="FILE", help="combinations, one per line: KEY=VALUE KEY=VALUE; # is a comment"
    )
    verb.add_argument(
        "--then",
        action=append_once,
        default=(),
        metavar="'VERB …'",
        help="a verb to run on each run after its training, in its job, such as 'sweep --windows 3,6'; {} is the run, "
        "which follows the verb unless a word is {}; may be repeated",
    )
    verb.add_argument("--engine", choices=ENGINES, default="local", help="where the runs train (default local)")
    verb.add_argument(
        "--parallel",
        type=values.positive,
        default=1,
        metavar="N",
        help="runs at a time; each has an equal share of the cores, and of the GPUs if there are any (default 1; with "
        "--engine slurm, as many as it starts)",
    )
    verb.add_argument(
        "--slurm",
        action=append_once,
        type=values.parameter,
        default=(),
        metavar="KEY=VALUE",
        help="with --engine slurm: a parameter of submitit's executor, such as time=240 (minutes, required), "
        "partition=gpu, account=lab, gpus_per_node=1; may be repeated",
    )
    verb.add_argument(
        "--host",
        type=values.host,
        metavar="I",
        help="this is one of several hosts that run the steps of each run together: I is 0 on the first, and in "
        "slices SLICE-HOST; --engine gke adds it",
    )
    group = verb.add_argument_group("with --engine gke, for each run")
    launch_options.add_machine_options(group, append_once)
    verb.add_argument("--status", action="store_true", help="print how far the runs are, and start none")
    verb.add_argument("--dry-run", action="store_true", help="print the commands that would run, and start none")
