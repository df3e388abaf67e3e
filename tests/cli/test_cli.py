import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from pma_jax.cli import command, main
from pma_jax.cli.arguments import parser
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.runs import steps
from pma_jax.runs.directory import open_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training import loop

VERBS = [
    "train",
    "fork",
    "grid",
    "launch",
    "merge",
    "sweep",
    "watch",
    "evaluate",
    "inspect",
    "plan",
    "import",
    "export",
    "report",
]


@pytest.fixture
def pma(capsys):
    """Return a function that runs `pma` in this process: exit status, standard output, standard error."""

    def run(*arguments):
        capsys.readouterr()
        try:
            status = main([str(word) for word in arguments])
        except SystemExit as left:  # argparse exits.
            status = left.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def fails(pma):
    """Return a function that asserts that `pma` exits with status 1 and one line of error, which it returns."""

    def run(*arguments):
        status, out, err = pma(*arguments)
        assert status == 1, (status, out, err)
        # The only other line allowed reports that the corpus was prepared.
        line = err.splitlines()[-1]
        assert out == "" and line.startswith("error: ") and err.count("error: ") == 1, err
        assert len(err.splitlines()) == 1 + err.startswith("prepared "), err
        return line

    return run


@pytest.fixture
def copy(finished, tmp_path):
    """Return a copy of the finished run, which the test may change."""
    return open_run(shutil.copytree(finished.path, tmp_path / "run"))


# --- Help and invalid calls -------------------------------------------------------------------------------------------


def test_help_does_not_import_jax():
    code = "import sys; from pma_jax.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('jax', 'flax', 'orbax', 'numpy', 'tokenizers') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert all(verb in ended.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(pma, verb):
    status, out, _ = pma(verb, "--help")
    assert status == 0
    assert f"Example:\n    pma {verb} " in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "--config", "demo"],
        ["train", "--config", "demo", "--workdir", "x", "--wrokdir", "y"],
        ["fork", "run", "--workdir", "x"],
        ["fork", "run", "--workdir", "x", "--at-tokens", "many"],
        ["fork", "run", "--workdir", "x", "--at-tokens", "1.5"],
        ["fork", "run", "--workdir", "x", "--at-tokens", "inf"],
        ["fork", "run", "--workdir", "x", "--at-tokens", "nan"],
        ["merge", "run"],
        ["merge", "--out", "x"],
        ["merge", "run", "--out", "x", "--last", "0"],
        ["merge", "run", "--out", "x", "--last", "-3"],
        ["merge", "run", "--out", "x", "--last", "²"],
        ["merge", "run", "--out", "x", "--tokens", "1e6"],
        ["merge", "run", "--out", "x", "--config.training.seed=1"],
        ["merge", "run", "--out", "x", "--memory-limit", "2 bananas"],
        ["merge", "run", "--out", "x", "--memory-limit", "0"],
        ["merge", "run", "--out", "x", "--dtype", "int8"],
        ["merge", "run", "--out", "x", "--every", "often"],
        ["sweep", "run", "--windows", "3,x"],
        ["sweep", "run", "--intervals", "1,0"],
        ["sweep", "run", "--kind", "mean"],
        ["watch"],
        ["watch", "run", "--windows", "0"],
        ["watch", "run", "--kind", "points"],
        ["watch", "run", "--poll-seconds", "0"],
        ["watch", "run", "--poll-seconds", "soon"],
        ["evaluate"],
        ["inspect", "a", "b"],
        ["import", "model"],
        ["import", "model", "--out", "x", "--config.training.seed=1"],
        ["export", "snapshot"],
        ["export", "snapshot", "--out", "x", "--dtype", "float8"],
        ["export", "snapshot", "--out", "x", "--shard-size", "large"],
        ["merge", "run", "--out", "x", "--config.training.seed=1", "--config.training.seed=2"],
        ["train", "--config", "demo", "--workdir", "x", "--config.training.seed=1", "--config.training.seed=2"],
        ["train", "--confi", "demo", "--workdir", "x"],
        ["fork", "run", "--workdir", "x", "--at-tokens", "1e999999999"],
    ],
    ids=" ".join,
)
def test_invalid_call_exits_with_status_2_and_one_line(pma, arguments):
    status, out, err = pma(*arguments)
    assert (status, out) == (2, "") and err.startswith("error: ") and len(err.splitlines()) == 1, err


