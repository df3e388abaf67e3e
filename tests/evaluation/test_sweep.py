import gc
import json
import math
import shutil

import jax
import numpy as np
import pytest
import tiny

from pma_jax.data.sampling import SELECT, estimate
from pma_jax.evaluation import merges
from pma_jax.evaluation import sweep as sweeping
from pma_jax.evaluation.held_out import make_evaluator, read_sample_of_run
from pma_jax.evaluation.sweep import Cell, sweep
from pma_jax.evaluation.trajectory import evaluate_along_run
from pma_jax.merging import recipes
from pma_jax.runs import restore
from pma_jax.runs.directory import open_run
from pma_jax.runtime.mesh import make_mesh

RECIPES = ["sma", "wma", "ema:alpha=0.2", "lagfree:lag=0.5", "lagfree"]


@pytest.fixture
def copy(finished_with_block_means, tmp_path):
    return open_run(shutil.copytree(finished_with_block_means.path, tmp_path / "run"))


@pytest.fixture
def reads(monkeypatch):
    """Record the paths of the snapshots whose arrays are read, in order."""
    read, paths = merges.restore_params, []

    def counted(snapshot, abstract):
        paths.append(str(snapshot.path))
        return read(snapshot, abstract)

    monkeypatch.setattr(merges, "restore_params", counted)
    return paths


def by_text(result):
    return {row["text"]: row["loss"] for row in result["rows"]}


@pytest.mark.parametrize("kind", ["point", pytest.param("block_mean", marks=pytest.mark.slow)])
def test_each_row_is_the_loss_of_numpys_merge(copy, kind):
    result = sweep(copy, RECIPES, [2, 3], [1, 2], kind)
    snapshots = copy.of_kind(kind)
    assert len(result["rows"]) == 20 and result["left_out"] == {}
    for row in result["rows"]:
        chosen = snapshots[::-1][:: row["interval"]][: row["window"]][::-1]
        weights = recipes.coefficients(row["recipe"], [s.tokens for s in chosen])
        expected = tiny.loss_of_sum(copy, [tiny.named(tiny.read(s)) for s in chosen], weights)
        assert row["loss"] == pytest.approx(expected, rel=2e-6), row["text"]
    assert result["raw_loss"] == pytest.approx(copy.snapshots[-1].loss, rel=1e-6)
    assert result["tokens"] == tiny.HORIZON and result == json.loads((copy.path / "sweep.json").read_text())


@pytest.mark.slow
def test_kinds_have_different_losses(copy):
    sweep(copy, ["sma"], [3])
    losses = by_text(sweep(copy, ["sma"], [3], kind="block_mean"))
    assert abs(losses["sma:3"] - losses["block/sma:3"]) > 0.01


def test_each_snapshot_is_read_once(copy, reads):
    sweep(copy, RECIPES, [1, 2, 3, 4], [1, 2])
    # 4 at every second snapshot need 7, and there are 6: the oldest that any merge needs is the fifth from the newest.
    assert reads == [str(s.path) for s in copy.snapshots[1:]]
    reads.clear()
    sweep(copy, ["sma", "wma"], [2, 3], kind="block_mean")
    assert reads == [str(s.path) for s in (*copy.of_kind("block_mean")[-3:], copy.snapshots[-1])]


@pytest.mark.slow
def test_differences_from_the_raw_loss_have_standard_errors_over_documents(copy):
    first, second = (sweep(copy, ["sma"], [3], kind=kind)["rows"][-1] for kind in ("point", "block_mean"))
    evaluator = make_evaluator(copy.config, make_mesh(copy.config.mesh), SELECT)
    raw_D, counts_D = evaluator.sum_by_document(tiny.read(copy.snapshots[-1])), evaluator.sample.counts_D
    for row, snapshots in ((first, copy.snapshots), (second, copy.of_kind("block_mean"))):
        models = [tiny.read(s) for s in snapshots[-3:]]
        merged_D = evaluator.sum_by_document(jax.tree.map(lambda *leaves: sum(leaves) / 3, *models))
        expected = estimate(merged_D - raw_D, counts_D)
        assert row["difference"] == pytest.approx(expected.loss, rel=1e-4)
        assert row["difference_standard_error"] == pytest.approx(expected.standard_error, rel=1e-3)
        assert row["difference_standard_error"] < row["standard_error"], "the same documents are difficult for both"


