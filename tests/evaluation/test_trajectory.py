"""Losses along a run: each equals that of numpy's merge of the snapshots up to its end."""

import concurrent.futures
import dataclasses
import json
import shutil

import pytest
import tiny

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation import sweep, trajectory
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.trajectory import evaluate_along_run
from pma_jax.merging import recipes
from pma_jax.runs.directory import open_run

V = 4 * tiny.BATCH_TOKENS
CELLS = [RAW, Cell("sma", 3), Cell("wma", 2, 2), Cell("lagfree", 4), Cell("sma", 2, kind="block_mean")]


@pytest.fixture
def run(finished_with_block_means, tmp_path):
    return open_run(shutil.copytree(finished_with_block_means.path, tmp_path / "run"))


def test_each_loss_is_that_of_numpys_merge_of_the_snapshots_up_to_then(run):
    actual = evaluate_along_run(run, CELLS, [3 * V, 6 * V], SELECT)
    assert set(actual) == {(cell, end) for cell in CELLS for end in (3 * V, 6 * V)} - {(Cell("lagfree", 4), 3 * V)}
    for (cell, end), evaluated in actual.items():
        there = [s for s in run.of_kind(cell.kind) if s.tokens <= end]
        chosen = there[::-1][:: cell.interval][: cell.window][::-1]
        weights = recipes.coefficients(cell.recipe, [s.tokens for s in chosen])
        expected = tiny.loss_of_sum(run, [tiny.named(tiny.read(s)) for s in chosen], weights)
        assert evaluated.loss == pytest.approx(expected, rel=2e-6), (cell.text, end)
    assert actual[RAW, 3 * V].loss == pytest.approx(run.snapshots[2].loss, rel=1e-6)


def test_stored_losses_are_not_recomputed(run, monkeypatch):
    requests, evaluate = [], sweep.evaluate_merges
    monkeypatch.setattr(
        sweep,
        "evaluate_merges",
        lambda c, s, rows, *part: requests.append(len(rows)) or evaluate(c, s, rows, *part),
    )
    first = evaluate_along_run(run, [RAW, Cell("sma", 3)], [6 * V], SELECT)
    assert evaluate_along_run(run, [Cell("sma", 3)], [6 * V], SELECT) == {
        (Cell("sma", 3), 6 * V): first[Cell("sma", 3), 6 * V]
    }
    both = evaluate_along_run(run, [RAW, Cell("sma", 3), Cell("sma", 99)], [5 * V, 6 * V], SELECT)
    evaluate_along_run(run, [Cell("sma", 99)], [5 * V, 6 * V], SELECT)
    assert requests == [2, 2] and both.items() >= first.items()
    shorter = dataclasses.replace(run.config.evaluation, tokens=300)
    other = evaluate_along_run(run, [RAW], [6 * V], SELECT, shorter)
    assert requests == [2, 2, 1] and other[RAW, 6 * V] != first[RAW, 6 * V], "another text has another loss"
    assert evaluate_along_run(run, [RAW], [6 * V], REPORT)[RAW, 6 * V] not in (other[RAW, 6 * V], first[RAW, 6 * V])


def test_another_corpus_than_that_of_the_run_is_refused_with_both_digests(run):
    metadata = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(metadata | {"corpus": "c0ffee"}))
    with pytest.raises(ValueError, match=rf"another corpus \(c0ffee\) .* \({metadata['corpus']}\)"):
        evaluate_along_run(open_run(run.path), [RAW], [6 * V], SELECT)


def test_end_without_a_snapshot_is_named(run):
    with pytest.raises(ValueError, match=r"no snapshot at 1,500 tokens \(there are: 1,024, 2,048"):
        evaluate_along_run(run, [RAW], [1500], SELECT)


def test_concurrent_writers_keep_each_others_losses(finished, tmp_path):
    run = open_run(shutil.copytree(finished.path, tmp_path / "run"))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: trajectory._store_losses(run, f"text {i % 3}", {f"cell {i}": [float(i)]}), range(60)))
    stored = json.loads((run.path / trajectory.LOSSES_FILE_NAME).read_text())
    assert {name: loss for losses in stored.values() for name, loss in losses.items()} == {
        f"cell {i}": [float(i)] for i in range(60)
    }
    (run.path / trajectory.LOSSES_FILE_NAME).write_text("{")
    with pytest.raises(ValueError, match=r"losses\.json: invalid JSON"):
        evaluate_along_run(run, [RAW], [6 * V], SELECT)
