"""Grids of merges of any checkpoints, scored by a program: `pma sweep CHECKPOINTS --score COMMAND`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pma_jax.cli import main
from pma_jax.evaluation.grid import End, find_ends
from pma_jax.evaluation.scorer import parse_output
from pma_jax.merging.gather import open_checkpoints

SUM = """import sys, numpy, safetensors.numpy
weights = safetensors.numpy.load_file(sys.argv[1] + "/model.safetensors")
print("loaded")
print(repr(float(sum(x.astype(numpy.float64).sum() for x in weights.values()))))
print()
"""


def write_checkpoints(folder: Path, count: int = 6, shape: tuple[int, ...] = (5, 3)) -> list[np.ndarray]:
    """Write checkpoints at steps 100, 200, …; return their arrays as float64."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(count)]
    for i, array in enumerate(arrays, start=1):
        (folder / f"step-{100 * i}").mkdir(parents=True)
        save_file({"w": array}, folder / f"step-{100 * i}" / "model.safetensors")
    return [array.astype(np.float64) for array in arrays]


def write_program(folder: Path, text: str) -> str:
    """Write a shell script; return the command that runs it on a merge."""
    (folder / "score.sh").write_text(text)
    return f"sh {folder / 'score.sh'} {{}}"


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Write six checkpoints, and return a function that sweeps them: status and content of sweep.json."""
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path / "ck")

    def sweep(command: str, *options: str, out: str = "out") -> tuple[int, dict]:
        status = main(["sweep", "ck", "--score", command, "--out", out, *options])
        path = tmp_path / out / "sweep.json"
        return status, json.loads(path.read_text()) if path.exists() else {}

    return sweep


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


def test_scores_are_those_of_the_merges(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = write_checkpoints(tmp_path / "ck")
    (tmp_path / "score.py").write_text(SUM)
    command = f"{sys.executable} score.py {{}}"
    words = ["sweep", "ck", "--score", command, "--recipes", "sma,wma", "--windows", "2,3", "--intervals", "1,2"]
    assert main([*words, "--ends", "50%,600", "--parallel", "2", "--keep", "all", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    expected = {}
    for end in (3, 6):
        raw = arrays[end - 1].sum()
        for window, interval in ((2, 1), (2, 2), (3, 1), (3, 2)):
            indices = range(end - 1 - (window - 1) * interval, end, interval)
            if indices[0] >= 0:
                label = f"{window}@2" if interval == 2 else f"{window}"
                sums = [arrays[i].sum() for i in indices]
                expected[f"sma:{label}", 100 * end] = (np.mean(sums), np.mean(sums) - raw)
                wma = np.dot(np.arange(1, window + 1), sums) / np.arange(1, window + 1).sum()
                expected[f"wma:{label}", 100 * end] = (wma, wma - raw)
    got = {(row["text"], row["end"]): (row["score"], row["difference"]) for row in content["rows"]}
    assert got.keys() == expected.keys() and len(got) == 14
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, rtol=1e-5, atol=1e-5)
    assert [(row["end"], pytest.approx(row["score"])) for row in content["raw"]] == [
        (300, arrays[2].sum()),
        (600, arrays[5].sum()),
    ]
    assert set(content["left_out"]) == {"sma:3@2 at 300", "wma:3@2 at 300"}
    merged = load_file(tmp_path / "sweep" / "sma-3@2-at-600" / "model.safetensors")["w"]
    np.testing.assert_allclose(merged, np.mean(arrays[1::2], axis=0), rtol=1e-6)
    assert len(kept(tmp_path / "sweep")) == 14
    for name in ("sweep.png", "ends.png"):
        assert (tmp_path / "sweep" / name).read_bytes().startswith(b"\x89PNG")


def test_failures_are_rows_and_the_next_call_tries_only_them_again(tmp_path, grid, capsys):
    command = write_program(
        tmp_path,
        """case "$1" in
