"""Plots that the reader's browser draws with Bokeh: hover for values, click a name to hide its curve, zoom by tools.

A page contains Bokeh's script and the plots as JSON, so it needs no network. Plots are drawn in the colours of `LIGHT`;
page.js replaces them by `DARK_COLORS` for readers who prefer a dark page.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.colors
import numpy as np
from bokeh import resources
from bokeh.embed import json_item
from bokeh.models import (
    BoxAnnotation,
    FixedTicker,
    GlyphRenderer,
    HoverTool,
    Legend,
    LegendItem,
    NoOverlap,
    NumeralTickFormatter,
    Range1d,
    Title,
)
from bokeh.plotting import ColumnDataSource, figure

from pma_jax.reporting.drawing import DARK, LIGHT, SERIES_COLORS
from pma_jax.reporting.panels import MAX_TICKS, LinePanel

PLOT_PIXELS, LEGEND_ROW_PIXELS = 370, 30  # heights of a plot without its legend, and of a row of the legend
_TWO_COLUMNS_CHARACTERS = 18  # names up to this length fit twice into the width of a phone
BOKEH_MARKERS = ("circle", "square", "diamond", "triangle", "inverted_triangle", "plus", "x", "star", "hex", "asterisk")
_SERIES = [matplotlib.colors.to_hex(color) for color in SERIES_COLORS]
_ON_DARK = [
    matplotlib.colors.to_hex((0.6 * red + 0.4, 0.6 * green + 0.4, 0.6 * blue + 0.4))
    for red, green, blue in map(matplotlib.colors.to_rgb, SERIES_COLORS)
]
DARK_COLORS = {
    **dict(zip(_SERIES, _ON_DARK, strict=True)),
    **dict(zip(LIGHT.merges, DARK.merges, strict=True)),
    **{
        getattr(LIGHT, field.name): getattr(DARK, field.name)
        for field in dataclasses.fields(LIGHT)
        if field.name != "merges"
    },
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a plot. Curves with the same name share an entry of the legend, which shows and hides them."""

    name: str
    points: Sequence[Sequence[float]]  # (x, y) of each
    color: str  # of `LIGHT` or `SERIES_COLORS`, as #rrggbb
    width: float = 1.5  # pixels
    alpha: float = 1.0
    dash: str = "solid"  # or "dashed", "dotted"
    marker: str | None = None  # of Bokeh; None: a line alone
    error_bars: Sequence[tuple[float, float]] = ()  # (low, high) of each point


@dataclasses.dataclass(frozen=True)
class Level:
    """A horizontal line over the whole width of a plot."""

    name: str  # in the legend; empty: not there
    y: float
    color: str
    dash: str = "solid"


@dataclasses.dataclass(frozen=True)
class Plot:
    """One pair of axes with curves."""

    title: str
    x_label: str
    curves: Sequence[Curve]
    x_range: tuple[float, float] | None = None  # None: chosen by Bokeh
    y_range: tuple[float, float] | None = None
    levels: Sequence[Level] = ()
    spikes: Sequence[tuple[float, str]] = ()  # (x, what happened there) of vertical lines
    shaded: tuple[float, float] | None = None  # range of x in the colour of annealing
    log_x: bool = False
    ticks: Mapping[float, str] | None = None  # label by x; None: chosen by Bokeh
    has_named_x: bool = False  # whether x are not numbers, so that their labels stand for them
    percent: bool = False  # format y, a share, in percent


def _plot_of_panel(panel: LinePanel, names: Sequence[str]) -> Plot:
    """Return the plot of a panel; `names` has those of all lines of its figure, for equal colours in all panels."""
    curves = []
    for line in panel.lines:
        i = names.index(line.name)
        has_errors = line.low is not None and line.high is not None
        curves.append(
            Curve(
                line.name,
                list(zip(line.x, line.y, strict=True)),
                _SERIES[i % len(_SERIES)],
                dash="dashed" if line.dashed else "solid",
                marker=BOKEH_MARKERS[i % len(BOKEH_MARKERS)],
                error_bars=list(zip(line.low or (), line.high or (), strict=True)) if has_errors else (),
            )
        )
    x_values = sorted({x for line in panel.lines for x in line.x})
    ticks: dict[float, str] | None = None
    if panel.tick_labels:
        ticks = {float(x): label for x, label in enumerate(panel.tick_labels)}
    elif len(x_values) <= MAX_TICKS:
        ticks = {x: f"{x:.3g}" for x in x_values}
    return Plot(
        panel.title,
        panel.x_label,
        curves,
        y_range=panel.y_limits,
        levels=[Level("", 0.0, LIGHT.muted)] if panel.zero_line else (),
        log_x=panel.log_x,
        ticks=ticks,
        has_named_x=bool(panel.tick_labels),
        percent=panel.percent,
    )


def plots_of_panels(panels: Sequence[LinePanel]) -> list[Plot]:
    """Return the plots of the panels of one figure; lines with the same name have the same colour and marker."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    return [_plot_of_panel(panel, names) for panel in panels]


def bokeh_script() -> str:
    """Return BokehJS, which draws the plots of a page. It contains no `</script`."""
    return resources.Resources(mode="inline", components=["bokeh"]).js_raw[0]


def to_json(plot: Plot) -> dict[str, Any]:
    """Return a plot as page.js embeds it. Equal plots give equal JSON."""
    ids: dict[str, str] = {}

    def renumber(node: Any, key: str = "") -> Any:
        """Replace Bokeh's identifiers, which count all models of the process, by counts within the plot."""
        if isinstance(node, dict):
            return {name: renumber(value, name) for name, value in node.items()}
        if isinstance(node, list | tuple):
            return [renumber(value) for value in node]
        return ids.setdefault(node, f"m{len(ids)}") if key in ("id", "root_id") and isinstance(node, str) else node

    return renumber(json_item(draw(plot)))


