"""Run every script of experiments/ that answers a question, and check that each page matches its results."""

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from pma_jax import config as configuration
from pma_jax.evaluation.held_out import prepare_tokens
from pma_jax.studies import experiment, pages, recorded_runs
from pma_jax.studies.tuning import TUNING_SEEDS

FOLDER = Path(__file__).parent.parent / "experiments"
QUESTIONS = sorted(path.parent for path in FOLDER.glob("*/script.py") if "run_experiment(" in path.read_text())
NAMES = [folder.name for folder in QUESTIONS]
# Each trains up to dozens of runs; test_study.py tests a script of its own, in `.ci/run`. test_spike_recovery.py runs
# the one that needs a loss spike.
SCRIPTS = [
    pytest.param(folder, id=folder.name, marks=pytest.mark.long)
    for folder in QUESTIONS
    if folder.name != "spike_recovery"
]


def load_module(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_keys(workspace):
    text, cache = tiny.write_functions(workspace / "functions"), workspace / "cache"
    arguments = {"data.source": "files", "data.files": text, "data.cache_dir": cache}
    arguments |= {"data.held_out_percent": 20, "mesh.cpu_devices": 0}
    return [f"--config.{key}={value}" for key, value in arguments.items()]


def write_tuned_settings(workspace, path):
    """Write results of the experiment tuning, with the digest of the tests' text."""
    overrides = [key.removeprefix("--config.") for key in data_keys(workspace)]
    digest = prepare_tokens(configuration.resolve(configuration.defaults(), overrides)).digest
    best = {"science_small": {"best": {"raw": ["schedule.peak_rate=0.003"]}, "tokens": 4096}}
    path.write_text(json.dumps({"made": {"text": {"corpus_digest": digest}}, "sizes": best}))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return one folder of runs, which the scripts share."""
    return tmp_path_factory.mktemp("science")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", SCRIPTS)
def test_script_runs_end_to_end(folder, runs, workspace, tmp_path):
    shutil.copy(folder / "README.md", tmp_path)
    before = [path.read_text() for path in (folder / "README.md", FOLDER / "README.md")]
    arguments = [
        str(folder / "script.py"),
        "--runs",
        str(runs),
        "--out",
        str(tmp_path),
        "--tiny",
        *data_keys(workspace),
    ]
    if folder.name == "tasks":  # its answers need longer sequences
        arguments += ["--config.training.sequence_length_tokens=128", "--evaluation-tokens", "1024"]
    if folder.name == "stable_phase":
        arguments += ["--tuned", str(write_tuned_settings(workspace, tmp_path / "tuned.json"))]
    # A separate process with one device, as for a user; eight simulated devices take three times as long.
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=tiny.environment(devices=1), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    script = load_module(folder / "script.py")
    output = pages.extract_results((tmp_path / "README.md").read_text())
    assert output == experiment.render_results(script.report, results).strip() and output in done.stdout
    row = script.summarize(results)
    assert results["row"] == dataclasses.asdict(row) and all(map(str, dataclasses.astuple(row))), (
        "no cell of the row is empty"
    )
    drawn = {path.name for path in tmp_path.glob("*.png")}
    pictures = set(re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", (folder / "README.md").read_text()))
    assert drawn and drawn <= pictures, "the page embeds every figure"
    assert before == [path.read_text() for path in (folder / "README.md", FOLDER / "README.md")], (
        "only --out is written"
    )


@pytest.mark.mesh
@pytest.mark.parametrize("folder", QUESTIONS, ids=NAMES)
def test_page_matches_its_results(folder):
    page = (folder / "README.md").read_text()
    output = pages.extract_results(page)
    command = f"python experiments/{folder.name}/script.py --runs runs/science"
    assert command in page and command in (folder / "script.py").read_text()
    if not (folder / "results.json").exists():
        assert output == "", "a page without results.json shows no results"
        return
    script, results = load_module(folder / "script.py"), json.loads((folder / "results.json").read_text())
    assert output == experiment.render_results(script.report, results).strip()
    assert results["row"] == dataclasses.asdict(script.summarize(results))
    assert pages.find_bare_figures(page) == [], "figures without an interval"
    assert pages.find_unknown_figures(page) == [], "figures of the hand-written text that are not in the results"
    parts = results["made"]["text"]["parts"].values()
    wanted = 131_072 if results["made"]["part"] == "report" else 65_536
    assert all(part["documents"] >= 10 and part["tokens"] >= wanted for part in parts)
    assert len(results["made"]["seeds"]) >= 3 and results["made"]["overrides"] == []
    is_published = results["made"]["part"] == "report"
    assert is_published != bool(set(results["made"]["seeds"]) & set(TUNING_SEEDS)), "settings are chosen on other seeds"
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page):
        assert (folder / picture).exists()


def test_index_page_has_one_row_per_question_with_results():
    assert pages.extract_results((FOLDER / "README.md").read_text()) == pages.format_index(FOLDER)


@pytest.mark.parametrize("page", ["README.md", "experiments/README.md", "docs/findings.md"])
def test_paragraphs_about_experiments_have_no_figures_but_those_of_the_pages_that_they_name(page):
    text, named = (FOLDER.parent / page).read_text(), r"\b(\w+)/README\.md|`experiments/(\w+)"
    text = pages.replace_results(text, "") if pages.RESULTS_BEGIN in text else text
    for paragraph in re.split(r"\n\n|\n- ", text):
        names = {one or other for one, other in re.findall(named, paragraph)} & set(NAMES)
        if page == "README.md" and not names:
            continue  # of the demo and of speed, which have pages of their own
        results = "".join(pages.extract_results((FOLDER / name / "README.md").read_text()) for name in sorted(names))
        alone = f"{paragraph.replace(pages.RESULTS_BEGIN, '').replace(pages.RESULTS_END, '')}{pages.RESULTS_BEGIN}"
        assert pages.find_unknown_figures(f"{alone}{results}{pages.RESULTS_END}") == [], paragraph
        assert pages.find_bare_figures(paragraph) == [], paragraph


def test_readme_says_what_the_results_say():
    page = (FOLDER.parent / "README.md").read_text()
    assert pages.extract_results(page) == pages.format_summary(FOLDER)


def test_readme_says_how_long_the_recorded_runs_took():
    page = (FOLDER / "README.md").read_text()
    hours = recorded_runs.machine_hours(recorded_runs.read_file(FOLDER / "recorded_runs.jsonl.gz"))
    (said,) = re.findall(r"took (\d+) machine hours", page)
    assert int(said) == pytest.approx(hours, abs=0.05 * hours)


def test_recorded_runs_name_no_folder_of_the_machine_that_trained_them():
    for run in recorded_runs.read_file(FOLDER / "recorded_runs.jsonl.gz"):
        assert re.findall(r'"/[^"]*', json.dumps([run["config"], run["metadata"]])) == []


def test_run_all_lists_every_question():
    assert set(NAMES) <= set(load_module(FOLDER / "run_all.py").QUESTIONS)


@pytest.mark.parametrize(
    ("options", "of_anytime"),
    [
        (
            ["--jobs", "2"],
            [["--jobs", "2"], ["--jobs", "2", "--sizes", "science_long", "--seeds", "0,1,2,3,4", "--add"]],
        ),
        (["--estimate"], [["--estimate"], ["--estimate", "--sizes", "science_long", "--seeds", "0,1,2,3,4"]]),
        (["--sizes=dense_1b"], [["--sizes=dense_1b"]]),
        (["--tiny"], [["--tiny"]]),
    ],
)
def test_run_all_adds_second_sizes_unless_the_command_line_chooses_them(options, of_anytime):
    calls = load_module(FOLDER / "run_all.py").list_calls(["anytime", "weights"], options)
    assert [list(given) for name, given in calls.values() if name == "anytime"] == of_anytime
    assert [list(given) for name, given in calls.values() if name == "weights"] == [options]


@pytest.mark.slow
def test_run_all_continues_after_a_failure_and_reports_it(workspace, runs, tmp_path):
    command = [sys.executable, str(FOLDER / "run_all.py")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()].count("stable_phase") == 1
    arguments = [
        *command,
        "--runs",
        str(runs),
        "--out",
        str(tmp_path),
        "--tiny",
        "--only",
        "stable_phase,learning_rate",
    ]
    done = subprocess.run(
        [*arguments, "--config.data.source=nowhere"],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "[1 of 2] stable_phase: failed" in done.stderr and "[2 of 2] learning_rate: failed" in done.stderr
    estimated = subprocess.run(
        [*arguments, "--only", "weights,learning_rate", "--estimate"],
        capture_output=True,
        text=True,
        env=tiny.environment(),
    )
    assert estimated.returncode == 0, estimated.stderr
    last = estimated.stdout.splitlines()[-1]
    assert re.fullmatch(r"all: about \d\.\d\d machine hours", last)
    assert not (tmp_path / "weights" / "results.json").exists()
    refused = subprocess.run([*command, "--only", "no_such"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "unknown experiment no_such" in refused.stderr


def test_all_contenders_without_a_horizon_were_tried_at_as_many_settings():
    sizes = json.loads((FOLDER / "anytime" / "results.json").read_text())["sizes"]
    for name, size in sizes.items():
        counts = {rival: len({tuple(one["setting"]) for one in tried}) for rival, tried in size["tried"].items()}
        assert len(set(counts.values())) == 1 and len(counts) == 7, f"{name}: {counts}"
        assert {len(of) for of in size["finalists"].values()} == {3}


ANNEALING = json.loads((FOLDER / "annealing" / "results.json").read_text())["sizes"]


@pytest.mark.parametrize(("name", "horizon"), [(name, at) for name, size in ANNEALING.items() for at in size["best"]])
def test_best_annealing_of_a_horizon_has_no_untried_neighbour(name, horizon):
    best, shapes = ANNEALING[name]["best"][horizon], ANNEALING[name]["tried"][horizon]
    assert sum(best["losses"]) == min(sum(of[0]["losses"]) for of in shapes.values())
    tried = [(one["rate"], one["batch"], len(one["losses"])) for one in shapes[best["shape"]] if one["losses"]]
    rate, batch, seeds = tried[0]
    assert len(best["losses"]) == seeds == 3
    for factor, times in ((2**0.5, 1), (2**-0.5, 1), (1, 2), (1, 0.5)):
        near = [one for one in tried if one[:2] == (pytest.approx(rate * factor, rel=0.01), batch * times)]
        assert near or batch * times < 1, (factor, times)


TUNING = FOLDER / "tuning" / "results.json"


def tuned_sizes():
    return json.loads(TUNING.read_text())["sizes"].items() if TUNING.exists() else []


@pytest.mark.parametrize(("name", "size"), tuned_sizes(), ids=lambda value: value if isinstance(value, str) else "")
def test_configuration_of_a_size_is_its_tuned_setting(name, size):
    config = configuration.resolve(configuration.load(name))
    for text in size["configuration"]:
        key, _, value = text.partition("=")
        section, _, field = key.partition(".")
        assert getattr(getattr(config, section), field) == float(value), text


def test_summary_of_the_tuning_names_the_configuration_of_each_size():
    found = json.loads(TUNING.read_text())["row"]["found"]
    for name, _ in tuned_sizes():
        config = configuration.resolve(configuration.load(name))
        rate, batch = config.schedule.peak_rate, config.training.batch_size_sequences
        named = f"{name}: rate {rate:g}, batch {batch}, weight decay {config.optimizer.weight_decay:g}"
        assert named in found


@pytest.mark.parametrize(("name", "size"), tuned_sizes(), ids=lambda value: value if isinstance(value, str) else "")
def test_no_tuned_setting_is_at_the_edge_and_contenders_have_as_many(name, size):
    for horizon, contenders in size["tried"].items():
        assert len({len(tried["settings"]) for tried in contenders.values()}) == 1, (name, horizon)
        for contender, tried in contenders.items():
            best = tried["settings"][tried["best"]]
            assert sum(best["losses"]) == min(sum(one["losses"]) for one in tried["settings"]), (name, contender)
            measured = {(one["rate"], one["batch"], one["weight_decay"]) for one in tried["settings"]}
            near = neighbours(name, horizon, size, (best["rate"], best["batch"], best["weight_decay"]))
            assert near and near <= measured, (name, horizon, contender)


def neighbours(name, horizon, size, setting):
    """Return the settings next to one, along one axis, that the search may try."""
    script = load_module(FOLDER / "tuning" / "script.py")
    axes = script.STATIONARY_AXES if name in script.STATIONARY else script.FINE_AXES
    axes = script.COARSE_AXES if horizon == "a quarter" else axes
    found = set()
    for k, axis in enumerate(axes):
        at = next(i for i in range(-20, 20) if axis.is_valid(i) and axis.value(i) == setting[k])
        for i in (at - 1, at + 1):
            near = (*setting[:k], axis.value(i), *setting[k + 1 :])
            steps = size["tokens"] / (near[1] * size["sequence_tokens"])
            is_refused = name in script.STATIONARY and horizon == "all" and steps * near[0] * near[2] <= 3
            if axis.is_valid(i) and not is_refused and not (horizon == "a quarter" and k == 2):
                found.add(near)
    return found


@pytest.mark.parametrize(("name", "size"), tuned_sizes(), ids=lambda value: value if isinstance(value, str) else "")
def test_adamw_becomes_stationary_where_that_is_the_purpose_of_a_size(name, size):
    config = configuration.resolve(configuration.load(name))
    steps = size["tokens"] / config.batch_tokens
    forgets = config.schedule.peak_rate * config.optimizer.weight_decay
    assert name != "science_long" or steps > 3 / forgets
