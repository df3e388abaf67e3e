"""A read that fails says nothing about the data: the command ends, and no file is moved, removed or written again."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import tiny
from orbax.checkpoint import v1 as ocp

from pma_jax import cli
from pma_jax import config as configuration
from pma_jax.config.errors import DamageError, StorageError
from pma_jax.evaluation.watch import watch
from pma_jax.merging.verify import verify
from pma_jax.runs import restore, steps
from pma_jax.runs.directory import is_run, open_run
from pma_jax.storage.formats import orbax_read
from pma_jax.storage.formats.open import open_source, read_leaf
from pma_jax.storage.paths import exists
from pma_jax.training.loop import train

FAILURES = {
    "too many open files": (OSError(errno.EMFILE, "Too many open files"), 75),
    "stale handle": (ValueError("ABORTED: Error reading [os_error_code='116']"), 75),
    "time-out": (TimeoutError("no answer"), 75),
    "the bucket is busy": (ValueError("UNAVAILABLE: Error reading gs://bucket/object"), 75),
    "no memory": (MemoryError(), 1),
    "permission": (PermissionError(errno.EACCES, "Permission denied"), 1),
    "device error": (ValueError("UNKNOWN: Error reading [os_error_code='5']"), 1),
}


@pytest.fixture
def copy(finished, tmp_path):
    """Copy the finished run without its last state, so that it resumes from the one before."""
    shutil.copytree(
        finished.path, tmp_path / "run", ignore=lambda folder, _: ["24"] if folder.endswith("states") else []
    )
    return open_run(tmp_path / "run")


def without_lock(folder) -> dict[str, bytes]:
    return {name: data for name, data in tiny.contents(folder).items() if name != "lock" and "events.out" not in name}


def raise_on_call(monkeypatch, owner, name, error, numbers=(1,)):
    """Make the calls of `owner.name` with these numbers raise `error`, hidden as Orbax hides errors."""
    original, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(name)
        if len(calls) in numbers:
            raise KeyError("Failed to load checkpointable: incompatible handler") from error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_read_of_a_state_ends_the_run_and_touches_nothing(
    copy, workspace, failure, monkeypatch, capsys, tmp_path
):
    error, status = FAILURES[failure]
    file, before = tiny.write_config(tmp_path / "config.py", workspace), without_lock(copy.path)
    calls = raise_on_call(monkeypatch, ocp, "load_checkpointables", error)
    assert cli.main(["train", "--config", file, "--workdir", str(copy.path)]) == status
    lines = capsys.readouterr().err.splitlines()
    assert calls == ["load_checkpointables"] and lines[-1].startswith("error: cannot read ")
    assert not any("corrupt" in line or "skipped" in line for line in lines)
    assert without_lock(copy.path) == before


def test_run_resumes_from_the_same_state_after_a_failed_read(finished, copy, monkeypatch):
    with monkeypatch.context() as patch:
        raise_on_call(patch, ocp, "load_checkpointables", OSError(errno.EIO, "Input/output error"))
        with pytest.raises(StorageError, match="Input/output error"):
            train(copy.config, copy.path)
    run = train(copy.config, copy.path)
    assert tiny.numbers(run) == tiny.numbers(finished) and not (run.path / "damaged").exists()
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_missing_item_of_orbax_is_read_again_before_it_counts_as_damage(copy, monkeypatch):
    # Orbax returns None for an item whose metadata it could not read, whatever the reason.
    metadata, calls = ocp.checkpointables_metadata, []

    def lose_once(path):
        calls.append(path)
        found = metadata(path)
        if len(calls) == 1:
            found.metadata["state"] = None
        return found

    monkeypatch.setattr(ocp, "checkpointables_metadata", lose_once)
    assert restore.read_array_metadata(copy.states[-1].path).items["state"] is not None and len(calls) == 2
    monkeypatch.setattr(
        ocp, "checkpointables_metadata", lambda path: lose_once(path) if calls.clear() is None else None
    )
    with pytest.raises(DamageError, match="state is missing"):
        restore.read_array_metadata(copy.states[-1].path)


def test_directory_that_cannot_be_listed_is_not_absent(copy, monkeypatch):
    stat = os.stat

    def fail(path, *arguments, **options):
        if str(path).endswith((steps.COMMIT_MARKER, "run.json")):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *arguments, **options)

    before = tiny.contents(Path(copy.path))
    monkeypatch.setattr(os, "stat", fail)
    for read in (lambda: is_run(copy.path), lambda: steps.unpublished_steps(copy.path / "states")):
        with pytest.raises(OSError, match="Input/output error"):
            read()
    assert not exists(copy.path / "absent") and exists(copy.path / "config.json")
    with pytest.raises(OSError, match="Input/output error"):
        train(copy.config, copy.path)
    monkeypatch.undo()
    assert tiny.contents(Path(copy.path)) == before


def test_watch_ends_at_a_failed_read_and_skips_damage(copy, monkeypatch):
    with monkeypatch.context() as patch:
        raise_on_call(patch, ocp, "load_checkpointables", OSError(errno.EMFILE, "Too many open files"))
        with pytest.raises(StorageError, match="Too many open files"):
            list(watch(copy, once=True))
    shutil.rmtree(copy.path / "snapshots" / "4" / "params" / "d")
    lines = list(watch(copy, once=True))
    assert sum(line.startswith("skipped: ") and "snapshots/4" in line for line in lines) == 1 and len(lines) > 3


def test_verify_does_not_call_a_failed_read_corrupt(copy, monkeypatch, capsys):
    from pma_jax.merging.engine import provenance

    def fail(*_):
        raise StorageError("Too many open files", is_temporary=True)

    monkeypatch.setattr(provenance, "compute_leaf_digest", fail)
    with pytest.raises(StorageError):
        verify(copy.path)
    assert cli.main(["inspect", str(copy.path), "--verify"]) == 75
    assert "corrupt" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("UNKNOWN: Error reading [os_error_code='5']"), StorageError),
        (MemoryError(), StorageError),
        (ValueError("DATA_LOSS: Error decoding"), DamageError),
    ],
)
def test_leaf_that_tensorstore_cannot_read(copy, monkeypatch, error, kind):
    import tensorstore

    source = open_source(copy.snapshots[-1].path)
    name = next(iter(source.leaves))
    source = orbax_read.open_orbax(Path(copy.snapshots[-1].path))
    source.byte_ranges.clear()

    def fail(*_, **__):
        raise error

    expected = np.asarray(read_leaf(source, name))
    with monkeypatch.context() as patch:
        patch.setattr(tensorstore, "open", fail)
        with pytest.raises(kind, match=f"{name} cannot be read"):
            read_leaf(source, name)
    np.testing.assert_array_equal(read_leaf(source, name), expected)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOMEM, "No memory")])
def test_cached_tokens_that_cannot_be_mapped_are_not_corrupt(workspace, finished, monkeypatch, error):
    from pma_jax.data import shards

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(shards.np, "memmap", fail)
    with pytest.raises(OSError, match=error.strerror) as raised:
        shards.prepare_tokens(finished.config.data, progress=False)
    assert "delete" not in str(raised.value)


AGREE = """
import errno, sys
from pathlib import Path
from pma_jax import config
from pma_jax.cli import command
from pma_jax.runs import restore, steps
from pma_jax.config.errors import DamageError, StorageError
from pma_jax.training.loop import train
load, failing = restore._load, json.loads(sys.argv[3])
def load_or_fail(path, items):
    loaded = load(path, items)
    kind = failing.get(f"{hosts.process_index_and_count()[0]} {path.parent.name}/{path.name}")
    if kind == "damage":
        raise DamageError(f"{path} is corrupt")
    if kind:
        raise OSError(getattr(errno, kind), "injected")
    return loaded
