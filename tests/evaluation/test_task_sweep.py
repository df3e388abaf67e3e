"""Task scores of merges that are made in memory, by a sweep and while a run trains."""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("lm_eval")

import harness_tasks
import tiny

import pma_jax as pma
from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.evaluation import merges
from pma_jax.evaluation.task_scores import GOLD_BITS
from pma_jax.evaluation.task_sweep import sweep_tasks
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.merging import recipes
from pma_jax.runs.directory import open_run
from pma_jax.training.loop import train


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return the path of a task whose texts fit into the tiny run's sequences of 32 tokens."""
    folder = tmp_path_factory.mktemp("tasks")
    harness_tasks.write_tasks(folder, documents=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield [str(folder / "tiny_choice.yaml")]


@pytest.fixture
def run(finished, tmp_path):
    return open_run(shutil.copytree(finished.path, tmp_path / "run"))


def metrics(scores):
    return {score["task"]: score["metrics"] for score in scores["tasks"]}


@pytest.mark.slow
def test_each_row_has_the_scores_of_the_merge_on_disk(run, tasks, tmp_path):
    result = sweep_tasks(run, tasks, ["sma", "wma"], [2, 3], [1, 2])
    assert len(result["rows"]) == 8 and result["left_out"] == {} and result["passes"] == 1
    assert len({row["tasks"][0]["metrics"][GOLD_BITS]["value"] for row in result["rows"]}) > 5
    for row in result["rows"]:
        chosen = run.snapshots[::-1][:: row["interval"]][: row["window"]][::-1]
        out = tmp_path / row["text"].replace(":", "-")
        pma.merge(chosen, recipes.coefficients(row["recipe"], [s.tokens for s in chosen]), out=out)
        (expected,) = score_targets([out], tasks, [])
        assert metrics(row) == metrics(expected), row["text"]
    assert metrics(result["raw"]) == metrics(score_targets([run.path], tasks, [])[0])


def test_snapshots_are_read_once_and_no_merge_is_written(run, tasks, monkeypatch):
    read, paths = merges.restore_params, []
    monkeypatch.setattr(merges, "restore_params", lambda s, a: paths.append(str(s.path)) or read(s, a))
    before = tiny.contents(run.path)
    result = sweep_tasks(run, tasks, ["sma", "wma"], [2, 3])
    assert sorted(paths) == sorted(str(s.path) for s in run.snapshots[-3:])
    after = tiny.contents(run.path)
    assert {name for name in after if after[name] != before.get(name)} - {".watch.lock"} == {"watch.jsonl"}
    records = [r for r in open_run(run.path).metrics if r["kind"] == "task"]
    assert {r["model"] for r in records} == {"raw", "sma:2", "sma:3", "wma:2", "wma:3"}
    for row in result["rows"]:
        for metric, estimate in metrics(row)["tiny_choice"].items():
            stored = [r["value"] for r in records if (r["model"], r["metric"]) == (row["text"], metric)]
            assert stored == [estimate["value"]]


def test_merges_that_cannot_be_made_are_left_out(run, tasks):
    result = sweep_tasks(run, tasks, ["sma"], [2, 50], limit=2)
    assert [row["text"] for row in result["rows"]] == ["sma:2"]
    assert result["left_out"].keys() == {"sma:50"}


@pytest.mark.slow
def test_training_scores_snapshots_and_previews(workspace, tasks, tmp_path):
    config = tiny.config(workspace, evaluation__tasks=tuple(tasks), evaluation__tasks_limit=6)
    run = train(config, tmp_path / "run")
    records = [r for r in run.metrics if r["kind"] == "task"]
    assert {r["metric"] for r in records} == {"acc", GOLD_BITS}
    assert [r["tokens"] for r in records if r["model"] == "raw" and r["metric"] == "acc"] == [
        snapshot.tokens for snapshot in run.snapshots
    ]
    newest = run.snapshots[-1].tokens
    assert {r["model"] for r in records if r["tokens"] == newest} == {"raw", "sma:2", "sma:3"}
    expected = sweep_tasks(run, tasks, ["sma"], [2, 3], limit=6)
    for row in [*expected["rows"], {"text": "raw", **expected["raw"]}]:
        stored = {r["metric"]: r["value"] for r in records if (r["model"], r["tokens"]) == (row["text"], newest)}
        values = {name: metrics(row)["tiny_choice"][name]["value"] for name in stored}
        assert stored == pytest.approx(values, rel=1e-5)


def test_a_task_that_does_not_exist_ends_training_before_a_step(workspace, tmp_path):
    config = tiny.config(workspace, evaluation__tasks=("pma:last_lin",))
    with pytest.raises(UserError, match="no task 'pma:last_lin'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not open_run(tmp_path / "run").metrics


def test_the_command_prints_a_row_per_merge_and_draws_them(run, tasks, capsys):
    arguments = ["sweep", str(run.path), "--recipes", "sma", "--windows", "2,3", "--tasks", tasks[0]]
    assert main([*arguments, "--limit", "4"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in table] == ["merge", "raw", "sma:2", "sma:3"]
    expected = sweep_tasks(run, tasks, ["sma"], [2, 3], limit=4)
    for row, line in zip([expected["raw"], *expected["rows"]], table[1:], strict=True):
        assert line[1] == f"{metrics(row)['tiny_choice'][GOLD_BITS]['value']:.4f}"
    assert (run.path / "task_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_tasks_and_a_program_are_not_both_given(run, capsys):
    assert main(["sweep", str(run.path), "--tasks", "pma:brackets", "--score", "echo 1"]) == 1
    assert "two ways to score" in capsys.readouterr().err
