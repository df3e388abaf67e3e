"""Panels of lines with error bars, side by side: the figures of the experiments.

Drawn on its own canvas, as figures.py does.
"""

import dataclasses
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pma_jax.analysis.comparison import Difference
from pma_jax.reporting.figures import DASHES, LIGHT, MARKERS, SMALL_POINTS, TEXT_POINTS, png_bytes

COLUMN_INCHES, ROW_INCHES, LEGEND_LINE_INCHES, DPI = 4.2, 3.3, 0.22, 130
LEGEND_COLUMNS = 4
MOST_TICKS = 8  # where fewer x were measured, the ticks are these


@dataclasses.dataclass(frozen=True)
class Line:
    """One series. Lines of one name have one colour and marker in all panels, and one entry in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # ends of the error bars
    high: Sequence[float] | None = None
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class LinePanel:
    """One pair of axes."""

    title: str
    x_label: str
    lines: Sequence[Line]
    zero: bool = False  # a line at 0
    log_x: bool = False
    percent: bool = False  # y is a share
    limits: tuple[float, float] | None = None  # of y


def interval_line(name: str, x: Sequence[float], intervals: Sequence[Difference]) -> Line:
    """Means with their intervals as error bars."""
    return Line(name, x, [d.mean for d in intervals], [d.low for d in intervals], [d.high for d in intervals])


def png(panels: Sequence[LinePanel], columns: int = 3) -> bytes:
    """The panels as PNG; the same panels give the same bytes."""
    return png_bytes(figure(panels, columns), DPI)


def figure(panels: Sequence[LinePanel], columns: int = 3) -> Figure:
    """The panels row by row, `columns` beside each other, and one legend below."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    legend = LEGEND_LINE_INCHES * (-(-len(names) // LEGEND_COLUMNS) + 0.5)
    size = (max(COLUMN_INCHES * columns, 7.0), ROW_INCHES * rows + legend)
    drawn = Figure(figsize=size, facecolor=LIGHT.paper)
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for panel, one in zip(panels, axes, strict=False):
        _draw(one, panel, names)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    entries = {}
    for one in axes[: len(panels)]:
        handles, labels = one.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    drawn.legend(
        [entries[name] for name in names],
        names,
        loc="lower center",
        ncols=min(LEGEND_COLUMNS, len(names)),
        fontsize=SMALL_POINTS,
        frameon=False,
    )
    drawn.tight_layout(rect=(0, legend / size[1], 1, 1))
    return drawn


def _draw(axes: Axes, panel: LinePanel, names: Sequence[str]) -> None:
    colors = matplotlib.color_sequences["tab10"]
    for line in panel.lines:
        i = names.index(line.name)
        errors = None
        if line.low is not None and line.high is not None:
            below = [y - low for y, low in zip(line.y, line.low, strict=True)]
            errors = [below, [high - y for y, high in zip(line.y, line.high, strict=True)]]
        axes.errorbar(
            line.x,
            line.y,
            errors,
            label=line.name,
            color=colors[i % len(colors)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            linestyle=DASHES if line.dashed else "-",
        )
    if panel.zero:
        axes.axhline(0, color=LIGHT.ink, linewidth=0.8)
    measured = sorted({x for line in panel.lines for x in line.x})
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if len(measured) <= MOST_TICKS:
        axes.set_xticks(measured, [f"{x:.3g}" for x in measured])
        axes.minorticks_off()
    elif all(float(x).is_integer() for x in measured):
        axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True))
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    if panel.limits:
        axes.set_ylim(*panel.limits)
    axes.grid(axis="y", color=LIGHT.grid)
    axes.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)
    axes.set_title(panel.title, loc="left", fontsize=TEXT_POINTS, color=LIGHT.ink)
    axes.set_xlabel(panel.x_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
