"""experiments/: every script that answers a question runs end to end, and every page says what its results say."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from pma_jax.studies import pages, study

FOLDER = Path(__file__).parent.parent / "experiments"
QUESTIONS = sorted(path.parent for path in FOLDER.glob("*/script.py") if "run_experiment(" in path.read_text())
NAMES = [folder.name for folder in QUESTIONS]
# Up to dozens of runs each; .ci/run has that of stable_phase, and test_study.py a script of its own.
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
SCRIPTS = [pytest.param(folder, id=folder.name, marks=SLOW) for folder in QUESTIONS]


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_words(workspace):
    text, cache = tiny.write_functions(workspace / "functions"), workspace / "cache"
    words = {"data.source": "files", "data.files": text, "data.cache_dir": cache}
    words |= {"data.held_out_percent": 20, "mesh.cpu_devices": 0}
    return [f"--config.{key}={value}" for key, value in words.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder of runs, as the scripts share one."""
    return tmp_path_factory.mktemp("science")


@pytest.mark.parametrize("folder", SCRIPTS)
def test_a_script_runs_from_end_to_end(folder, runs, workspace, tmp_path):
    shutil.copy(folder / "README.md", tmp_path)
    before = [path.read_text() for path in (folder / "README.md", FOLDER / "README.md")]
    words = [str(folder / "script.py"), "--runs", str(runs), "--out", str(tmp_path), "--tiny", *data_words(workspace)]
    # A process of its own with one device, as a user has it; eight simulated ones take three times as long.
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=tiny.environment(devices=1), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    script = loaded(folder / "script.py")
    said = pages.extract_results((tmp_path / "README.md").read_text())
    assert said == study.render_results(script.report, results).strip() and said in done.stdout
    row = script.summarize(results)
    assert results["row"] == dataclasses.asdict(row) and all(dataclasses.astuple(row)), "no part of the row is empty"
    drawn = {path.name for path in tmp_path.glob("*.png")}
    pictures = set(re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", (folder / "README.md").read_text()))
    assert drawn and drawn <= pictures, "every figure is on the page"
    assert before == [path.read_text() for path in (folder / "README.md", FOLDER / "README.md")], (
        "only --out is written"
    )


@pytest.mark.mesh
@pytest.mark.parametrize("folder", QUESTIONS, ids=NAMES)
def test_a_page_says_what_its_results_say(folder):
    page = (folder / "README.md").read_text()
    said = pages.extract_results(page)
    command = f"python experiments/{folder.name}/script.py --runs runs/science"
    assert command in page and command in (folder / "script.py").read_text()
    if not (folder / "results.json").exists():
        assert said == "", "a page without results.json shows no results"
        return
    script, results = loaded(folder / "script.py"), json.loads((folder / "results.json").read_text())
    assert said == study.render_results(script.report, results).strip()
    assert results["row"] == dataclasses.asdict(script.summarize(results))
    assert len(results["made"]["seeds"]) >= 3 and results["made"]["overrides"] == []
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page):
        assert (folder / picture).exists()


def test_the_page_of_all_has_the_row_of_every_question_with_results():
    assert pages.extract_results((FOLDER / "README.md").read_text()) == pages.format_index(FOLDER)


def test_the_one_command_knows_every_question():
    assert set(NAMES) <= set(loaded(FOLDER / "run_all.py").QUESTIONS)


@pytest.mark.slow
def test_the_one_command_goes_on_after_a_failure_and_tells(workspace, runs, tmp_path):
    command = [sys.executable, str(FOLDER / "run_all.py")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()].count("stable_phase") == 1
    words = [*command, "--runs", str(runs), "--out", str(tmp_path), "--tiny", "--only", "stable_phase,learning_rate"]
    done = subprocess.run(
        [*words, "--jobs", "2", "--config.data.source=nowhere"],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "[1 of 2] stable_phase: failed" in done.stderr and "[2 of 2] learning_rate: failed" in done.stderr
    refused = subprocess.run([*command, "--only", "no_such"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "unknown experiment no_such" in refused.stderr
    refused = subprocess.run([*command, "--runs", str(runs), "--jobs", "0"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--jobs is 0: give 1 to" in refused.stderr


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_jobs_share_the_cores_without_one_in_common():
    cores, run_all = os.sched_getaffinity(0), loaded(FOLDER / "run_all.py")
    for jobs in range(1, len(cores) + 1):
        shares = run_all.split_cores(jobs)
        assert sorted(itertools.chain(*shares)) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
