"""`pma sweep CHECKPOINTS`: from the options to a grid of merges that a program scores, and results as text.

The program is that of --score, or `pma evaluate`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.cli import own_scorer
from pma_jax.config.errors import UserError
from pma_jax.evaluation import grid_file
from pma_jax.evaluation.grid import End, Grid, make_grid
from pma_jax.evaluation.grid_plan import SweepSettings, describe_sweep, plan_sweep
from pma_jax.evaluation.grid_sweep import sweep_grid
from pma_jax.merging import gather
from pma_jax.merging.listing import is_run_directory
from pma_jax.runtime.formatting import align_columns, format_duration, format_storage_bytes
from pma_jax.storage.paths import is_bucket


def plan_options(options: argparse.Namespace) -> tuple[Grid, SweepSettings]:
    """Open the checkpoints, and return the grid and the settings that the options describe.

    Raises:
        UserError: An option or a checkpoint is wrong.
    """
    if options.distributed:
        raise UserError("the merges are scored by programs on this machine: leave out --distributed")
    if options.overrides and options.score is not None:
        raise UserError(f"--config.{options.overrides[0]}: a scorer has no configuration: leave it out, or --score")
    if is_bucket(options.out):
        raise UserError(f"--out {options.out}: the merges are scored on a disk: give a directory on it")
    out = Path(options.out).expanduser().absolute()
    if is_run_directory(out):
        raise UserError(f"--out {out} is a run, whose sweep.json has other losses: give another directory")
    is_alone = "jax" not in sys.modules
    series = gather.open_checkpoints(
        options.source,
        subtrees=options.subtrees,
        snapshot_kind=options.kind,
        tokens_per_step=options.tokens_per_step,
        order=options.order,
        memory_limit_bytes=options.memory_limit if is_alone else sys.maxsize,
    )
    text, words = options.score, ()
    if options.score is None:
        own_scorer.check_checkpoints(series.sources, options)
        text, words = own_scorer.command(options)
    ends = [End(*end) for end in options.ends]
    grid = make_grid(series, options.recipes, options.windows, options.intervals, ends, options.across_stages)
    settings = SweepSettings(
        command=text,
        words=words,
        addresses=tuple(grid_file.absolute_addresses(options.source)),
        out=out,
        keep=options.keep,
        best=options.best,
        metric=options.metric,
        parallel=options.parallel,
        disk_limit_bytes=options.disk_limit,
        timeout_seconds=options.score_timeout,
        subtrees=tuple(options.subtrees),
        merge_options={
            "dtype": options.dtype,
            "integers": options.integers,
            "format": options.format,
            "memory_limit_bytes": options.memory_limit,
            "is_alone": is_alone,
        },
        pma_command=" ".join(["pma", *options.argv]),
    )
    return grid, settings


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a sweep would do (--dry-run), as JSON values."""
    return describe_sweep(plan_sweep(*plan_options(options)))


def sweep(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    """Run a sweep, write its figures, and return the content of its sweep.json."""
    grid, settings = plan_options(options)
    if options.score is None:
        settings = own_scorer.choose_metric(grid, settings, options, log)
    content = sweep_grid(grid, settings, log)
    from pma_jax.reporting.grid_figures import write_grid_figures

    for path in [settings.out / grid_file.FILE_NAME, *write_grid_figures(content, settings.out)]:
        log(f"wrote {path}")
    return content


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of `describe` as lines of text."""
    read, written, disk = (format_storage_bytes(description[f"{name}_bytes"]) for name in ("read", "write", "disk"))
    again = description["again"]
    known = description["read_bytes"] > 0 or not description["passes"]
    size = f"reads {read}, writes {written}, at most {disk} at the same time"
    seconds = description["seconds"]
    ends = ", ".join(f"{end:,}" for end in description["ends"]) or "none"
    duration = "unknown before the first score" if seconds is None else f"about {format_duration(seconds)}"
    return "\n".join(
        [
            f"{description['merges']} merges and {description['raw']} raw checkpoints to score, "
            f"{description['finished']} finished" + (f", {again} to make again" if again else "") + f"; ends: {ends}",
            f"{description['passes']} passes over checkpoints; {size if known else 'sizes are known after a download'}",
            f"duration: {duration}",
        ]
    )


def format_content(content: Mapping[str, Any]) -> str:
    """Format the content of sweep.json as a table."""
    rows = sorted([*content["raw"], *content["rows"]], key=lambda row: row["end"])
    table: list[Sequence[str]] = [["merge", content["unit"], "score", "minus raw"]]
    for row in rows:
        difference = row.get("difference")
        score = "failed" if row["score"] is None else f"{row['score']:.6g}"
        table.append([row["text"], f"{row['end']:,}", score, "-" if difference is None else f"{difference:+.6g}"])
    return align_columns(table)


def content_notes(content: Mapping[str, Any]) -> list[str]:
    """Return the notes about a sweep's result: the best merge, failures, and what was left out."""
    notes = list(content["notes"])
    notes += [f"skipped {text}: {why}" for text, why in content["left_out"].items()]
    failures: dict[str, list[str]] = {}
    for row in [*content["raw"], *content["rows"]]:
        if row["failure"] is not None:
            failures.setdefault(row["failure"], []).append(f"{row['text']} at {row['end']:,}")
    for failure, names in failures.items():
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        notes.append(f"{names[0]}{others}: {failure}")
    best = grid_file.best_row(content["rows"], content["best"])
    if best is not None:
        raw = grid_file.best_row([row for row in content["raw"] if row["end"] == best["end"]], content["best"])
        kept = f", kept as {best['path']}" if best["path"] else ""
        notes.append(
            f"the best merge ({content['best']} score) is {best['text']} at {best['end']:,} {content['unit']}{kept}"
        )
        if raw is not None and grid_file.best_row([raw, best], content["best"]) is raw:
            notes.append(f"no merge is better than the raw checkpoint at {best['end']:,} {content['unit']}")
    return notes


def check_scored(content: Mapping[str, Any]) -> None:
    """Raise UserError if no merge has a score."""
    if grid_file.best_row(content["rows"], content["best"]) is None:
        reason = next((row["failure"] for row in content["rows"] if row["failure"]), "")
        raise UserError(f"no merge has a score: {reason}; the same command tries again")
