import numpy as np

from pma_jax.reporting.contours import ContourPanel, Marked, figure, png

X, Y = np.linspace(-1, 1, 7), np.linspace(-2, 2, 5)
PANEL = ContourPanel(
    "a bowl",
    X,
    Y,
    (X[None, :] ** 2 + Y[:, None] ** 2).tolist(),
    [Marked("path", [0.5, -0.5], [1, -1]), Marked("mean", [0], [0])],
)


def test_a_panel_shows_the_loss_and_what_is_marked():
    drawn = figure([PANEL, PANEL])
    panels = [axes for axes in drawn.axes if axes.get_title(loc="left")]
    assert len(panels) == 2
    for axes in panels:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["path", "mean"]
        path, mean = axes.get_lines()
        assert path.get_xydata().tolist() == [[0.5, 1], [-0.5, -1]] and mean.get_marker() == "*"
        assert axes.get_xlim() == (-1, 1) and axes.get_ylim() == (-2, 2)


def test_the_same_planes_give_the_same_bytes():
    assert png([PANEL]) == png([PANEL]) and png([PANEL]).startswith(b"\x89PNG")
