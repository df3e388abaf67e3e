"""experiments/spike_recovery: run the script end to end at tiny size, and check the README's table."""

import importlib.util
import json
from pathlib import Path

import pytest
import tiny

from pma_jax.studies import pages

FOLDER = Path(__file__).parent.parent / "experiments" / "spike_recovery"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("spike_recovery_script", FOLDER / "script.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_script_trains_classifies_and_plots(script, workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "BASE", [])
    monkeypatch.setattr(script, "FROM_SCRATCH", {"clean": ["schedule.peak_rate=0.01"]})
    # A warm-up of its own would override the one below, which lets the tiny model survive.
    factors = script.FACTORS | {"warm-up": {"none": "spikes.attempts=1", "25 steps": "spikes.attempts=1"}}
    monkeypatch.setattr(script, "FACTORS", factors)
    monkeypatch.setattr(script, "ARMS", script.factorial())
    # The ramp of tests/training/test_rollback.py: its rate makes the tiny model diverge; after a rollback it is slow.
    made = tiny.config(workspace, training__total_tokens=64 * tiny.BATCH_TOKENS)
    keys = {
        "data.source": "files",
        "data.files": made.data.files[0],
        "data.held_out_percent": 20,
        "data.cache_dir": made.data.cache_dir,
        "model.width": 16,
        "model.layers": 2,
        "model.heads": 2,
        "model.kv_heads": 2,
        "model.head_dim": 8,
        "model.hidden": 32,
        "model.scan_layers": True,
        "training.total_tokens": 64 * tiny.BATCH_TOKENS,
        "training.sequence_length_tokens": 32,
        "training.batch_size_sequences": 8,
        "training.log_interval_tokens": tiny.BATCH_TOKENS,
        "schedule.peak_rate": 5.0,
        "schedule.warmup_tokens": 100 * tiny.BATCH_TOKENS,
        "checkpoint.interval_tokens": 4 * tiny.BATCH_TOKENS,
        "checkpoint.kinds": "point",
        "checkpoint.state_interval_tokens": 4 * tiny.BATCH_TOKENS,
        "checkpoint.keep_states": 99,
        "checkpoint.keep_states_at_tokens": "()",
        "evaluation.tokens": 500,
        "evaluation.batch_size_sequences": 8,
        "preview.windows": "()",
        "mesh.cpu_devices": 0,
        "spikes.window_tokens": 16 * tiny.BATCH_TOKENS,
        "spikes.patience_tokens": 6 * tiny.BATCH_TOKENS,
        "spikes.confirm_steps": 3,
        "spikes.loss_z": 3,
        "spikes.minimum_rise_nats": 0.3,
        "spikes.warmup_tokens": 800 * tiny.BATCH_TOKENS,
    }
    arguments = ["script.py", "--runs", str(tmp_path / "runs"), "--seeds", "0,1", "--out", str(tmp_path / "out")]
    arguments += ["--evaluation-tokens", "400"]
    monkeypatch.setattr("sys.argv", arguments + [f"--config.{key}={value}" for key, value in keys.items()])
    script.main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    arms = results["seeds"]["0"]
    back = set(script.factorial())
    assert set(arms) == {"nothing", "clean", *back} and len(back) == 12 and results["never_collapsed"] == []
    assert arms["nothing"]["onset_tokens"] and not arms["nothing"]["went_back_to_tokens"]
    for arm in back:
        assert arms[arm]["went_back_to_tokens"][0] < arms["nothing"]["onset_tokens"]
        assert arms[arm]["curve"][0] == arms["nothing"]["curve"][0], "identical up to the spike"
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert script.format_report(results) in capsys.readouterr().out
    script.main()
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert again == results, "finished runs are not trained again"


def test_page_matches_the_results(script):
    page, file = (FOLDER / "README.md").read_text(), FOLDER / "results.json"
    if not file.exists():
        assert pages.extract_results(page) == "", "a page without results.json shows no results"
        return
    results = json.loads(file.read_text())
    assert pages.extract_results(page) == script.format_report(results)
    assert pages.find_bare_figures(pages.extract_results(page)) == [] and pages.find_unknown_figures(page) == []
    assert len(results["seeds"]) == script.COLLAPSES and results["text"]["documents"] >= 10
    for arms in results["seeds"].values():
        assert script.judge(json.loads(json.dumps(arms))) == arms, "the verdicts follow from the numbers"


def test_odds_and_the_test_against_the_restart_agree_with_counts_by_hand(script):
    page = importlib.import_module("recovery_page")
    passes = {page.RESTART: [0] * 10, "better": [1] * 6 + [0] * 4, "same": [0] * 10}
    seeds = {str(i): {arm: {"passes": bool(of[i])} for arm, of in passes.items()} for i in range(10)}
    results = {"seeds": seeds}
    assert page.against_restart(results, "better") == pytest.approx(2 * 0.5**6), "six of six differences are better"
    assert page.against_restart(results, "same") == 1
    assert page.format_odds([1.0] * 6 + [0.0] * 4) == "6 of 10 [26%, 88%]"
