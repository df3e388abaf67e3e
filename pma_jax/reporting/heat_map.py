"""Heat maps of losses over windows and intervals or recipes, such as the figure of a sweep.

Each cell shows its number; the lowest loss of all is framed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pma_jax.config import SNAPSHOT_KINDS
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
TITLE_CHARACTER_INCHES = 0.092
COLUMNS = 3  # panels per row, where each shows one recipe
GAP_INCHES = 0.3
BELOW_INCHES, ABOVE_INCHES, TITLE_INCHES = 0.5, 0.4, 0.55


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """One table of losses; its columns are numbers of snapshots merged."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    losses: np.ndarray  # [rows, columns]; NaN where nothing was measured


def write_sweep_figure(sweep: dict[str, Any], folder: epath.Path) -> epath.Path:
    """Write FOLDER/sweep.png atomically and return its path. `sweep` is what sweep.json holds."""
    target = folder / "sweep.png"
    atomic.write_bytes(target, to_png(draw_sweep(sweep), PAGE_DPI))
    return target


def sweep_heat_maps(rows: Sequence[dict[str, Any]]) -> list[HeatMap]:
    """Arrange a sweep's rows as heat maps.

    With more than one interval: intervals by windows, one map per recipe and kind of snapshot. Otherwise: recipes by
    windows, one map per kind.
    """
    kinds = [k for k in SNAPSHOT_KINDS if any(r["kind"] == k for r in rows)]
    maps = []
    for kind in kinds:
        of_kind = [r for r in rows if r["kind"] == kind]
        recipes = list(dict.fromkeys(r["recipe"] for r in of_kind))
        if len({r["interval"] for r in rows}) == 1:
            names = {recipe: display_name(recipe) for recipe in recipes}
            maps.append(_heat_map(SNAPSHOT_KINDS[kind].title, of_kind, "recipe", names))
            continue
        for recipe in recipes:
            of_recipe = [r for r in of_kind if r["recipe"] == recipe]
            intervals = {i: f"every {i} V" if i > 1 else "every V" for i in sorted({r["interval"] for r in of_recipe})}
            name = display_name(recipe)
            title = f"{name}, {SNAPSHOT_KINDS[kind].title}" if len(kinds) > 1 else name
            maps.append(_heat_map(title, of_recipe, "interval", intervals))
    return maps


def _heat_map(title: str, rows: Sequence[dict[str, Any]], key: str, names: dict[Any, str]) -> HeatMap:
    """Return the heat map of `rows` over windows and the values of `key`, whose names are given."""
    values, windows = list(names), sorted({r["window"] for r in rows})
    losses = np.full((len(values), len(windows)), np.nan)
    for r in rows:
        losses[values.index(r[key]), windows.index(r["window"])] = r["loss"] if math.isfinite(r["loss"]) else np.nan
    return HeatMap(title, list(names.values()), [str(w) for w in windows], losses)


def draw_sweep(sweep: dict[str, Any]) -> Figure:
    """Draw all heat maps of a sweep on one scale of colours."""
    raw = "" if sweep["raw_loss"] is None else f"; the raw model has {sweep['raw_loss']:.4f}"
    title = f"Held-out loss of merges at {sweep['tokens'] / 1e6:.2f}M tokens{raw}"
    return draw_heat_maps(sweep_heat_maps(sweep["rows"]), title)


def draw_heat_maps(maps: Sequence[HeatMap], title: str, columns: int = COLUMNS, highest: float | None = None) -> Figure:
    """Draw heat maps on one scale of colours, in rows of `columns`, and frame the lowest loss of all.

    Args:
      maps: the tables.
      title: of the figure.
      columns: heat maps per row.
      highest: upper end of the scale, for when a few losses are far above the rest: those get the last colour.
    """
    columns = min(columns, len(maps))
    grid = [maps[i : i + columns] for i in range(0, len(maps), columns)]
    left = 0.25 + CHARACTER_INCHES * max(len(name) for m in maps for name in m.rows)
    wide = max(max(CELL_INCHES[0] * len(m.columns), TITLE_CHARACTER_INCHES * len(m.title)) for m in maps)
    slot = left + wide + GAP_INCHES
    heights = [max(len(m.rows) for m in row) * CELL_INCHES[1] + BELOW_INCHES + ABOVE_INCHES for row in grid]
    width, height = max(columns * slot, 4.5), TITLE_INCHES + sum(heights)
    figure = new_figure(width, height)
    losses = np.concatenate([m.losses.ravel() for m in maps])
    finite = losses[np.isfinite(losses)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    high = high if highest is None else min(high, highest)
    scale = Normalize(low, high if high > low else low + 1e-6)
    top = height - TITLE_INCHES
    for row, row_height in zip(grid, heights, strict=True):
        for i, heat_map in enumerate(row):
            wide, tall = CELL_INCHES[0] * len(heat_map.columns), CELL_INCHES[1] * len(heat_map.rows)
            x, y = i * slot + left, top - ABOVE_INCHES - tall
            axes = figure.add_axes((x / width, y / height, wide / width, tall / height))
            _draw_heat_map(axes, heat_map, scale, low)
        top -= row_height
    style = {"color": LIGHT.ink, "fontsize": TITLE_POINTS, "fontweight": "bold", "va": "center"}
    figure.text(0.25 / width, 1 - 0.28 / height, title, **style)
    return figure


def _draw_heat_map(axes: Axes, heat_map: HeatMap, scale: Normalize, best: float) -> None:
    image = axes.imshow(heat_map.losses, cmap=LOSS_COLORMAP, norm=scale, aspect="auto")
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
    axes.set_xticks(range(len(heat_map.columns)), heat_map.columns)
    axes.set_yticks(range(len(heat_map.rows)), heat_map.rows)
    axes.tick_params(colors=LIGHT.muted, labelsize=SMALL_POINTS, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(heat_map.title, loc="left", color=LIGHT.ink, fontsize=TEXT_POINTS, fontweight="bold", pad=6)
    axes.set_xlabel("snapshots merged, N", color=LIGHT.muted, fontsize=SMALL_POINTS)