*raw*) echo '{"loss": 1.5, "name": "x", "is_best": true}';;
*sma-2*) echo lost >&2; exit 3;;
*sma-3*) kill -9 $$;;
*sma-4*) sleep 60 & sleep 60;;
*wma-2*) ;;
*wma-3*) echo 3 apples;;
*) echo nan;;
esac""",
    )
    options = ["--recipes", "sma,wma", "--windows", "2,3,4", "--parallel", "6"]
    began = time.monotonic()
    status, content = grid(command, *options, "--score-timeout", "0.5")
    assert status == 1 and "no merge has a score" in capsys.readouterr().err and time.monotonic() - began < 30
    assert content["raw"][0]["score"] == 1.5
    failures = {row["text"]: row["failure"] for row in content["rows"]}
    for text, part in {
        "sma:2": "ended with status 3: lost",
        "sma:3": "killed by SIGKILL",
        "sma:4": "did not end within 0.5 s (--score-timeout)",
        "wma:2": "printed nothing",
        "wma:3": "'3 apples', which is neither a number nor",
        "wma:4": "not finite",
    }.items():
        assert part in failures[text] and "\n" not in failures[text]
    assert kept(tmp_path / "out") == []
    write_program(tmp_path, f'echo "$1" >> {tmp_path}/calls; echo 2')
    status, content = grid(command, *options)
    assert status == 0 and [row["score"] for row in content["rows"]] == [2] * 6
    assert len((tmp_path / "calls").read_text().splitlines()) == 6  # the raw checkpoint has its score
    assert kept(tmp_path / "out") == ["sma-2-at-600"]  # the first of equal ones


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGINT, 130)],
)
def test_a_sweep_resumes_after_a_signal(tmp_path, number, status):
    write_checkpoints(tmp_path / "ck")
    calls, block = tmp_path / "calls", tmp_path / "block"
    block.touch()
    command = write_program(
        tmp_path,
        f"""echo "$(basename "$1") $$" >> {calls}