# Valid values of the options that not every text is valid for.
VALUES = {
    "--part": "select",
    "--engine": "local",
    "--host": "0",
    **{"--at-tokens": "4.9M", "--tokens": "1:2", "--every": "20B", "--tolerance": "0", "--tokens-per-step": "1"},
    **{
        "--memory-limit": "1GiB",
        "--shard-size": "1GB",
        "--storage-bandwidth": "10GB/s",
        "--host-bandwidth": "1GB/s",
        "--annealing-share": "0.2",
    },
    **{"--kind": "point", "--dtype": "float32", "--format": "keep", "--order": "given", "--integers": "equal"},
    **{"--on": "host"},
    **{"--recipes": "sma", "--keep": "best", "--best": "lowest", "--disk-limit": "1GB"},
}


def options_of(pma, verb):
    """Return the options of a verb that have a value and are not documented as repeatable."""
    text = pma(verb, "--help")[1].partition("options:")[2]
    entries = re.split(r"\n(?=  --)", text)
    found = [re.match(r"\s*(--[a-z-]+) (?:[A-Z]|\{)", entry) for entry in entries if "repeated" not in entry]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("verb", VERBS)
def test_a_second_value_of_an_option_is_refused(pma, verb):
    options = options_of(pma, verb)
    assert options or verb in ("evaluate", "inspect"), "this test finds the options of the verb"
    for option in options:
        value = "gke" if (verb, option) == ("launch", "--engine") else VALUES.get(option, "7")
        status, _, err = pma(verb, option, value, f"{option}={value}")
        assert status == 2 and f"argument {option}: is given twice" in err and len(err.splitlines()) == 1, err


@pytest.mark.slow
def test_recipes_may_be_repeated(pma, finished, tmp_path):
    recipes = ["--recipe", "sma", "--recipe", "wma"]
    assert pma("merge", finished.path, *recipes, "--out", tmp_path / "out", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4.096e3", 4096), ("4.096k", 4096), ("1.1B", 1_100_000_000), ("2M", 2 * 10**6), ("1T", 10**12)],
)
def test_tokens_take_units(text, tokens):
    parsed = parser().parse_args(["fork", "run", "--workdir", "x", "--at-tokens", text])
    assert parsed.at_tokens == tokens


# --- Mistakes: one line, status 1 -------------------------------------------------------------------------------------


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("checkpoint.intervall_tokens=4e6", "checkpoint.interval_tokens"),
        ("training.seed=one", "a whole number"),
        ("data.source=web", "packaged, files, tokens, hub"),
        ("data.files=nowhere/*.txt", "nowhere/*.txt"),
        ("data.files=~no-such-user/*.txt", "~no-such-user/*.txt: Could not determine home directory"),
        ("data.cache_dir=~no-such-user/cache", "~no-such-user/cache: Could not determine home directory"),
        (
            "data.tokenizer=~no-such-user/tokenizer.json",
            "~no-such-user/tokenizer.json: Could not determine home directory",
        ),
        ("mesh.data=3", "needs 3 devices"),
        ("mesh.cpu_devices=-1", "from 0 to 1,024"),
        ("training.accumulation_steps=2", "data x fsdp x expert splits it in 8"),
    ],
)
def test_invalid_key_or_value_is_one_line(fails, workspace, tmp_path, assignment, message):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    assert message in fails("train", "--config", file, "--workdir", tmp_path / "run", f"--config.{assignment}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no configuration file"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "get_config()"),
        ("def get_config():\n    raise ValueError('two\\nlines')", "two lines"),
        ("from pma_jax import config\ndef get_config():\n    c = config.defaults()\n    c.trainig = 3\n", "trainig"),
    ],
)
def test_invalid_config_file_is_one_line(fails, tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.py").write_text(text)
    assert message in fails("train", "--config", tmp_path / "config.py", "--workdir", tmp_path / "run")


@pytest.mark.parametrize(
    "verb", ["evaluate", "inspect", "sweep", "watch", "report", "merge", "fork", "import", "export"]
)
@pytest.mark.parametrize("target", ["nothing", "empty", "file", "config"])
def test_path_that_is_neither_run_nor_snapshot_is_one_line(fails, tmp_path, verb, target):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model": {"wid')
    more = {verb: ["--out", tmp_path / "out"] for verb in ("merge", "import", "export")}
    more |= {"fork": ["--at-tokens", "1e3", "--workdir", tmp_path / "out"]}
    assert str(tmp_path / target) in fails(verb, tmp_path / target, *more.get(verb, []))
    assert not (tmp_path / "out").exists()


def corrupt(snapshot, how):
    """Corrupt a snapshot's files as a full disk or a partial copy would."""
    arrays = [*snapshot.path.glob("params/d/*"), *snapshot.path.glob("params/*/d/*")]
    if how == "no arrays":
        (snapshot.path / "params").rmtree()
    elif how == "no metadata":
        for path in snapshot.path.glob("*"):
            if path.is_file() and path.name != steps.COMMIT_MARKER:
                path.unlink()
    else:
        assert arrays
        for path in arrays:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2] if how == "cut" else b"\0" * len(content))


