"""The figure of a report: held-out loss against tokens, and the loss of each merge against its window.

The design follows PMA (arXiv 2505.12082), Figure 3: the constant-rate run, its merged models, and the annealed branch
that merging replaces.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pma_jax.reporting.drawing import (
    CHARACTER_INCHES,
    DASHES,
    DOTS,
    LIGHT,
    MARKERS,
    SMALL_POINTS,
    TEXT_POINTS,
    TITLE_POINTS,
    display_name,
    new_figure,
    series_name,
)
from pma_jax.reporting.report_lines import (
    MERGES_TITLE,
    WORKERS,
    annealed_branch,
    is_block_mean,
    merge_lines,
    raw_name,
    visible_range,
)

HEIGHT_INCHES = 4.9
_CURVES_INCHES, _MERGES_INCHES = 5.0, 3.4  # widths of the panels
_TICKS_INCHES = 0.68  # left of a panel, for the labels of its y axis
LABEL_OFFSET_INCHES = 0.34  # between a panel and the labels of its lines
_LOSS_CHARACTERS = 8  # of the loss that follows the name of a curve


def draw_report(report: dict[str, Any]) -> Figure:
    """Draw a report.

    The left panel plots loss against tokens. The right panel, drawn only if the report has merges, plots the loss of
    each merge against its window.
    """
    names = [raw_name(report), *report["curves"]["previews"], (report["best_merge"] or {}).get("text", ""), "annealed"]
    curves_end = _TICKS_INCHES + _CURVES_INCHES
    merges_start = curves_end + _room_for(names, _LOSS_CHARACTERS) + _TICKS_INCHES
    if not report["merges"]:
        figure = new_figure(merges_start - _TICKS_INCHES, HEIGHT_INCHES)
        _draw_curves(_add_panel(figure, _TICKS_INCHES, _CURVES_INCHES), report)
        return figure
    room = _room_for([*(series_name(m) for m in report["merges"]), "annealed"])
    figure = new_figure(merges_start + _MERGES_INCHES + room, HEIGHT_INCHES)
    _draw_curves(_add_panel(figure, _TICKS_INCHES, _CURVES_INCHES), report)
    _draw_merges(_add_panel(figure, merges_start, _MERGES_INCHES), report)
    return figure


def _room_for(names: Sequence[str], more_characters: int = 0) -> float:
    """Return the inches that the labels of lines take right of a panel."""
    longest = max(len(display_name(name)) for name in names)
    return LABEL_OFFSET_INCHES + CHARACTER_INCHES * (longest + more_characters)


def _add_panel(figure: Figure, left: float, width: float) -> Axes:
    """Add axes at a position in inches, with room above for a title and below for the x label."""
    whole = figure.get_figwidth()
    return figure.add_axes((left / whole, 0.125, width / whole, 0.765))


def _draw_curves(axes: Axes, report: dict[str, Any]) -> None:
    raw, annealed, previews = (report["curves"][name] for name in ("raw", "annealed", "previews"))
    left, low, high = visible_range(report)
    _style_panel(axes, "Held-out loss, nats per token", "tokens seen")
    horizon = report["tokens"]
    axes.set_xlim(left, horizon)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1e6:g}M"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    axes.plot(*_split_points(raw), color=LIGHT.muted, linewidth=1.0, zorder=2)
    labels = [(report["raw_loss"], raw_name(report), LIGHT.muted, False)]
    workers = report["curves"]["workers"].values()
    for curve in workers:
        axes.plot(*_split_points(curve), color=LIGHT.muted, alpha=0.35, linewidth=0.7, zorder=1)
    if workers:
        labels.append((statistics.mean(curve[-1][1] for curve in workers), WORKERS, LIGHT.muted, False))
    best = min(previews, key=lambda text: previews[text][-1][1], default=None)
    for i, (text, curve) in enumerate(previews.items()):
        strong = text == best
        # Shades of one hue, darker for longer windows; labels name the curves.
        alpha = 1.0 if strong else 0.3 + 0.35 * i / max(len(previews) - 1, 1)
        axes.plot(
            *_split_points(curve),
            color=LIGHT.preview,
            alpha=alpha,
            linewidth=2.2 if strong else 1.1,
            linestyle=DOTS if is_block_mean(text) else "-",
            zorder=5 if strong else 3,
        )
        labels.append((curve[-1][1], text, LIGHT.preview, strong))
    if annealed:
        branch = annealed_branch(report)
        axes.plot(*_split_points(branch), color=LIGHT.annealed, linewidth=1.9, linestyle=DASHES, zorder=4)
        labels.append((report["annealed_loss"], "annealed", LIGHT.annealed, True))
        _shade_annealing(axes, report)
    _mark_spikes(axes, report)
    top = report["best_merge"]
    if top and top["text"] not in previews:
        axes.plot([horizon], [top["loss"]], "D", color=LIGHT.preview, markersize=4.5, clip_on=False, zorder=6)
        labels.append((top["loss"], top["text"], LIGHT.preview, True))
    _label_ends(axes, [(y, f"{display_name(text)}  {y:.3f}", color, bold) for y, text, color, bold in labels])


def _draw_merges(axes: Axes, report: dict[str, Any]) -> None:
    lines, references, limits = merge_lines(report)
    _style_panel(axes, MERGES_TITLE, "snapshots merged, N")
    for i, (name, points) in enumerate(lines.items()):
        color, is_block = LIGHT.merges[i % len(LIGHT.merges)], is_block_mean(name)
        axes.plot(
            *_split_points(points),
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            markerfacecolor=LIGHT.paper if is_block else color,
            markeredgecolor=color if is_block else LIGHT.paper,
            markeredgewidth=1.2 if is_block else 0.6,
            linewidth=1.5,
            clip_on=False,
            zorder=4,
        )
    windows = sorted({window for points in lines.values() for window, _ in points})
    axes.set_xticks(windows)
    # More than 8 tick labels would overlap.
    if len(windows) > 8:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    margin = 0.06 * max(windows[-1] - windows[0], 1)
    axes.set_xlim(windows[0] - margin, windows[-1] + margin)
    axes.set_ylim(*limits)
    colors = {"raw": LIGHT.muted, "annealed": LIGHT.annealed}
    for name, value in references.items():
        style = DASHES if name == "annealed" else "-"
        axes.axhline(value, color=colors[name], linewidth=1.4, linestyle=style, zorder=2)
    labels = [
        (points[-1][1], display_name(recipe), LIGHT.merges[i % len(LIGHT.merges)], False)
        for i, (recipe, points) in enumerate(lines.items())
    ]
    labels += [(value, name, colors[name], name == "annealed") for name, value in references.items()]
    _label_ends(axes, labels)


def _shade_annealing(axes: Axes, report: dict[str, Any]) -> None:
    fork, horizon = report["fork_tokens"], report["tokens"]
    axes.axvspan(fork, horizon, color=LIGHT.annealed, alpha=0.06, linewidth=0, zorder=0)
    text = f"annealing:\n{report['tokens_saved'] / 1e6:.2f}M tokens"
    _write_note(axes, (fork + horizon) / 2, 0.975, text, ha="center", va="top", linespacing=1.25)


def _mark_spikes(axes: Axes, report: dict[str, Any]) -> None:
    """Mark the onset of each loss spike that does not recover, and plot the losses that a rollback discarded."""
    for spike in report["spikes"]:
        back = spike["went_back"]
        if spike["verdict"] != "irrecoverable":
            continue
        axes.axvline(spike["onset_tokens"], color=LIGHT.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)
        name = f"spike: back to\n{back['recipe']}:{back['snapshots']}" if back else "spike"
        _write_note(axes, spike["onset_tokens"], 0.02, f" {name}", va="bottom", clip_on=True)
        if back and back["set_aside"]:
            axes.plot(*_split_points(back["set_aside"]), color=LIGHT.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)


def _write_note(axes: Axes, tokens: float, height: float, text: str, **style: Any) -> None:
    """Write a note at x = `tokens` and y = `height`, a fraction of the panel's height."""
    place = axes.get_xaxis_transform()
    axes.text(tokens, height, text, transform=place, fontsize=SMALL_POINTS, color=LIGHT.annealed, **style)


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str, str, bool]]) -> None:
    """Label each line to the right of the panel, at the height of its end or as near as other labels allow.

    Args:
        axes: The panel.
        labels: (y at the end of the line, text, colour, whether the text is bold) of each line.
    """
    low, high = axes.get_ylim()
    gap = (high - low) * min(0.047, 1 / len(labels))
    positions = spread_labels([y for y, *_ in labels], gap, low + gap / 2, high)
    figure = axes.get_figure(root=True)
    assert figure is not None
    width = axes.get_position().width * figure.get_figwidth()
    start, end, at = (1 + inches / width for inches in (0.07, LABEL_OFFSET_INCHES - 0.06, LABEL_OFFSET_INCHES))
    beside = axes.get_yaxis_transform()  # x in widths of the panel, y in data coordinates
    for (y, text, color, bold), position in zip(labels, positions, strict=True):
        weight, ends = "bold" if bold else "normal", [min(max(y, low), high), position]
        axes.plot([start, end], ends, transform=beside, color=LIGHT.muted, linewidth=0.5, alpha=0.8, clip_on=False)
        axes.text(
            at, position, text, transform=beside, fontsize=TEXT_POINTS, fontweight=weight, color=color, va="center"
        )


def spread_labels(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the label positions that are closest to `values` in least squares.

    The positions keep the order of `values`, are at least `gap` apart, and lie in [low, high].
    """
    order = np.argsort(values, kind="stable")
    gaps = gap * np.arange(len(values))
    # With k gaps subtracted from position k, the constraint is ascending order, which isotonic regression solves.
    pooled = scipy.optimize.isotonic_regression(np.asarray(values)[order] - gaps).x
    positions = np.empty(len(values))
    positions[order] = np.clip(pooled, low, high - gaps[-1]) + gaps
    return positions.tolist()


def _split_points(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _style_panel(axes: Axes, title: str, x_label: str) -> None:
    axes.set_facecolor(LIGHT.paper)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT.muted)
    axes.tick_params(colors=LIGHT.muted, labelsize=SMALL_POINTS, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=LIGHT.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", color=LIGHT.ink, fontsize=TITLE_POINTS, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, color=LIGHT.muted, fontsize=TEXT_POINTS)
