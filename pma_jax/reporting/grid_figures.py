"""Figures of a grid of merges that a program scored: the score against the end point, and a heat map of the last end.

The first is Figure 1 of the PMA paper for any run: merges beside the raw checkpoints along training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pma_jax.evaluation.grid_file import best_row
from pma_jax.reporting.drawing import (
    LIGHT,
    MARKERS,
    PAGE_DPI,
    SERIES_COLORS,
    SMALL_POINTS,
    display_name,
    label_panel,
    new_figure,
    to_png,
)
from pma_jax.reporting.heat_map import draw_heat_maps, sweep_heat_maps
from pma_jax.storage import atomic

MAX_LINES = 6  # merges in the figure of end points: those with the best scores at the last end


def write_grid_figures(content: Mapping[str, Any], out: Path) -> list[Path]:
    """Write OUT/sweep.png and OUT/ends.png atomically, if a merge has a score, and return their paths."""
    if best_row(content["rows"], content["best"]) is None:
        return []
    written = []
    for name, draw in (("sweep.png", draw_last_end), ("ends.png", draw_ends)):
        atomic.write_bytes(out / name, to_png(draw(content), PAGE_DPI))
        written.append(out / name)
    return written


def draw_last_end(content: Mapping[str, Any]) -> Figure:
    """Draw the scores at the last end as heat maps, with one column per window."""
    end = last_end(content)
    rows = [
        row | {"loss": row["score"], "kind": "point"}
        for row in content["rows"]
        if row["end"] == end and row["score"] is not None
    ]
    raw = next((row["score"] for row in content["raw"] if row["end"] == end), None)
    compared = "" if raw is None else f"; the raw checkpoint has {raw:.4g}"
    title = f"Scores of merges at {end:,} {content['unit']}{compared}"
    return draw_heat_maps(sweep_heat_maps(rows), title, is_highest_best=content["best"] == "highest")


def draw_ends(content: Mapping[str, Any]) -> Figure:
    """Draw the score of the raw checkpoints and of the best merges against the end point."""
    figure = new_figure(7.2, 4.2, layout="constrained")
    axes = figure.add_subplot()
    raw = score_by_end(content["raw"])
    axes.plot(list(raw), list(raw.values()), color=LIGHT.muted, marker="o", label="raw")
    for number, text in enumerate(texts_to_draw(content)):
        scores = score_by_end([row for row in content["rows"] if row["text"] == text])
        style = {"color": SERIES_COLORS[number], "marker": MARKERS[(number + 1) % len(MARKERS)]}
        axes.plot(list(scores), list(scores.values()), label=display_name(text), **style)
    label_panel(axes, "Merged and raw checkpoints", f"end point ({content['unit']})", "score")
    axes.grid(color=LIGHT.grid)
    axes.legend(fontsize=SMALL_POINTS, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def texts_to_draw(content: Mapping[str, Any]) -> list[str]:
    """Return the labels of the merges with the best scores at the last end, the best first."""
    end = last_end(content)
    rows = [row for row in content["rows"] if row["end"] == end and row["score"] is not None]
    rows.sort(key=lambda row: row["score"], reverse=content["best"] == "highest")
    return [row["text"] for row in rows[:MAX_LINES]]


def last_end(content: Mapping[str, Any]) -> int:
    """Return the last end at which a merge has a score."""
    return max(row["end"] for row in content["rows"] if row["score"] is not None)


def score_by_end(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the scores of rows by their ends, in ascending order, without failures."""
    return {row["end"]: row["score"] for row in sorted(rows, key=lambda row: row["end"]) if row["score"] is not None}
