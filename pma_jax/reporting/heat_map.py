"""Heat maps of losses: one column per window size, one row per interval or recipe, as in the figure of a sweep.

Each cell shows its number; the lowest loss of all is framed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.evaluation.task_scores import main_metric
from pma_jax.reporting.drawing import (
    CHARACTER_INCHES,
    LIGHT,
    LOSS_COLORMAP,
    PAGE_DPI,
    SMALL_POINTS,
    TEXT_POINTS,
    TITLE_POINTS,
    display_name,
    new_figure,
    to_png,
)
from pma_jax.storage import atomic

CELL_INCHES = (0.72, 0.36)  # width, height
MAP_TITLE_CHARACTER_INCHES = 0.092  # width of a character in the title of a heat map
MAPS_PER_ROW = 3
GAP_INCHES = 0.3  # between heat maps
BELOW_MAP_INCHES, ABOVE_MAP_INCHES, FIGURE_TITLE_INCHES = 0.5, 0.4, 0.55  # heights


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A table of losses with one column per window size (number of snapshots merged)."""

    title: str
    row_labels: Sequence[str]
    column_labels: Sequence[str]
    losses: np.ndarray  # [rows, columns]; NaN where nothing was measured


def write_sweep_figure(sweep: dict[str, Any], folder: epath.Path) -> epath.Path:
    """Write FOLDER/sweep.png atomically and return its path. `sweep` is the parsed content of sweep.json."""
    target = folder / "sweep.png"
    atomic.write_bytes(target, to_png(draw_sweep(sweep), PAGE_DPI))
    return target


def write_task_figure(result: Mapping[str, Any], folder: epath.Path) -> epath.Path:
    """Write FOLDER/task_sweep.png atomically and return its path. `result` is that of `sweep_tasks`."""
    target = folder / "task_sweep.png"
    atomic.write_bytes(target, to_png(draw_task_sweep(result), PAGE_DPI))
    return target


def draw_task_sweep(result: Mapping[str, Any]) -> Figure:
    """Draw heat maps of the main metric of the first task; tasks and metrics have no common scale."""
    first = result["rows"][0]["tasks"][0]
    metric = main_metric(first)
    rows = [row | {"loss": row["tasks"][0]["metrics"][metric]["value"]} for row in result["rows"]]
    raw = "" if result["raw"] is None else f"; raw {result['raw']['tasks'][0]['metrics'][metric]['value']:.4f}"
    title = f"{first['task']}, {metric}, at {result['tokens'] / 1e6:.2f}M tokens{raw}"
    return draw_heat_maps(sweep_heat_maps(rows), title, is_highest_best=first["metrics"][metric]["is_higher_better"])


def sweep_heat_maps(records: Sequence[dict[str, Any]]) -> list[HeatMap]:
    """Arrange the losses of a sweep as heat maps with one column per window size.

    `records` is the list `rows` of sweep.json. With several intervals, return one map per recipe and kind of snapshot,
    with intervals as rows. With one interval, return one map per kind, with recipes as rows.
    """
    kinds = [k for k in SNAPSHOT_KINDS if any(r["kind"] == k for r in records)]
    maps = []
    for kind in kinds:
        of_kind = [r for r in records if r["kind"] == kind]
        recipes = list(dict.fromkeys(r["recipe"] for r in of_kind))
        if len({r["interval"] for r in records}) == 1:
            labels = {recipe: display_name(recipe) for recipe in recipes}
            maps.append(_heat_map(SNAPSHOT_KINDS[kind].title, of_kind, "recipe", labels))
            continue
        for recipe in recipes:
            of_recipe = [r for r in of_kind if r["recipe"] == recipe]
            intervals = sorted({r["interval"] for r in of_recipe})
            labels = {i: f"every {i} snapshots" if i > 1 else "every snapshot" for i in intervals}
            name = display_name(recipe)
            title = f"{name}, {SNAPSHOT_KINDS[kind].title}" if len(kinds) > 1 else name
            maps.append(_heat_map(title, of_recipe, "interval", labels))
    return maps


def _heat_map(title: str, records: Sequence[dict[str, Any]], key: str, labels: dict[Any, str]) -> HeatMap:
    """Build a heat map with one row per value of `key`; `labels` maps each value to the label of its row."""
    values, windows = list(labels), sorted({r["window"] for r in records})
    losses = np.full((len(values), len(windows)), np.nan)
    for r in records:
        losses[values.index(r[key]), windows.index(r["window"])] = r["loss"] if math.isfinite(r["loss"]) else np.nan
    return HeatMap(title, list(labels.values()), [str(w) for w in windows], losses)