@pytest.mark.slow
def test_raw_loss_is_that_of_the_newest_point_when_only_block_means_are_merged(copy, reads):
    result = sweep(copy, ["sma"], [2], kind="block_mean")
    assert reads == [str(s.path) for s in (*copy.of_kind("block_mean")[-2:], copy.snapshots[-1])]
    assert result["raw_loss"] == pytest.approx(copy.snapshots[-1].loss, rel=1e-6)


@pytest.mark.slow
def test_raw_loss_is_unknown_without_points(copy):
    shutil.rmtree(copy.path / "snapshots")
    result = sweep(copy, ["sma"], [2], kind="block_mean")
    assert result["raw_loss"] is None and result["rows"][0]["difference"] is None


def test_sweep_extends_the_previous_one_and_recomputes_nothing(copy, reads):
    first = sweep(copy, ["sma"], [2, 3])
    assert sweep(copy, ["sma"], [3, 2]) == first and len(reads) == 3
    reads.clear()
    both = sweep(copy, ["wma", "sma"], [2])
    assert list(by_text(both)) == ["sma:2", "sma:3", "wma:2"]
    assert by_text(both) | by_text(first) == by_text(both)
    assert len(reads) == 2
    assert list(by_text(sweep(copy, ["sma"], [2], kind="block_mean"))) == [*by_text(both), "block/sma:2"]


def test_losses_that_are_not_finite_are_cached(copy, monkeypatch):
    evaluator = tiny.FakeEvaluator(lambda params: np.full(2, math.nan))
    monkeypatch.setattr(merges, "make_evaluator", lambda *_: evaluator)
    sweep(copy, ["sma"], [2])
    assert all(map(math.isnan, by_text(sweep(copy, ["sma", "wma"], [2])).values()))
    evaluator.sample = read_sample_of_run(copy, SELECT, copy.config.evaluation)
    evaluator.sum_by_document = lambda params: np.full(len(evaluator.sample.counts_D), math.nan)
    evaluate_along_run(copy, [Cell("sma", 2)], [tiny.HORIZON], SELECT)
    (again,) = evaluate_along_run(copy, [Cell("sma", 2)], [tiny.HORIZON], SELECT).values()
    assert math.isnan(again.loss)


@pytest.mark.slow
def test_rows_at_other_tokens_are_dropped(copy):
    newest = copy.snapshots[-1]
    hidden = newest.path.rename(newest.path.parent / "hidden")
    assert sweep(copy, ["sma", "wma"], [2])["tokens"] < tiny.HORIZON
    hidden.rename(newest.path)
    result = sweep(copy, ["sma"], [2])
    assert result["tokens"] == tiny.HORIZON and list(by_text(result)) == ["sma:2"]


@pytest.mark.slow
def test_impossible_merge_is_skipped_and_reported(copy):
    result = sweep(copy, ["sma", "lagfree:order=2"], [2, 4], [1, 2])
    assert list(by_text(result)) == ["sma:2", "sma:2@2", "sma:4", "lagfree:order=2:4"]
    assert result["left_out"]["sma:4@2"] == "there are 6 snapshots, and the merge needs 7"
    assert "at least 3 checkpoints" in result["left_out"]["lagfree:order=2:2"]
    assert len(result["rows"]) + len(result["left_out"]) == 8


def test_sweep_without_a_merge_changes_nothing(copy, reads):
    with pytest.raises(ValueError, match="sma:3@3: there are 6 snapshots, and the merge needs 7; sma:4@3"):
        sweep(copy, ["sma"], [3, 4], [3])
    assert not (copy.path / "sweep.json").exists() and reads == []


