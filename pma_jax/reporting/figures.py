"""The report's figure: held-out loss against tokens, and what each merge recovers by its window.

After PMA (arXiv 2505.12082), Figure 3: the constant-rate run, its merged models, and the annealed branch they stand in
for. Figures are drawn on their own canvas, without pyplot: nothing global is read or changed.
"""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pma_jax.config import SNAPSHOT_KINDS

DPI = 200  # twice the size at which the page shows it
WIDTH_INCHES, HEIGHT_INCHES = 11.0, 4.9
TEXT_POINTS, SMALL_POINTS = 9.5, 8.5
LABEL_INCHES = 0.34  # from a panel to the labels of its lines
CHARACTER_INCHES = 0.082  # of a label, on average
ROOM_CHARACTERS = 9  # of a curve's name that fit between the panels
DASHES, DOTS = (0, (4, 1.8)), (0, (1, 1))
MARKERS = "osD^vPX*<>"


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours on one background. Series colours follow Okabe and Ito: told apart with any colour vision."""

    paper: str
    ink: str
    muted: str  # axes, notes, and the raw run
    grid: str
    preview: str  # the family of merged previews
    annealed: str
    merges: tuple[str, ...]  # one a recipe, in the order of the sweep; with markers when they repeat


LIGHT = Theme(
    "#ffffff", "#1d2127", "#767d87", "#e7e9ec", "#0072b2", "#c84b00", ("#0072b2", "#009e73", "#b5579a", "#b07d00")
)
DARK = Theme(
    "#15181d", "#e8eaed", "#9aa1ab", "#2a2f37", "#56b4e9", "#ff8a3d", ("#56b4e9", "#2fc79b", "#e08fc4", "#e8b93a")
)


def png(report: dict[str, Any], dark: bool = False) -> bytes:
    """The figure as PNG; the same report gives the same bytes."""
    return png_bytes(figure(report, DARK if dark else LIGHT), DPI)


def png_bytes(drawn: Figure, dpi: int) -> bytes:
    """A figure as PNG, without the name and version of what drew it: the same figure gives the same bytes."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def figure(report: dict[str, Any], theme: Theme = LIGHT) -> Figure:
    """Left: loss against tokens. Right, where the report has merges: recovered share (or loss) by window."""
    drawn = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), facecolor=theme.paper)
    FigureCanvasAgg(drawn)
    if not report["merges"]:
        _draw_curves(_panel(drawn, left=0.68, right=WIDTH_INCHES - 1.75), report, theme)
        return drawn
    room = LABEL_INCHES + CHARACTER_INCHES * max(len(shown(series(m))) for m in report["merges"])
    # The names of the curves stand between the panels.
    names = [*report["curves"]["previews"], (report["best_merge"] or {}).get("text", "")]
    longer = CHARACTER_INCHES * max(len(shown(name)) - ROOM_CHARACTERS for name in names)
    _draw_curves(_panel(drawn, left=0.68, right=5.7 - max(longer, 0)), report, theme)
    _draw_windows(_panel(drawn, left=7.85, right=max(WIDTH_INCHES - max(room, 1.25), 8.9)), report, theme)
    return drawn


def _panel(drawn: Figure, left: float, right: float) -> Axes:
    """Axes between two positions in inches, with room above for a title and below for the tokens."""
    return drawn.add_axes((left / WIDTH_INCHES, 0.125, (right - left) / WIDTH_INCHES, 0.765))


def _draw_curves(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    raw, annealed, previews = (report["curves"][name] for name in ("raw", "annealed", "previews"))
    left, low, high = _interesting(report)
    _style(axes, theme, "Held-out loss, nats a token", "tokens seen")
    horizon = report["tokens"]
    axes.set_xlim(left, horizon)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1e6:g}M"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    axes.plot(*_xy(raw), color=theme.muted, linewidth=1.0, zorder=2)
    labels = [(report["raw_loss"], "raw", theme.muted, False)]
    best = min(previews, key=lambda text: previews[text][-1][1], default=None)
    for i, (text, curve) in enumerate(previews.items()):
        strong = text == best
        # Shades of one hue, longer windows darker; the labels say which is which.
        alpha = 1.0 if strong else 0.3 + 0.35 * i / max(len(previews) - 1, 1)
        axes.plot(
            *_xy(curve),
            color=theme.preview,
            alpha=alpha,
            linewidth=2.2 if strong else 1.1,
            linestyle=DOTS if _is_block(text) else "-",
            zorder=5 if strong else 3,
        )
        labels.append((curve[-1][1], text, theme.preview, strong))
    if annealed:
        # The branch begins on the raw curve, where that was evaluated at the fork.
        start = [point for point in raw if point[0] == report["fork_tokens"]]
        axes.plot(*_xy(start + annealed), color=theme.annealed, linewidth=1.9, linestyle=DASHES, zorder=4)
        labels.append((report["annealed_loss"], "annealed", theme.annealed, True))
        _mark_fork(axes, report, theme)
    _mark_spikes(axes, report, theme)
    top = report["best_merge"]
    if top and top["text"] not in previews:
        axes.plot([horizon], [top["loss"]], "D", color=theme.preview, markersize=4.5, clip_on=False, zorder=6)
        labels.append((top["loss"], top["text"], theme.preview, True))
    _label_ends(axes, [(y, f"{shown(text)}  {y:.3f}", color, bold) for y, text, color, bold in labels], theme)


