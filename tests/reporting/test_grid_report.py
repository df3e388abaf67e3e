"""`pma report ROOT`: the runs of a grid ranked, on records that are written here."""

import json

import numpy as np
import pytest
from metrics_records import evaluation, preview
from report_pages import embedded_plots
from scipy import stats

from pma_jax.cli import main
from pma_jax.config import resolve
from pma_jax.reporting.grid_report import build_grid_report, format_grid_report, grid_panels
from pma_jax.reporting.panels import draw_lines
from pma_jax.runs.directory import create_run

MARKS = (100_000, 200_000, 300_000)
RATES = (0.001, 0.002, 0.004, 0.032)
# Of each rate, at each mark: merges rank the runs as the end does from the second mark on, raw losses only at the end.
RAW = {0.001: (5.0, 4.0, 3.4), 0.002: (5.1, 4.2, 3.3), 0.004: (5.2, 4.3, 3.2), 0.032: (5.3, 4.1, 3.5)}
MERGED = {0.001: (4.9, 3.9, 3.3), 0.002: (4.8, 3.8, 3.2), 0.004: (4.95, 3.7, 3.1), 0.032: (4.7, 4.0, 3.4)}
ANNEALED = {0.001: 3.0, 0.002: 2.9, 0.004: 2.8, 0.032: 3.1}


def write_run(path, records, assignments, metadata=None):
    config = resolve({}, ["mesh.data=1", "training.total_tokens=300000", *assignments])
    run = create_run(path, config, {"corpus": "c0ffee"} | (metadata or {}))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return run


def records_of(raw, merged, text="t"):
    marks = [evaluation(t, loss) | {"text": text} for t, loss in zip(MARKS, raw, strict=False)]
    for t, loss in zip(MARKS, merged, strict=False):
        marks += [preview(t, f"sma:{n}", loss + 0.01 * (6 - n)) | {"text": text} for n in (3, 6)]
    return sorted(marks, key=lambda r: r["tokens"])


def write_grid(root, annealed=True, key="schedule.peak_rate"):
    for rate in RATES:
        run = write_run(root / f"{key}={rate}", records_of(RAW[rate], MERGED[rate]), [f"{key}={rate}"])
        if annealed:
            origin = {"path": str(run.path), "tokens": 200_000, "step": 1}
            decay = ["schedule.decay=linear", "schedule.decay_start_tokens=200000"]
            record = evaluation(300_000, ANNEALED[rate]) | {"text": "t"}
            write_run(run.path / "annealed", [record], [f"{key}={rate}", *decay], {"forked_from": origin})
    return root


def rho(values, finals):
    """Return Spearman's rank correlation by its definition: Pearson's of the ranks."""
    return np.corrcoef(stats.rankdata(values), stats.rankdata(finals))[0, 1]


@pytest.mark.parametrize("annealed", [True, False])
def test_runs_are_ranked_and_correlations_are_those_of_the_ranks(tmp_path, annealed):
    report = build_grid_report(write_grid(tmp_path / "grid", annealed))
    finals = [ANNEALED[rate] if annealed else RAW[rate][-1] for rate in RATES]
    assert report["keys"] == ["schedule.peak_rate"] and report["final"] == ("annealed" if annealed else "raw")
    assert [row["values"]["schedule.peak_rate"] for row in report["runs"]] == [0.004, 0.002, 0.001, 0.032]
    assert report["preview"] == "sma:6" and report["notes"] == []
    assert [a["tokens"] for a in report["agreement"]] == list(MARKS)
    for mark, agreement in enumerate(report["agreement"]):
        assert agreement["raw"] == pytest.approx(rho([RAW[rate][mark] for rate in RATES], finals))
        assert agreement["merged"] == pytest.approx(rho([MERGED[rate][mark] for rate in RATES], finals))
    best = report["runs"][0]
    assert best["merged"] == "sma:6" and best["losses"]["merged"]["loss"] == 3.1
    assert (best["losses"].get("annealed") or {}).get("loss") == (2.8 if annealed else None)
    assert best["annealed"] == ("annealed" if annealed else None)