@pytest.mark.parametrize("how", ["cut", "zeros", "no arrays", "no metadata"])
def test_corrupt_snapshot_is_one_line(fails, copy, tmp_path, how):
    first, *_, damaged = copy.snapshots
    corrupt(damaged, how)
    output = [fails("evaluate", damaged.path), fails("merge", first.path, damaged.path, "--out", tmp_path / "out")]
    assert all(str(damaged.path) in line and len(line) < 1000 for line in output)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_corrupt_snapshot_is_one_line_in_a_terminal_too(copy):
    # Threads and event loops of the libraries print by themselves, which only a separate process shows.
    damaged = copy.snapshots[-1]
    corrupt(damaged, "zeros")
    ended = tiny.pma("evaluate", damaged.path)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1 and "corrupt" in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--last", "7"], "7 checkpoints are requested and there are 6"),
        (["--tokens", "1:2"], "no checkpoint is in 1:2 tokens"),
        (["--recipe", "smaa"], "'sma'"),
        (["--recipe", "ema:alpha=2"], "alpha"),
        (["--recipe", "ema:beta=0.2"], "alpha"),
        (["--recipe", "weights:0.5,0.5"], "6"),
        (["--recipe", ""], "sma"),
    ],
)
def test_impossible_merge_is_one_line(fails, finished, tmp_path, arguments, message):
    assert message in fails("merge", finished.path, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_fork_without_a_state_lists_the_states(fails, finished, tmp_path):
    line = fails("fork", finished.path, "--at-tokens", "5e3", "--workdir", tmp_path / "fork")
    assert "2,048, 4,096, 6,144" in line and "keep_states_at_tokens=5000" in line


def test_sweep_of_more_snapshots_than_exist_is_one_line(fails, finished):
    line = fails("sweep", finished.path, "--windows", "15,20", "--recipes", "sma")
    assert "sma:15: there are 6 snapshots, and the merge needs 15" in line and "sma:20" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--recipes", "smaa"], "did you mean 'sma'"),
        (["sweep", "--kind", "block_mean"], "no snapshots of kind block_mean"),
        (["watch", "--recipe", "smaa"], "did you mean 'sma'"),
        (["watch", "--recipe", "weights:0.5,0.5", "--windows", "3"], "2 weights for 3"),
    ],
)
def test_impossible_sweep_or_watch_is_one_line(fails, copy, arguments, message):
    verb, *rest = arguments
    before = tiny.contents(copy.path)
    assert message in fails(verb, copy.path, *rest)
    assert tiny.contents(copy.path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x2"], "unknown topology 'v9:2x2'"),
        (["--topology", "v5e:2x2", "--out", "nowhere/plan.json"], "nowhere"),
        (["--topology", "v5e:2x2", "--config.model.widht=3"], "model.width"),
    ],
)
def test_impossible_plan_is_one_line(fails, arguments, message):
    assert message in fails("plan", "--config", "demo", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--storage-bandwidth", "2GB"], "not a rate"),
        (["--storage-bandwidth", "fast/s"], "not a size"),
        (["--annealing-share", "20"], "not a share"),
        ([], "--topology"),
    ],
)
def test_invalid_plan_arguments_are_reported(pma, arguments, message):
    topology = ["--topology", "v5e:2x2"] if arguments else []
    status, out, err = pma("plan", "--config", "demo", *topology, *arguments)
    assert status == 2 and out == "" and message in err


