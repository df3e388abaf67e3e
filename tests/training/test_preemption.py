import os
import re
import signal
import subprocess
import time

import pytest
import tiny
from test_loop import assert_same_run

from pma_jax import cli
from pma_jax.config import resolve
from pma_jax.merging.engine import merge as engine
from pma_jax.runs.directory import open_run
from pma_jax.runs.retention import tokens_to_keep
from pma_jax.runs.states import STATES
from pma_jax.runtime import signals
from pma_jax.training import loop
from pma_jax.training.fork import fork
from pma_jax.training.loop import train


def send_signal_at(monkeypatch, number, step):
    """Send this process a signal while the batch of `step` is placed."""
    place, calls = loop.put_batch, iter(range(10**6))

    def place_and_signal(mesh, batch):
        if next(calls) == step:
            signal.raise_signal(number)
        return place(mesh, batch)

    monkeypatch.setattr(loop, "put_batch", place_and_signal)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_signal_saves_a_state_at_the_next_boundary_and_loses_no_step(finished, tmp_path, monkeypatch, number, status):
    with monkeypatch.context() as patch, pytest.raises(signals.Stopped) as stopped:
        send_signal_at(patch, number, 17)
        train(finished.config, tmp_path / "run")
    assert stopped.value.status == status
    name = signal.Signals(number).name
    assert re.fullmatch(
        rf"stopped by {name}: the state at step 18 \(4,608 tokens\) is saved; repeat the command .*", str(stopped.value)
    )
    run = open_run(tmp_path / "run")
    assert [s.step for s in run.states] == [8, 16, 18]
    assert run.newest_resumable_state.step == 18
    assert [r["step"] for r in run.metrics if r["kind"] == "train"] == list(range(1, 19)), "every step has its record"
    # It resumes bitwise at step 18, and the finished directory equals that of an uninterrupted run.
    assert_same_run(train(run.config, run.path), finished)


def test_retention_is_unaffected_by_repeated_preemption(finished, workspace, tmp_path, monkeypatch):
    config = tiny.config(workspace, checkpoint__keep_states=1)
    for step in (2, 8, 1, 4):
        with monkeypatch.context() as patch, pytest.raises(signals.Stopped):
            send_signal_at(patch, signal.SIGTERM, step)
            train(config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    # Preempted at steps 3, 12, 14 and 19: retention keeps the newest regular state, and of the others only the newest.
    assert [s.step for s in run.states] == [16, 19]
    run = train(config, run.path)
    assert [s.step for s in run.states] == [24]
    assert tiny.numbers(run) == tiny.numbers(finished)
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_fork_may_start_where_a_run_was_preempted(finished, workspace, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(signals.Stopped):
        send_signal_at(patch, signal.SIGTERM, 9)
        train(finished.config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    forked = fork(run, 10 * tiny.BATCH_TOKENS, finished.config, tmp_path / "fork")
    assert [s.step for s in forked.states] == [10]
    tiny.assert_equal(tiny.read(train(forked.config, forked.path).snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_nothing_is_saved_before_the_first_step(finished, tmp_path, monkeypatch):
    run_of = loop.open_or_create

    def signal_and_open(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return run_of(*arguments)

    with monkeypatch.context() as patch, pytest.raises(signals.Stopped, match="no step was done"):
        patch.setattr(loop, "open_or_create", signal_and_open)
        train(finished.config, tmp_path / "run")
    assert open_run(tmp_path / "run").states == []


def test_signal_handlers_are_restored(finished, tmp_path):
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.catch_signals(raises_stopped=True), signals.catch_signals(raises_stopped=False) as inner:
        assert inner.signal is None and inner.name == ""
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


TWICE = """
import sys, time
from pma_jax import cli
from pma_jax.runtime import signals
with signals.catch_signals(raises_stopped=False):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_second_signal_ends_the_process_at_once():
    process = subprocess.Popen(tiny.python(TWICE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "stopped at once: published checkpoints are intact\n")


def test_states_between_marks_do_not_count_for_retention():
    config = resolve(
        {
            "training": {"sequence_length_tokens": 32, "batch_size_sequences": 8, "total_tokens": 25600},
            "checkpoint": {"state_interval_tokens": 2560, "keep_states": 2, "keep_states_at_tokens": (2560,)},
        }
    )
    published = [2560, 2816, 5120, 7680, 7936]
    assert tokens_to_keep(config, STATES, published, 7936, []) == {2560, 5120, 7680, 7936}
    assert tokens_to_keep(config, STATES, [*published, 10240], 10240, []) == {2560, 7680, 10240}
    # After resuming, states that are not reached again yet replace none.
    assert tokens_to_keep(config, STATES, [2560, 5120, 7680, 10240], 7936, []) == {2560, 5120, 7680, 10240}


@pytest.mark.slow
def test_command_reports_preemption_in_one_line_and_exits_with_its_status(finished, workspace, tmp_path):
    file = tiny.write_config(tmp_path / "config.py", workspace, training__total_tokens=10**6)
    command_line = ["train", "--config", file, "--workdir", tmp_path / "run"]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = subprocess.Popen(
            tiny.command(*command_line), stderr=subprocess.PIPE, text=True, env=tiny.environment()
        )
        for line in process.stderr:
            if "loss" in line:
                break
        process.send_signal(number)
        last = process.stderr.read().splitlines()[-1]
        assert process.wait(60) == status
        assert last.startswith(f"stopped by {signal.Signals(number).name}: the state at step ")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_other_verbs_stop_at_once_with_one_line(finished, tmp_path, monkeypatch, capsys, number, status):
    def interrupted(*arguments, **options):
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(engine, "merge", interrupted)
    command_line = ["merge", str(finished.path), "--last", "2", "--out", str(tmp_path / "merged")]
    assert cli.main(command_line) == status
    assert capsys.readouterr().err == ("stopped: nothing was published; the same command resumes the merge\n")
    monkeypatch.undo()
    assert cli.main(command_line) == 0
