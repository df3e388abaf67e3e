"""`pma sweep CHECKPOINTS` without --score: merges of our models and of Hugging Face ones, scored by `pma evaluate`."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import harness_tasks
import hub_server
import pytest

from pma_jax.cli import main, own_scorer
from pma_jax.evaluation import hf_directory
from pma_jax.evaluation import sweep as memory_sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.interop import hf
from pma_jax.runs.directory import open_run

NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("lm_eval") is None, reason="needs torch"
)
LOSS = '{"loss": 2, "perplexity": 7.4, "bits_per_byte": 3, "held_out": "abcd"}'
SUITE = "hf://org/suite@step-*"
TASK = '{"t/acc": 0.5, "t/bits_per_byte_of_answer": 1.5, "u/acc": 0.25, "higher_is_better": ["t/acc", "u/acc"]}'


@pytest.fixture
def snapshots(finished, tmp_path, monkeypatch):
    """Return the paths of three snapshots of the tiny run, relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    for snapshot in finished.snapshots[-3:]:
        shutil.copytree(snapshot.path, Path("ck") / Path(snapshot.path).name)
    return sorted(str(path) for path in Path("ck").iterdir())


@pytest.fixture
def evaluator(tmp_path, monkeypatch):
    """Return a function that replaces the program `pma` by a shell script, which writes its arguments to `calls`."""

    def replace(text: str) -> None:
        (tmp_path / "pma.sh").write_text(f'echo "$@" >> {tmp_path}/calls\n{text}\n')
        monkeypatch.setattr(own_scorer, "_PROGRAM", ("sh", str(tmp_path / "pma.sh")))

    return replace


def sweep(*options: str, windows: str = "2") -> tuple[int, dict]:
    status = main(["sweep", "ck", "--recipes", "sma", "--windows", windows, *options])
    path = Path("sweep/sweep.json")
    return status, json.loads(path.read_text()) if path.exists() else {}


def calls() -> list[str]:
    lines = Path("calls").read_text().splitlines()
    Path("calls").unlink()
    return lines


def losses_in_memory(run, folder: Path, windows: list[int]) -> dict[str, float]:
    """Return the losses of the run's merges by `pma sweep RUN`."""
    shutil.copytree(run.path, folder / "run")
    rows = memory_sweep.sweep(open_run(folder / "run"), ["sma"], windows)["rows"]
    return {row["text"]: row["loss"] for row in rows}


def test_a_merge_is_scored_by_our_own_program(snapshots, evaluator, capsys):
    evaluator(f"echo '{LOSS}'")
    key = "--config.evaluation.tokens=400"
    status, content = sweep(key)
    assert status == 0
    arguments = f"--numbers --part select {key}"
    check, *scored = calls()
    assert check == f"evaluate {Path(snapshots[-1]).absolute()} {arguments}"
    assert [Path(line.split()[1]).name.split("-at-")[0] for line in scored] == ["raw", "sma-2"]
    assert all(line.endswith(f" {arguments}") for line in scored)
    assert content["score"] == f"pma evaluate {{}} {arguments}"
    assert (content["metric"], content["best"], content["held_out"]) == ("loss", "lowest", "abcd")
    assert [row["score"] for row in content["rows"]] == [2]
    assert "the merge with the lowest loss is the best" in capsys.readouterr().err
    status, content = sweep(key, "--metric", "bits_per_byte")
    assert status == 0 and [row["score"] for row in content["rows"]] == [3]
    assert not Path("calls").exists()  # nothing was left to score
    assert sweep("--config.evaluation.tokens=300")[0] == 1
    assert "has scores of another command" in capsys.readouterr().err


def test_losses_on_other_text_are_not_mixed(snapshots, evaluator, capsys):
    evaluator(f"echo '{LOSS}'")
    assert sweep()[0] == 0
    stored = Path("sweep/sweep.json").read_bytes()
    evaluator(f"echo '{LOSS.replace('abcd', 'efgh')}'")
    assert sweep(windows="2,3")[0] == 1
    assert "sweep.json has losses on other held-out text (abcd)" in capsys.readouterr().err
    assert Path("sweep/sweep.json").read_bytes() == stored