def draw_sweep(sweep: dict[str, Any]) -> Figure:
    """Draw all heat maps of a sweep with a shared colour scale; `sweep` is the parsed content of sweep.json."""
    raw = "" if sweep["raw_loss"] is None else f"; the raw model has {sweep['raw_loss']:.4f}"
    title = f"Held-out loss of merges at {sweep['tokens'] / 1e6:.2f}M tokens{raw}"
    return draw_heat_maps(sweep_heat_maps(sweep["rows"]), title)


def draw_heat_maps(
    maps: Sequence[HeatMap],
    title: str,
    maps_per_row: int = MAPS_PER_ROW,
    max_loss: float | None = None,
    is_highest_best: bool = False,
) -> Figure:
    """Draw heat maps with a shared colour scale, and frame the lowest loss of all.

    Args:
        maps: The tables.
        title: Title of the figure.
        maps_per_row: Number of heat maps side by side.
        max_loss: Upper limit of the colour scale, if it is less than the largest finite loss, which is the default.
            Losses above the limit have the colour of the limit.
        is_highest_best: Whether the numbers are scores of which the highest is dark and framed.
    """
    maps_per_row = min(maps_per_row, len(maps))
    grid = [maps[i : i + maps_per_row] for i in range(0, len(maps), maps_per_row)]
    labels_width = 0.25 + CHARACTER_INCHES * max(len(label) for m in maps for label in m.row_labels)
    max_map_width = max(CELL_INCHES[0] * len(m.column_labels) for m in maps)
    max_title_width = max(MAP_TITLE_CHARACTER_INCHES * len(m.title) for m in maps)
    slot_width = labels_width + max(max_map_width, max_title_width) + GAP_INCHES
    margins = BELOW_MAP_INCHES + ABOVE_MAP_INCHES
    row_heights = [max(len(m.row_labels) for m in row) * CELL_INCHES[1] + margins for row in grid]
    width, height = max(maps_per_row * slot_width, 4.5), FIGURE_TITLE_INCHES + sum(row_heights)
    figure = new_figure(width, height)
    losses = np.concatenate([m.losses.ravel() for m in maps])
    finite = losses[np.isfinite(losses)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    high = high if max_loss is None else min(high, max_loss)
    scale = Normalize(low, high if high > low else low + 1e-6)
    best, colormap = (high, LOSS_COLORMAP.removesuffix("_r")) if is_highest_best else (low, LOSS_COLORMAP)
    top = height - FIGURE_TITLE_INCHES
    for row, row_height in zip(grid, row_heights, strict=True):
        for i, heat_map in enumerate(row):
            map_height, map_width = CELL_INCHES[1] * heat_map.losses.shape[0], CELL_INCHES[0] * heat_map.losses.shape[1]
            x, y = i * slot_width + labels_width, top - ABOVE_MAP_INCHES - map_height
            axes = figure.add_axes((x / width, y / height, map_width / width, map_height / height))
            _draw_heat_map(axes, heat_map, scale, best, colormap)
        top -= row_height
    style = {"color": LIGHT.ink, "fontsize": TITLE_POINTS, "fontweight": "bold", "va": "center"}
    figure.text(0.25 / width, 1 - 0.28 / height, title, **style)
    return figure


def _draw_heat_map(axes: Axes, heat_map: HeatMap, scale: Normalize, best: float, colormap: str) -> None:
    image = axes.imshow(heat_map.losses, cmap=colormap, norm=scale, aspect="auto")
    for (i, j), loss in np.ndenumerate(heat_map.losses):
        text, ink, weight = "–", LIGHT.muted, "normal"
        if np.isfinite(loss):
            red, green, blue, _ = image.cmap(scale(loss))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            text, ink = f"{loss:.4f}", "#ffffff" if is_dark else LIGHT.ink
        if loss == best:
            weight, corner = "bold", (j - 0.5, i - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=LIGHT.annealed, linewidth=2, clip_on=False))
        axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=SMALL_POINTS, fontweight=weight)
    axes.set_xticks(range(len(heat_map.column_labels)), heat_map.column_labels)
    axes.set_yticks(range(len(heat_map.row_labels)), heat_map.row_labels)
    axes.tick_params(colors=LIGHT.muted, labelsize=SMALL_POINTS, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(heat_map.title, loc="left", color=LIGHT.ink, fontsize=TEXT_POINTS, fontweight="bold", pad=6)
    axes.set_xlabel("snapshots merged, N", color=LIGHT.muted, fontsize=SMALL_POINTS)