def _draw_windows(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    shares = all(m["recovered_share"] is not None for m in report["merges"])
    title = "Share of annealing recovered" if shares else "Loss of the merges"
    _style(axes, theme, title, "snapshots merged, N")
    if shares:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    # One interval only: the sweep's own figure has them all.
    interval = min(m["interval"] for m in report["merges"])
    merges = [m for m in report["merges"] if m["interval"] == interval]
    lines = _by_series(merges, "recovered_share" if shares else "loss")
    for i, (name, points) in enumerate(lines.items()):
        color, is_block = theme.merges[i % len(theme.merges)], _is_block(name)
        axes.plot(
            *_xy(points),
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
    # Too many ticks to read: matplotlib's own choice of whole numbers.
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
        (points[-1][1], shown(recipe), theme.merges[i % len(theme.merges)], False)
        for i, (recipe, points) in enumerate(lines.items())
    ]
    labels += [(value, name, color, name == "annealed") for value, name, color, _ in references]
    _label_ends(axes, labels, theme)


def _interesting(report: dict[str, Any]) -> tuple[float, float, float]:
    """(first tokens, lowest loss, highest loss) to show: the end of the run at a scale where the gain is visible."""
    raw, horizon = report["curves"]["raw"], report["tokens"]
    later = [loss for tokens, loss in raw if tokens >= horizon / 2]
    lowest = min(
        [loss for _, loss in report["curves"]["annealed"]]
        + [curve[-1][1] for curve in report["curves"]["previews"].values()]
        + [m["loss"] for m in report["merges"]]
        + later
    )
    # The gain, or how far the run itself still moves: whichever is larger sets the scale.
    scale = max(report["raw_loss"] - lowest, (max(later) - min(later)) / 2, 1e-3)
    high = max(report["raw_loss"] + 1.6 * scale, max(later) + 0.1 * scale)
    left = next((tokens for tokens, loss in raw if loss <= high), horizon)
    # Never so late that what leads up to the fork is cut off.
    left = min(left, 0.5 * (report["fork_tokens"] or horizon))
    return left, lowest - 0.25 * scale, high


def _mark_fork(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    fork, horizon = report["fork_tokens"], report["tokens"]
    axes.axvspan(fork, horizon, color=theme.annealed, alpha=0.06, linewidth=0, zorder=0)
    axes.text(
        (fork + horizon) / 2,
        0.975,
        f"annealing:\n{report['tokens_saved'] / 1e6:.2f}M tokens",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=SMALL_POINTS,
        color=theme.annealed,
        linespacing=1.25,
    )


def _mark_spikes(axes: Axes, report: dict[str, Any], theme: Theme) -> None:
    """A line where a spike began that did not recover, named; with what was set aside when the run went back."""
    for spike in report["spikes"]:
        back = spike["went_back"]
        if spike["verdict"] != "irrecoverable":
            continue
        axes.axvline(spike["onset_tokens"], color=theme.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)
        name = f"spike: back to\n{back['recipe']}:{back['snapshots']}" if back else "spike"
        axes.text(
            spike["onset_tokens"],
            0.02,
            f" {name}",
            transform=axes.get_xaxis_transform(),
            va="bottom",
            fontsize=SMALL_POINTS,
            color=theme.annealed,
            clip_on=True,
        )
        if back and back["set_aside"]:
            axes.plot(*_xy(back["set_aside"]), color=theme.annealed, linewidth=1.0, linestyle=DOTS, zorder=2)


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str, str, bool]], theme: Theme) -> None:
    """Name each line right of the panel, at its end's height or as near as the labels leave room."""
    low, high = axes.get_ylim()
    gap = (high - low) * min(0.047, 1 / len(labels))
    positions = spread([y for y, *_ in labels], gap, low + gap / 2, high)
    width = axes.get_position().width * WIDTH_INCHES
    start, end, at = (1 + inches / width for inches in (0.07, LABEL_INCHES - 0.06, LABEL_INCHES))
    beside = axes.get_yaxis_transform()  # x in widths of the panel, y in losses
    for (y, text, color, bold), position in zip(labels, positions, strict=True):
        weight, ends = "bold" if bold else "normal", [min(max(y, low), high), position]
        axes.plot([start, end], ends, transform=beside, color=theme.muted, linewidth=0.5, alpha=0.8, clip_on=False)
        axes.text(
            at, position, text, transform=beside, fontsize=TEXT_POINTS, fontweight=weight, color=color, va="center"
        )


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions in [low, high] nearest to `values` (least squares, same order) that are at least `gap` apart."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    # Less k gaps, the k-th position may equal the one below: isotonic regression, by pooling those that violate it.
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for k, i in enumerate(order):
        pools.append((values[i] - k * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    highest = high - (len(values) - 1) * gap
    pooled = [min(max(mean, low), highest) for mean, n in pools for _ in range(n)]
    positions = [0.0] * len(values)
    for k, i in enumerate(order):
        positions[i] = pooled[k] + k * gap
    return positions


def series(merge: dict[str, Any]) -> str:
    """What merges that differ only by their window are called: `sma`, `block/wma`, `sma@2`."""
    every = f"@{merge['interval']}" if merge["interval"] > 1 else ""
    return f"{SNAPSHOT_KINDS[merge['kind']].prefix}{merge['recipe']}{every}"


def _is_block(text: str) -> bool:
    return text.startswith(SNAPSHOT_KINDS["block_mean"].prefix)


def _by_series(merges: Sequence[dict[str, Any]], key: str) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for merge in merges:
        lines.setdefault(series(merge), []).append((merge["window"], merge[key]))
    return {recipe: sorted(points) for recipe, points in lines.items()}


def shown(text: str) -> str:
    """A recipe or a merge as figures write it."""
    return text.replace(":alpha=", " α=").replace(":lag=", " lag=")


def _xy(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _style(axes: Axes, theme: Theme, title: str, x_label: str) -> None:
    axes.set_facecolor(theme.paper)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=SMALL_POINTS, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, color=theme.muted, fontsize=TEXT_POINTS)
