"""The figure of spike recovery: loss and gradient norm against tokens, one column a seed, one line an arm.

After PMA (arXiv 2505.12082), Figure 7.
"""

from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pma_jax.reporting.figures import LIGHT, MARKERS, SMALL_POINTS, TEXT_POINTS, png_bytes

COLUMN_INCHES, HEIGHT_INCHES, LEGEND_INCHES, DPI = 4.4, 6.0, 0.9, 110
BEFORE = 0.25  # of the panel's width lies before the spike
ROWS = (("training loss, nats a token", 1), ("gradient norm", 2))  # title, index in a curve's point


def png(seeds: dict[Any, dict[str, dict[str, Any]]]) -> bytes:
    """The figure as PNG.

    Args:
      seeds: seed -> arm -> `curve` ([tokens, loss, gradient norm] triples), and `onset_tokens` of the spike that was
        declared, or None. The first arm's spike is marked, and the panels begin shortly before it.
    """
    drawn = Figure(figsize=(COLUMN_INCHES * len(seeds), HEIGHT_INCHES + LEGEND_INCHES), facecolor=LIGHT.paper)
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(2, len(seeds), sharex="col", squeeze=False)
    names = list(next(iter(seeds.values())))
    colors = matplotlib.color_sequences["tab10"]
    for column, (seed, arms) in enumerate(seeds.items()):
        onset, end = arms[names[0]]["onset_tokens"], max(p[0] for arm in arms.values() for p in arm["curve"])
        start = max(onset - BEFORE / (1 - BEFORE) * (end - onset), 0)
        seen = {name: [p for p in arm["curve"] if p[0] >= start] for name, arm in arms.items()}
        for row, (title, index) in enumerate(ROWS):
            panel = axes[row][column]
            for i, name in enumerate(names):
                points = seen[name]
                panel.plot(
                    [p[0] / 1e6 for p in points],
                    [p[index] for p in points],
                    color=colors[i % len(colors)],
                    marker=MARKERS[i % len(MARKERS)],
                    markevery=(3 * i % 11, 12),
                    markersize=3.5,
                    linewidth=1.0,
                    label=name,
                )
            panel.axvline(onset / 1e6, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (2, 3)))
            panel.grid(axis="y", color=LIGHT.grid)
            panel.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)
            panel.set_title(f"seed {seed}: {title}", loc="left", fontsize=TEXT_POINTS, color=LIGHT.ink)
            if index == 2:
                panel.set_yscale("log")
                panel.set_xlabel("tokens, millions", fontsize=SMALL_POINTS, color=LIGHT.muted)
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="lower center", ncols=3, fontsize=SMALL_POINTS, frameon=False)
    drawn.tight_layout(rect=(0, LEGEND_INCHES / (HEIGHT_INCHES + LEGEND_INCHES), 1, 1))
    return png_bytes(drawn, DPI)
