"""experiments/spike_recovery: run the script end to end at tiny size, and check the numbers of its page."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import recovery_page as page
import tiny

FOLDER = Path(__file__).parent.parent / "experiments" / "spike_recovery"
# The ramp of tests/training/test_rollback.py: its rate makes the tiny model diverge.
RAMP = {
    "training.sequence_length_tokens": 32,
    "training.total_tokens": 64 * tiny.BATCH_TOKENS,
    "schedule.peak_rate": 5.0,
    "schedule.warmup_tokens": 100 * tiny.BATCH_TOKENS,
    "spikes.window_tokens": 16 * tiny.BATCH_TOKENS,
    "spikes.patience_tokens": 6 * tiny.BATCH_TOKENS,
    "spikes.confirm_steps": 3,
    "spikes.loss_z": 3,
    "spikes.minimum_rise_nats": 0.3,
}


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_each_arm_goes_back_to_before_the_spike(workspace, tmp_path, jobs):
    text, cache = tiny.write_functions(workspace / "functions"), workspace / "cache"
    keys = RAMP | {"data.source": "files", "data.files": text, "data.cache_dir": cache, "data.held_out_percent": 20}
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--tiny", "--jobs", str(jobs)]
    arguments += ["--sizes", "science_spikes", *(f"--config.{key}={value}" for key, value in keys.items())]

    def run():
        done = subprocess.run(
            [sys.executable, str(FOLDER / "script.py"), *arguments],
            capture_output=True,
            text=True,
            env=tiny.environment(devices=1),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((tmp_path / "out" / "results.json").read_text()), done.stdout

    results, printed = run()
    back = {page.arm_name(n, o, w) for n in page.WINDOWS for o in page.OPTIMIZERS for w in page.WARM_UPS}
    assert set(results["seeds"]) == {"0", "1"} and results["never_collapsed"] == []
    for arms in results["seeds"].values():
        assert set(arms) == {"nothing", "clean", "skip updates", "restart, pass over data", *back} and len(back) == 12
        assert arms["nothing"]["onset_tokens"] and not arms["nothing"]["went_back_to_tokens"]
        for arm in back:
            assert arms[arm]["went_back_to_tokens"][0] < arms["nothing"]["onset_tokens"]
            assert set(arms[arm]["optimizers"]) == {"restore" if "restored" in arm else "reset"}
            assert arms[arm]["curve"][0] == arms["nothing"]["curve"][0], "identical up to the spike"
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert page.report(results) in printed
    assert run()[0]["seeds"] == results["seeds"], "finished runs are not trained again"


@pytest.mark.mesh
def test_verdicts_follow_from_the_numbers():
    file = FOLDER / "results.json"
    seeds = json.loads(file.read_text())["seeds"] if file.exists() else {}
    for arms in seeds.values():
        assert page.judge(json.loads(json.dumps(arms))) == arms
        for n, optimizer, warm_up in itertools.product(page.WINDOWS, page.OPTIMIZERS, page.WARM_UPS):
            done = arms[page.arm_name(n, optimizer, warm_up)]["optimizers"]
            assert set(done) == {"restore" if optimizer == "restored" else "reset"}
    assert len(seeds) in (0, 10)


def test_odds_and_the_test_against_the_restart_agree_with_counts_by_hand():
    passes = {page.RESTART: [0] * 10, "better": [1] * 6 + [0] * 4, "same": [0] * 10}
    seeds = {str(i): {arm: {"passes": bool(of[i])} for arm, of in passes.items()} for i in range(10)}
    results = {"seeds": seeds}
    assert page.mcnemar(results, "better", page.RESTART) == pytest.approx(2 * 0.5**6), (
        "six of six differences are better"
    )
    assert page.mcnemar(results, "same", page.RESTART) == 1
    assert page.format_odds([1.0] * 6 + [0.0] * 4) == "6 of 10 [26%, 88%]"


def test_a_page_without_a_collapse_says_so():
    results = {"seeds": {}, "never_collapsed": [0, 1]}
    assert page.report(results) == "No run collapsed, of seeds 0, 1." and page.draw(results) == {}
    assert page.summarize(results).found == "no run collapsed"