def test_scores_of_changed_tasks_are_not_mixed(snapshots, evaluator, capsys):
    evaluator(f'echo \'{TASK[:-1]}, "asked": "abcd"}}\'')
    assert sweep("--tasks", "t")[0] == 0
    stored = Path("sweep/sweep.json").read_bytes()
    evaluator(f'echo \'{TASK[:-1]}, "asked": "efgh"}}\'')
    for windows in ("2", "2,3"):
        assert sweep("--tasks", "t", windows=windows)[0] == 1
        assert "sweep.json has scores of tasks that have changed since (abcd)" in capsys.readouterr().err
    assert Path("sweep/sweep.json").read_bytes() == stored


@pytest.mark.slow
def test_the_digest_of_tasks_of_a_folder(snapshots, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    harness_tasks.write_tasks(tmp_path / "tasks", documents=4, generated_tokens=8)
    yaml_file = tmp_path / "tasks" / "tiny_choice.yaml"

    def asked(*options: str) -> str:
        command = ["evaluate", snapshots[-1], "--numbers", "--tasks", str(yaml_file), *options]
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)["asked"]

    before = asked("--limit", "1")
    assert asked("--limit", "2") == before  # the check of a sweep scores one document
    (data,) = (tmp_path / "tasks").glob("tiny_choice.jsonl")
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:-1], lines[0]]) + "\n")
    changed = asked("--limit", "1")
    yaml_file.write_text(yaml_file.read_text() + 'description: "Answer: "\n')
    assert len({before, changed, asked("--limit", "1")}) == 3


def test_tasks_without_bits_per_byte_need_a_metric(snapshots, evaluator, capsys):
    evaluator("""echo '{"t/acc": 0.5, "u/acc": 0.5, "higher_is_better": ["t/acc", "u/acc"]}'""")
    assert sweep("--tasks", "t,u") == (1, {})
    assert "not t/bits_per_byte_of_answer: choose one with --metric" in capsys.readouterr().err
    evaluator("""echo '{"t/bits_per_byte_of_answer": 0.5, "u/bits_per_byte_of_answer": 0.25}'""")
    assert sweep("--tasks", "folder/tasks") == (1, {})  # which of the two is not said
    status, content = sweep("--tasks", "u,t")
    assert status == 0 and content["metric"] == "u/bits_per_byte_of_answer"


@pytest.mark.parametrize(
    ("options", "metric", "best", "score"),
    [
        ([], "t/bits_per_byte_of_answer", "lowest", 1.5),
        (["--metric", "u/acc"], "u/acc", "highest", 0.25),
        (["--metric", "t/acc", "--best", "lowest"], "t/acc", "lowest", 0.5),
    ],
)
def test_the_metric_of_tasks_and_which_is_best(snapshots, evaluator, capsys, options, metric, best, score):
    evaluator(f"echo '{TASK}'")
    status, content = sweep("--tasks", "a/t.yaml,u", "--limit", "7", "--shots", "0", *options)
    assert status == 0 and (content["metric"], content["best"]) == (metric, best)
    assert [row["score"] for row in content["rows"]] == [score]
    assert "held_out" not in content or content["held_out"] is None
    check, raw, _ = calls()
    assert check.endswith("--numbers --part select --tasks a/t.yaml,u --limit 1 --shots 0")
    assert raw.endswith("--numbers --part select --tasks a/t.yaml,u --limit 7 --shots 0")
    assert f"the merge with the {best} {metric} is the best" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tasks", "t", "--metric", "t/f1"],
            "gives t/acc, t/bits_per_byte_of_answer, u/acc, not t/f1: choose one with --metric",
        ),
        (["--limit", "3"], "--limit needs --tasks"),
        (["--tasks", "t", "--score", "echo 1"], "two ways to score the same merges"),
        (["--subtree", "params"], "--subtree needs --score"),
        (["--format", "safetensors"], "--format needs --score"),
        (["--distributed"], "leave out --distributed"),
        (["--score", "echo 1", "--config.evaluation.tokens=1"], "a scorer has no configuration"),
        (["--tasks", "{}.yaml"], "name tasks and keys without it"),
    ],
)
def test_bad_input_is_one_line_before_the_work(snapshots, evaluator, capsys, monkeypatch, options, message):
    monkeypatch.setattr("pma_jax.runtime.hosts.initialize_distributed", lambda seconds: None)
    evaluator(f"echo '{TASK}'")
    assert sweep(*options) == (1, {})
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("checking that")]
    assert len(lines) == 1 and message in lines[0]
    assert not Path("sweep").exists()


