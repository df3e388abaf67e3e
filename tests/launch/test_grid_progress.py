"""`pma grid` in this process: its table, its commands and its refusals, on runs that exist already."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import tiny

from pma_jax.cli import main
from pma_jax.runs import lock
from pma_jax.runs.directory import open_run


@pytest.fixture
def pma(tmp_path, workspace, capfd):
    """Return a function that calls `pma grid` on tiny runs of seeds 0 to 3: its status, output and errors."""
    config = tiny.write_config(tmp_path / "config.py", workspace)

    def call(*arguments):
        vary = [] if "--vary" in arguments else ["--vary", "training.seed=0,1,2,3"]
        words = ["grid", "--config", config, "--root", str(tmp_path / "root"), *vary, *arguments]
        return main(list(map(str, words))), *capfd.readouterr()

    return call


def copy_run(finished, root: Path, seed: int, without=()) -> Path:
    """Copy the finished run as that of a seed; only its name and its configuration say so."""
    path = root / f"training.seed={seed}"
    shutil.copytree(finished.path, path, ignore=shutil.ignore_patterns("lock", *without))
    text = json.loads((path / "config.json").read_text())
    text["training"]["seed"] = seed
    (path / "config.json").write_text(json.dumps(text))
    return path


def rows(pma, *arguments):
    status, out, error = pma("--status", "--json", *arguments)
    assert (status, error) == (0, "")
    return {row["name"].removeprefix("training.seed="): row for row in json.loads(out)}


def test_status_of_a_finished_a_stopped_a_running_and_an_absent_run(pma, finished, tmp_path):
    copy_run(finished, tmp_path / "root", 0)
    stopped, running = (copy_run(finished, tmp_path / "root", seed, without=["24"]) for seed in (1, 2))
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(x for x in lines if json.loads(x)["tokens"] <= 20 * 256))
    written = time.time() - 3600
    os.utime(stopped / "metrics.jsonl", (written, written))
    with lock.hold(running):
        found = rows(pma)
    assert {seed: row["state"] for seed, row in found.items()} == {
        "0": "finished",
        "1": "stopped",
        "2": "running",
        "3": "not started",
    }
    assert [found[seed]["tokens"] for seed in "013"] == [6144, 5120, 0]
    losses = [r["loss"] for r in finished.metrics if r["kind"] == "evaluation"]
    assert (found["0"]["loss"], found["1"]["loss"], found["3"]["loss"]) == (losses[-1], losses[-2], None)
    previews = {r["loss"]: r["recipe"] for r in finished.metrics if r["kind"] == "preview"}
    assert (found["0"]["best_merge_loss"], found["0"]["best_merge"]) == (min(previews), previews[min(previews)])
    assert 3600 <= found["1"]["record_age_seconds"] < 3900 and found["3"]["record_age_seconds"] is None
    assert f"process {os.getpid()} on" in found["2"]["line"]


def test_best_merge_is_also_of_the_sweep(pma, finished, tmp_path):
    path = copy_run(finished, tmp_path / "root", 0)
    sweep = {"tokens": 6144, "rows": [{"text": "wma:3", "loss": 0.5}, {"text": "sma:3", "loss": float("nan")}]}
    (path / "sweep.json").write_text(json.dumps(sweep))
    assert (rows(pma)["0"]["best_merge"], rows(pma)["0"]["best_merge_loss"]) == ("wma:3", 0.5)


def test_status_is_a_table_and_names_the_line_of_a_failed_run(pma, finished, tmp_path):
    path = copy_run(finished, tmp_path / "root", 0)
    failed = {"step": "sweep --windows 9", "status": 1, "line": "error: no merge fits"}
    (path / "job.json").write_text(json.dumps({"done": ["train"], "failed": failed}))
    status, out, _ = pma("--status", "--then", "sweep --windows 9")
    lines = out.splitlines()
    assert status == 0 and lines[0].split()[:4] == ["run", "state", "tokens", "of"] and len(lines) == 6
    assert lines[1].split()[:4] == ["training.seed=0", "failed", "6,144", "100%"]
    assert lines[-1] == "failed: training.seed=0: sweep: error: no merge fits"
    assert rows(pma)["0"]["state"] == "finished", "without --then it is"


def test_dry_run_prints_the_commands_that_are_left(pma, finished, tmp_path):
    path = copy_run(finished, tmp_path / "root", 0)
    (path / "job.json").write_text(json.dumps({"done": ["train", "sweep --windows 2"]}))
    before = sorted(tmp_path.rglob("*"))
    options = ["--config.optimizer.b1=0.9", "--then", "sweep --windows 2", "--then", "merge {} --out {}/merged/a"]
    status, out, _ = pma("--dry-run", *options)
    done, *others = out.split("# ")[1:]
    folder = path.resolve()
    assert status == 0 and done.splitlines()[1:] == [f"pma merge {folder} --out {folder}/merged/a"]
    config, other = tmp_path / "config.py", str(folder).replace("seed=0", "seed=1")
    assert others[0].splitlines()[1:] == [
        f"pma train --config {config} --workdir {other} --config.optimizer.b1=0.9 --config.training.seed=1",
        f"pma sweep {other} --windows 2",
        f"pma merge {other} --out {other}/merged/a",
    ]
    assert sorted(tmp_path.rglob("*")) == before
    assert json.loads(pma("--dry-run", "--json", *options)[1])[0]["commands"] == done.splitlines()[1:]


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--vary", "training.seeds=0,1"], 1, "unknown config key 'training.seeds'"),
        (["--vary", "training.seed=0", "--config.training.seed=1"], 1, "training.seed is given twice"),
        (["--vary", "training.seed=0", "--vary", "training.seed=0"], 2, "is given twice; keep one"),
        (["--overrides-file", "absent.txt"], 1, "absent.txt"),
        (["--engine", "ray"], 2, "invalid choice: 'ray'"),
        (["--parallel", "0"], 2, "'0' is not a whole number above 0"),
        (["--parallel", "4096"], 1, "4096 processes at a time need a core each"),
        (["--then", "train --workdir x"], 1, "--then 'train --workdir x' is not a verb on a run: begin with one of"),
        (["--then", "sweep --window 3"], 1, "--then 'sweep --window 3': unknown --window 3 (did you mean --windows?)"),
        (["--then", "merge --last 2"], 1, "--then 'merge --last 2': the following arguments are required: --out"),
        (["--then", "report --config.training.seed=1"], 1, "`pma report` does not accept --config"),
        (["--then", "sweep 'a"], 1, "No closing quotation"),
    ],
)
def test_wrong_call_is_one_line_and_starts_nothing(pma, tmp_path, arguments, status, line):
    got, out, error = pma(*arguments)
    assert (got, out, error.count("\n")) == (status, "", 1) and error.startswith("error: ") and line in error
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_failing_run_is_named_and_the_exit_status_is_1(pma, tmp_path):
    # No run can start: its text is not there.
    status, out, error = pma("--vary", "data.cache_dir=/dev/null/a,/dev/null/b")
    assert status == 1 and out.count(" failed ") == 2
    assert error.splitlines()[-1].startswith("error: 2 of 2 runs failed: data.cache_dir=_dev_null_a-")


@pytest.mark.slow
def test_then_runs_in_the_job_and_not_again(pma, tmp_path):
    vary = ["--vary", "training.seed=0", "--then", "sweep --recipes sma --windows 2"]
    status, out, error = pma(*vary)
    assert status == 0 and "finished" in out, error
    run = open_run(tmp_path / "root" / "training.seed=0")
    written = Path(run.path / "sweep.json")
    sweep = written.stat().st_mtime_ns
    status, _, error = pma(*vary, "--then", "evaluate")
    assert status == 0 and written.stat().st_mtime_ns == sweep
    assert "evaluate, log in" in error and "sweep" not in error and "train, " not in error
    assert json.loads((run.path / "job.json").read_text())["done"] == ["train", *vary[3::2], "evaluate"]
