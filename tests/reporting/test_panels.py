"""Panels of lines: every line, its error bars, and one legend."""

import io

import matplotlib.image
import numpy as np

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines

A = Line("merged", [1, 2, 4], [0.3, 0.2, 0.1], [0.2, 0.1, 0.0], [0.4, 0.3, 0.2])
B = Line("raw", [1, 2, 4], [0.5, 0.4, 0.3], dashed=True)

LONG = Line("raw", range(-15, 1), [0.1] * 16)


def test_each_name_has_one_colour_and_one_legend_entry():
    drawn = draw_lines([LinePanel("left", "tokens", [A, B], zero_line=True), LinePanel("right", "tokens", [B])])
    left, right = drawn.axes
    colours = {line.get_label(): c[0].get_color() for c in left.containers for line in [c]}
    assert colours["raw"] == right.containers[0][0].get_color() != colours["merged"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["merged", "raw"]
    assert left.get_title(loc="left") == "left" and right.get_xlabel() == "tokens"


def test_error_bars_reach_from_low_to_high():
    drawn = draw_lines([LinePanel("one", "tokens", [A], log_x=True)])
    (bars,) = drawn.axes[0].containers[0][2]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_allclose(ends, np.stack([A.low, A.high], axis=1), atol=1e-12)


def test_ticks_are_at_the_measured_values_and_integers_where_those_are():
    drawn = draw_lines([LinePanel("one", "tokens", [A], log_x=True), LinePanel("two", "snapshots", [LONG])])
    few, many = drawn.axes
    assert [t.get_text() for t in few.get_xticklabels()] == ["1", "2", "4"]
    assert all(float(x).is_integer() for x in many.get_xticks())


def test_panels_beyond_the_columns_wrap_and_bytes_are_reproducible():
    panels = [LinePanel(str(i), "x", [A, B], percent=True, y_limits=(0, 1)) for i in range(4)]
    png = to_png(draw_lines(panels, columns=3))
    assert png == to_png(draw_lines(panels, columns=3))
    height, width, _ = matplotlib.image.imread(io.BytesIO(png)).shape
    assert height > 0.5 * width
