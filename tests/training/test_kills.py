"""A part of the fault harnesses of experiments/faults: kills at the phases of each verb, and power cuts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "experiments" / "faults"


def run(script, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, FAULTS / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cells", "kills"),
    [
        (["train"], 16),
        (["merge", "sweep", "watch", "report", "export", "import", "prepare"], 21),
        (["fork"], 8),
        (["two processes"], 3),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_killed_commands_make_what_others_make(tmp_path, cells, kills):
    summary = run("kills.py", "--kills", kills, "--folder", tmp_path / "kills", "--only", *cells)
    assert int(summary.split()[0]) >= kills * 2 // 3 and summary.endswith("0 verbs failed")


@pytest.mark.long
def test_power_cuts_lose_nothing_that_a_state_relies_on(tmp_path):
    summary = run("power_cuts.py", "--cuts", 12, "--folder", tmp_path / "cuts")
    assert int(summary.split()[0]) >= 12 and summary.endswith("0 cells failed") and "(0 cuts undid" not in summary