case "$1" in *sma-4*) while [ -e {block} ]; do sleep 0.05; done;; esac
wc -l < {calls}""",
    )
    words = ["-m", "pma_jax.cli", "sweep", "ck", "--score", command, "--windows", "2,3,4,5", "--recipes", "sma"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    stored_file = tmp_path / "sweep" / "sweep.json"
    _wait_for(lambda: calls.exists() and "sma-4" in calls.read_text() and "sma:3" in stored_file.read_text())
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == status
    scorer = int(calls.read_text().splitlines()[-1].split()[1])
    if number != signal.SIGKILL:
        assert "stopped: what sweep.json has stays; the same command continues" in error
        _wait_for(lambda: not _is_running(scorer))
    block.unlink()
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [row["text"] for row in stored["rows"]] == ["sma:2", "sma:3"]
    assert subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment).returncode == 0
    names = [line.split()[0] for line in calls.read_text().splitlines()]
    assert [name.split("-at-")[0] for name in names] == ["raw", "sma-2", "sma-3", "sma-4", "sma-4", "sma-5"]
    content = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert content["rows"][:2] == stored["rows"] and len(content["rows"]) == 4
    assert kept(tmp_path / "sweep") == ["sma-2-at-600"]


@pytest.mark.parametrize("keep", ["best", "none", "all"])
def test_merges_on_disk_stay_under_the_limit(tmp_path, grid, capsys, keep):
    options = ["--recipes", "sma,wma", "--windows", "2,3,4", "--ends", "400,600", "--parallel", "2", "--keep", keep]
    assert grid("echo {}", *options, "--dry-run", "--json") == (0, {})
    plan = json.loads(capsys.readouterr().out)
    assert (plan["merges"], plan["raw"], plan["passes"]) == (12, 2, 2)
    each = plan["write_bytes"] // 14
    limit = {"best": 3, "none": 3, "all": 13}[keep]
    command = "sh -c 'find \"$0\"/../.. -name model.safetensors | wc -l' {}"
    status, content = grid(command, *options, "--disk-limit", f"{limit * each}", "--best", "highest")
    counts = [row["score"] for row in content["rows"]]
    assert status == 0 and len(counts) == 12 and 1 < max(counts) <= limit
    assert len(kept(tmp_path / "out")) == {"best": 1, "none": 0, "all": 12}[keep]


def test_the_grid_that_does_not_fit_is_refused(tmp_path, grid, capsys):
    for options in (["--disk-limit", "100"], ["--disk-limit", "20KB", "--keep", "all"]):
        assert grid("echo 1", "--windows", "2,3,4", *options) == (1, {})
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "does not fit the disk" in error and "raise --disk-limit" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_best_merge_is_kept_when_a_better_one_comes(tmp_path, grid):
    command = write_program(tmp_path, 'case "$1" in *-2-*) echo 2;; *-3-*) echo 3;; *-4-*) echo 1;; *) echo 0;; esac')
    options = ["--recipes", "sma"]
    assert grid(command, *options, "--windows", "2")[0] == 0
    assert kept(tmp_path / "out") == ["sma-2-at-600"]
    assert grid(command, *options, "--windows", "3")[0] == 0
    assert kept(tmp_path / "out") == ["sma-2-at-600"]
    status, content = grid(command, *options, "--windows", "4")
    assert status == 0 and kept(tmp_path / "out") == ["sma-4-at-600"]
    assert {row["text"]: row["path"] for row in content["rows"]} == {
        "sma:2": None,
        "sma:3": None,
        "sma:4": "sma-4-at-600",
    }
    status, content = grid(command, *options, "--windows", "2", "--best", "highest")  # nothing is scored again
    assert status == 0 and kept(tmp_path / "out") == ["sma-3-at-600"]


def test_metrics(tmp_path, grid, capsys):
    command = write_program(tmp_path, f'echo >> {tmp_path}/calls; echo \'{{"loss": 2, "accuracy": 0.5, "task": "x"}}\'')
    options = ["--recipes", "sma", "--windows", "2"]
    status, content = grid(command, *options)
    assert status == 1 and "several numbers (loss, accuracy): choose one with --metric" in capsys.readouterr().err
    assert content["rows"][0]["metrics"] == {"loss": 2, "accuracy": 0.5}
    status, content = grid(command, *options, "--metric", "accuracy", "--best", "highest")
    assert status == 0 and content["rows"][0]["score"] == 0.5 and kept(tmp_path / "out") == ["sma-2-at-600"]
    assert (tmp_path / "calls").read_text().count("\n") == 2  # raw and merge, once each
    status, content = grid(command, *options, "--metric", "f1")
    assert status == 1 and "loss, accuracy, not f1" in capsys.readouterr().err


def test_a_number_that_is_not_finite_is_not_replaced_by_another(tmp_path, grid, capsys):
    line = '{"loss": NaN, "n": -5}'
    command = write_program(tmp_path, f"case \"$1\" in *wma*) echo '{line}';; *) echo 2;; esac")
    options = ["--windows", "2", "--recipes", "sma,wma", "--keep", "none"]
    for metric, failure in ([], "several numbers (loss, n)"), (["--metric", "loss"], "loss is not finite"):
        _, content = grid(command, *options, *metric)
        rows = {row["text"]: row for row in content["rows"]}
        assert rows["wma:2"]["score"] is None and failure in rows["wma:2"]["failure"]
        assert rows["wma:2"]["metrics"] == {"loss": None, "n": -5}
    capsys.readouterr()


def test_merges_that_keep_all_makes_again_are_in_the_plan(tmp_path, grid, capsys):
    options = ["--recipes", "sma,wma", "--windows", "2,3,4"]
    assert grid("echo 1", *options)[0] == 0
    capsys.readouterr()
    assert grid("echo 1", *options, "--dry-run")[0] == 0
    assert "0 passes over checkpoints; reads 0 B" in capsys.readouterr().out
    grid("echo 1", *options, "--keep", "all", "--dry-run", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert (plan["merges"], plan["finished"], plan["again"], plan["passes"]) == (0, 7, 5, 1)
    each = plan["write_bytes"] // 5
    assert grid("echo 1", *options, "--keep", "all", "--disk-limit", f"{5 * each}")[0] == 1
    assert "does not fit the disk" in capsys.readouterr().err and kept(tmp_path / "out") == ["sma-2-at-600"]
    status, content = grid("echo 1", *options, "--keep", "all", "--disk-limit", f"{6 * each}")
    assert status == 0 and len(kept(tmp_path / "out")) == 6 and {row["kept"] for row in content["rows"]} == {"all"}


def test_changed_checkpoints_are_scored_again(tmp_path, grid, capsys):
    options = ["--recipes", "sma", "--windows", "2", "--ends", "300,600", "--keep", "none"]
    command = write_program(tmp_path, f'echo "$1" >> {tmp_path}/calls; echo 1')
    assert grid(command, *options)[0] == 0
    (tmp_path / "calls").unlink()
    save_file({"w": np.ones((5, 3), np.float32)}, tmp_path / "ck" / "step-500" / "model.safetensors")
    assert grid(command, *options)[0] == 0
    assert [Path(line).name for line in (tmp_path / "calls").read_text().splitlines()] == ["sma-2-at-600"]
    assert "1 scores of sweep.json are of checkpoints or options that have changed" in capsys.readouterr().err


def test_merges_of_a_corrupt_checkpoint_are_rows(tmp_path, grid):
    save_file({"w": np.full((5, 3), np.nan, np.float32)}, tmp_path / "ck" / "step-400" / "model.safetensors")
    status, content = grid("echo 1", "--recipes", "sma", "--windows", "2,3", "--ends", "600")
    assert status == 0
    first, second = content["rows"]
    assert first["score"] == 1 and second["score"] is None and "the merge failed" in second["failure"]
    assert kept(tmp_path / "out") == ["sma-2-at-600"]


def test_a_scorer_that_removes_the_merge(tmp_path, grid):
    command = write_program(tmp_path, 'rm -r "$1"; echo 1')
    status, _ = grid(command, "--recipes", "sma", "--windows", "2")
    assert status == 0 and kept(tmp_path / "out") == ["sma-2-at-600"]
    assert (tmp_path / "out" / "sma-2-at-600" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--score", "no-such-program {}"], 1, "there is no program no-such-program"),
        (["--score", "'echo {}"], 1, "cannot be split into words"),
        (["--score", ""], 1, "--score is empty"),
        ([], 1, "is neither a model of pma_jax nor of Hugging Face: give --score"),
        (["--score", "echo 1", "--ends", "1200"], 1, "the checkpoints are from 100 to 600 steps"),
        (["--score", "echo 1", "--ends", "120%"], 2, "'120' is not a percentage"),
        (["--score", "echo 1", "--windows", "9"], 1, "there are 6 checkpoints up to there, and the merge needs 9"),
        (["--score", "echo 1", "--recipes", "smaa"], 1, "smaa"),
        (["--score", "echo \udcff"], 2, "UTF-8"),
        (["--score", "echo 1", "--metric", "a\nb"], 2, "is no name"),
        (["--score", "echo 1", "--out", "ck"], 1, "is among the inputs"),
        (["--score", "echo 1", "--out", "ck/step-100/x"], 1, "is among the inputs"),
        (["--score", "echo 1", "--out", "gs://bucket/out"], 1, "give a directory on it"),
        (["--score", "echo 1", "--dtype", "float8"], 2, "--dtype"),
    ],
)
def test_bad_input_is_one_line_before_the_work(tmp_path, monkeypatch, capsys, options, status, message):
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path / "ck")
    windows = [] if "--windows" in options else ["--windows", "2"]
    assert main(["sweep", "ck", *windows, *options]) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and message in lines[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "ck"] and len(list((tmp_path / "ck").iterdir())) == 6


@pytest.mark.parametrize(
    "options", ["--out sweep", "--keep best", "--ends 1", "--dry-run", "--subtree a", "--format keep"]
)
def test_options_that_need_a_scorer_are_refused_without_one(finished, capsys, options):
    assert main(["sweep", str(finished.path), *options.split()]) == 1
    assert capsys.readouterr().err.startswith(f"error: {options.split()[0]} needs --score")


def test_other_sweeps_and_directories_are_not_overwritten(tmp_path, grid, capsys):
    options = ["--recipes", "sma", "--windows", "2"]
    (tmp_path / "out" / "sma-2-at-600").mkdir(parents=True)
    assert grid("echo 1", *options) == (1, {})
    assert "exists already, and is not of this sweep" in capsys.readouterr().err
    (tmp_path / "out" / "sma-2-at-600").rmdir()
    assert grid("echo 1", *options)[0] == 0
    assert "the command has no {}" in capsys.readouterr().err
    assert grid("echo 2", *options)[0] == 1
    assert "has scores of another command (echo 1)" in capsys.readouterr().err
    assert main(["sweep", "ck/step-100", "ck/step-200", "--score", "echo 1", "--out", "out", *options]) == 1
    assert "has merges of other checkpoints" in capsys.readouterr().err


def test_checkpoints_whose_order_is_not_known_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path / "ck", 2)
    for name, step in (("a", 100), ("b", 200)):
        (tmp_path / "ck" / f"step-{step}").rename(tmp_path / name)
    words = ["sweep", "b", "a", "--score", "echo 1", "--windows", "2", "--recipes", "sma"]
    assert main(words) == 1
    assert "a grid needs the order of the checkpoints" in capsys.readouterr().err
    assert main([*words, "--order", "given", "--ends", "1"]) == 1
    assert "give percentages (60%)" in capsys.readouterr().err
    assert main([*words, "--order", "given"]) == 0


def test_ends_are_the_nearest_checkpoints(tmp_path):
    write_checkpoints(tmp_path)
    series = open_checkpoints([tmp_path])
    indices, notes = find_ends(series, [End(60, True), End(510), End(649), End(500)])
    assert indices == [3, 4, 5]
    assert "the end 60% is the nearest checkpoint, at 400 steps" in notes
    assert "the end 500 is the same checkpoint as another end" in notes


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("1", {"score": 1.0}),
        ("-2.5e-3", {"score": -0.0025}),
        (
            '{"a": 1, "b": 0.5, "c": null, "d": {"e": 1}, "f": true, "g": NaN}',
            {"a": 1.0, "b": 0.5, "c": None, "g": None},
        ),
        ('{"loss": NaN, "n": null}', {}),
        ("1_000", {}),
        ("inf", {}),
        ("{}", {}),
        ('{"a": 1', {}),
        ('{"a": 1, "a": 2}', {}),
        ("[1]", {}),
        ("1" + "0" * 400, {}),
        ('{"a": 1' + "0" * 400 + "}", {}),
    ],
)
def test_output_of_a_scorer(line, metrics):
    got, failure = parse_output(line)
    assert got == metrics and (failure is None) == bool(metrics)
    assert failure is None or "\n" not in failure
