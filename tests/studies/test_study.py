"""A study: trunks cut into units, branches that end at their targets, and the files that a script writes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies import experiment, pages
from pma_jax.studies import study as studies
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, PlannedRun
from pma_jax.studies.study import Study

BATCH = 128  # Tokens: TINY has 8 sequences of 16.


@pytest.fixture(scope="module")
def study(workspace, tmp_path_factory):
    overrides = (*experiment.TINY, *data_keys(workspace))
    return Study(tmp_path_factory.mktemp("runs"), units=16, evaluation_tokens=400, overrides=overrides)


def data_keys(workspace):
    data = tiny.keys(workspace)["data"]
    return [
        "data.source=files",
        f"data.files={data['files'][0]}",
        "data.held_out_percent=20",
        f"data.cache_dir={data['cache_dir']}",
        "mesh.cpu_devices=0",
    ]


@pytest.mark.parametrize("size", studies.SIZES)
def test_trunk_is_cut_into_equal_units_of_complete_steps(size):
    config = Study(Path("cache")).trunk_config(size, seed=2)
    unit = config.checkpoint.interval_tokens
    assert unit % config.batch_tokens == 0 and config.training.total_tokens == 64 * unit
    assert config.training.total_tokens == configuration.load(size).training.total_tokens
    assert config.tokens_to_steps(unit) % config.checkpoint.block_every_steps == 0, (
        "every block mean has the same number of steps"
    )
    assert config.training.seed == 2 and config.schedule.decay == "none"
    assert [t // unit for t in config.checkpoint.keep_states_at_tokens] == Study(Path("cache")).fork_units()


def test_overrides_apply_to_every_run_and_replace_the_studys_own_marks():
    given = ("training.total_tokens=2e6", "training.batch_size_sequences=32", "evaluation.tokens=2048")
    study = Study(Path("cache"), overrides=given)
    config = study.trunk_config("science_small", 0, ["schedule.peak_rate=0.5"])
    unit = 2_000_000 // (4096 * 64) * 4096
    assert config.checkpoint.interval_tokens == unit and config.training.total_tokens == 64 * unit
    assert config.evaluation.tokens == 2048 and config.schedule.peak_rate == 0.5


def test_branches_of_every_length_can_end_at_a_quarter_half_and_the_end():
    study = Study(Path("cache"))
    assert study.branch_lengths(64) == [2, 4, 8, 16, 32] and study.branch_lengths(16) == [1, 2, 4, 8]
    for end in (16, 32, 64):
        assert {end - length for length in study.branch_lengths(end)} <= set(study.fork_units())
    assert Study(Path("cache"), units=16).branch_lengths(4) == [1, 2]


def test_settings_survive_json(study):
    assert Study.from_settings(json.loads(json.dumps(study.settings()))).settings() == study.settings()


def test_text_of_a_study_is_described_with_its_digests(study):
    text = study.describe_text()
    assert set(text["parts"]) == {"select", "report", "fit"} and text["corpus"] == "files"
    assert len({part["digest"] for part in text["parts"].values()} | {text["corpus_digest"]}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minimum_documents": 99}, r"part 'select' of the held-out text has \d+ documents, .* need 99"),
        ({"evaluation_tokens": 10**6}, r"evaluation.tokens is 1000000 but the part 'select' .* has only"),
    ],
)
def test_parts_with_too_few_documents_or_tokens_are_refused(study, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(study, **changes).describe_text()


def test_tuned_settings_are_those_of_the_same_text(study, tmp_path):
    path = tmp_path / "results.json"
    reading = dataclasses.replace(study, tuned=path)
    with pytest.raises(UserError, match=r"no tuned settings in .*results.json: run experiments/tuning"):
        reading.tuned_setting("science_small", "raw")
    best = {"raw": ["schedule.peak_rate=0.001"]}
    tokens = study.trunk_config("science_small", 0).training.total_tokens
    of_size = {"best": best, "tokens": tokens}
    results = {"made": {"text": study.describe_text()}, "sizes": {"science_small": of_size}}
    path.write_text(json.dumps(results))
    assert reading.tuned_setting("science_small", "raw") == ("schedule.peak_rate=0.001",)
    with pytest.raises(UserError, match="has no settings of science_moe, only of science_small"):
        reading.tuned_setting("science_moe", "raw")
    of_size["tokens"] = 2 * tokens
    path.write_text(json.dumps(results))
    with pytest.raises(UserError, match=f"tuned science_small for {2 * tokens:,} tokens, not for the {tokens:,}"):
        reading.tuned_setting("science_small", "raw")
    results["made"]["text"] |= {"corpus": "other", "corpus_digest": "c0ffee"}
    path.write_text(json.dumps(results))
    with pytest.raises(UserError, match=r"results.json was made on another text \(other, c0ffee\) than this study's"):
        reading.tuned_setting("science_small", "raw")


@pytest.mark.slow
def test_trunks_branches_and_losses(study):
    trunk = study.trunk("science_small", 0)
    unit = study.unit_tokens(trunk)
    assert unit == 2 * BATCH and [s.tokens // unit for s in trunk.of_kind("point")] == list(range(1, 17))
    assert len(trunk.of_kind("block_mean")) == 16
    assert [s.tokens // unit for s in trunk.states] == [*study.fork_units(), 16]
    branch = PlannedRun("science_small", 0, (), Branch(12, 16, "cosine")).get(study)
    rates = [r["learning_rate"] for r in branch.metrics if r["kind"] == "train"]
    assert len(branch.of_kind("point")) == 4 and rates[-1] == pytest.approx(0, abs=1e-9)
    losses = study.losses(trunk, [RAW, Cell("sma", 4)], [2, 16])
    assert set(losses) == {(RAW, 2), (RAW, 16), (Cell("sma", 4), 16)}
    assert study.loss(trunk) == losses[RAW, 16] and study.loss(trunk, Cell("sma", 4), 16) == losses[Cell("sma", 4), 16]
    assert study.loss(branch) != study.loss(trunk)
    planned = PlannedRun("science_small", 0, (), Branch(15, 16, start=Cell("sma", 4)))
    assert planned.find(study) is None
    short = planned.get(study)
    assert short.metadata["forked_from"]["weights"].endswith(f"sma-4-{15 * unit}")
    assert planned.find(study).path == short.path
    spent = study.training_cost()
    assert spent["runs"] == 3 and spent["tokens"] == (16 + 4 + 1) * unit and spent["training_hours"] > 0


SCRIPT = '''"""A question."""
import sys
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import PlannedRun
from pma_jax.studies.experiment import run_experiment

def measure(study):
    return {"losses": [study.loss(study.trunk(study.sizes[0], seed)) for seed in study.seeds]}

def report(results):
    return f"losses {results['losses']}"

def summarize(results):
    return IndexRow(3, "what?", "that", "so", f"{results['losses'][0]:.3f}")

def draw(results):
    return {"figure.png": b"PNG"}

def plan(study):
    return [PlannedRun(study.sizes[0], seed) for seed in study.seeds]

if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
'''
PAGE = f"# Page\n\n{pages.RESULTS_BEGIN}\n\n{pages.RESULTS_END}\n\nend\n"


@pytest.mark.slow
def test_script_writes_its_results_figure_page_and_row(workspace, tmp_path):
    folder = tmp_path / "experiments" / "question"
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    for page in (folder / "README.md", folder.parent / "README.md"):
        page.write_text(PAGE)
    arguments = [sys.executable, str(folder / "script.py"), "--runs", str(tmp_path / "runs"), "--tiny"]
    arguments += [f"--config.{key}" for key in data_keys(workspace)]
    done = subprocess.run(
        [*arguments, "--evaluation-tokens", "400"], capture_output=True, text=True, env=tiny.environment()
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert results["made"]["seeds"] == [0, 1] and results["made"]["runs"] == 2 and len(results["losses"]) == 2
    assert results["row"]["effect"] == f"{results['losses'][0]:.3f}"
    output = pages.extract_results((folder / "README.md").read_text())
    assert output.startswith(f"losses {results['losses']}\n") and "Seeds 0, 1; judged on 400 tokens of" in output
    assert output in done.stdout and (folder / "figure.png").read_bytes() == b"PNG"
    assert "| [what?](question/README.md) | that | so |" in (folder.parent / "README.md").read_text()
    (folder / "README.md").write_text(PAGE)
    redrawn = subprocess.run([*arguments, "--redraw"], capture_output=True, text=True, env=tiny.environment())
    assert redrawn.returncode == 0 and pages.extract_results((folder / "README.md").read_text()) == output
    counted, sums = tmp_path / "counted.json", []
    for seeds in ("5,6", "6,5", "5,6,7", "5,6,7"):  # not trained
        estimated = [*arguments, "--estimate", "--seeds", seeds, "--counted", str(counted)]
        subprocess.run(estimated, check=True, capture_output=True, env=tiny.environment())
        sums.append(json.loads(counted.read_text())["hours"])
    assert 0 < sums[0] == sums[1] < sums[2] == sums[3] == pytest.approx(1.5 * sums[0])
    (folder / "README.md").write_text("no marks")
    refused = subprocess.run(arguments, capture_output=True, text=True, env=tiny.environment())
    assert refused.returncode != 0 and "once each" in refused.stderr


def test_unknown_arguments_of_a_script_are_refused(tmp_path, capsys):
    for arguments, output in (
        (["--sead", "1"], "unrecognized arguments: --sead 1"),
        (["--units", "20"], "--units must be a multiple of 16"),
        (["--seeds", "7,101"], "--seeds 101: settings are tuned on these: choose others"),
        (["--runs", __file__], f"--runs: {__file__} is not a directory"),
        (["--counted", "x.json"], "--counted belongs to --estimate"),
    ):
        with pytest.raises(SystemExit):
            experiment.run_experiment(
                str(tmp_path / "script.py"),
                dict,
                str,
                lambda r: IndexRow(1, "", "", "", ""),
                dict,
                lambda study: [],
                arguments=["--runs", "x", *arguments],
            )
        assert output in capsys.readouterr().err


@pytest.mark.slow
def test_script_refuses_an_invalid_key_in_one_line(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [sys.executable, str(tmp_path / "script.py"), "--runs", str(tmp_path / "runs"), "--tiny"]
    done = subprocess.run(
        [*arguments, "--config.model.widht=3"], capture_output=True, text=True, env=tiny.environment(), check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: unknown config key 'model.widht': did you mean 'model.width'?\n"
    assert not (tmp_path / "results.json").exists()


def test_sizes_are_added_to_results_of_the_same_text_and_options(workspace, tmp_path, capsys):
    trained = iter(range(9))

    def run(*arguments):
        return experiment.run_experiment(
            str(tmp_path / "script.py"),
            lambda study: {"sizes": dict.fromkeys(study.sizes, next(trained))},
            lambda results: str(results["sizes"]),
            lambda results: IndexRow(1, "", "", "", ""),
            lambda results: {},
            lambda study: [],
            by_size=True,
            arguments=[
                *("--runs", str(tmp_path / "runs"), "--tiny", "--evaluation-tokens", "400"),
                *(f"--config.{key}" for key in data_keys(workspace)),
                *arguments,
            ],
        )

    with pytest.raises(SystemExit, match=r"error: --add: there is no .*results.json to add to"):
        run("--sizes", "science_small", "--add")
    run("--sizes", "science_small,science_moe")
    added = run("--sizes", "science_long", "--add")
    assert added["sizes"] == {"science_small": 0, "science_moe": 0, "science_long": 1}
    again = run("--sizes", "science_moe", "--add")
    assert list(again["sizes"].items()) == [("science_small", 0), ("science_moe", 2), ("science_long", 1)]
    assert [made["sizes"] for made in (*again["earlier"], again["made"])] == [
        ["science_small"],
        ["science_long"],
        ["science_moe"],
    ]
    fewer = run("--sizes", "science_moe", "--seeds", "0,2,4", "--add")
    assert fewer["made"]["seeds"] == [0, 2, 4], "a larger size may have fewer seeds"
    page = capsys.readouterr().out
    assert "Seeds 0, 2, 4;" in page and "Seeds 0, 1;" in page
    assert "science_small: made at commit" in page and "science_moe: made at commit" in page
    before = (tmp_path / "results.json").read_bytes()
    (tmp_path / "other").mkdir()
    for document in range(200):
        (tmp_path / "other" / f"{document}.txt").write_text(f"document {document} of another text. " * 20)
    for arguments, named in ((["--margin", "0.01"], "margin"), ([f"--config.data.files={tmp_path}/other/*"], "text")):
        with pytest.raises(SystemExit, match=f"error: --add: .*results.json was made with another value of '{named}'"):
            run("--sizes", "science_moe", "--add", *arguments)
    for other in ("--redraw", "--estimate"):
        with pytest.raises(SystemExit):
            run("--add", other)
        assert "--add measures, and --redraw and --estimate do not" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_bytes() == before
