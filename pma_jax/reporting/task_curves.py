"""The task scores of a report: from the records of a run and its forks to curves, panels and lines of text."""

from collections.abc import Sequence
from typing import Any

from pma_jax.evaluation.task_scores import GOLD_BITS, RAW_LABEL
from pma_jax.reporting.drawing import display_name
from pma_jax.reporting.panels import Line, LinePanel
from pma_jax.runs.directory import Run
from pma_jax.runtime.formatting import align_columns, format_estimate

MAX_CURVES = 6  # models of one panel: raw, annealed, and the merges with the best last scores


def task_curves(run: Run, forks: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the recorded scores of a run, and of the raw models of its forks, by task and metric.

    Scores on different questions (another `--limit`, `--shots` or part of the held-out text) are apart.

    Returns:
        One dict per task, metric and set of questions: task, metric, documents, questions (their digest),
        is_higher_better, and curves: model -> [[tokens, value, standard error or None], …] in order of tokens.
    """
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for source in (run, *forks):
        for record in source.metrics:
            if record["kind"] != "task":
                continue
            model = record["model"]
            if source is not run:
                if model != RAW_LABEL or record["tokens"] <= source.start_tokens:
                    continue
                model = source.path.name
            group = groups.setdefault(
                (record["task"], record["metric"], record["questions"]),
                {key: record[key] for key in ("task", "metric", "documents", "questions", "is_higher_better")}
                | {"curves": {}},
            )
            # The newest record replaces an earlier one of the same model.
            group["curves"].setdefault(model, {})[record["tokens"]] = [record["value"], record["standard_error"]]
    for group in groups.values():
        group["curves"] = {
            model: [[tokens, *points[tokens]] for tokens in sorted(points)] for model, points in group["curves"].items()
        }
    return list(groups.values())


def task_panels(tasks: Sequence[dict[str, Any]]) -> list[LinePanel]:
    """Return a panel per task, with the bits per byte of the answers or else its first metric."""
    panels = []
    for group in _main_groups(tasks):
        lines = [
            Line(
                display_name(model),
                [tokens / 1e6 for tokens, *_ in points],
                [value for _, value, _ in points],
                [value - (error or 0) for _, value, error in points],
                [value + (error or 0) for _, value, error in points],
            )
            for model, points in _best_curves(group)
        ]
        title = f"{group['task']}, {group['metric'].replace('_', ' ')}"
        panels.append(LinePanel(title, "million tokens", lines))
    return panels


def format_task_scores(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: the last score of each model on each task; none if there are no tasks."""
    rows = [["task", "metric", "documents", "model", "tokens", "value"]]
    for group in _main_groups(tasks):
        for model, points in _best_curves(group):
            tokens, value, error = points[-1]
            rows.append(
                [
                    group["task"],
                    group["metric"],
                    f"{group['documents']:,}",
                    model,
                    f"{tokens:,}",
                    format_estimate(value, error),
                ]
            )
    return align_columns(rows).splitlines() if len(rows) > 1 else []


def _main_groups(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one group per task and set of questions: the bits per byte of its answers, or its first metric."""
    main: dict[tuple[str, str], dict[str, Any]] = {}
    for group in tasks:
        key = group["task"], group["questions"]
        if key not in main or group["metric"] == GOLD_BITS:
            main[key] = group
    return list(main.values())


def _best_curves(group: dict[str, Any]) -> list[tuple[str, list[list[Any]]]]:
    """Return the curves of a group: raw first, then the others with the best last scores."""
    sign = -1 if group["is_higher_better"] else 1
    others = [item for item in group["curves"].items() if item[0] != RAW_LABEL]
    others.sort(key=lambda item: (-item[1][-1][0], sign * item[1][-1][1]))
    raw = [item for item in group["curves"].items() if item[0] == RAW_LABEL]
    return [*raw, *others[: MAX_CURVES - len(raw)]]
