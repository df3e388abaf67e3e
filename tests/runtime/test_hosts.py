import json
import shutil
import signal
import time

import jax
import numpy as np
import processes
import pytest
import tiny
from safetensors.numpy import save_file

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.watch import watch
from pma_jax.merging.engine import provenance
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots, states
from pma_jax.runs.directory import open_run, read_metric_records
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage.paths import absolute_path
from pma_jax.training import rollback
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state

B = tiny.BATCH_TOKENS


def read(snapshot):
    """Read a snapshot's parameters onto this process's devices, whatever the mesh of its run is."""
    abstract = abstract_params(snapshot.config.model, data_parallel_mesh())
    return jax.tree.map(np.asarray, snapshots.restore_params(snapshot, abstract))


def assert_same(run, expected, rtol=1e-5):
    """Assert that two runs' numbers and parameters are equal up to float32 summation order."""
    actual, desired = ([r for r in tiny.numbers(one) if "by" not in r] for one in (run, expected))
    assert [(r["kind"], r["tokens"]) for r in actual] == [(r["kind"], r["tokens"]) for r in desired]
    for one, other in zip(actual, desired, strict=True):
        close = {key: pytest.approx(value, rel=rtol) if type(value) is float else value for key, value in other.items()}
        assert one == close
    assert [s.step for s in run.snapshots] == [s.step for s in expected.snapshots]
    assert [s.step for s in run.states] == [s.step for s in expected.states]
    for one, other in zip(run.snapshots, expected.snapshots, strict=True):
        tiny.assert_close(read(one), read(other), rtol=1e-4, atol=1e-5)


def test_single_process_needs_no_communication(monkeypatch):
    assert (
        hosts.process_index_and_count() == (0, 1) and hosts.is_first_process() and hosts.all_gather_text("a") == ["a"]
    )
    assert hosts.broadcast_from_first(lambda: "b") == "b" and hosts.run_on_first_then_rest(lambda: 3) == 3
    hosts.raise_if_any_failed(None)
    problem = OSError("full")
    with pytest.raises(OSError, match="full"):
        hosts.raise_if_any_failed(problem)
    with pytest.raises(KeyError), hosts.exit_on_error():
        raise KeyError("of this process")


def test_some_of_the_variables_of_a_job_are_refused(monkeypatch):
    values = dict(zip(hosts.ENVIRONMENT_VARIABLES, ["127.0.0.1:1", "2", "0"], strict=True))
    for number in range(1, 7):  # each set of one or two of the three
        for bit, (name, value) in enumerate(values.items()):
            monkeypatch.setenv(name, value) if number & 1 << bit else monkeypatch.delenv(name, raising=False)
        with pytest.raises(UserError, match=r"^set all of JAX_COORDINATOR_ADDRESS, .* or none"):
            hosts.initialize_distributed()


COMMUNICATE = """
import jax
index, count = hosts.process_index_and_count()
assert hosts.all_gather_text("x" * index) == ["", "x", "xx"][:count]
with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):
    assert hosts.broadcast_from_first(lambda: f"from {index}") == "from 0"
seen = []
hosts.run_on_first_then_rest(lambda: seen.append(index))
assert seen == [index]
def refuse():
    raise ValueError(f"refused by {index}")
for ask in (lambda: hosts.broadcast_from_first(refuse), lambda: hosts.run_on_first_then_rest(refuse)):
    try:
        ask()
    except ValueError as error:
        print(error)
try:
    hosts.raise_if_any_failed(OSError("no room") if index == 1 else None)
except (ValueError, OSError) as error:
    print(type(error).__name__, error)
"""


def test_processes_share_results_and_errors():
    job = processes.script(COMMUNICATE, [], 2).check()
    refusals = ["refused by 0", "refused by 0"]
    lines = [job.out(p).splitlines() for p in (0, 1)]
    assert lines == [[*refusals, "StorageError process 1 failed: no room"], [*refusals, "OSError no room"]]