def test_the_command_writes_a_table_and_a_page_and_the_grid_goes_on(tmp_path, capsys):
    root = write_grid(tmp_path / "grid")
    assert main(["report", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["rank", "by", "merged"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        *(["1", "1", "0.004"], ["2", "2", "0.002"], ["3", "3", "0.001"], ["4", "4", "0.032"]),
    ]
    assert json.loads((root / "report.json").read_text()) == build_grid_report(root)
    page = (root / "report.html").read_text()
    titles = [plot.title.text for plot in embedded_plots(page).values()]
    assert titles == ["schedule.peak_rate", "rank correlation with annealed"]
    assert (root / "report.png").stat().st_size > 10_000
    assert main(["report", str(root), "--out", str(tmp_path / "there")]) == 0
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["report.html", "report.json", "report.png"]
    # The files of the report do not stop the grid's own command.
    (tmp_path / "config.py").write_text("from pma_jax import config\nget_config = config.defaults\n")
    words = ["--config", str(tmp_path / "config.py"), "--config.training.total_tokens=300000", "--root", str(root)]
    assert main(["grid", *words, "--vary", "schedule.peak_rate=0.001,0.002", "--dry-run"]) == 0


def test_panels_have_means_over_the_other_keys(tmp_path):
    for rate, seed, loss in ((0.001, 0, 3.0), (0.001, 1, 5.0), (0.1, 0, 2.0), (0.1, 1, 3.0)):
        keys = [f"schedule.peak_rate={rate}", f"training.seed={seed}", f"model.scan_layers={rate < 0.01}"]
        write_run(tmp_path / f"{rate}-{seed}", records_of((9.0, 8.0, loss), ()), keys)
    figure = draw_lines(grid_panels(build_grid_report(tmp_path)))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}
    assert panels.keys() == {"model.scan_layers", "schedule.peak_rate", "rank correlation with raw"}
    rate = panels["schedule.peak_rate"]
    assert rate.get_xscale() == "log"
    np.testing.assert_allclose(rate.lines[0].get_xydata(), [[0.001, 4.0], [0.1, 2.5]])
    labels = [text.get_text() for text in panels["model.scan_layers"].get_xticklabels()]
    assert labels == ["False", "True"]


def test_what_cannot_be_compared_is_not_ranked(tmp_path):
    root = write_grid(tmp_path / "grid", annealed=False)
    write_run(root / "new", records_of((5.0,), (4.9,)), ["schedule.peak_rate=0.5"])
    report = build_grid_report(root)
    assert report["notes"] == ["1 of 5 runs have not ended: they are not ranked"] and len(report["agreement"]) == 3
    write_run(root / "text", records_of(RAW[0.001], MERGED[0.001], "other"), ["schedule.peak_rate=0.6"])
    report = build_grid_report(root)
    assert report["agreement"] == [] and "evaluated on different text" in format_grid_report(report)
    write_run(root / "long", [evaluation(400_000, 3.0)], ["schedule.peak_rate=0.7", "training.total_tokens=400000"])
    assert "different horizons" in build_grid_report(root)["notes"][-1]


def test_a_fork_that_has_not_ended_or_was_evaluated_on_other_text_is_no_annealed_run(tmp_path):
    run = write_run(tmp_path / "run", records_of(RAW[0.001], MERGED[0.001]), [])
    origin = {"forked_from": {"path": str(run.path), "tokens": 200_000, "step": 1}}
    decay = ["schedule.decay=linear", "schedule.decay_start_tokens=200000"]
    for name, keys, record in (
        ("unfinished", decay, evaluation(200_000, 1.0) | {"text": "t"}),
        ("other", decay, evaluation(300_000, 1.0) | {"text": "u"}),
        ("constant", [], evaluation(300_000, 1.0) | {"text": "t"}),
    ):
        write_run(run.path / name, [record], keys, origin)
    (row,) = build_grid_report(tmp_path)["runs"]
    assert "annealed" not in row["losses"] and row["annealed"] is None
    write_run(tmp_path / "beside", [evaluation(300_000, 2.5) | {"text": "t"}], decay, origin)
    (row,) = build_grid_report(tmp_path)["runs"]  # a fork is no run of the grid
    assert row["losses"]["annealed"]["loss"] == 2.5 and row["annealed"] == "beside"
