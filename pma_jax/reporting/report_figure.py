"""The figure of a report: held-out loss against tokens, and recovered share against the window of each merge.

The design follows PMA (arXiv 2505.12082), Figure 3: the constant-rate run, its merged models, and the annealed branch
that merging replaces.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.reporting.drawing import (
    CHARACTER_INCHES,
    DASHES,
    DOTS,
    LIGHT,
    MARKERS,
    SMALL_POINTS,
    TEXT_POINTS,
    TITLE_POINTS,
    Theme,
    display_name,
    group_by_series_and_window,
    new_figure,
    series_name,
)

HEIGHT_INCHES = 4.9
_CURVES_INCHES, _MERGES_INCHES = 5.0, 3.4  # widths of the panels
_TICKS_INCHES = 0.68  # left of a panel, for the labels of its y axis
LABEL_OFFSET_INCHES = 0.34  # between a panel and the labels of its lines
_LOSS_CHARACTERS = 8  # of the loss that follows the name of a curve


def draw_report(report: dict[str, Any], theme: Theme = LIGHT) -> Figure:
    """Draw a report.

    The left panel plots loss against tokens. The right panel, drawn only if the report has merges, plots against the
    window the share of the annealed run's gain in loss that each merge recovers, or, if a merge has no such share (as
    without an annealed run), the loss of each merge.
    """
    names = [*report["curves"]["previews"], (report["best_merge"] or {}).get("text", ""), "annealed"]
    curves_end = _TICKS_INCHES + _CURVES_INCHES
    merges_start = curves_end + _room_for(names, _LOSS_CHARACTERS) + _TICKS_INCHES
    if not report["merges"]:
        figure = new_figure(merges_start - _TICKS_INCHES, HEIGHT_INCHES, theme)
        _draw_curves(_add_panel(figure, _TICKS_INCHES, _CURVES_INCHES), report, theme)
        return figure
    room = _room_for([*(series_name(m) for m in report["merges"]), "annealed"])
    figure = new_figure(merges_start + _MERGES_INCHES + room, HEIGHT_INCHES, theme)
    _draw_curves(_add_panel(figure, _TICKS_INCHES, _CURVES_INCHES), report, theme)
    _draw_merges(_add_panel(figure, merges_start, _MERGES_INCHES), report, theme)
    return figure


def _room_for(names: Sequence[str], more_characters: int = 0) -> float:
    """Return the inches that the labels of lines take right of a panel."""
    longest = max(len(display_name(name)) for name in names)
    return LABEL_OFFSET_INCHES + CHARACTER_INCHES * (longest + more_characters)


def _add_panel(figure: Figure, left: float, width: float) -> Axes:
    """Add axes at a position in inches, with room above for a title and below for the x label."""
    whole = figure.get_figwidth()
    return figure.add_axes((left / whole, 0.125, width / whole, 0.765))


def _draw_curves(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    raw, annealed, previews = (report["curves"][name] for name in ("raw", "annealed", "previews"))
    left, low, high = _visible_range(report)
    _style_panel(axes, theme, "Held-out loss, nats per token", "tokens seen")
    horizon = report["tokens"]
    axes.set_xlim(left, horizon)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1e6:g}M"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    axes.plot(*_split_points(raw), color=theme.muted, linewidth=1.0, zorder=2)
    labels = [(report["raw_loss"], "raw", theme.muted, False)]
    best = min(previews, key=lambda text: previews[text][-1][1], default=None)
    for i, (text, curve) in enumerate(previews.items()):
        strong = text == best
        # Shades of one hue, darker for longer windows; labels name the curves.
        alpha = 1.0 if strong else 0.3 + 0.35 * i / max(len(previews) - 1, 1)
        axes.plot(
            *_split_points(curve),
            color=theme.preview,
            alpha=alpha,
            linewidth=2.2 if strong else 1.1,
            linestyle=DOTS if _is_block_mean(text) else "-",
            zorder=5 if strong else 3,
        )
        labels.append((curve[-1][1], text, theme.preview, strong))
    if annealed:
        # Start the branch on the raw curve, if the run was evaluated at the fork.
        start = [point for point in raw if point[0] == report["fork_tokens"]]
        axes.plot(*_split_points(start + annealed), color=theme.annealed, linewidth=1.9, linestyle=DASHES, zorder=4)
        labels.append((report["annealed_loss"], "annealed", theme.annealed, True))
        _shade_annealing(axes, report, theme)
    _mark_spikes(axes, report, theme)
    top = report["best_merge"]
    if top and top["text"] not in previews:
        axes.plot([horizon], [top["loss"]], "D", color=theme.preview, markersize=4.5, clip_on=False, zorder=6)
        labels.append((top["loss"], top["text"], theme.preview, True))
    _label_ends(axes, [(y, f"{display_name(text)}  {y:.3f}", color, bold) for y, text, color, bold in labels], theme)


def _draw_merges(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    shares = all(m["recovered_share"] is not None for m in report["merges"])
    title = "Share of annealing recovered" if shares else "Loss of the merges"
    _style_panel(axes, theme, title, "snapshots merged, N")
    if shares:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    # Plot only the smallest interval; sweep.png plots all.
    interval = min(m["interval"] for m in report["merges"])
    merges = [m for m in report["merges"] if m["interval"] == interval]
    key = "recovered_share" if shares else "loss"
    lines = {
        name: sorted((n, m[key]) for n, m in by.items()) for name, by in group_by_series_and_window(merges).items()
    }
    for i, (name, points) in enumerate(lines.items()):
        color, is_block = theme.merges[i % len(theme.merges)], _is_block_mean(name)
        axes.plot(
            *_split_points(points),
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            markerfacecolor=theme.paper if is_block else color,
            markeredgecolor=color if is_block else theme.paper,
            markeredgewidth=1.2 if is_block else 0.6,
            linewidth=1.5,
            clip_on=False,
            zorder=4,
        )
    windows = sorted({m["window"] for m in merges})
    axes.set_xticks(windows)
    # More than 8 tick labels would overlap.
    if len(windows) > 8:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    margin = 0.06 * max(windows[-1] - windows[0], 1)
    axes.set_xlim(windows[0] - margin, windows[-1] + margin)
    raw, annealed = (0.0, 1.0) if shares else (report["raw_loss"], report["annealed_loss"])
    values = [value for points in lines.values() for _, value in points]
    references: list[tuple[float, str, str, Any]] = [(raw, "raw", theme.muted, "-")]
    if annealed is not None:
        references.append((annealed, "annealed", theme.annealed, DASHES))
    known = [*values, *(value for value, *_ in references)]
    reach = max(max(known) - min(known), 1e-6)
    axes.set_ylim(min(known) - 0.04 * reach, max(known) + 0.04 * reach)
    for value, _, color, style in references:
        axes.axhline(value, color=color, linewidth=1.4, linestyle=style, zorder=2)
    labels = [
        (points[-1][1], display_name(recipe), theme.merges[i % len(theme.merges)], False)
        for i, (recipe, points) in enumerate(lines.items())
    ]
    labels += [(value, name, color, name == "annealed") for value, name, color, _ in references]
    _label_ends(axes, labels, theme)


def _visible_range(report: dict[str, Any]) -> tuple[float, float, float]:
    """Return the axis limits (min tokens, min loss, max loss) that show the end of the run and the gain of merging."""
    raw, horizon = report["curves"]["raw"], report["tokens"]
    later = [loss for tokens, loss in raw if tokens >= horizon / 2]
    lowest = min(
        [loss for _, loss in report["curves"]["annealed"]]
        + [curve[-1][1] for curve in report["curves"]["previews"].values()]
        + [m["loss"] for m in report["merges"]]
        + later
    )
    # The scale is the gain (raw minus lowest loss), or half the range of the raw losses in the second half of the run
    # if that is larger.
    scale = max(report["raw_loss"] - lowest, (max(later) - min(later)) / 2, 1e-3)
    high = max(report["raw_loss"] + 1.6 * scale, max(later) + 0.1 * scale)
    left = next((tokens for tokens, loss in raw if loss <= high), horizon)
    # Show at least half of the tokens before the fork.
    left = min(left, 0.5 * (report["fork_tokens"] or horizon))
    return left, lowest - 0.25 * scale, high


def _shade_annealing(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    fork, horizon = report["fork_tokens"], report["tokens"]
    axes.axvspan(fork, horizon, color=theme.annealed, alpha=0.06, linewidth=0, zorder=0)
    text = f"annealing:\n{report['tokens_saved'] / 1e6:.2f}M tokens"
    _write_note(axes, (fork + horizon) / 2, 0.975, text, theme, ha="center", va="top", linespacing=1.25)


def _mark_spikes(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    """Mark the onset of each loss spike that does not recover, and plot the losses that a rollback discarded."""
    for spike in report["spikes"]:
        back = spike["went_back"]
        if spike["verdict"] != "irrecoverable":
            continue
        axes.axvline(spike["onset_tokens"], color=theme.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)
        name = f"spike: back to\n{back['recipe']}:{back['snapshots']}" if back else "spike"
        _write_note(axes, spike["onset_tokens"], 0.02, f" {name}", theme, va="bottom", clip_on=True)
        if back and back["set_aside"]:
            axes.plot(*_split_points(back["set_aside"]), color=theme.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)


def _write_note(axes: Axes, tokens: float, height: float, text: str, theme: Theme, **style: Any) -> None:
    """Write a note at x = `tokens` and y = `height`, a fraction of the panel's height."""
    place = axes.get_xaxis_transform()
    axes.text(tokens, height, text, transform=place, fontsize=SMALL_POINTS, color=theme.annealed, **style)


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str, str, bool]], theme: Theme) -> None:
    """Label each line to the right of the panel, at the height of its end or as near as other labels allow.

    Args:
        axes: The panel.
        labels: (y at the end of the line, text, colour, whether the text is bold) of each line.
        theme: Colours.
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
        axes.plot([start, end], ends, transform=beside, color=theme.muted, linewidth=0.5, alpha=0.8, clip_on=False)
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


def _is_block_mean(text: str) -> bool:
    return text.startswith(SNAPSHOT_KINDS["block_mean"].label_prefix)


def _split_points(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _style_panel(axes: Axes, theme: Theme, title: str, x_label: str) -> None:
    axes.set_facecolor(theme.paper)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=SMALL_POINTS, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", color=theme.ink, fontsize=TITLE_POINTS, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, color=theme.muted, fontsize=TEXT_POINTS)