AGREE = """
import errno, sys
from etils import epath
from pma_jax.runs import steps
from pma_jax.storage import atomic
from pma_jax.training import rollback
folder, (index, _) = epath.Path(sys.argv[1]), hosts.process_index_and_count()
class Run:
    path = folder
def fail(*_):
    raise OSError(errno.EIO, "injected")
def report(work):
    try:
        print(work())
    except (ValueError, OSError) as error:
        print(type(error).__name__, error)
rollback.events = lambda run: [{"number": 1, "done": bool(index)}]  # process 1 does not see the event yet
rollback._set_aside_steps = fail
report(lambda: rollback.finish(Run))
write_text, atomic.write_text = atomic.write_text, fail
report(lambda: rollback._write_event(Run, {"number": 1}))
atomic.write_text = write_text
steps.published_steps = (lambda _: []) if index else (lambda _: [folder / "3"])
steps.read_metadata = lambda path, keys: {"tokens": 24}
report(lambda: steps._read_published(folder, steps._read_tokens))
steps.read_metadata = fail
report(lambda: steps._read_published(folder, steps._read_tokens))
"""


@pytest.mark.slow
def test_processes_agree_on_rollbacks_and_published_steps_and_fail_together(tmp_path):
    """Process 0 alone does the work: if it fails, the others must not wait for it."""
    job = processes.script(AGREE, [tmp_path], 2, devices=1).check(120)
    lines = [job.out(p).splitlines() for p in (0, 1)]
    failed = "OSError [Errno 5] injected"
    assert lines[0] == [failed, failed, "{3: 24}", failed]
    assert lines[1] == ["StorageError [Errno 5] injected"] * 2 + ["{3: 24}", "StorageError [Errno 5] injected"]


EVERY_VERB = """
import json, sys
from pathlib import Path
from pma_jax import config
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runs import states
from pma_jax.storage.paths import absolute_path
from pma_jax.evaluation import merges
from pma_jax.evaluation.sweep import sweep
from pma_jax.evaluation.targets import evaluate_targets
from pma_jax.evaluation.watch import watch
from pma_jax.training.loop import train
from pma_jax.training.fork import fork
from pma_jax.training.loop import train
config, fork_config = (config.from_json(Path(path).read_text()) for path in sys.argv[1:3])
workdir, forked = sys.argv[3:5]
run = train(config, workdir)
train(config, workdir)  # complete: nothing is done
lines = list(watch(run, "wma", [2, 3]))
merges._usable_bytes = lambda mesh: 1e9 * (1 + hosts.process_index_and_count()[0])
rows = sweep(run, ["sma", "wma"], [2, 4])["rows"]
loss = evaluate_targets([workdir], [])[0]["loss"]
fork(run, 4096, fork_config, forked)
train(fork_config, forked)
print(json.dumps([lines, rows, loss]))
"""


def write_configs(folder, **configs):
    """Write resolved configurations as files for the processes."""
    paths = []
    for name, made in configs.items():
        (folder / f"{name}.json").write_text(configuration.to_json(made))
        paths.append(folder / f"{name}.json")
    return paths


