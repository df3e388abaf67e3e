"""`pma evaluate --tasks`: scores of runs, snapshots and merges as a table, JSON and records of the run."""

import json
import os
import shutil
import textwrap
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import harness_tasks
import processes
import tiny

import pma_jax as pma
from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.evaluation.task_scores import GOLD_BITS, WRONG_BITS
from pma_jax.evaluation.task_sweep import sweep_tasks
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.runs.directory import open_run

NAMES = ("tiny_choice", "tiny_text", "tiny_generation")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return the paths of tasks whose texts fit into the tiny run's sequences of 32 tokens."""
    folder = tmp_path_factory.mktemp("tasks")
    harness_tasks.write_tasks(folder, documents=6, generated_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield [str(folder / f"{name}.yaml") for name in NAMES]


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    return open_run(tmp_path / "run")


def metrics(scores):
    return {score["task"]: score["metrics"] for score in scores["tasks"]}


def test_a_merge_of_one_snapshot_scores_as_the_snapshot(run, tasks, tmp_path, capsys):
    newest = run.snapshots[-1].path
    out = run.path / "merged" / "sma-1"
    assert main(["merge", str(run.path), "--last", "1", "--out", str(out)]) == 0
    first, same, older = score_targets([run.path, out, run.snapshots[0].path], tasks, [])
    assert (first["tokens"], older["tokens"]) == (run.snapshots[-1].tokens, run.snapshots[0].tokens)
    assert metrics(first).keys() == set(NAMES)
    assert metrics(same) == metrics(first)
    assert metrics(older) != metrics(first)
    capsys.readouterr()
    # The command prints the same numbers.
    assert main(["evaluate", str(newest), "--tasks", ",".join(tasks), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert metrics(row) == metrics(first)
    assert row["truncated"] > 0


def test_scores_are_records_of_the_run(run, tasks, capsys):
    assert main(["evaluate", str(run.path), "--tasks", tasks[0], "--limit", "3"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["target", "tokens", "task", "documents", "metric", "value"]
    records = [record for record in open_run(run.path).metrics if record["kind"] == "task"]
    assert len(records) == len(table) - 1
    assert {(r["tokens"], r["model"], r["task"], r["documents"]) for r in records} == {
        (run.snapshots[-1].tokens, "raw", "tiny_choice", 3)
    }
    for record, line in zip(records, table[1:], strict=True):
        assert f"{record['value']:.4f}" in line and record["metric"] in line


def test_each_document_has_its_values_in_the_order_of_the_questions(run, tasks):
    whole, part = (score_targets([run.path], tasks, [], limit=limit)[0]["tasks"] for limit in (None, 3))
    for score, first in zip(whole, part, strict=True):
        of_each = score["by_document"]
        for metric, values in of_each.items():
            assert len(values) == score["documents"] and values[:3] == pytest.approx(first["by_document"][metric])
            if metric in score["metrics"]:
                assert np.mean(values) == pytest.approx(score["metrics"][metric]["value"])
    choice = next(score for score in whole if score["task"] == "tiny_choice")["by_document"]
    assert choice.keys() == {"acc", "acc_norm", GOLD_BITS, WRONG_BITS} and set(choice["acc"]) <= {0.0, 1.0}
    # The answer with the fewest bits per byte is chosen: where it is right, the mean of the wrong ones is above it.
    for is_right, right, wrong in zip(*(choice[name] for name in ("acc_norm", GOLD_BITS, WRONG_BITS)), strict=True):
        assert right < wrong or not is_right


def test_the_limit_and_the_accuracy_are_those_of_the_documents(run, tasks):
    whole = metrics(score_targets([run.path], tasks[:1], [])[0])["tiny_choice"]["acc"]["value"]
    parts = [
        metrics(score_targets([run.path], tasks[:1], [], limit=n)[0])["tiny_choice"]["acc"]["value"] for n in (1, 5)
    ]
    assert parts[0] in (0, 1)
    assert 0 <= 6 * whole - 5 * parts[1] <= 1 + 1e-9


def test_groups_have_bits_per_byte_and_documents_without_a_right_answer_are_told(run, tasks, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    task = """
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: "is"
        doc_to_choice: ["a", "bc"]
        doc_to_target: gold
        metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
        task: {name}
    """
    for name, golds in {"three": [0, 1, -1], "one": [1]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"gold": gold}) + "\n" for gold in golds))
        (folder / f"{name}.yaml").write_text(textwrap.dedent(task.format(name=name)))
    # A group without aggregated metrics has only the bits per byte.
    (folder / "all.yaml").write_text("group: together\ntask: [three, one]\n")
    assert main(["evaluate", str(run.path), "--tasks", str(folder)]) == 0
    captured = capsys.readouterr()
    rows = {tuple(line.split()[2:5]): line.split()[5:] for line in captured.out.splitlines()[1:]}
    assert rows.keys() == {
        *(("three", "3", "acc"), ("one", "1", "acc"), ("three", "2", GOLD_BITS), ("one", "1", GOLD_BITS)),
        ("together", "3", GOLD_BITS),
    }
    value = {task: float(cells[0]) for (task, _, metric), cells in rows.items() if metric == GOLD_BITS}
    assert value["together"] == pytest.approx((2 * value["three"] + value["one"]) / 3, abs=1e-4)
    notes = [line for line in captured.err.splitlines() if "leaves out" in line]
    assert [line.partition(", whose")[0] for line in notes] == [
        f"note: {task}: {GOLD_BITS} leaves out 1 documents" for task in ("three", "together")
    ]


def test_merges_are_recorded_by_their_interval_and_only_in_their_own_run(run, tasks, tmp_path):
    outs = [run.path / "merged" / name for name in ("next", "second", "uneven")]
    for out, indices in zip(outs, ([-2, -1], [-3, -1], [-4, -3, -1]), strict=True):
        pma.merge([run.snapshots[i] for i in indices], np.full(len(indices), 1 / len(indices)), out=out)
    other = open_run(shutil.copytree(run.path, tmp_path / "other"))
    pma.merge(run.snapshots[-2:], np.full(2, 0.5), out=other.path / "merged" / "foreign")
    score_targets([*outs, other.path / "merged" / "foreign"], tasks[:1], [], limit=1)
    models = dict.fromkeys(r["model"] for r in open_run(run.path).metrics if r["kind"] == "task")
    texts = [pma.read_snapshot(out).merge["recipe"] for out in outs]
    assert list(models) == [f"{texts[0]}:2", f"{texts[1]}:2@2", f"{texts[2]}:3 (uneven)"]
    assert not [r for r in other.metrics if r["kind"] == "task"]


def test_a_run_whose_text_has_changed_is_not_asked_about_it(run):
    metadata = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(metadata | {"corpus": "another"}))
    for score in (
        lambda: score_targets([run.path], ["pma:brackets"], []),
        lambda: sweep_tasks(open_run(run.path), ["pma:brackets"], ["sma"], [2]),
    ):
        with pytest.raises(UserError, match="was trained on another corpus"):
            score()


def test_a_lost_line_of_the_records_does_not_damage_the_next(run, tasks):
    log = Path(run.path) / "watch.jsonl"
    log.write_text('{"kind": "task", "tok')
    score_targets([run.path], tasks[:1], [], limit=1)
    assert next(r["task"] for r in open_run(run.path).metrics if r["kind"] == "task") == "tiny_choice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "tiny_choise.yaml"], "no file or folder of tasks tiny_choise.yaml"),
        (["--tasks", "pma:last_lin"], "no task 'pma:last_lin': the nearest are pma:last_line"),
        (["--limit", "3"], "--limit needs --tasks"),
        (["--shots", "0"], "--shots needs --tasks"),
    ],
)
def test_bad_input_is_one_line(finished, arguments, message, capsys):
    assert main(["evaluate", str(finished.path), *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_tokenizer_that_does_not_fit_is_refused(finished, tasks, tmp_path):
    from pma_jax.data.tokenizer import train_bpe

    train_bpe(["a text of a few words"] * 3, 270).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"has ids up to .* but the model"):
        score_targets([finished.path], tasks, [f"data.tokenizer={tmp_path / 'tokenizer.json'}"])


@pytest.mark.slow
@pytest.mark.mesh
def test_two_processes_score_as_one(run, tasks):
    arguments = ["evaluate", str(run.path), "--tasks", ",".join(tasks), "--json"]
    job = processes.pma([*arguments, "--distributed"], count=2).check()
    (several,) = json.loads(job.out(0))
    assert job.out(1) == ""
    ended = tiny.pma(*arguments, devices=1)
    assert ended.returncode == 0, ended.stderr
    (alone,) = json.loads(ended.stdout)
    assert metrics(several).keys() == metrics(alone).keys()
    for task, values in metrics(alone).items():
        for metric, estimate in values.items():
            assert metrics(several)[task][metric]["value"] == pytest.approx(estimate["value"], rel=1e-4), (task, metric)


@pytest.mark.slow
@pytest.mark.mesh
def test_an_error_of_lm_eval_ends_all_processes(run, tasks):
    arguments = ["evaluate", str(run.path), "--tasks", f"{tasks[0]},pma:nothing", "--distributed"]
    assert processes.pma(arguments, count=2).wait() == [1, 1]