# --- What the verbs do ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_and_resume_in_a_separate_process(finished, workspace, tmp_path):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    arguments = ["train", "--config", file, "--workdir", "runs/tiny"]
    ended = tiny.pma(*arguments, "--config.training.total_tokens=2048", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith(f"2,048 tokens, 2 snapshots, held-out loss {finished.snapshots[1].loss:.4f}")
    refused = tiny.pma(*arguments, cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: runs/tiny holds a run with another configuration")
    assert "training.total_tokens: 2048 -> 6144" in refused.stderr and "Traceback" not in refused.stderr


def test_interrupted_command_reports_how_to_resume(pma, workspace, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    file = tiny.write_config(tmp_path / "config.py", workspace)
    status, _, err = pma("train", "--config", file, "--workdir", tmp_path / "run")
    assert status == 130 and "same command" in err and "Traceback" not in err


def test_interrupted_watch_is_one_line(pma, finished, monkeypatch):
    from pma_jax.evaluation import watch

    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(watch, "watch", interrupted)
    assert pma("watch", finished.path) == (130, "", "stopped: the same command continues after the last preview\n")


@pytest.mark.slow
def test_fork_trains_to_the_horizon(pma, finished, tmp_path):
    arguments = ["fork", finished.path, "--at-tokens", "4096", "--workdir", tmp_path / "fork"]
    arguments += ["--config.schedule.decay=linear", "--config.schedule.decay_start_tokens=4096"]
    assert pma(*arguments)[0] == 0
    run = open_run(tmp_path / "fork")
    assert [s.step for s in run.snapshots] == [20, 24] and run.config.schedule.decay == "linear"
    before = tiny.contents(tmp_path / "fork")
    assert pma(*arguments)[0] == 0
    assert tiny.contents(tmp_path / "fork") == before, "the same command again changes nothing"
    arguments[arguments.index("--workdir") + 1] = tmp_path / "other"
    assert pma(*arguments, "--weights", finished.snapshots[1].path)[0] == 0
    first, other = (next(r for r in open_run(tmp_path / f).metrics if r["kind"] == "train") for f in ("fork", "other"))
    assert first["tokens"] == other["tokens"] and first["loss"] != other["loss"]


RECIPES = {
    "sma": np.full(3, 1 / 3),
    "wma": np.array([1, 2, 3]) / 6,
    "ema:alpha=0.2": np.array([0.8 * 0.8, 0.2 * 0.8, 0.2]),
    "weights:0.2,0.3,0.5": np.array([0.2, 0.3, 0.5]),
}


@pytest.mark.parametrize(
    "recipe", ["sma", *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES if recipe != "sma")]
)
def test_merge_equals_numpy_and_every_verb_accepts_it(pma, finished, tmp_path, recipe):
    out = tmp_path / "deep" / "merged"
    status, output, _ = pma("merge", finished.path, "--last", "3", "--recipe", recipe, "--out", out)
    assert status == 0
    assert f"{recipe} of 3 checkpoints (4,096 to 6,144 tokens)" in output
    merged = read_snapshot(out)
    np.testing.assert_allclose(merged.merge["coefficients"], RECIPES[recipe], rtol=1e-12)
    stored = [tiny.named(tiny.read(s)) for s in finished.snapshots[-3:]]
    expected = {
        name: sum(c * leaves[name].astype(np.float64) for c, leaves in zip(RECIPES[recipe], stored, strict=True))
        for name in stored[0]
    }
    tiny.assert_close(tiny.read(merged), expected, rtol=1e-5, atol=1e-6)

    (row,) = json.loads(pma("evaluate", out, "--part", "select", "--json")[1])
    if recipe == "sma":  # The run's own preview of the same merge.
        preview = [r for r in finished.metrics if r["kind"] == "preview"][-1]
        assert row["loss"] == pytest.approx(preview["loss"], rel=1e-6)
    facts = json.loads(pma("inspect", out, "--json")[1])
    assert facts["kind"] == "merged snapshot" and facts["merge"]["recipe"] == recipe
    assert pma("merge", out, finished.snapshots[0].path, "--out", tmp_path / "again")[0] == 0


def test_merge_orders_by_tokens_and_accepts_ranges(pma, finished, tmp_path):
    paths = [finished.snapshots[i].path for i in (4, 0, 2)]
    assert pma("merge", *paths, "--recipe", "wma", "--out", tmp_path / "a")[0] == 0
    assert [s["tokens"] for s in read_snapshot(tmp_path / "a").merge["sources"]] == [1024, 3072, 5120]
    assert pma("merge", finished.path, "--tokens", "2e3:4096", "--out", tmp_path / "b")[0] == 0
    assert [s["step"] for s in read_snapshot(tmp_path / "b").merge["sources"]] == [8, 12, 16]


def test_merge_never_overwrites(fails, pma, finished, tmp_path):
    arguments = ["merge", finished.path, "--out", tmp_path / "out"]
    assert pma(*arguments)[0] == 0
    before = tiny.contents(tmp_path)
    assert "exists already" in fails(*arguments, "--last", "2")
    assert "exists already" in fails("merge", finished.path, "--out", finished.path)
    assert tiny.contents(tmp_path) == before


def test_evaluate_prints_the_losses_of_the_run(pma, finished):
    paths = [finished.path, *[s.path for s in finished.snapshots[:2]]]
    status, out, _ = pma("evaluate", *paths, "--part", "select", "--json")
    rows = json.loads(out)
    assert status == 0 and [r["target"] for r in rows] == [str(p) for p in paths]
    expected = [finished.snapshots[-1], *finished.snapshots[:2]]
    for row, snapshot in zip(rows, expected, strict=True):
        assert row["tokens"] == snapshot.tokens
        assert row["loss"] == pytest.approx(snapshot.loss, rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2)), "a token of `bytes` is a byte"
        assert row["held_out"] == finished.metadata["held_out"] and row["standard_error"] > 0
    table = pma("evaluate", finished.path, "--part", "select")[1]
    assert "6,144" in table and f"{finished.snapshots[-1].loss:.4f} ± {rows[0]['standard_error']:.4f}" in table
    assert "500 tokens of" in table and "documents of the part select" in table


def test_evaluate_reads_the_part_report_unless_told_otherwise(pma, finished):
    rows = [json.loads(pma("evaluate", finished.path, *part, "--json")[1])[0] for part in ([], ["--part", "report"])]
    assert rows[0] == rows[1] and rows[0]["held_out"]["part"] == "report"
    assert rows[0]["held_out"]["digest"] != finished.metadata["evaluation"]


def test_evaluate_compares_models_on_the_same_documents(pma, finished):
    paths = [s.path for s in finished.snapshots[-2:]]
    rows = json.loads(pma("evaluate", *paths, "--json")[1])
    assert rows[0]["difference"] == 0 and rows[0]["difference_standard_error"] is None
    config = finished.config
    evaluator = make_evaluator(config, make_mesh(config.mesh), "report")
    one, two = (evaluator.sum_by_document(tiny.read(s)) for s in finished.snapshots[-2:])
    counts = evaluator.sample.counts_D
    difference = (two - one).sum() / counts.sum()
    assert rows[1]["difference"] == pytest.approx(difference, rel=1e-5)
    assert rows[1]["difference"] == pytest.approx(rows[1]["loss"] - rows[0]["loss"], abs=1e-6)
    without = ((two - one).sum() - (two - one)) / (counts.sum() - counts)
    spread = math.sqrt((len(counts) - 1) * np.var(without))
    assert rows[1]["difference_standard_error"] == pytest.approx(spread, rel=1e-4)
    table = pma("evaluate", *paths)[1]
    assert f"{difference:+.4f} ± {spread:.4f}" in table and "minus the first" in table


def test_evaluate_refuses_models_on_different_text_with_both_digests(pma, fails, finished, workspace, tmp_path):
    config = tiny.config(workspace, training__total_tokens=1024, evaluation__tokens=400, preview__windows=())
    loop.train(config, tmp_path / "other")
    digests = [
        json.loads(pma("evaluate", path, "--json")[1])[0]["held_out"]["digest"]
        for path in (finished.path, tmp_path / "other")
    ]
    line = fails("evaluate", finished.path, tmp_path / "other")
    assert "cannot be compared: their held-out text differs" in line and all(digest in line for digest in digests)
    tokens = "--config.evaluation.tokens=450"
    assert len(json.loads(pma("evaluate", finished.path, tmp_path / "other", tokens, "--json")[1])) == 2


def test_evaluate_says_that_a_model_may_have_been_trained_on_the_text(pma, finished):
    status, _, errors = pma("evaluate", finished.path, "--config.data.held_out_percent=60")
    assert status == 0 and f"{finished.path} may have been trained on this text" in errors
    assert "trained on" not in pma("evaluate", finished.path)[2]


def test_evaluate_accepts_configuration_keys(pma, fails, finished):
    (row,) = json.loads(pma("evaluate", finished.path, "--config.evaluation.tokens=1500", "--json")[1])
    assert row["loss"] != finished.snapshots[-1].loss
    assert row["loss"] == pytest.approx(finished.snapshots[-1].loss, rel=0.2)
    assert "evaluation.tokens" in fails("evaluate", finished.path, "--config.evaluation.token=15")
    assert "evaluation.tokens" in fails("evaluate", finished.path, "--config.evaluation.tokens=1e9")


def test_sweep_evaluates_each_merge(pma, copy):
    arguments = [
        "sweep",
        copy.path,
        "--recipes",
        "sma,lagfree:lag=0.5,order=1,ema:alpha=0.2",
        "--windows",
        "3,5",
        "--json",
    ]
    status, out, _ = pma(*arguments)
    actual = json.loads(out)
    assert status == 0 and actual == json.loads((copy.path / "sweep.json").read_text())
    assert actual["tokens"] == tiny.HORIZON
    assert actual["raw_loss"] == pytest.approx(copy.snapshots[-1].loss, rel=1e-6)
    grid = [(r["recipe"], r["window"]) for r in actual["rows"]]
    assert grid == [(r, n) for r in ("sma", "lagfree:lag=0.5,order=1", "ema:alpha=0.2") for n in (3, 5)]
    rows = {r["text"]: r["loss"] for r in actual["rows"]}
    ema = [0.8**4, 0.2 * 0.8**3, 0.2 * 0.8**2, 0.2 * 0.8, 0.2]
    stored = [tiny.named(tiny.read(s)) for s in copy.snapshots]
    for text, weights in (("sma:3", [1 / 3] * 3), ("sma:5", [0.2] * 5), ("ema:alpha=0.2:5", ema)):
        assert rows[text] == pytest.approx(tiny.loss_of_sum(copy, stored[-len(weights) :], weights), rel=1e-6)
    assert pma(*arguments)[1] == out, "the same sweep again prints the same"
    assert "sma:3" in pma(*arguments[:-1])[1]


@pytest.mark.slow
def test_rows_of_a_sweep_without_any_field_are_read_or_refused(pma, copy):
    arguments = ("sweep", copy.path, "--windows", "2,3")
    pma(*arguments)
    path = copy.path / "sweep.json"
    written = path.read_text()
    for field in json.loads(written)["rows"][0]:
        result = json.loads(written)
        result["rows"] = [{key: value for key, value in row.items() if key != field} for row in result["rows"]]
        path.write_text(json.dumps(result))
        status, _, err = pma(*arguments)
        assert status == 0 or (status == 1 and "sweep.json" in err and len(err.splitlines()) == 1), (field, err)


@pytest.mark.slow
def test_sweep_accepts_kinds_and_intervals_and_reports_what_it_skips(pma, copy):
    tiny.write_block_means(copy)
    assert pma("sweep", copy.path, "--recipes", "sma", "--windows", "2,3", "--intervals", "1,3")[0] == 0
    status, out, err = pma("sweep", copy.path, "--recipes", "wma", "--windows", "3,7", "--kind", "block_mean")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["merge", "sma:2", "sma:2@3", "sma:3", "block/wma:3"]
    assert err.splitlines()[0] == "note: skipped block/wma:7: there are 6 snapshots, and the merge needs 7"
    assert (copy.path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_watch_prints_one_line_per_preview(pma, copy):
    arguments = ["watch", copy.path, "--recipe", "wma", "--windows", "5", "--once"]
    status, out, err = pma(*arguments)
    records = [r for r in copy.metrics if r.get("by") == "watch"]
    assert (status, err) == (0, "")
    assert [line.split()[-2:] for line in out.splitlines()] == [["wma:5", f"{r['loss']:.4f}"] for r in records]
    assert [r["tokens"] for r in records] == [5120, 6144]
    assert pma(*arguments) == (0, "", "")


def test_inspect_prints_text_and_json(pma, finished):
    status, out, _ = pma("inspect", finished.path)
    assert status == 0 and "6 snapshots" in out and "3 states" in out
    facts = json.loads(pma("inspect", finished.snapshots[0].path, "--json")[1])
    assert facts["kind"] == "snapshot" and facts["tokens"] == 1024


def test_module_runs_like_the_command():
    ended = subprocess.run([sys.executable, "-m", "pma_jax.cli", "--help"], capture_output=True, text=True, check=True)
    assert "VERB" in ended.stdout


def test_reads_that_orbax_drops_are_not_printed(monkeypatch):
    """A failed read leaves coroutines of Orbax that end with errors; those of others are shown."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    command._silence_libraries()
    coroutines = {}
    for file in ("/lib/orbax/checkpoint/x.py", "/lib/other/x.py"):
        names = {}
        exec(compile("async def read(): pass", file, "exec"), names)
        coroutines[file] = names["read"]()
        sys.unraisablehook(SimpleNamespace(object=coroutines[file], exc_value=ValueError("x")))
        coroutines[file].close()
    sys.unraisablehook(SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed")))
    assert [unraisable.object for unraisable in shown] == [coroutines["/lib/other/x.py"]]