@pytest.mark.slow
def test_two_processes_equal_one_for_every_verb(finished, tmp_path):
    """Compare training, snapshots, states, previews, watch, sweep, evaluate and fork, on a corpus not yet prepared."""
    fresh = tmp_path / "fresh"
    config = tiny.config(fresh, mesh__data=2, mesh__fsdp=2)
    fork_config = tiny.config(fresh, training__total_tokens=18 * B, mesh__data=2, mesh__fsdp=2)
    configs = write_configs(tmp_path, config=config, fork=fork_config)
    job = processes.script(EVERY_VERB, [*configs, tmp_path / "two", tmp_path / "forked"], 2).check()
    lines, rows, loss = json.loads(job.out(0))
    assert json.loads(job.out(1)) == [lines, rows, loss]
    assert "held-out loss" in job.error(0) and "tokens" not in job.error(1), "exactly one process reports it"
    assert len(list((fresh / "cache").glob("[0-9a-f]*"))) == 1

    two, forked = open_run(tmp_path / "two"), open_run(tmp_path / "forked")
    assert_same(two, finished)
    alone = open_run(shutil.copytree(finished.path, tmp_path / "alone"))
    assert lines == list(watch(alone, "wma", [2, 3]))
    assert len(read_metric_records(two.path / "watch.jsonl")) == len(lines)
    expected = sweep(alone, ["sma", "wma"], [2, 4])["rows"]
    close = {"loss": 1e-5, "standard_error": 1e-4, "difference": 1e-4, "difference_standard_error": 1e-3}
    assert rows == [row | {key: pytest.approx(row[key], rel=rel) for key, rel in close.items()} for row in expected]
    assert loss == pytest.approx(evaluate_targets([str(alone.path)], [])[0]["loss"], rel=1e-5)
    assert forked.metadata["forked_from"]["step"] == 16 and forked.states[-1].step == 18
    trained = {r["step"]: r["loss"] for r in tiny.numbers(finished) if r["kind"] == "train"}
    for record in tiny.numbers(forked):
        if record["kind"] == "train":
            assert record["loss"] == pytest.approx(trained[record["step"]], rel=1e-5)


GRIDS = [
    # Processes, devices per process, mesh: each mesh axis both within a process and across processes.
    (2, 2, {"mesh__data": 4}),
    (2, 2, {"mesh__fsdp": 2, "mesh__tensor": 2}),
    (2, 1, {"mesh__tensor": 2}),
    (4, 2, {"mesh__data": 2, "mesh__fsdp": 4}),
    (4, 2, {"mesh__tensor": 2, "mesh__fsdp": 4}),
]

TRAIN = """
import sys
from pathlib import Path
from pma_jax import config
from pma_jax.training.loop import train
train(config.from_json(Path(sys.argv[1]).read_text()), sys.argv[2])
"""


@pytest.mark.long
@pytest.mark.parametrize(("count", "devices", "mesh"), GRIDS)
def test_training_on_any_grid_of_hosts_and_devices_equals_one_process(
    finished, workspace, tmp_path, count, devices, mesh
):
    (config,) = write_configs(tmp_path, config=tiny.config(workspace, **mesh))
    processes.script(TRAIN, [config, tmp_path / "run"], count, devices).check(600)
    assert_same(open_run(tmp_path / "run"), finished)