def model_bytes(run):
    return sum(4 * math.prod(leaf["shape"]) for leaf in restore.read_params_metadata(run.snapshots[0].path).values())


@pytest.mark.slow
def test_merges_that_do_not_fit_in_memory_take_several_passes(copy, reads, monkeypatch):
    at_once = sweep(copy, RECIPES, [2, 3])
    assert at_once["passes"] == 1
    (copy.path / "sweep.json").unlink()
    reads.clear()
    groups = []
    name, sums = "weighted_sums_of_stream", merges.weighted_sums_of_stream
    monkeypatch.setattr(merges, name, lambda loads, rows: groups.append(len(rows)) or sums(loads, rows))
    # The raw model and ten merges, four at a time in addition to the two that are read.
    monkeypatch.setattr(merges, "_usable_bytes", lambda mesh: 6.5 * model_bytes(copy))
    result = sweep(copy, RECIPES, [2, 3])
    assert groups == [4, 4, 3] and result["passes"] == 3
    assert by_text(result) == pytest.approx(by_text(at_once), rel=1e-7)
    assert max(map(reads.count, reads)) == 3


def held_bytes():
    """Return the bytes of all arrays on the first device; several arrays may be views of one buffer."""
    shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards if s.device == jax.devices()[0]]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


@pytest.mark.slow
def test_memory_holds_the_merges_and_not_the_snapshots(copy, monkeypatch):
    read, peaks = merges.restore_params, []

    def measured(snapshot, abstract):
        params = read(snapshot, abstract)
        gc.collect()
        peaks.append(held_bytes())
        return params

    gc.collect()
    before = held_bytes()
    monkeypatch.setattr(merges, "restore_params", measured)
    sweep(copy, ["sma"], [6])
    assert len(peaks) == 6
    # The raw model and one merge, the array being added and the one being read; and the held-out text.
    text_bytes = 4 * (copy.config.evaluation.tokens + 2 * 8 * 33)
    assert max(peaks) - before <= 4 * model_bytes(copy) + text_bytes


@pytest.mark.slow
def test_duration_and_reads_are_reported(copy):
    seconds = sweep(copy, ["sma"], [2])["seconds"]
    assert set(seconds) == {"read", "evaluate", "all"}
    assert 0 < seconds["read"] < seconds["all"] and 0 < seconds["evaluate"] < seconds["all"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (("sma", 10), "sma:10"),
        (("wma", 6, 2), "wma:6@2"),
        (("sma", 10, 1, "block_mean"), "block/sma:10"),
        (("lagfree:lag=0.5", 6, 4, "block_mean"), "block/lagfree:lag=0.5:6@4"),
    ],
)
def test_row_text_form(cell, text):
    assert Cell(*cell).text == text


@pytest.mark.slow
def test_rows_on_other_text_are_not_reused(copy, reads):
    first = sweep(copy, ["sma"], [2])
    assert first["held_out"] == copy.metadata["held_out"] and first["rows"][0]["standard_error"] > 0
    path = copy.path / "sweep.json"
    path.write_text(json.dumps({k: v for k, v in first.items() if k != "held_out"}))  # as early versions wrote it
    reads.clear()
    assert by_text(sweep(copy, ["sma"], [2])) == by_text(first) and len(reads) == 2


@pytest.mark.slow
def test_rows_that_another_process_adds_meanwhile_are_kept(copy, monkeypatch):
    evaluate = sweeping.evaluate_cells
    inner = []

    def evaluate_while_another_sweeps(*arguments):
        if not inner:
            inner.append(True)
            sweep(copy, ["wma"], [3])
        return evaluate(*arguments)

    monkeypatch.setattr(sweeping, "evaluate_cells", evaluate_while_another_sweeps)
    result = sweep(copy, ["sma"], [2])
    assert set(by_text(result)) == {"sma:2", "wma:3"} and result == json.loads((copy.path / "sweep.json").read_text())
