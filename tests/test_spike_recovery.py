"""experiments/spike_recovery: run the script end to end at tiny size, and check the README's table."""

import importlib.util
import json
from pathlib import Path

import pytest
import tiny

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
    monkeypatch.setattr(script, "RESET", [])
    tiny_arms = {"restart": "spikes.snapshots=1", "PMA-init N=3": "spikes.snapshots=3"}
    monkeypatch.setattr(script, "ARMS", {arm: [key, "spikes.attempts=1"] for arm, key in tiny_arms.items()})
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
    arguments = ["script.py", "--runs", str(tmp_path / "runs"), "--seeds", "0", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", arguments + [f"--config.{key}={value}" for key, value in keys.items()])
    script.main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    arms = results["seeds"]["0"]
    assert set(arms) == {"nothing", "clean", "restart", "PMA-init N=3"} and results["never_collapsed"] == []
    assert arms["nothing"]["onset_tokens"] and not arms["nothing"]["went_back_to_tokens"]
    for arm in ("restart", "PMA-init N=3"):
        assert arms[arm]["went_back_to_tokens"][0] < arms["nothing"]["onset_tokens"]
        assert arms[arm]["evaluations"][0] == arms["nothing"]["evaluations"][0], "identical up to the spike"
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert script.format_table(results) in shown
    script.main()
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert again == results, "finished runs are not trained again"


def test_readme_table_matches_the_results(script):
    results = json.loads((FOLDER / "results.json").read_text())
    page = (FOLDER / "README.md").read_text()
    assert script.format_table(results) in page
    assert f"{results['machine_hours']:.2f} machine hours" in page
    assert results["never_collapsed"] == [] or str(results["never_collapsed"]) in page
    judged = script.judge(json.loads(json.dumps(results["seeds"]))[next(iter(results["seeds"]))])
    assert judged == next(iter(results["seeds"].values())), "the verdicts follow from the numbers"
