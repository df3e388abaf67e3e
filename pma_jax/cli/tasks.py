"""`pma evaluate --tasks`: from the options to scores, and scores as text."""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pma_jax.evaluation.task_scores import GOLD_BITS, TaskScore
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.runtime import hosts
from pma_jax.runtime.formatting import format_estimate
from pma_jax.runtime.progress import show_progress


def evaluate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Score the targets that the options name."""
    with show_progress("models", is_shown=hosts.is_first_process()) as progress:
        return score_targets(
            options.target,
            options.tasks,
            options.overrides,
            limit=options.limit,
            shots=options.shots,
            part=options.part,
            is_recorded=not options.numbers,
            progress=progress,
        )


def table(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the rows of a table: one per target, task and metric."""
    cells: list[Sequence[str]] = [["target", "tokens", "task", "documents", "metric", "value"]]
    for row in rows:
        tokens = "-" if row["tokens"] is None else f"{row['tokens']:,}"
        for score in row["tasks"]:
            for metric, estimate in score["metrics"].items():
                value = format_estimate(estimate["value"], estimate["standard_error"])
                documents = f"{estimate['documents']:,}"
                cells.append([row["target"], tokens, score["task"], documents, metric, value])
    return cells


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a target by TASK/METRIC, None if they are not finite; which rise; and the tasks' digest."""
    metrics = {f"{score['task']}/{name}": m for score in row["tasks"] for name, m in score["metrics"].items()}
    finite = {name: m["value"] if math.isfinite(m["value"]) else None for name, m in metrics.items()}
    higher = [name for name, m in metrics.items() if m["is_higher_better"]]
    return finite | {"higher_is_better": higher, "asked": row["asked"]}


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on the scores: sequences that were too long for the model, and questions without bits per byte."""
    lines = [
        f"{row['target']}: {row['truncated']:,} sequences were cut from the left, because the model reads fewer tokens"
        for row in rows
        if row["truncated"]
    ]
    return lines + left_out_of_bits(rows[0]["tasks"])


def left_out_of_bits(scores: Sequence[TaskScore]) -> list[str]:
    """Return a note per task of which some documents have no gold answer to score; they are those of every model."""
    counts = {
        score["task"]: score["documents"] - score["metrics"][GOLD_BITS]["documents"]
        for score in scores
        if GOLD_BITS in score["metrics"]
    }
    return [
        f"{task}: {GOLD_BITS} leaves out {count:,} documents, whose right answer is empty, unknown or no choice"
        for task, count in counts.items()
        if count
    ]
