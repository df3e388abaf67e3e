import re
import signal
import subprocess
import time

import pytest
import tiny
from test_loop import assert_same_run

from pma_jax.config import resolve
from pma_jax.runs.directory import open_run
from pma_jax.runs.retention import tokens_to_keep
from pma_jax.runs.states import STATES
from pma_jax.runtime import signals
from pma_jax.training import loop
from pma_jax.training.fork import fork
from pma_jax.training.loop import train


def send_signal_at(monkeypatch, number, step):
    """Send this process a signal while the batch of `step` is placed, and wait until it is recorded."""
    place, calls, started = loop.put_batch, iter(range(10**6)), []
    start = signals.StopRequest.start

    def start_and_keep(request):
        started.append(request)
        start(request)

    def place_and_signal(mesh, batch):
        if next(calls) == step:
            signal.raise_signal(number)
            wait_until(lambda: started[0].signal == number)
        return place(mesh, batch)

    monkeypatch.setattr(loop, "put_batch", place_and_signal)
    monkeypatch.setattr(signals.StopRequest, "start", start_and_keep)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_fork_may_start_where_a_run_was_preempted(finished, workspace, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(signals.Stopped):
        send_signal_at(patch, signal.SIGTERM, 9)
        train(finished.config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    forked = fork(run, 10 * tiny.BATCH_TOKENS, finished.config, tmp_path / "fork")
    assert [s.step for s in forked.states] == [10]
    tiny.assert_equal(tiny.read(train(forked.config, forked.path).snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_signal_handlers_are_restored(finished, tmp_path):
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.record_signals() as request:
        assert [signal.getsignal(number) for number in signals.SIGNALS] == before, "nothing is recorded before start"
        request.start()
        request.start()
        assert request.signal is None and request.name == ""
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: request.name == "SIGTERM")
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def wait_until(condition):
    """Wait until the thread that reads signals has recorded one."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


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
