"""Reports evaluate stored snapshots again, on other held-out documents than those on which the best were chosen."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny

from pma_jax.config import resolve
from pma_jax.data.sampling import REPORT, SELECT, HeldOutLoss
from pma_jax.evaluation import trajectory
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import sweep
from pma_jax.merging import recipes
from pma_jax.reporting import judging
from pma_jax.reporting.report import build_report, format_report, write_report
from pma_jax.runs.directory import open_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.training.fork import fork
from pma_jax.training.loop import train

DECAY = {"decay": "linear", "decay_start_tokens": 2048}
ORIGIN = {"path": "run", "tokens": 2048, "step": 8}


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished run, which the test may change."""
    return open_run(shutil.copytree(finished.path, tmp_path / "run"))


def edit_json(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_losses_are_those_of_the_part_report_and_choices_those_of_select(copy, monkeypatch):
    swept = {row["text"]: row["loss"] for row in sweep(copy, ["sma", "wma"], [2, 3, 4])["rows"]}
    report = build_report(copy, [])
    stored = [tiny.named(tiny.read(s)) for s in copy.snapshots]
    for row in report["merges"]:
        weights = recipes.coefficients(row["recipe"], range(1, row["window"] + 1))
        expected = tiny.loss_of_sum(copy, stored[-row["window"] :], weights, REPORT)
        assert row["loss"] == pytest.approx(expected, rel=2e-6) and row["standard_error"] > 0
        assert row["select_loss"] == swept[row["text"]] != row["loss"]
    assert report["best_merge"]["text"] == min(swept, key=swept.__getitem__)
    models = [tiny.read(s) for s in copy.snapshots]
    assert [tokens for tokens, _ in report["curves"]["raw"]] == [s.tokens for s in copy.snapshots]
    assert [loss for _, loss in report["curves"]["raw"]] == pytest.approx(tiny.losses(copy.config, models, REPORT))
    assert report["raw_loss"] == report["curves"]["raw"][-1][1]
    marks = [(r["recipe"], r["tokens"]) for r in copy.metrics if r["kind"] == "preview"]
    assert {(t, tokens) for t, curve in report["curves"]["previews"].items() for tokens, _ in curve} == set(marks)
    assert report["curves"]["previews"]["sma:3"][-1][1] == report["merged_loss"]["sma:3"]
    text = read_sample_of_run(copy, REPORT, copy.config.evaluation).describe()
    assert report["held_out"] == text and report["evaluation_digest"] == text["digest"]
    assert f"{text['documents']} documents of the part report" in report["judged"]
    assert report["judged"].endswith(f"{copy.metadata['held_out']['documents']} documents of the part select")
    assert report["judged"] in format_report(report) and f"± {report['raw_standard_error']:.4f}" in format_report(
        report
    )
    assert "chosen on other held-out text" in " ".join(write_report(report, copy)[2].read_text().split())
    monkeypatch.setattr(trajectory, "evaluate_cells", lambda *_: pytest.fail("losses were evaluated again"))
    assert build_report(copy, []) == report


def test_best_on_select_is_the_best_even_if_another_is_better_on_report(copy, monkeypatch):
    swept = {row["text"]: row["loss"] for row in sweep(copy, ["sma"], [2, 3])["rows"]}
    best, other = sorted(swept, key=swept.__getitem__)
    losses = {best: HeldOutLoss(1.5, 0.1), other: HeldOutLoss(1.0, 0.1)}
    monkeypatch.setattr(
        judging,
        "evaluate_pairs",
        lambda run, pairs, *_: {pair: losses.get(pair[0].text, HeldOutLoss(2.0, 0.1)) for pair in pairs},
    )
    report = build_report(copy, [])
    assert report["best_merge"]["text"] == best and report["best_merge"]["loss"] == 1.5
    assert report["best_sma"]["text"] == best and "to 1.5000" in report["finding"]


def test_losses_that_cannot_be_evaluated_again_are_said_to_have_chosen_the_best(copy):
    newest = copy.snapshots[-1].path
    hidden = newest.rename(newest.parent.parent / "hidden")
    report = build_report(copy, [])
    assert report["held_out"] is None and "run has no point snapshot at 6,144 tokens" in report["judged"]
    assert "chosen on the text that judges them" in report["judged"]
    assert report["raw_loss"] == [r["loss"] for r in copy.metrics if r["kind"] == "evaluation"][-1]
    hidden.rename(newest)
    edit_json(copy.path / "run.json", lambda run: run | {"corpus": "c0ffee"})
    assert "trained on another corpus (c0ffee)" in build_report(copy, [])["judged"]


def test_marks_whose_snapshots_are_gone_are_left_out_of_the_curves(copy):
    shutil.rmtree(copy.snapshots[1].path)
    report = build_report(copy, [])
    assert [tokens for tokens, _ in report["curves"]["raw"]] == [1024, 3072, 4096, 5120, 6144]
    # Without the snapshot at 2,048 tokens there are neither the merges that end there, nor those that need it.
    assert [tokens for tokens, _ in report["curves"]["previews"]["sma:3"]] == [5120, 6144]
    assert "5 of 15 marks are not in the curves: their snapshots are no longer there" in report["notes"]


def test_sweep_on_other_text_is_left_out_with_both_digests(copy):
    sweep(copy, ["sma"], [4])
    edit_json(copy.path / "sweep.json", lambda s: s | {"held_out": s["held_out"] | {"digest": "0bad"}})
    assert list(build_report(copy, [])["merged_loss"]) == ["sma:4"], "all are evaluated on the part report"
    shutil.rmtree(copy.path / "snapshots")
    report = build_report(copy, [])
    assert list(report["merged_loss"]) == ["sma:2", "sma:3"]
    assert f"its held-out text is 0bad, that of the run's marks {copy.metadata['evaluation']}" in report["notes"][0]


def make_early(run, tokens, sweep_rows=()):
    """Change a run so that an early version could have written it: marks on a text that is not known to this one."""
    edit_json(run.path / "config.json", lambda c: c | {"evaluation": c["evaluation"] | {"tokens": tokens}})
    edit_json(
        run.path / "run.json", lambda run: {k: v for k, v in run.items() if k != "held_out"} | {"evaluation": "01d"}
    )
    path = run.path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [{k: v for k, v in r.items() if k not in ("text", "standard_error")} for r in records]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    (run.path / "sweep.json").write_text(json.dumps({"tokens": 6144, "raw_loss": None, "rows": list(sweep_rows)}))
    return open_run(run.path)


EARLY_ROWS = [
    {"text": f"{recipe}:{n}", "recipe": recipe, "window": n, "loss": n / 10}
    for recipe in ("sma", "wma")
    for n in (2, 4)
]


@pytest.mark.slow
def test_best_of_a_run_of_an_earlier_version_is_chosen_on_select(copy):
    swept = {row["text"]: row["loss"] for row in sweep(copy, ["sma", "wma"], [2, 4])["rows"]}
    assert min(swept, key=swept.__getitem__) != "sma:2", "the losses of the early version choose another merge"
    report = build_report(make_early(copy, 500, EARLY_ROWS), [])
    assert {m["text"]: m["select_loss"] for m in report["merges"]} == pytest.approx(swept, rel=1e-6)
    assert report["best_merge"]["text"] == min(swept, key=swept.__getitem__)
    assert report["judged"].endswith("documents of the part select")
    # Without the newest snapshot, the recorded losses remain, which are all on the early text.
    shutil.rmtree(copy.snapshots[-1].path)
    assert build_report(open_run(copy.path), [])["merged_loss"] == {row["text"]: row["loss"] for row in EARLY_ROWS}


@pytest.mark.slow
def test_run_of_an_earlier_version_that_evaluated_more_than_a_part_resumes(copy, capfd):
    run = make_early(copy, 5000, EARLY_ROWS)
    shutil.rmtree(run.path / "states" / "24")
    with pytest.raises(ValueError, match=r"tokens is 5000 but the part 'select' .* has only"):
        train(run.config, copy.path.parent / "new")
    assert not (copy.path.parent / "new").exists()
    run = train(run.config, run.path)
    output = capfd.readouterr().err
    text = read_sample_of_run(run, SELECT, run.config.evaluation)
    assert len(run.snapshots) == 6 and f"read all {text.describe()['tokens']:,} tokens of the part 'select'" in output
    assert (
        f"earlier held-out losses of this run are on other text (01d) than those from here on ({text.digest})" in output
    )
    texts = {r["tokens"]: r.get("text") for r in run.metrics if r["kind"] == "evaluation"}
    assert [texts[s.tokens] for s in run.snapshots] == [None] * 4 + [text.digest] * 2
    config = resolve(run.config, ["schedule.decay=linear", "schedule.decay_start_tokens=4096"])
    forked = train(config, fork(run, 4096, config, copy.path.parent / "fork").path)
    sweep(run, ["sma"], [3])
    report = build_report(run, [forked])
    assert [annealed["run"] for annealed in report["annealed_runs"]] == ["fork"]
    assert [tokens for tokens, _ in report["curves"]["raw"]] == [s.tokens for s in run.snapshots]
    assert [tokens for tokens, _ in report["curves"]["previews"]["sma:3"]] == [3072, 4096, 5120, 6144]
    # Without the newest snapshot, the marks of one text remain, and the others are told.
    shutil.rmtree(run.snapshots[-1].path)
    report = build_report(open_run(run.path), [forked])
    assert [tokens for tokens, _ in report["curves"]["raw"]] == [5120, 6144] and report["held_out"] is None
    note = f"marks are left out: their held-out text is 01d, that of the newest is {text.digest}"
    assert any(note in line for line in report["notes"])


def test_marks_on_two_texts_are_not_mixed(copy):
    path = copy.path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    mixed = [r | {"text": "01d"} if r.get("text") and r["tokens"] <= 3072 else r for r in records]
    path.write_text("".join(json.dumps(r) + "\n" for r in mixed))
    shutil.rmtree(copy.path / "snapshots")
    curves = build_report(copy, [])["curves"]
    assert [tokens for tokens, _ in curves["raw"]] == [4096, 5120, 6144]
    assert {tokens for curve in curves["previews"].values() for tokens, _ in curve} == {4096, 5120, 6144}


def test_fork_on_other_text_is_refused_with_both_digests(copy, make_run, forked):
    decaying = shutil.copytree(copy.path, copy.path.parent / "fork")
    edit_json(decaying / "config.json", lambda c: c | {"schedule": c["schedule"] | DECAY})
    edit_json(decaying / "run.json", lambda run: run | {"forked_from": ORIGIN})
    report = build_report(copy, [open_run(decaying)])
    (annealed,) = report["annealed_runs"]
    assert annealed["loss"] == report["raw_loss"] and annealed["standard_error"] == report["raw_standard_error"]
    assert [tokens for tokens, _ in report["curves"]["annealed"]] == [3072, 4096, 5120, 6144]
    edit_json(decaying / "config.json", lambda c: c | {"training": c["training"] | {"sequence_length_tokens": 16}})
    with pytest.raises(ValueError, match=r"fork and .* cannot be compared: their held-out text differs \(\w{16} and"):
        build_report(copy, [open_run(decaying)])


@pytest.mark.slow
def test_forks_whose_marks_are_on_other_text_are_chosen_on_select(copy):
    forks = []
    for name, loss in (("worse", 0.5), ("better", 0.6)):  # the recorded losses choose the worse
        forks.append(Path(shutil.copytree(copy.path, copy.path.parent / name)))
        edit_json(forks[-1] / "config.json", lambda c: c | {"schedule": c["schedule"] | DECAY})
        edit_json(forks[-1] / "run.json", lambda run: run | {"forked_from": ORIGIN, "evaluation": "01d"})
        record = {"kind": "evaluation", "tokens": 6144, "step": 24, "loss": loss}
        (forks[-1] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    shutil.rmtree(forks[0] / "snapshots" / "24")
    shutil.copytree(copy.snapshots[2].path, forks[0] / "snapshots" / "24")
    path = forks[0] / "snapshots" / "24"
    snapshot = read_snapshot(path)
    params = tiny.read(snapshot)
    shutil.rmtree(path)
    tiny.write_snapshot(params, dataclasses.replace(snapshot, path=path, step=24, tokens=6144))
    report = build_report(copy, [open_run(fork) for fork in forks])
    assert [fork["run"] for fork in report["annealed_runs"]] == ["better", "worse"]
    assert report["annealed_loss"] == report["raw_loss"]
    shutil.rmtree(copy.snapshots[-1].path)
    with pytest.raises(ValueError, match=rf"held-out text differs \(01d and {copy.metadata['evaluation']}\)"):
        build_report(open_run(copy.path), [open_run(fork) for fork in forks])
