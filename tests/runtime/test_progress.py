"""Progress on a terminal, of which these tests have the other end, and in a log."""

import os
import pty
import re
import subprocess
import threading

import pytest
import tiny

from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.runtime import progress


def run_on_terminal(*arguments):
    """Run `pma` with standard error on a terminal of 120 columns; return what it shows there, without its codes."""
    ours, theirs = pty.openpty()
    shown = []

    def read():
        while True:
            try:
                shown.append(os.read(ours, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    environment = tiny.environment() | {"TERM": "xterm", "COLUMNS": "120"}
    command = tiny.command(*arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=300, check=False)
    os.close(theirs)
    reader.join()
    text = b"".join(shown).decode()
    assert done.returncode == 0, text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.slow
def test_training_shows_tokens_loss_speed_and_time_left(workspace, tmp_path):
    # Of 0.01M tokens in steps of 256, the bar may show any.
    name = tiny.write_config(tmp_path / "tiny.py", workspace)
    shown = run_on_terminal("train", "--config", name, "--workdir", str(tmp_path / "run"))
    assert re.search(r"\d+% 0\.\d\dM tokens  loss \d\.\d{4}  [\d,]+ tokens/s left: \d:\d\d:\d\d", shown)
    assert re.search(r"0\.\d\dM tokens  held-out loss of sma:3 \d\.\d{4} *\r?\n", shown), "it stays above the bar"


@pytest.mark.slow
def test_sweep_and_merge_show_what_is_done_of_how_much(finished, tmp_path):
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(finished.path), str(run)], check=True)
    shown = run_on_terminal("sweep", str(run), "--recipes", "sma", "--windows", "2,3")
    assert re.search(r"\b6/6 reads and evaluations", shown), shown  # three snapshots, two merges and the raw model
    shown = run_on_terminal("merge", str(run), "--last", "3", "--out", str(tmp_path / "merged"))
    assert re.search(r"(\d+\.\d)/\1 [kM]B", shown), shown


@pytest.mark.slow
def test_grid_shows_how_many_runs_have_ended(workspace, tmp_path):
    name = tiny.write_config(tmp_path / "tiny.py", workspace)
    # One at a time: two runs that end together would take the bar from 0 to 2.
    shown = run_on_terminal(
        *("grid", "--config", name, "--root", str(tmp_path / "root"), "--vary", "training.seed=0,1", "--parallel", "1")
    )
    assert re.search(r"\b1/2 runs", shown) and re.search(r"\[1 of 2\] training.seed=0: done in .*\r?\n", shown), shown


def test_progress_counts_each_read_and_each_evaluation(finished):
    seen = []
    evaluate_merges(
        finished.config, finished.snapshots[-3:], [[0, 0, 1], [0, 0.5, 0.5]], "select", lambda *now: seen.append(now)
    )
    assert seen == [(n, 4) for n in range(1, 5)]  # of the two snapshots that have weights, and of two merges


def test_log_has_a_line_now_and_then_with_the_time_left(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.show_progress("merges") as report:
        for done in range(1, 11):
            now[0] += 20
            report(done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "2 of 10 merges, about 2.7 min left",
        "4 of 10 merges, about 2 min left",
        "6 of 10 merges, about 1.3 min left",
        "8 of 10 merges, about 40 s left",
    ]


def test_bytes_are_formatted_as_sizes():
    assert progress.describe_progress("bytes", 500_000_000, 2_000_000_000, 10) == "500 MB of 2 GB, about 30 s left"
