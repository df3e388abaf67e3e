"""Contours of a loss over planes in parameter space."""

import dataclasses
from collections.abc import Sequence

from matplotlib.figure import Figure

from pma_jax.reporting.drawing import LIGHT, LOSS_COLORMAP, SMALL_POINTS, label_panel, new_figure
from pma_jax.reporting.panels import Line

CONTOUR_INCHES, CONTOUR_LEVELS = (5.0, 4.0), 18


@dataclasses.dataclass(frozen=True)
class ContourPanel:
    """A loss over a plane in parameter space, with marked points: a star for a single one, else a line through them."""

    title: str
    x: Sequence[float]  # distances along the plane's axes
    y: Sequence[float]
    losses: Sequence[Sequence[float]]  # [len(y), len(x)], nats per token
    points: Sequence[Line]


def draw_contours(panels: Sequence[ContourPanel]) -> Figure:
    """Draw panels side by side, each with its own colour scale, as in PMA (arXiv 2505.12082), Figure 8. Dark is low."""
    figure = new_figure(CONTOUR_INCHES[0] * len(panels), CONTOUR_INCHES[1], layout="tight")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        filled = axes.contourf(panel.x, panel.y, panel.losses, CONTOUR_LEVELS, cmap=LOSS_COLORMAP)
        figure.colorbar(filled, ax=axes).ax.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)
        colors = ("#000000", "#d00000", LIGHT.annealed, LIGHT.preview)
        for points, color in zip(panel.points, colors, strict=False):
            style = {"marker": "*", "markersize": 14} if len(points.x) == 1 else {"marker": "o", "markersize": 3.5}
            axes.plot(points.x, points.y, color=color, linewidth=0.7, label=points.name, **style)
        label_panel(axes, panel.title, "distance", "distance")
        axes.legend(fontsize=SMALL_POINTS, loc="upper right")
    return figure
