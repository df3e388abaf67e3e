"""The file sweep.json of a grid of merges that a program scores: its content, what may be reused, and the best row."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from pma_jax.config.errors import UserError
from pma_jax.evaluation.scorer import SCORE
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json
from pma_jax.storage.json_schema import Count

FILE_NAME = "sweep.json"
BEST = ("lowest", "highest")


class GridRow(TypedDict):
    """One merge, or a raw checkpoint, in sweep.json."""

    text: str
    recipe: str
    window: Count
    interval: Count
    end: Count
    score: float | None
    metrics: dict[str, float | None]
    failure: str | None
    seconds: float
    digest: str
    path: str | None
    kept: Literal["best", "all"] | None
    difference: NotRequired[float | None]


class GridContent(TypedDict):
    """Content of sweep.json."""

    score: str
    checkpoints: list[str]
    unit: str
    held_out: NotRequired[str | None]
    asked: NotRequired[str | None]
    metric: str | None
    best: Literal["lowest", "highest"]
    rows: list[GridRow]
    raw: list[GridRow]
    left_out: dict[str, str]
    notes: list[str]
    rates: dict[str, float]


def read_grid(out: Path) -> dict[str, Any] | None:
    """Return the content of OUT/sweep.json; None if there is none.

    Raises:
        UserError: The file is corrupt, or it is one of a run's sweep.
    """
    path = out / FILE_NAME
    return read_json(path, GridContent) if path.exists() else None


def write_grid(out: Path, content: Mapping[str, Any]) -> None:
    """Write OUT/sweep.json atomically."""
    atomic.write_text(out / FILE_NAME, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_same_sweep(
    content: Mapping[str, Any],
    out: Path,
    command: str,
    addresses: Sequence[str],
    held_out: str | None = None,
    asked: str | None = None,
) -> None:
    """Raise UserError if sweep.json has scores of another command, text or tasks, or of other checkpoints."""
    has_scores = any(row["metrics"] for row in [*content["rows"], *content["raw"]])
    for name, old, new in (
        ("scores of another command", content["score"], command),
        ("merges of other checkpoints", content["checkpoints"], list(addresses)),
        ("losses on other held-out text", content.get("held_out") or "", held_out or content.get("held_out") or ""),
        ("scores of tasks that have changed since", content.get("asked") or asked, asked or content.get("asked")),
    ):
        if has_scores and old != new:
            shown = old if isinstance(old, str) else " ".join(old or ())
            raise UserError(f"{out / FILE_NAME} has {name} ({shown[:200]}): choose another --out, or remove that file")


def absolute_addresses(addresses: Sequence[str | Path]) -> list[str]:
    """Return the addresses with absolute paths, so that they mean the same in every directory."""
    return [str(a) if "://" in str(a) else str(Path(a).expanduser().absolute()) for a in addresses]


def choose_metric(metrics: Mapping[str, float | None], metric: str | None) -> tuple[float | None, str | None]:
    """Return the number of a scorer's output that ranks the merges, or why there is none, in one line."""
    if metric is None and len(metrics) > 1 and SCORE not in metrics:
        return None, f"the scorer gives several numbers ({_names(metrics)}): choose one with --metric"
    name = metric or (SCORE if SCORE in metrics else next(iter(metrics)))
    if name not in metrics:
        return None, f"the scorer's numbers are {_names(metrics)}, not {name} (--metric)"
    return metrics[name], f"the scorer's {name} is not finite" if metrics[name] is None else None


def rank_rows(content: Mapping[str, Any], metric: str | None) -> None:
    """Set the score of each row from its metrics, and its difference from the raw score at the same end."""
    for row in [*content["raw"], *content["rows"]]:
        if row["metrics"]:
            row["score"], row["failure"] = choose_metric(row["metrics"], metric)
    raw = {row["end"]: row["score"] for row in content["raw"]}
    for row in content["rows"]:
        is_known = row["score"] is not None and raw.get(row["end"]) is not None
        row["difference"] = row["score"] - raw[row["end"]] if is_known else None


def best_row(rows: Sequence[dict[str, Any]], best: str) -> dict[str, Any] | None:
    """Return the row with the best score, the first of equal ones; None if none has a score."""
    scored = [row for row in rows if row["score"] is not None]
    choose: Callable[..., Any] = min if best == "lowest" else max
    return choose(scored, key=lambda row: row["score"], default=None)


def _names(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(list(metrics)[:10])
