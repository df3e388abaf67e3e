"""`pma sweep RUN`: from the options to the merges of a run with their losses or task scores, and these as text."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax.cli.tasks import left_out_of_bits
from pma_jax.evaluation import sweep as losses
from pma_jax.evaluation import task_sweep
from pma_jax.evaluation.task_scores import RAW_LABEL, main_metric
from pma_jax.runs.directory import open_run
from pma_jax.runtime import hosts
from pma_jax.runtime.formatting import format_difference, format_estimate, format_loss, format_text
from pma_jax.runtime.progress import show_progress


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the merges that the options describe."""
    run, kind = open_run(options.source[0]), options.kind or "point"
    grid = (options.recipes, options.windows, options.intervals, kind)
    with show_progress("reads and evaluations", is_shown=hosts.is_first_process()) as progress:
        if options.tasks is None:
            return losses.sweep(run, *grid, progress=progress)
        settings = {"limit": options.limit, "shots": options.shots}
        return task_sweep.sweep_tasks(run, options.tasks, *grid, **settings, progress=progress)


def table(result: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the rows of a table: one per merge, with its loss or the main metric of each task."""
    if "raw" not in result:
        rows = [[row["text"], format_loss(row), format_difference(row)] for row in result["rows"]]
        return [["merge", "loss", "minus raw"], *rows]
    names = [score["task"] for score in result["rows"][0]["tasks"]]
    metrics = [main_metric(score) for score in result["rows"][0]["tasks"]]
    header = ["merge", *(f"{name} {metric}" for name, metric in zip(names, metrics, strict=True))]
    models: list[Mapping[str, Any]] = [
        *([{"text": RAW_LABEL, **result["raw"]}] if result["raw"] else []),
        *result["rows"],
    ]
    rows = []
    for model in models:
        estimates = [score["metrics"][metric] for score, metric in zip(model["tasks"], metrics, strict=True)]
        rows.append([model["text"], *(format_estimate(e["value"], e["standard_error"]) for e in estimates)])
    return [header, *rows]


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return notes on a result: merges that were left out, passes, and the text."""
    lines = [f"skipped {text}: {why}" for text, why in result["left_out"].items()]
    if result["passes"] > 1:
        lines.append(f"not all merges fit into memory at once: the snapshots were read {result['passes']} times")
    if "raw" not in result:
        text = format_text(result["held_out"])
        lines.append(f"losses are on {text}, for choosing a merge: `pma report` judges it on other documents")
    else:
        if cut := sum(row["truncated"] for row in result["rows"]):
            lines.append(f"{cut:,} sequences were cut from the left, because the model reads fewer tokens")
        lines += left_out_of_bits(result["rows"][0]["tasks"])
    return lines


def write_figure(options: argparse.Namespace, result: Mapping[str, Any]) -> epath.Path:
    """Write the heat map of the losses, or the heat maps of the tasks, into the run; return its path."""
    from pma_jax.reporting.heat_map import write_sweep_figure, write_task_figure

    folder = open_run(options.source[0]).path
    return write_sweep_figure(dict(result), folder) if "raw" not in result else write_task_figure(result, folder)
