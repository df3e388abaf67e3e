"""The plots of a page: their numbers are those of the report, and each curve can be pointed at and hidden."""

import re

import numpy as np
import pytest
from bokeh.models import HoverTool
from report_pages import curves, embedded_plots

from pma_jax.reporting import html, interactive
from pma_jax.reporting.drawing import DARK, LIGHT
from pma_jax.reporting.panels import Line, LinePanel
from pma_jax.reporting.report import build_report
from pma_jax.reporting.report_plots import MAX_POINTS


@pytest.fixture
def report(realistic):
    run, fork = realistic
    return build_report(run, [fork])


def plots(report):
    return embedded_plots(html.render_page(report, "{}"))


def test_the_losses_are_those_of_the_report(report):
    drawn = curves(plots(report)["losses-1"])
    raw = drawn.pop(f"raw  {report['raw_loss']:.4f}")
    np.testing.assert_allclose(raw, np.array(report["curves"]["raw"]) * [1e-6, 1])
    branch = drawn.pop(f"annealed  {report['annealed_loss']:.4f}")
    start = [point for point in report["curves"]["raw"] if point[0] == report["fork_tokens"]]
    np.testing.assert_allclose(branch, np.array(start + report["curves"]["annealed"]) * [1e-6, 1])
    best = report["best_merge"]
    assert drawn.pop(f"{best['text']}  {best['loss']:.4f}") == [(report["tokens"] / 1e6, best["loss"])]
    assert len(drawn) == len(report["curves"]["previews"]) == 4
    for name, points in drawn.items():
        curve = report["curves"]["previews"][name.split()[0]]
        assert name.endswith(f"  {curve[-1][1]:.4f}")
        np.testing.assert_allclose(points, np.array(curve) * [1e-6, 1])


def test_the_losses_of_merges_are_drawn_with_those_of_raw_and_annealed(report, realistic):
    plot = plots(report)["losses-2"]
    losses = {m["text"]: m["loss"] for m in report["merges"]}
    drawn = curves(plot)
    assert {
        f"{name.replace(' α', ':alpha')}:{window:g}": loss for name in drawn for window, loss in drawn[name]
    } == losses
    assert plot.y_range.start < report["annealed_loss"] and plot.y_range.end > report["raw_loss"]
    assert [item.label.value for item in plot.legend[0].items][-2:] == ["raw", "annealed"]
    without = plots(build_report(realistic[0], []))["losses-2"]
    assert without.title.text == plot.title.text and "annealed" not in str(without.legend[0].items)


def test_a_click_on_a_name_hides_all_of_its_curve_and_each_curve_can_be_pointed_at(report):
    for plot in plots(report).values():
        assert plot.legend[0].click_policy == "hide"
        hidden = [renderer for item in plot.legend[0].items for renderer in item.renderers]
        assert set(hidden) == set(plot.renderers) and len(hidden) == len(plot.renderers)
        pointed = {
            renderer.data_source for tool in plot.tools if isinstance(tool, HoverTool) for renderer in tool.renderers
        }
        assert pointed == {renderer.data_source for renderer in hidden if "x" in renderer.data_source.data}


def test_panels_keep_error_bars_names_of_x_and_logarithms():
    merged = Line("merged", [0, 1], [0.3, 0.2], [0.2, 0.1], [0.4, 0.3])
    left, right = interactive.plots_of_panels(
        [
            LinePanel("left", "", [Line("raw", [1e-5, 1e-3], [2.0, 1.0], dashed=True)], log_x=True),
            LinePanel("right", "", [merged], tick_labels=("no", "yes"), percent=True),
        ]
    )
    bars = interactive.draw(right)
    (source,) = {item.renderers[0].data_source for item in bars.legend[0].items}
    np.testing.assert_array_equal(source.data["low"], merged.low)
    np.testing.assert_array_equal(source.data["high"], merged.high)
    assert source.data["label"] == ["no", "yes"] and bars.xaxis[0].major_label_overrides == {0: "no", 1: "yes"}
    assert left.log_x and left.curves[0].dash == "dashed" and left.curves[0].color != right.curves[0].color
    assert dict(left.ticks) == {1e-5: "1e-05", 1e-3: "0.001"}


def test_a_dark_page_replaces_every_colour(report):
    text = html.render_page(report, "{}")
    (drawn,) = re.findall(r'id="plots">(.*?)</script>', text, re.S)
    used = set(re.findall(r'"(#[0-9a-f]{6})"', drawn))
    assert {LIGHT.ink, LIGHT.muted, LIGHT.annealed} < used <= interactive.DARK_COLORS.keys()
    assert interactive.DARK_COLORS[LIGHT.preview] == DARK.preview
    assert not interactive.DARK_COLORS.keys() & set(interactive.DARK_COLORS.values())


@pytest.mark.slow
def test_long_curves_are_thinned_and_the_page_says_so_and_stays_small(report):
    count = 6 * MAX_POINTS + 1
    tokens = np.linspace(100, report["tokens"], count)
    for previews in (report["curves"]["previews"], {"raw": report["curves"]["raw"]}):
        for curve in previews.values():
            last = curve[-1][1]
            curve[:] = [[t, last + 1 / (1 + t)] for t in tokens]
    page = html.render_page(report, "{}")
    assert "as few as one in 7 points is drawn" in " ".join(page.split()) and len(page) < 3_000_000
    for name, points in curves(embedded_plots(page)["losses-1"]).items():
        if not name.startswith(("annealed", "wma")):
            assert len(points) == -(-count // 7) and points[-1][0] == report["tokens"] / 1e6
    assert "Of a long curve" not in html.render_page(
        report | {"curves": report["curves"] | {"raw": [[1e6, 2.0], [6e6, 1.0]], "previews": {}}}, "{}"
    )