@pytest.mark.long
def test_experts_and_block_means_across_processes(workspace, tmp_path):
    keys = {
        "model__experts": 4,
        "model__expert_hidden": 16,
        "checkpoint__kinds": ("point", "block_mean"),
        "checkpoint__block_every_steps": 2,
        "training__total_tokens": 8 * B,
    }
    alone = train(tiny.config(workspace, **keys), tmp_path / "alone")
    (config,) = write_configs(tmp_path, config=tiny.config(workspace, **keys, mesh__expert=4))
    processes.script(TRAIN, [config, tmp_path / "run"], 2).check(600)
    assert_same(open_run(tmp_path / "run"), alone)
    for one, other in zip(*(run.of_kind("block_mean") for run in (open_run(tmp_path / "run"), alone)), strict=True):
        tiny.assert_close(read(one), read(other), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_run_resumes_on_other_processes_and_another_mesh(finished, workspace, tmp_path):
    """Train 8 steps on each of 4 processes, then 2, then 1."""
    run = tmp_path / "run"
    for count, devices, mesh, last in (
        (4, 2, {"mesh__fsdp": 8}, 8),
        (2, 2, {"mesh__data": 2, "mesh__tensor": 2}, 16),
        (1, 1, {"mesh__data": 1}, 24),
    ):
        (config,) = write_configs(tmp_path, config=tiny.config(workspace, **mesh))
        processes.script(TRAIN_UNTIL, [config, run, last], count, devices).check(600)
        assert open_run(run).newest_resumable_state.step == last
    assert_same(open_run(run), finished)


TRAIN_UNTIL = """
import sys
from pathlib import Path
from pma_jax import config
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import snapshots
from pma_jax.runs import states
from pma_jax.storage.paths import absolute_path
from pma_jax.training import loop
config = config.from_json(Path(sys.argv[1]).read_text())
last = int(sys.argv[3])
save = states.save_state
class Stop(BaseException): pass
def save_and_stop(writer, state, progress):
    save(writer, state, progress)
    if progress.step == last:
        raise Stop
states.save_state = save_and_stop
try:
    loop.train(config, sys.argv[2])
except Stop:
    pass
"""


def wait_until(job, is_time, seconds=300.0):
    """Wait until `is_time` returns True, while all processes are alive."""
    end = time.monotonic() + seconds
    while not is_time() and time.monotonic() < end:
        assert all(p.poll() is None for p in job.processes), [job.error(p)[-3000:] for p in range(len(job.processes))]
        time.sleep(0.05)


def kill_one(job, index, is_time, seconds=300.0):
    """Kill one process when `is_time` returns True and require the others to stop in time; print time and statuses."""
    wait_until(job, is_time, seconds)
    job.processes[index].kill()
    start = time.monotonic()
    statuses = job.wait(seconds)
    taken = time.monotonic() - start
    print(f"{len(statuses)} processes, {index} killed: the others stopped after {taken:.1f} s with {statuses}")
    assert statuses == [-signal.SIGKILL if p == index else 75 for p in range(len(statuses))], job.error(1 - index)[
        -2000:
    ]
    assert taken < 5 * processes.HEARTBEAT_SECONDS
    for process in set(range(len(statuses))) - {index}:
        assert "another process was lost" in job.error(process)


WAIT = """
import sys, time
with hosts.exit_on_error():
    hosts.all_gather_text("")
    print("ready", flush=True)
    if sys.argv[1] == "no collective" or hosts.process_index_and_count()[0] == int(sys.argv[2]):
        time.sleep(300)
    hosts.all_gather_text("") if sys.argv[1] == "gather" else hosts.barrier("of the test")
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["no collective", "gather", "barrier"])
def test_lost_process_ends_the_others_with_75(wait):
    for killed in (0, 1):
        job = processes.script(WAIT, [wait, killed], 2, devices=1)
        kill_one(job, killed, lambda job=job: all("ready" in job.out(p) for p in (0, 1)))


def saves(run) -> bool:
    return any(".orbax-checkpoint-tmp" in path.name for path in (run / "states").glob("*"))


PHASES = {
    "start": lambda run: (run / "config.json").exists(),
    "training": lambda run: len(read_metric_records(absolute_path(run / "metrics.jsonl"))) > 10,
    "saving": saves,
    "evaluation": lambda run: (
        "evaluation" in {r["kind"] for r in read_metric_records(absolute_path(run / "metrics.jsonl"))}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_lost_process_in_every_phase_of_training(workspace, tmp_path, phase, killed):
    keys = {"training__total_tokens": 400 * B, "checkpoint__state_interval_tokens": 4 * B, "mesh__fsdp": 2}
    file = tiny.write_config(tmp_path / "config.py", workspace, **keys)
    job = processes.pma(["train", "--config", file, "--workdir", tmp_path / "run"], 2, devices=1)
    kill_one(job, killed, lambda: PHASES[phase](tmp_path / "run"))


@pytest.mark.long
@pytest.mark.parametrize(("count", "killed"), [(2, 1), (2, 0), (4, 2)])
def test_killed_process_stops_the_others_and_the_restart_is_bitwise(workspace, tmp_path, count, killed):
    long = {"training__total_tokens": 64 * B, "preview__windows": ()}
    config = tiny.config(workspace, **long, mesh__fsdp=2, mesh__data=-1)
    file = tiny.write_config(tmp_path / "config.py", workspace, **long, mesh__fsdp=2, mesh__data=-1)
    arguments = ["train", "--config", file, "--workdir"]
    processes.pma([*arguments, tmp_path / "whole"], count).check(600)
    cut = tmp_path / "cut"
    job = processes.pma([*arguments, cut], count)
    kill_one(job, killed, lambda: len(read_metric_records(absolute_path(cut / "metrics.jsonl"))) > 30)
    newest = open_run(cut).newest_resumable_state
    assert newest is None or newest.tokens < config.training.total_tokens
    processes.pma([*arguments, cut], count).check(600)
    uninterrupted, again = open_run(tmp_path / "whole"), open_run(cut)
    assert tiny.numbers(again) == tiny.numbers(uninterrupted)
    for one, other in zip(again.snapshots, uninterrupted.snapshots, strict=True):
        tiny.assert_equal(read(one), read(other))


@pytest.mark.long
@pytest.mark.parametrize("notified", [[0], [1], [0, 1]], ids=["the first", "the second", "both"])
def test_preemption_notice_to_any_process_stops_all_at_one_step_with_a_state(workspace, tmp_path, notified):
    file = tiny.write_config(
        tmp_path / "config.py", workspace, training__total_tokens=400 * B, preview__windows=(), mesh__fsdp=4
    )
    arguments = ["train", "--config", file, "--workdir", tmp_path / "run"]
    job = processes.pma(arguments, 2)
    wait_until(job, lambda: len(read_metric_records(absolute_path(tmp_path / "run" / "metrics.jsonl"))) > 20)
    for index in notified:
        job.processes[index].send_signal(signal.SIGTERM)
    assert job.wait() == [143, 143]
    stopped = open_run(tmp_path / "run")
    step = stopped.newest_resumable_state.step
    assert [r["step"] for r in stopped.metrics if r["kind"] == "train"] == list(range(1, step + 1)), "no step is lost"
    for index in (0, 1):
        output = job.error(index).splitlines()[-1]
        assert f"stopped by a preemption: the state at step {step:,} " in output
    processes.pma(arguments, 2).check(600)
    uninterrupted = tmp_path / "whole"
    processes.pma([*arguments[:-1], uninterrupted], 2).check(600)
    assert tiny.numbers(open_run(tmp_path / "run")) == tiny.numbers(open_run(uninterrupted))


@pytest.mark.long
def test_processes_roll_back_from_a_spike_together(workspace, tmp_path):
    """Compare two runs of two processes (one: test_rollback.py). Diverging runs are too chaotic to compare with one."""
    spike = {
        "training__total_tokens": 64 * B,
        "schedule__peak_rate": 5.0,
        "schedule__warmup_tokens": 100 * B,
        "spikes__window_tokens": 16 * B,
        "spikes__patience_tokens": 6 * B,
        "spikes__confirm_steps": 3,
        "spikes__loss_z": 3.0,
        "spikes__minimum_rise_nats": 0.3,
        "spikes__attempts": 2,
        "spikes__warmup_tokens": 800 * B,
        "checkpoint__state_interval_tokens": 4 * B,
        "checkpoint__keep_states": 20,
        "preview__windows": (),
        "mesh__data": 2,
        "mesh__fsdp": 2,
    }
    (file,) = write_configs(tmp_path, config=tiny.config(workspace, **spike))
    processes.script(TRAIN, [file, tmp_path / "run"], 2).check(600)
    run = open_run(tmp_path / "run")
    (event,) = rollback.events(run)
    assert event["done"] and event["spike"]["verdict"] == "irrecoverable"
    assert [r["step"] for r in run.metrics if r["kind"] == "train"] == list(range(1, 65)), "one record per step"
    merged = [tiny.named(read(s)) for s in run.snapshots if s.step in [m["step"] for m in event["merged"]]]
    restarted = next(s for s in run.states if s.step == event["step"])
    state = states.restore_state(restarted, abstract_state(run.config, data_parallel_mesh()))
    for name, leaf in tiny.named(state.params).items():
        np.testing.assert_allclose(leaf, np.mean([m[name] for m in merged], axis=0), rtol=1e-5, atol=1e-7)
    assert all(not leaf.any() for leaf in tiny.named(state.optimizer).values())
    processes.script(TRAIN, [file, tmp_path / "again"], 2).check(600)
    assert tiny.numbers(open_run(tmp_path / "again")) == tiny.numbers(run)


def merge_files(path):
    return {name: data for name, data in tiny.contents(path).items() if name != "provenance.json"}


ELEMENTS = 40_000  # more than a leaf of a pack has, so that every leaf is a unit of work


def write_models(folder, count=3, leaves=24):
    """Write safetensors files with this number of leaves of ELEMENTS elements each."""
    paths = []
    for k in range(count):
        rng = np.random.default_rng(k)
        (folder / f"step{k}").mkdir(parents=True)
        tree = {f"leaf{n}": rng.standard_normal(ELEMENTS, np.float32) for n in range(leaves)}
        save_file(tree, folder / f"step{k}" / "model.safetensors")
        paths.append(folder / f"step{k}")
    return paths


def test_merge_by_two_processes_is_bytewise_equal_to_one(tmp_path):
    paths = write_models(tmp_path / "models")
    assert main(["merge", *map(str, paths), "--out", str(tmp_path / "one")]) == 0
    job = processes.pma(["merge", *paths, "--out", tmp_path / "two"], 2).check()
    assert merge_files(tmp_path / "two") == merge_files(tmp_path / "one")
    one, two = (provenance.read(tmp_path / name) for name in ("one", "two"))
    assert {k: v for k, v in two.items() if k != "command"} == {k: v for k, v in one.items() if k != "command"}
    assert "written to" in job.out(0) and job.out(1) == ""
    assert {p.name for p in tmp_path.iterdir()} == {"models", "one", "two"}


@pytest.mark.slow
def test_refusal_by_one_process_is_a_refusal_by_all(tmp_path):
    paths = write_models(tmp_path / "models")
    tree = {f"leaf{n}": np.full(ELEMENTS, np.nan if n == 13 else 1, np.float32) for n in range(24)}
    save_file(tree, paths[1] / "model.safetensors")
    job = processes.pma(["merge", *paths, "--out", tmp_path / "out"], 2)
    assert job.wait() == [1, 1]
    assert "error: process 1 of 2: " in job.error(1) and "only finite values merge" in job.error(1)
    assert "error: process 0 of 2: process 1 failed: " in job.error(0)
    assert [p.name for p in tmp_path.iterdir()] == ["models"]


SLOW_MERGE = """
import sys, time
import numpy as np
from pma_jax.merging.engine import sums
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.storage.formats.open import open_source
finish, delay = sums.finish_block, float(sys.argv[1])
sums.finish_block = lambda *arguments: time.sleep(delay) or finish(*arguments)
made = plan([open_source(path) for path in sys.argv[3:]], np.array([0.2, 0.3, 0.5]), cores=1)
with hosts.exit_on_error():
    identity = hosts.process_index_and_count()
    merge(made, [sys.argv[2]], process_index_and_count=identity, barrier=hosts.raise_if_any_failed)
"""


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_merge_that_loses_a_process_publishes_nothing_and_resumes(tmp_path, killed):
    paths = write_models(tmp_path / "models")
    processes.script(SLOW_MERGE, [0, tmp_path / "whole", *paths], 2).check()

    def journals():
        return [len(p.read_text().splitlines()) for p in tmp_path.glob(".out.partial-*/journal.*.jsonl")]

    job = processes.script(SLOW_MERGE, [0.5, tmp_path / "out", *paths], 2)
    kill_one(job, killed, lambda: len(journals()) == 2 and min(journals()) > 2)
    assert not (tmp_path / "out").exists() and min(journals()) > 2
    processes.script(SLOW_MERGE, [0, tmp_path / "out", *paths], 4).check()
    assert tiny.contents(tmp_path / "out") == tiny.contents(tmp_path / "whole")
