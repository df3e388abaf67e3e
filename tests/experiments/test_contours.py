"""Contours of experiments/why_it_works: every plane with its marked points."""

import numpy as np
from contours import ContourPanel, draw_contours

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line

X, Y = np.linspace(-1, 1, 7), np.linspace(-2, 2, 5)
PANEL = ContourPanel(
    "a bowl",
    X,
    Y,
    (X[None, :] ** 2 + Y[:, None] ** 2).tolist(),
    [Line("path", [0.5, -0.5], [1, -1]), Line("mean", [0], [0])],
)


def test_panel_shows_the_loss_and_the_marked_points():
    drawn = draw_contours([PANEL, PANEL])
    panels = [axes for axes in drawn.axes if axes.get_title(loc="left")]
    assert len(panels) == 2
    for axes in panels:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["path", "mean"]
        path, mean = axes.get_lines()
        assert path.get_xydata().tolist() == [[0.5, 1], [-0.5, -1]] and mean.get_marker() == "*"
        assert axes.get_xlim() == (-1, 1) and axes.get_ylim() == (-2, 2)


def test_same_planes_give_the_same_bytes():
    assert to_png(draw_contours([PANEL])) == to_png(draw_contours([PANEL])) and to_png(
        draw_contours([PANEL])
    ).startswith(b"\x89PNG")
