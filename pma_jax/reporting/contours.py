"""Contours of a loss over planes, with points and paths in them: figures of landscapes.

After PMA (arXiv 2505.12082), Figure 8. Drawn on its own canvas, as figures.py does.
"""

import dataclasses
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pma_jax.reporting.figures import LIGHT, SMALL_POINTS, TEXT_POINTS, png_bytes
from pma_jax.reporting.heat_map import COLOURS

PANEL_INCHES, DPI, LEVELS = (5.0, 4.0), 130, 18


@dataclasses.dataclass(frozen=True)
class Marked:
    """Points of a plane: one, drawn as a star, or several, joined in their order."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclasses.dataclass(frozen=True)
class ContourPanel:
    """One plane."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    losses: Sequence[Sequence[float]]  # [y, x], nats a token
    marked: Sequence[Marked]
    x_label: str = "distance"
    y_label: str = "distance"


def png(panels: Sequence[ContourPanel]) -> bytes:
    """The planes side by side as PNG; the same planes give the same bytes."""
    return png_bytes(figure(panels), DPI)


def figure(panels: Sequence[ContourPanel]) -> Figure:
    """The planes side by side, each with a scale of its own: dark is low."""
    drawn = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]), facecolor=LIGHT.paper, layout="tight")
    FigureCanvasAgg(drawn)
    for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        filled = axes.contourf(panel.x, panel.y, panel.losses, LEVELS, cmap=COLOURS)
        bar = drawn.colorbar(filled, ax=axes)
        bar.ax.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)
        colors = iter(("#000000", "#d00000", LIGHT.annealed, LIGHT.preview))
        for marked, color in zip(panel.marked, colors, strict=False):
            style = {"marker": "*", "markersize": 14} if len(marked.x) == 1 else {"marker": "o", "markersize": 3.5}
            axes.plot(marked.x, marked.y, color=color, linewidth=0.7, label=marked.name, **style)
        axes.set_title(panel.title, loc="left", fontsize=TEXT_POINTS, color=LIGHT.ink)
        axes.set_xlabel(panel.x_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
        axes.set_ylabel(panel.y_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
        axes.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)
        axes.legend(fontsize=SMALL_POINTS, loc="upper right")
    return drawn