restore._load = load_or_fail
if failing.get(f"{hosts.process_index_and_count()[0]} listing"):  # a file system that shows other processes less
    published = steps.published_steps
    steps.published_steps = lambda folder: published(folder)[:-1]
with hosts.exit_on_error():
    run = train(config.from_json(Path(sys.argv[1]).read_text()), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "statuses", "aside"),
    [
        ({"1 states/16": "EMFILE"}, [75, 75], None),
        pytest.param({"0 states/16": "EIO"}, [1, 1], None, marks=pytest.mark.long),
        pytest.param({"0 states/16": "damage", "1 states/16": "EIO"}, [1, 1], None, marks=pytest.mark.long),
        ({"1 listing": "stale"}, [0, 0], []),
        pytest.param({"1 states/16": "damage"}, [0, 0], ["states-16.0"], marks=pytest.mark.long),
        ({"0 states/16": "damage", "1 states/16": "damage"}, [0, 0], ["states-16.0"]),
    ],
    ids=str,
)
def test_two_processes_agree_on_what_is_damaged(finished, copy, workspace, tmp_path, failing, statuses, aside):
    (tmp_path / "config.json").write_text(configuration.to_json(tiny.config(workspace)))
    before = without_lock(copy.path)
    arguments = [tmp_path / "config.json", copy.path, json.dumps(failing)]
    job = processes.script("import json\n" + AGREE, arguments, 2, devices=1)
    assert job.wait(120) == statuses, [job.error(p)[-2000:] for p in (0, 1)]
    if aside is None:
        assert without_lock(copy.path) == before
        return
    assert [path.name for path in copy.path.glob("damaged/*")] == aside
    assert sum("skipped: " in job.error(p) for p in (0, 1)) == len(aside)
    run = open_run(copy.path)
    assert [s.step for s in run.states] == [8, 16, 24] and verify(run.path) == []
    assert [r["step"] for r in run.metrics if r["kind"] == "train"] == list(range(1, 25))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="the failing calls are injected by a library in C")
def test_injected_errors_of_system_calls():
    """Run three cases of the harness, which runs for half an hour otherwise."""
    harness = Path(__file__).parents[2] / "experiments" / "faults" / "system_calls.py"
    command = [sys.executable, harness, "--count", "3"]
    command += ["--only", "resume/(open|read)/(EMFILE|EIO)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and "3 failures injected" in done.stdout, done.stdout + done.stderr
