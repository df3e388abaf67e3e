"""Spikes in a report: those that recovered, and those after which the run rolled back."""

import json

import pytest
from metrics_records import evaluation

from pma_jax.config import to_json
from pma_jax.reporting import html
from pma_jax.reporting.report import build_report, write_report
from pma_jax.reporting.report_figure import draw_report


def spike(onset, tokens, verdict, loss=3.0):
    numbers = {"loss": loss, "peak_loss": loss, "median_loss": 2.0, "spread_nats": 0.1}
    return {"kind": "spike", "tokens": tokens, "step": 1, "verdict": verdict, "onset_tokens": onset, **numbers}


def event(number, lost, tokens, **changes):
    keys = {"number": number, "attempt": number, "spike": lost, "recipe": "sma", "tokens": tokens, "optimizer": "reset"}
    merged = [{"path": f"snapshots/{i}", "step": i, "tokens": tokens - i} for i in (3, 2, 1)]
    keys |= {"merged": merged, "coefficients": [1 / 3] * 3, "step": 3, "aside": {}, "done": True}
    return keys | {"position": 100, "position_there": 80} | changes


@pytest.fixture
def spiky(make_run):
    """Return a run with a recovered spike at 1M tokens, and one at 3M after which it rolled back twice."""
    records = [evaluation(t, 2.0 - t / 1e7) for t in range(100_000, 6_000_001, 100_000)]
    run = make_run("spiky", [*records, spike(1_000_000, 1_100_000, "recovered")])
    for number, tokens in ((1, 2_900_000), (2, 2_800_000)):
        folder = run.path / "spikes" / str(number)
        folder.mkdir(parents=True)
        lost = spike(3_000_000 + number, 3_200_000, "irrecoverable", loss=None if number == 2 else 4.0)
        (folder / "event.json").write_text(json.dumps(event(number, lost, tokens)))
        aside = [evaluation(3_100_000, 4.0), evaluation(3_200_000, float("nan"))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in aside))
    return run


def test_each_spike_is_a_row_with_the_action_taken(spiky):
    rows = build_report(spiky, [])["spikes"]
    assert [(r["onset_tokens"], r["verdict"]) for r in rows] == [
        (1_000_000, "recovered"),
        (3_000_001, "irrecoverable"),
        (3_000_002, "irrecoverable"),
    ]
    assert rows[0]["went_back"] is None
    assert rows[1]["went_back"] == {
        "tokens": 2_900_000,
        "recipe": "sma",
        "snapshots": 3,
        "optimizer": "reset",
        "passes_over_data": True,
        "attempt": 1,
        "set_aside": [[3_100_000, 4.0]],
    }


def test_page_and_files_contain_the_spikes(spiky, tmp_path):
    report = build_report(spiky, [])
    page = html.render_page(report, to_json(spiky.config))
    assert "Loss spikes" in page and "back to sma of 3 snapshots" in " ".join(page.split()) and "not finite" in page
    assert json.loads(write_report(report, spiky, tmp_path)[0].read_text())["spikes"] == report["spikes"]


def test_figure_marks_the_rollbacks(spiky):
    drawn = draw_report(build_report(spiky, []))
    texts = [text.get_text() for axes in drawn.axes for text in axes.texts]
    assert sum("back to\nsma:3" in text for text in texts) == 2


def test_run_without_spikes_reports_none(make_run):
    run = make_run("calm", [evaluation(6_000_000, 1.5)])
    report = build_report(run, [])
    assert report["spikes"] == []
    assert "Loss spikes" not in html.render_page(report, to_json(run.config))