def draw(plot: Plot) -> figure:
    """Draw a plot with its legend below, where names need no room beside the curves."""
    drawn = _empty_figure(plot)
    if plot.shaded:
        band = BoxAnnotation(left=plot.shaded[0], right=plot.shaded[1], fill_color=LIGHT.annealed, fill_alpha=0.06)
        band.line_color = None
        drawn.add_layout(band)
    entries: dict[str, list[GlyphRenderer]] = {}
    for curve in plot.curves:
        entries.setdefault(curve.name, []).extend(_draw_curve(drawn, plot, curve))
    for level in plot.levels:
        source = ColumnDataSource({"y": [level.y]})
        line = drawn.hspan(y="y", source=source, color=level.color, line_width=1.4, line_dash=level.dash)
        if level.name:
            entries.setdefault(level.name, []).append(line)
    if plot.spikes:
        entries["loss spikes"] = [_draw_spikes(drawn, plot)]
    _add_legend(drawn, entries)
    return drawn


def _empty_figure(plot: Plot) -> figure:
    drawn = figure(
        title=Title(text=plot.title, text_color=LIGHT.ink, text_font_size="15px"),
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_drag=None,  # a finger scrolls the page
        x_axis_type="log" if plot.log_x else "linear",
        sizing_mode="stretch_width",
        height=PLOT_PIXELS,
        background_fill_color=None,  # the page shows through
        border_fill_color=None,
        outline_line_color=None,
    )
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    if plot.x_range:
        drawn.x_range = Range1d(start=plot.x_range[0], end=plot.x_range[1])
    if plot.y_range:
        drawn.y_range = Range1d(start=plot.y_range[0], end=plot.y_range[1])
    drawn.xaxis.axis_label = plot.x_label
    drawn.xaxis.major_label_policy = NoOverlap()
    if plot.ticks is not None:
        drawn.xaxis.ticker = FixedTicker(ticks=list(plot.ticks))
        labels: dict[Any, Any] = dict(plot.ticks)
        drawn.xaxis.major_label_overrides = labels
    if plot.percent:
        drawn.yaxis.formatter = NumeralTickFormatter(format="0%")
    drawn.axis.axis_label_text_color = drawn.axis.major_label_text_color = LIGHT.muted
    drawn.axis.axis_label_text_font_style = "normal"
    drawn.axis.axis_line_color = drawn.axis.major_tick_line_color = LIGHT.muted
    drawn.axis.minor_tick_line_color = None
    drawn.yaxis.axis_line_color = drawn.yaxis.major_tick_line_color = None
    drawn.xgrid.grid_line_color = None
    drawn.ygrid.grid_line_color = LIGHT.grid
    return drawn


def _draw_curve(drawn: figure, plot: Plot, curve: Curve) -> list[GlyphRenderer]:
    """Draw the line, points that react to the pointer, and the error bars of a curve."""
    data: dict[str, Any] = dict(zip("xy", np.array(curve.points, np.float64).T, strict=True))
    if curve.error_bars:
        data |= dict(zip(("low", "high"), np.array(curve.error_bars, np.float64).T, strict=True))
    source = ColumnDataSource(data)
    line = drawn.line(
        "x", "y", source=source, color=curve.color, line_width=curve.width, alpha=curve.alpha, line_dash=curve.dash
    )
    points = drawn.scatter(
        "x",
        "y",
        source=source,
        name=curve.name,
        marker=curve.marker or "circle",
        size=7,
        color=curve.color,
        alpha=1.0 if curve.marker else 0.0,
        hover_color=curve.color,
        hover_alpha=1.0,
    )
    if plot.has_named_x:
        source.data["label"] = [(plot.ticks or {})[x] for x in data["x"].tolist()]
    value = "@y{0.0%}" if plot.percent else "@y{0.0000}"
    value += " (@low{0.0000} to @high{0.0000})" if curve.error_bars else ""
    tooltips = [
        ("", "$name"),
        (plot.x_label or plot.title, "@label" if plot.has_named_x else "@x{%g}"),
        ("value", value),
    ]
    drawn.add_tools(HoverTool(renderers=[points], tooltips=tooltips, formatters={"@x": "printf"}))
    renderers: list[GlyphRenderer] = [line, points]
    if curve.error_bars:
        renderers.append(drawn.segment("x", "low", "x", "high", source=source, color=curve.color, line_width=0.8))
    return renderers


def _draw_spikes(drawn: figure, plot: Plot) -> GlyphRenderer:
    tokens, texts = zip(*plot.spikes, strict=True)
    source = ColumnDataSource({"x": tokens, "text": texts})
    lines = drawn.vspan(x="x", source=source, color=LIGHT.annealed, line_dash="dotted")
    drawn.add_tools(
        HoverTool(renderers=[lines], tooltips=[(plot.x_label, "@x{%g}"), ("", "@text")], formatters={"@x": "printf"})
    )
    return lines


def _add_legend(drawn: figure, entries: Mapping[str, list[GlyphRenderer]]) -> None:
    columns = 2 if max(map(len, entries)) <= _TWO_COLUMNS_CHARACTERS else 1
    drawn.add_layout(
        Legend(
            items=[LegendItem(label=name, renderers=renderers) for name, renderers in entries.items()],
            ncols=columns,
            click_policy="hide",
            location="top_left",
            label_text_color=LIGHT.ink,
            label_text_font_size="13px",
            background_fill_color=None,
            border_line_color=None,
            inactive_fill_color=LIGHT.grid,
            spacing=8,
        ),
        "below",
    )
    drawn.height = PLOT_PIXELS + LEGEND_ROW_PIXELS * -(-len(entries) // columns)
