import io

import numpy as np
import pytest
from matplotlib import image
from matplotlib.patches import Rectangle

from pma_jax.reporting import heat_map
from pma_jax.reporting.drawing import to_png


def sweep(recipes=("sma", "lagfree:lag=0.5"), windows=(3, 10), intervals=(1, 2, 4), kinds=("point", "block_mean")):
    rows = [
        {"recipe": r, "window": n, "interval": i, "kind": k, "text": "", "loss": 1 + n / 100 + i / 1000 + len(r + k)}
        for k in kinds
        for r in recipes
        for n in windows
        for i in intervals
    ]
    return {"tokens": 5_120_000, "raw_loss": 1.5, "rows": rows}


def test_one_panel_per_recipe_and_kind_with_intervals_by_windows():
    panels = heat_map.sweep_heat_maps(sweep()["rows"])
    assert [p.title for p in panels] == [
        "sma, points",
        "lagfree lag=0.5, points",
        "sma, block means",
        "lagfree lag=0.5, block means",
    ]
    first = panels[0]
    assert (first.row_labels, first.column_labels) == (
        ["every snapshot", "every 2 snapshots", "every 4 snapshots"],
        ["3", "10"],
    )
    assert first.losses[2, 1] == 1 + 0.1 + 0.004 + len("smapoint")


def test_single_interval_gives_one_panel_per_kind_with_recipes_by_windows():
    panels = heat_map.sweep_heat_maps(sweep(intervals=(1,))["rows"])
    assert [(p.title, p.row_labels) for p in panels] == [
        ("points", ["sma", "lagfree lag=0.5"]),
        ("block means", ["sma", "lagfree lag=0.5"]),
    ]
    assert panels[1].losses[1, 0] == 1 + 0.03 + 0.001 + len("lagfree:lag=0.5block_mean")


@pytest.mark.parametrize("intervals", [(1,), (1, 2, 4)])
def test_every_loss_is_printed_and_the_best_is_framed(intervals):
    actual = sweep(intervals=intervals)
    del actual["rows"][3]
    drawn = heat_map.draw_sweep(actual)
    written = [text.get_text() for axes in drawn.axes for text in axes.texts]
    assert sorted(t for t in written if t != "–") == sorted(f"{r['loss']:.4f}" for r in actual["rows"])
    assert written.count("–") == 1
    frames = [p for axes in drawn.axes for p in axes.patches if isinstance(p, Rectangle)]
    bold = [t.get_text() for axes in drawn.axes for t in axes.texts if t.get_fontweight() == "bold"]
    assert len(frames) == 1 and bold == [f"{min(r['loss'] for r in actual['rows']):.4f}"]


def test_all_artists_are_inside_the_figure_without_overlap():
    drawn = heat_map.draw_sweep(sweep(recipes=("sma", "wma", "ema:alpha=0.1", "lagfree:lag=0.5,order=1")))
    drawn.canvas.draw()
    renderer = drawn.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in drawn.axes]
    boxes += [text.get_window_extent(renderer) for text in drawn.texts]
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= drawn.bbox.width and box.y0 >= 0 and box.y1 <= drawn.bbox.height
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_non_finite_losses_and_a_single_loss_can_be_drawn(tmp_path):
    actual = sweep(recipes=("sma",), windows=(3,), intervals=(1,), kinds=("point",))
    actual["raw_loss"] = None
    path = heat_map.write_sweep_figure(actual, tmp_path)
    assert image.imread(io.BytesIO(path.read_bytes())).shape[2] == 4
    actual["rows"][0]["loss"] = float("nan")
    assert [t.get_text() for t in heat_map.draw_sweep(actual).axes[0].texts] == ["–"]
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.png"]


def test_stacked_panels_are_taller_and_bytes_are_reproducible():
    panels = heat_map.sweep_heat_maps(sweep(intervals=(1, 2))["rows"])
    assert len(panels) > 1
    beside, below = (
        image.imread(io.BytesIO(to_png(heat_map.draw_heat_maps(panels, "title", maps_per_row=n)))).shape
        for n in (len(panels), 1)
    )
    assert below[0] > beside[0] and below[1] < beside[1]
    assert to_png(heat_map.draw_heat_maps(panels, "title")) == to_png(heat_map.draw_heat_maps(panels, "title"))


def test_cells_above_the_scale_have_its_last_colour():
    panel = heat_map.HeatMap("one", ["a"], ["1", "2", "3"], np.array([[0.0, 1.0, 100.0]]))
    wide, narrow = (heat_map.draw_heat_maps([panel], "t", max_loss=h).axes[0].images[0] for h in (None, 1.0))
    assert narrow.get_clim() == (0.0, 1.0) and wide.get_clim() == (0.0, 100.0)
