"""The task scores of a report are those of the records, apart by what was asked."""

import shutil

import pytest
import tiny
from report_pages import embedded_plots

from pma_jax.evaluation.task_scores import GOLD_BITS
from pma_jax.reporting.report import build_report, format_report, write_report
from pma_jax.reporting.task_curves import task_curves, task_panels
from pma_jax.runs.directory import append_watch_records, open_run


def record(tokens, model, value, metric=GOLD_BITS, questions="q1", task="pma:brackets", error=0.25):
    return {
        **{"kind": "task", "tokens": tokens, "step": 1, "model": model, "task": task, "metric": metric},
        **{"value": value, "standard_error": error, "is_higher_better": metric != GOLD_BITS},
        **{"documents": 20, "questions": questions, "limit": None, "shots": None},
    }


@pytest.fixture
def run(finished, tmp_path):
    run = open_run(shutil.copytree(finished.path, tmp_path / "run"))
    append_watch_records(
        run.path,
        [
            record(tiny.HORIZON, "raw", 3.5),
            record(2048, "raw", 4.5),
            record(tiny.HORIZON, "sma:3", 3.75),
            record(tiny.HORIZON, "sma:2", 3.125),
            record(tiny.HORIZON, "sma:3", 3.25),  # scored again
            record(tiny.HORIZON, "raw", 0.5, metric="acc"),
            record(tiny.HORIZON, "raw", 2.5, questions="q2", error=None),
        ],
    )
    return run


def test_scores_are_grouped_by_task_metric_and_questions(run):
    groups = {(g["metric"], g["questions"]): g for g in task_curves(run, [])}
    assert groups.keys() == {(GOLD_BITS, "q1"), ("acc", "q1"), (GOLD_BITS, "q2")}
    assert groups[GOLD_BITS, "q1"]["curves"] == {
        "raw": [[2048, 4.5, 0.25], [tiny.HORIZON, 3.5, 0.25]],
        "sma:3": [[tiny.HORIZON, 3.25, 0.25]],
        "sma:2": [[tiny.HORIZON, 3.125, 0.25]],
    }
    assert groups[GOLD_BITS, "q2"]["curves"] == {"raw": [[tiny.HORIZON, 2.5, None]]}


def test_the_report_has_a_figure_a_table_and_lines(run):
    report = build_report(run, [])
    lines = format_report(report).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("task "))
    # The best model comes first after raw.
    assert [line.split()[3] for line in lines[start + 1 : start + 5]] == ["raw", "sma:2", "sma:3", "raw"]
    assert lines[start + 2].endswith("3.1250 ± 0.2500") and lines[start + 4].endswith(" 2.5000")
    page = write_report(report, run)[2].read_text()
    assert "<h2>Tasks</h2>" in page and "3.1250<small>± 0.2500</small>" in page
    panels = task_panels(report["tasks"])
    assert len(panels) == 2
    raw = next(line for line in panels[0].lines if line.name == "raw")
    assert (raw.y, raw.low, raw.high) == ([4.5, 3.5], [4.25, 3.25], [4.75, 3.75])
    assert sum(name.startswith("tasks-") for name in embedded_plots(page)) == 2


def test_without_scores_the_report_has_no_tasks(finished):
    report = build_report(finished, [])
    assert report["tasks"] == []
    assert "task " not in format_report(report)
