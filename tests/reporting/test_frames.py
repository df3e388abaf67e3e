"""DataFrames of runs, compared with the records that the runs contain."""

import builtins
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from metrics_records import evaluation, preview

import pma_jax as pma
from pma_jax.config import resolve
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import sweep
from pma_jax.runs.directory import create_run

PAGE = (Path(__file__).parents[2] / "docs" / "frames.md").read_text()
pytest.importorskip("pandas")


def write_grid(root, losses):
    """Write a run per learning rate, with the raw loss and the merged losses of its newest mark."""
    for rate, (raw, merged) in losses.items():
        config = resolve({}, [f"schedule.peak_rate={rate}", "mesh.data=1", "training.total_tokens=200000"])
        run = create_run(root / f"rate-{rate}", config, {"corpus": "c0ffee"})
        records = [evaluation(100_000, raw + 1), preview(100_000, "sma:3", raw - 5), evaluation(200_000, raw)]
        records += [preview(200_000, f"sma:{n}", loss) for n, loss in merged.items()]
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_metrics_are_the_records(finished):
    frame = pma.frames.metrics(str(finished.path))
    records = finished.metrics
    assert len(frame) == len(records)
    for name in ("tokens", "loss"):
        assert frame[name].tolist() == [record[name] for record in records]
    steps = [r["gradient_norm"] for r in records if r["kind"] == "train"]
    assert frame.gradient_norm.dropna().tolist() == steps


def test_sweep_has_the_merges_from_the_lowest_loss(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    run = dataclasses.replace(finished, path=finished.path.__class__(tmp_path / "run"))
    with pytest.raises(UserError, match=r"has no sweep\.json: run `pma sweep"):
        pma.frames.sweep(run)
    rows = sweep(run, ["sma", "wma"], [2, 3])["rows"]
    frame = pma.frames.sweep(run)
    assert frame.loss.tolist() == sorted(row["loss"] for row in rows)
    assert dict(zip(frame.text, frame.difference, strict=True)) == {row["text"]: row["difference"] for row in rows}
    merged = pma.frames.grid(tmp_path).loc["run"]
    assert (merged.merged_loss, merged.raw_loss) == (frame.loss[0], run.snapshots[-1].loss)


def test_grid_has_the_varied_keys_and_the_newest_results_of_each_run(tmp_path):
    write_grid(tmp_path, {0.001: (3.5, {3: 3.25, 6: 3.0}), 0.002: (3.25, {3: 3.125})})
    (tmp_path / "notes").mkdir()
    frame = pma.frames.grid(tmp_path)
    assert frame.index.tolist() == ["rate-0.001", "rate-0.002"]
    assert frame.columns[0] == "schedule.peak_rate"
    assert "." not in "".join(frame.columns[1:])
    assert frame["schedule.peak_rate"].tolist() == [0.001, 0.002]
    assert frame.raw_loss.tolist() == [3.5, 3.25]
    assert list(zip(frame.merged, frame.merged_loss, strict=True)) == [("sma:6", 3.0), ("sma:3", 3.125)]
    assert frame.tokens.tolist() == frame.total_tokens.tolist() == [200_000] * 2


def test_grid_of_no_runs_is_refused(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="has no runs"):
            pma.frames.grid(root)


def test_page_documents_every_column_and_no_other(finished, tmp_path):
    write_grid(tmp_path, {0.001: (3.5, {3: 3.25})})
    frames = [pma.frames.metrics(finished), pma.frames.grid(tmp_path)]
    columns = {name for frame in frames for name in frame.columns} | set(pma.frames._SWEEP_COLUMNS)
    documented = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
    assert columns - documented == set()
    assert documented - columns <= {"model", "task", "metric", "value", "is_higher_better", "documents", "questions"}


def test_without_pandas_there_is_one_line(finished, monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pma.frames needs pandas: pip install 'pma-jax\[frames\]'"):
        pma.frames.metrics(finished)
