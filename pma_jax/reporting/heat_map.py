"""The figure of a sweep: loss as colour, over windows and intervals or recipes.

Every cell has its number; the best of all is framed. Drawn on its own canvas, as figures.py does.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.reporting.figures import DPI, LIGHT, SMALL_POINTS, TEXT_POINTS, png_bytes, shown
from pma_jax.storage import atomic

CELL_INCHES = (0.72, 0.36)  # width, height
CHARACTER_INCHES, TITLE_CHARACTER_INCHES = 0.082, 0.092
COLUMNS = 3  # panels beside each other, where each is of one recipe
GAP_INCHES = 0.3
BELOW_INCHES, ABOVE_INCHES, TITLE_INCHES = 0.5, 0.4, 0.55
COLOURS = "YlGnBu_r"  # dark is low; even in lightness, and readable in grey


@dataclasses.dataclass(frozen=True)
class Panel:
    """One table of losses."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    columns_label: str
    losses: np.ndarray  # [rows, columns], NaN where the sweep has none


def write(sweep: dict[str, Any], folder: epath.Path) -> epath.Path:
    """Write FOLDER/sweep.png, whole or not at all; returns its path. `sweep` is what sweep.json holds."""
    target = folder / "sweep.png"
    atomic.write_bytes(target, png_bytes(figure(sweep), DPI))
    return target


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """The tables that show a sweep's rows.

    Where there is more than one interval: intervals by windows, one for each recipe and kind; else recipes by windows,
    one for each kind.
    """
    kinds = [k for k in SNAPSHOT_KINDS if any(r["kind"] == k for r in rows)]
    found = []
    for kind in kinds:
        of_kind = [r for r in rows if r["kind"] == kind]
        recipes = list(dict.fromkeys(r["recipe"] for r in of_kind))
        if len({r["interval"] for r in rows}) == 1:
            found.append(_panel(SNAPSHOT_KINDS[kind].title, of_kind, "recipe", recipes, "window", "N"))
            continue
        for recipe in recipes:
            of_recipe = [r for r in of_kind if r["recipe"] == recipe]
            intervals = sorted({r["interval"] for r in of_recipe})
            title = f"{shown(recipe)}, {SNAPSHOT_KINDS[kind].title}" if len(kinds) > 1 else shown(recipe)
            found.append(_panel(title, of_recipe, "interval", intervals, "window", "N"))
    return found


def _panel(
    title: str, rows: Sequence[dict[str, Any]], down: str, downs: Sequence[Any], across: str, label: str
) -> Panel:
    acrosses = sorted({r[across] for r in rows})
    losses = np.full((len(downs), len(acrosses)), np.nan)
    for r in rows:
        losses[downs.index(r[down]), acrosses.index(r[across])] = r["loss"] if math.isfinite(r["loss"]) else np.nan
    names = [f"every {d} V" if d > 1 else "every V" for d in downs] if down == "interval" else [shown(d) for d in downs]
    return Panel(title, names, [str(a) for a in acrosses], f"snapshots merged, {label}", losses)


def figure(sweep: dict[str, Any]) -> Figure:
    """All panels of a sweep on one scale of colours."""
    raw = "" if sweep["raw_loss"] is None else f"; the raw model has {sweep['raw_loss']:.4f}"
    return draw(panels(sweep["rows"]), f"Held-out loss of merges at {sweep['tokens'] / 1e6:.2f}M tokens{raw}")


def png(drawn_panels: Sequence[Panel], title: str, columns: int = COLUMNS, highest: float | None = None) -> bytes:
    """`draw` as PNG; the same panels give the same bytes."""
    return png_bytes(draw(drawn_panels, title, columns, highest), DPI)


def draw(drawn_panels: Sequence[Panel], title: str, columns: int = COLUMNS, highest: float | None = None) -> Figure:
    """Panels on one scale of colours, `columns` beside each other; the lowest cell of all is framed.

    Where a few cells are far above the rest, `highest` ends the scale: whatever is above has its last colour.
    """
    columns = min(columns, len(drawn_panels))
    grid = [drawn_panels[i : i + columns] for i in range(0, len(drawn_panels), columns)]
    left = 0.25 + CHARACTER_INCHES * max(len(name) for panel in drawn_panels for name in panel.rows)
    wide = max(max(CELL_INCHES[0] * len(p.columns), TITLE_CHARACTER_INCHES * len(p.title)) for p in drawn_panels)
    slot = left + wide + GAP_INCHES
    heights = [max(len(p.rows) for p in row) * CELL_INCHES[1] + BELOW_INCHES + ABOVE_INCHES for row in grid]
    size = (max(columns * slot, 4.5), TITLE_INCHES + sum(heights))
    drawn = Figure(figsize=size, facecolor=LIGHT.paper)
    FigureCanvasAgg(drawn)
    losses = np.concatenate([p.losses.ravel() for p in drawn_panels])
    finite = losses[np.isfinite(losses)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    high = high if highest is None else min(high, highest)
    top = size[1] - TITLE_INCHES
    for row, height in zip(grid, heights, strict=True):
        for i, panel in enumerate(row):
            wide, tall = CELL_INCHES[0] * len(panel.columns), CELL_INCHES[1] * len(panel.rows)
            x, y = i * slot + left, top - ABOVE_INCHES - tall
            axes = drawn.add_axes((x / size[0], y / size[1], wide / size[0], tall / size[1]))
            _draw(axes, panel, Normalize(low, high if high > low else low + 1e-6), low)
        top -= height
    drawn.text(
        0.25 / size[0],
        1 - 0.28 / size[1],
        title,
        color=LIGHT.ink,
        fontsize=11,
        fontweight="bold",
        va="center",
    )
    return drawn


def _draw(axes: Axes, panel: Panel, scale: Normalize, best: float) -> None:
    image = axes.imshow(panel.losses, cmap=COLOURS, norm=scale, aspect="auto")
    for (i, j), loss in np.ndenumerate(panel.losses):
        if not np.isfinite(loss):
            axes.text(j, i, "–", ha="center", va="center", color=LIGHT.muted, fontsize=SMALL_POINTS)
            continue
        red, green, blue, _ = image.cmap(scale(loss))
        ink = "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else LIGHT.ink
        weight = "bold" if loss == best else "normal"
        axes.text(j, i, f"{loss:.4f}", ha="center", va="center", color=ink, fontsize=SMALL_POINTS, fontweight=weight)
        if loss == best:
            axes.add_patch(
                Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=LIGHT.annealed, linewidth=2, clip_on=False)
            )
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.tick_params(colors=LIGHT.muted, labelsize=SMALL_POINTS, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(panel.title, loc="left", color=LIGHT.ink, fontsize=TEXT_POINTS, fontweight="bold", pad=6)
    axes.set_xlabel(panel.columns_label, color=LIGHT.muted, fontsize=SMALL_POINTS)
