"""The plots of report.html: held-out loss against tokens, and the merges at the horizon against their window."""

from collections.abc import Sequence
from typing import Any

from pma_jax.reporting.drawing import LIGHT, display_name
from pma_jax.reporting.interactive import BOKEH_MARKERS, Curve, Level, Plot
from pma_jax.reporting.panels import MAX_TICKS
from pma_jax.reporting.report_lines import (
    MERGES_TITLE,
    WORKERS,
    annealed_branch,
    is_block_mean,
    merge_lines,
    raw_name,
    visible_range,
)

MAX_POINTS = 5000  # of one curve, so that a page with many curves stays under 3 MB


def report_plots(report: dict[str, Any]) -> list[Plot]:
    """Return the plot of the losses and, if the report has merges, that of the merges."""
    return [_plot_losses(report), *([_plot_merges(report)] if report["merges"] else [])]


def _plot_losses(report: dict[str, Any]) -> Plot:
    previews, horizon = report["curves"]["previews"], report["tokens"]
    left, low, high = visible_range(report)
    raw, workers = _in_millions(report["curves"]["raw"]), report["curves"]["workers"].values()
    curves = [Curve(WORKERS, _in_millions(points), LIGHT.muted, width=0.8, alpha=0.45) for points in workers]
    curves.append(Curve(f"{raw_name(report)}  {report['raw_loss']:.4f}", raw, LIGHT.muted, width=1.2))
    best = min(previews, key=lambda text: previews[text][-1][1], default=None)
    for i, (text, points) in enumerate(previews.items()):
        curves.append(
            Curve(
                f"{display_name(text)}  {points[-1][1]:.4f}",
                _in_millions(points),
                LIGHT.preview,
                width=2.4 if text == best else 1.3,
                # Shades of one hue, darker for longer windows.
                alpha=1.0 if text == best else 0.45 + 0.3 * i / max(len(previews) - 1, 1),
                dash="dotted" if is_block_mean(text) else "solid",
            )
        )
    if report["curves"]["annealed"]:
        name, points = f"annealed  {report['annealed_loss']:.4f}", _in_millions(annealed_branch(report))
        curves.append(Curve(name, points, LIGHT.annealed, width=2.0, dash="dashed"))
    top = report["best_merge"]
    if top and top["text"] not in previews:
        name = f"{display_name(top['text'])}  {top['loss']:.4f}"
        curves.append(Curve(name, [(horizon / 1e6, top["loss"])], LIGHT.preview, marker="diamond"))
    spikes = [spike for spike in report["spikes"] if spike["verdict"] == "irrecoverable"]
    for spike in spikes:
        if spike["went_back"] and spike["went_back"]["set_aside"]:
            points = _in_millions(spike["went_back"]["set_aside"])
            curves.append(Curve("rolled back", points, LIGHT.annealed, width=1.0, dash="dotted"))
    return Plot(
        "Held-out loss, nats per token",
        "million tokens seen",
        curves,
        x_range=(left / 1e6, (horizon + 0.02 * (horizon - left)) / 1e6),  # room for a marker at the end
        y_range=(low, high),
        spikes=[(spike["onset_tokens"] / 1e6, _describe_spike(spike)) for spike in spikes],
        shaded=(report["fork_tokens"] / 1e6, horizon / 1e6) if report["curves"]["annealed"] else None,
    )


def _in_millions(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return points for the plot: all, or every n-th, with the last, of more than `MAX_POINTS`."""
    n = points_per_drawn(len(points))
    return [(tokens / 1e6, loss) for tokens, loss in points[(len(points) - 1) % n :: n]]


def points_per_drawn(count: int) -> int:
    """Return n if every n-th of `count` points of a curve is drawn."""
    return max(-(-count // MAX_POINTS), 1)


def _describe_spike(spike: dict[str, Any]) -> str:
    back = spike["went_back"]
    return f"loss spike: back to {back['recipe']}:{back['snapshots']}" if back else "loss spike"


def _plot_merges(report: dict[str, Any]) -> Plot:
    lines, references, limits = merge_lines(report)
    curves = [
        Curve(
            display_name(name),
            points,
            LIGHT.merges[i % len(LIGHT.merges)],
            marker=BOKEH_MARKERS[i % len(BOKEH_MARKERS)],
            dash="dotted" if is_block_mean(name) else "solid",
        )
        for i, (name, points) in enumerate(lines.items())
    ]
    styles = {"raw": (LIGHT.muted, "solid"), "annealed": (LIGHT.annealed, "dashed")}
    windows = sorted({window for points in lines.values() for window, _ in points})
    return Plot(
        MERGES_TITLE,
        "snapshots merged, N",
        curves,
        y_range=limits,
        levels=[Level(name, value, *styles[name]) for name, value in references.items()],
        ticks={n: str(n) for n in windows} if len(windows) <= MAX_TICKS else None,
    )