def test_an_error_of_the_check_is_told_in_full(snapshots, evaluator, capsys):
    reason = "no task 'arc_eesy': " + "the nearest are " * 20
    evaluator(f'echo "error: {reason}" >&2; exit 1')
    assert sweep("--tasks", "arc_eesy") == (1, {})
    assert reason.strip() in capsys.readouterr().err
    evaluator("kill -9 $$")
    assert sweep() == (1, {})
    assert "killed by SIGKILL" in capsys.readouterr().err


def test_checkpoints_of_another_trainer_need_a_scorer(tmp_path, monkeypatch, capsys):
    import numpy as np
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        (tmp_path / f"ck/step-{step}").mkdir(parents=True)
        save_file({"w": np.ones(3, np.float32)}, f"ck/step-{step}/model.safetensors")
    assert sweep() == (1, {})
    assert "is neither a model of pma_jax nor of Hugging Face: give --score" in capsys.readouterr().err
    # Hugging Face models, with no package that scores them.
    for step in (100, 200):
        Path(f"ck/step-{step}/config.json").write_text('{"model_type": "gpt_neox"}')
    for name in ("lm_eval", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert sweep() == (1, {})
    assert "pip install 'pma-jax[eval,torch]'" in capsys.readouterr().err


def test_keys_are_refused_for_a_run(finished, capsys):
    assert main(["sweep", str(finished.path), "--config.evaluation.tokens=400"]) == 1
    assert "a run's merges are evaluated with its keys" in capsys.readouterr().err


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Serve three revisions of a Hugging Face model from a stand-in of the hub; return the files that are asked for."""
    import numpy as np
    from safetensors.numpy import save

    monkeypatch.setattr(hf_directory, "check_installed", lambda: None)  # a script stands in for the packages
    monkeypatch.chdir(tmp_path)
    revisions = {
        f"step-{step}": {
            "model.safetensors": save({"w": np.full(5, step, np.float32)}),
            "config.json": b'{"model_type": "gpt_neox"}',
        }
        for step in (100, 200, 400)
    }
    with hub_server.serve(revisions, tmp_path / "cache") as fetched:
        yield fetched, revisions


def test_checkpoints_on_the_hub(suite, evaluator, capsys):
    fetched, _ = suite
    evaluator(f"echo '{TASK}'")
    grid = ["sweep", SUITE, "--recipes", "sma", "--tasks", "t", "--metric", "t/acc", "--keep", "all"]
    assert main([*grid, "--windows", "2", "--dry-run"]) == 0
    assert fetched == []  # names alone decide
    assert main([*grid, "--windows", "2"]) == 0
    content = json.loads(Path("sweep/sweep.json").read_text())
    assert (content["metric"], content["best"]) == ("t/acc", "highest")  # as the task says of a downloaded checkpoint
    assert [row["score"] for row in [*content["raw"], *content["rows"]]] == [0.5, 0.5]
    check = calls()[0]
    assert check.split()[1].endswith(hub_server.commit("step-400"))
    assert json.loads((Path("sweep") / content["rows"][0]["path"] / "config.json").read_text())["model_type"]
    assert [file for how, file in fetched if how == "GET"].count("model.safetensors") == 2  # 400 once, 200 once
    assert main([*grid, "--windows", "2,3"]) == 0
    assert [Path(line.split()[1]).name.split("-at-")[0] for line in calls()[1:]] == ["sma-3"]  # the others are finished
    evaluator("exit 3")
    assert main([*grid, "--windows", "2", "--out", "again"]) == 1
    assert "`pma evaluate` does not score" in capsys.readouterr().err
    assert not Path("again").exists()


def test_checkpoints_on_the_hub_that_are_no_model(suite, evaluator, capsys):
    _, revisions = suite
    evaluator(f"echo '{LOSS}'")
    revisions["step-400"]["config.json"] = b"{}"
    assert main(["sweep", SUITE, "--recipes", "sma", "--windows", "2"]) == 1
    assert "is neither a model of pma_jax nor of Hugging Face: give --score" in capsys.readouterr().err
    assert not Path("sweep").exists() and not Path("calls").exists()


@pytest.mark.slow
def test_losses_are_those_of_the_sweep_in_memory(finished, snapshots, tmp_path):
    status, content = sweep("--parallel", "2", windows="2,3")
    assert status == 0
    expected = losses_in_memory(finished, tmp_path, [2, 3])
    assert {row["text"]: pytest.approx(row["score"], rel=1e-5) for row in content["rows"]} == expected
    (raw,) = content["raw"]
    assert raw["score"] == evaluate_targets([snapshots[-1]], [], "select")[0]["loss"]


@pytest.mark.slow
def test_a_task_that_does_not_exist_is_told_before_the_first_merge(snapshots, capsys):
    pytest.importorskip("lm_eval")
    assert sweep("--tasks", "pma:last_lin") == (1, {})
    assert "no task 'pma:last_lin': the nearest are pma:last_line" in capsys.readouterr().err


@pytest.mark.slow
@NEEDS_TORCH
def test_merges_of_hugging_face_models(finished, snapshots, tmp_path, capsys):
    for path in snapshots:
        hf.export_snapshot(path, tmp_path / "hf" / f"step-{Path(path).name}")
    shutil.rmtree("ck")
    Path("hf").rename("ck")
    data = finished.config.data
    keys = {"data.source": "files", "data.files": data.files[0], "data.cache_dir": data.cache_dir}
    keys |= {"data.held_out_percent": 20, "evaluation.tokens": 500, "training.sequence_length_tokens": 32}
    keys = [f"--config.{key}={value}" for key, value in keys.items()]
    status, content = sweep(*keys)
    assert status == 0
    # The same models on the hub have the same losses.
    revisions = {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in Path("ck").iterdir()}
    with hub_server.serve(revisions, tmp_path / "cache"):
        assert main(["sweep", SUITE, "--recipes", "sma", "--windows", "2", "--out", "hub", *keys]) == 0
    scores = [
        [row["score"] for row in json.loads(Path(out, "sweep.json").read_text())["rows"]] for out in ("hub", "sweep")
    ]
    assert scores[0] == scores[1]
    expected = losses_in_memory(finished, tmp_path, [2])
    assert {row["text"]: pytest.approx(row["score"], rel=1e-5) for row in content["rows"]} == expected
    # Tasks.
    harness_tasks.write_tasks(tmp_path / "tasks", documents=4, generated_tokens=8)
    task = str(tmp_path / "tasks" / "tiny_choice.yaml")
    status, content = sweep("--tasks", task, "--metric", "tiny_choice/acc", "--out", "sweep-tasks")
    assert status == 0
    content = json.loads(Path("sweep-tasks/sweep.json").read_text())
    assert content["best"] == "highest"
    (row,) = content["rows"]
    capsys.readouterr()
    assert main(["evaluate", f"sweep-tasks/{row['path']}", "--numbers", "--part", "select", "--tasks", task]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert row["metrics"] == {name: value for name, value in numbers.items() if "/" in name}
    assert content["asked"] == numbers["asked"]
