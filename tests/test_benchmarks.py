"""Run the accelerator benchmark at a tiny size on CPU, complete and with failing parts."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"


def gpu(out: Path, *options: str) -> tuple[subprocess.CompletedProcess, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command = [sys.executable, str(FOLDER / "gpu.py"), "--config", "tiny", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=environment)
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())["parts"]


def numbers(tree) -> list[float]:
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in numbers(value)]
    if isinstance(tree, list):
        return [x for value in tree for x in numbers(value)]
    return [tree] if isinstance(tree, float) else []


@dataclasses.dataclass
class Event:
    name: str
    start_ns: int
    duration_ns: int

    @property
    def stats(self):
        return [("hlo_op", self.name)]


def test_nested_operations_count_once_and_overlapping_kernels_in_full(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from profile_costs import own_times

    events = [Event("outer", 0, 100), Event("inner", 10, 40), Event("next", 120, 50)]
    seconds = {key[1]: own for key, own in own_times(events, kernels=False)}
    assert {name: round(own * 1e9) for name, own in seconds.items()} == {"outer": 60, "inner": 40, "next": 50}
    kernels = [Event("first", 0, 100), Event("second", 90, 100)]
    assert [round(own * 1e9) for _, own in own_times(kernels, kernels=True)] == [100, 100]


@pytest.mark.slow
def test_failing_part_is_recorded_and_the_others_run(tmp_path):
    done, parts = gpu(tmp_path / "out.json", "--parts", "moe_2k,rates", "--set", "model.kv_heads=7")
    assert done.returncode == 1
    assert "7" in parts["moe_2k"]["error"] and "FAILED" in done.stdout
    assert parts["rates"]["stream_add_bytes_per_second"] > 0


@pytest.mark.slow
def test_parts_without_time_left_are_recorded(tmp_path):
    done, parts = gpu(tmp_path / "out.json", "--parts", "rates,merge", "--limit-seconds", "0.5")
    assert done.returncode == 1
    assert parts["rates"]["error"].startswith("took longer than") and parts["merge"] == {
        "error": "the time limit was reached before this part"
    }


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_every_part_measures(tmp_path):
    done, parts = gpu(tmp_path / "out.json", "--limit-seconds", "1500")
    assert done.returncode == 0, done.stdout
    assert set(parts) == {"rates", "dense_2k", "dense_8k", "moe_2k", "grouped_product", "merge", "training", "pma"}
    assert all(math.isfinite(x) for x in numbers(parts))
    for name in ("dense_2k", "dense_8k", "moe_2k"):
        part = parts[name]
        assert part["mfu"] is None, "the peak of a CPU is unknown"
        assert part["memory_over_floor"] > 1, "the floor is one"
        assert part["costs"]["top"][0]["share"] >= part["costs"]["top"][1]["share"] > 0
        assert sum(part["costs"]["kinds"].values()) == pytest.approx(1)
        assert part["tokens_per_second"] == pytest.approx(part["batch_tokens"] / part["step_seconds"])
    ways = parts["grouped_product"]
    assert {"ours", "batch", "loop", "ragged_dot"} < set(ways)
    assert all(ways[way]["difference_from_ours"] < 0.02 for way in ("batch", "loop", "ragged_dot"))
    assert parts["merge"]["float32_share_of_stream"] > 0
    assert parts["training"]["step_seconds"] > 0
    pma = parts["pma"]
    assert 0 <= pma["marks_with_a_merge_below_raw"] <= pma["marks"]
    assert pma["merged_minus_raw"] == pytest.approx(pma["merged"] - pma["raw"])
