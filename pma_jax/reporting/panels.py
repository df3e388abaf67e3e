"""The experiments' figures: panels of lines with error bars."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pma_jax.reporting.drawing import (
    DASHES,
    LIGHT,
    MARKERS,
    SERIES_COLORS,
    SMALL_POINTS,
    label_panel,
    new_figure,
)
from pma_jax.studies.statistics import MeanInterval

COLUMN_INCHES, ROW_INCHES = 4.2, 3.6
LEGEND_COLUMNS = 4
MAX_TICKS = 8  # if there are at most this many distinct x values, each has a tick


@dataclasses.dataclass(frozen=True)
class Line:
    """One series of points. Lines with the same name share a colour, marker and legend entry in all panels."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # lower and upper ends of the error bars
    high: Sequence[float] | None = None
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class LinePanel:
    """One pair of axes with lines."""

    title: str
    x_label: str
    lines: Sequence[Line]
    zero_line: bool = False  # draw a horizontal line at 0
    log_x: bool = False
    tick_labels: Sequence[str] = ()  # of x = 0, 1, …, which are not numbers then
    percent: bool = False  # format y, a share, in percent
    y_limits: tuple[float, float] | None = None  # None: chosen by matplotlib


def interval_line(name: str, x: Sequence[float], intervals: Sequence[MeanInterval]) -> Line:
    """Make a line of the means of `intervals`, with the intervals as error bars."""
    return Line(name, x, [d.mean for d in intervals], [d.low for d in intervals], [d.high for d in intervals])


def draw_lines(panels: Sequence[LinePanel], columns: int = 3) -> Figure:
    """Draw panels of lines in rows of `columns` panels, with one legend below."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    figure = new_figure(max(COLUMN_INCHES * columns, 7.0), ROW_INCHES * rows, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    entries = {}
    for panel, axes in zip(panels, grid, strict=False):
        _draw_line_panel(axes, panel, names)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    _add_legend(figure, [entries[name] for name in names], names)
    return figure


def _add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Add a legend below the panels, in as many columns as the figure is wide enough for."""
    for columns in range(LEGEND_COLUMNS, 0, -1):
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, fontsize=SMALL_POINTS, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _draw_line_panel(axes: Axes, panel: LinePanel, names: Sequence[str]) -> None:
    for line in panel.lines:
        i = names.index(line.name)
        errors = None
        if line.low is not None and line.high is not None:
            lower = [y - low for y, low in zip(line.y, line.low, strict=True)]
            errors = [lower, [high - y for y, high in zip(line.y, line.high, strict=True)]]
        axes.errorbar(
            line.x,
            line.y,
            errors,
            label=line.name,
            color=SERIES_COLORS[i % len(SERIES_COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            linestyle=DASHES if line.dashed else "-",
        )
    if panel.zero_line:
        axes.axhline(0, color=LIGHT.ink, linewidth=0.8)
    x_values = sorted({x for line in panel.lines for x in line.x})
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if panel.tick_labels:
        axes.set_xticks(range(len(panel.tick_labels)), panel.tick_labels)
    elif len(x_values) <= MAX_TICKS:
        axes.set_xticks(x_values, [f"{x:.3g}" for x in x_values])
        axes.minorticks_off()
    elif all(float(x).is_integer() for x in x_values):
        axes.xaxis.set_major_locator(MaxNLocator(MAX_TICKS, integer=True))
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    if panel.y_limits:
        axes.set_ylim(*panel.y_limits)
    axes.grid(axis="y", color=LIGHT.grid)
    label_panel(axes, panel.title, panel.x_label)
