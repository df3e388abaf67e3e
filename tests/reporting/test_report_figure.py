import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image

from pma_jax.reporting import report_figure
from pma_jax.reporting.drawing import PAGE_DPI, to_png
from pma_jax.reporting.report import build_report
from pma_jax.reporting.report_lines import visible_range


@pytest.fixture
def report(realistic):
    run, fork = realistic
    return build_report(run, [fork])


def test_png_is_valid_and_at_twice_the_size(report):
    drawn = report_figure.draw_report(report)
    data = to_png(drawn, PAGE_DPI)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = image.imread(io.BytesIO(data)).shape
    assert height == 980 and width == int(200 * drawn.get_figwidth())


def test_pyplot_is_not_imported():
    check = "import sys, pma_jax.reporting.report_figure; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_gain_fills_the_panel(report):
    left, low, high = visible_range(report)
    gain = report["raw_loss"] - report["annealed_loss"]
    assert low < report["annealed_loss"] and report["raw_loss"] < high
    assert gain > 0.25 * (high - low)
    assert 0 < left <= report["fork_tokens"] / 2


def test_labels_stay_inside_the_figure(report):
    report["merges"] += [
        m | {"recipe": "lagfree:lag=0.5,order=1", "text": "lagfree:lag=0.5,order=1:3"} for m in report["merges"][:4]
    ]
    drawn = report_figure.draw_report(report)
    renderer = drawn.canvas.get_renderer()
    assert all(axes.get_position().width * drawn.get_figwidth() > 3 for axes in drawn.axes)
    for axes in drawn.axes:
        for text in axes.texts:
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0 and box.x1 <= drawn.bbox.width and box.y0 >= 0 and box.y1 <= drawn.bbox.height


def test_labels_do_not_overlap(report):
    drawn = report_figure.draw_report(report)
    renderer = drawn.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for axes in drawn.axes for text in axes.texts]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_run_without_forks_has_a_figure(realistic):
    run, _ = realistic
    report = build_report(run, [])
    assert len(report_figure.draw_report(report).axes) == 2
    assert len(report_figure.draw_report(report | {"merges": [], "best_merge": None}).axes) == 1


def test_spread_moves_labels_no_further_than_needed():
    assert report_figure.spread_labels([0.0, 5.0], 1.0, 0.0, 9.0) == [0.0, 5.0]
    assert report_figure.spread_labels([3.0, 3.0], 1.0, 0.0, 9.0) == [2.5, 3.5]
    assert report_figure.spread_labels([3.2, 3.0, 3.4], 1.0, 0.0, 9.0) == pytest.approx([3.2, 2.2, 4.2])
    assert report_figure.spread_labels([9.0, 9.0, 9.0], 1.0, 0.0, 9.0) == [7.0, 8.0, 9.0]


def test_spread_keeps_the_gap_and_the_order():
    values = list(np.random.default_rng(0).uniform(0, 10, 20))
    positions = np.array(report_figure.spread_labels(values, 0.4, 0.0, 10.0))
    assert (np.diff(positions[np.argsort(values)]) >= 0.4 - 1e-9).all()
    assert positions.min() >= 0 and positions.max() <= 10
