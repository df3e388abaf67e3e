"""Disk full, read-only, no permission: one line, a non-zero exit status, and existing files stay intact."""

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from etils import epath

from pma_jax import cli
from pma_jax.config.errors import UserError
from pma_jax.merging.verify import verify
from pma_jax.runs import steps
from pma_jax.runs.directory import open_run
from pma_jax.training.loop import train


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """Mount a small file system at `folder`; skip the test where mounting is not permitted."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a file system needs root, and a machine that permits it")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def read_error(capsys, *arguments) -> str:
    assert cli.main([str(word) for word in arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and sum(line.startswith("error: ") for line in lines) == 1, lines
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.mark.slow
def test_full_disk_during_training_is_one_line_and_the_run_resumes_elsewhere(finished, workspace, tmp_path, capsys):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    size = sum(p.stat().st_size for p in Path(finished.path).rglob("*") if p.is_file())
    filled = set()
    for share in (0.45, 0.6, 0.75):
        disk = tmp_path / f"disk-{share}"
        with mounted(disk, f"size={int(share * size) // 4096 * 4096}"):
            error = read_error(capsys, "train", "--config", file, "--workdir", disk / "run")
            assert "no space is left on the device" in error or "No space left on device" in error, error
            assert error.count(str(disk)) >= 1
            filled.add(error.replace(str(disk), ""))
            run = open_run(disk / "run")
            assert run.snapshots and run.snapshots[-1].step < 24
            assert verify(run.path) == [], "what was published before is intact"
            shutil.copytree(disk / "run", tmp_path / f"moved-{share}")
        run = train(finished.config, tmp_path / f"moved-{share}")
        assert tiny.numbers(run) == tiny.numbers(finished)
        tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("inodes", [30, 45, 60])
def test_disk_without_inodes_ends_the_process(workspace, tmp_path, inodes):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    with mounted(tmp_path / "disk", f"size=32m,nr_inodes={inodes}"):
        done = subprocess.run(
            tiny.command("train", "--config", file, "--workdir", tmp_path / "disk" / "run"),
            capture_output=True,
            text=True,
            timeout=120,
            env=tiny.environment(1),
            check=False,
        )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: "), done.stderr


@pytest.mark.parametrize(
    ("error", "is_storage"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ValueError("RESOURCE_EXHAUSTED: Error writing \"a\" [os_error_code='28']"), True),
        (MemoryError(), True),
        (TypeError("unhashable"), False),
        (KeyError("params"), False),
        (ValueError("Step 108 already exists"), False),
        (jax.errors.JaxRuntimeError("INTERNAL: compilation failed"), False),
        (UserError("the data are mendable"), False),
    ],
    ids=repr,
)
def test_only_failures_of_storage_are_reported_as_such(error, is_storage):
    """A bug keeps its type, and so its traceback."""
    with pytest.raises(UserError if is_storage else type(error)) as raised, steps.report_write_errors("a/b"):
        raise error
    assert (raised.value is error) != is_storage
    assert not is_storage or str(raised.value).startswith("cannot write a/b: ")


def test_step_that_does_not_fit_replaces_no_older_step(tmp_path):
    with mounted(tmp_path / "disk", "size=1m"):
        folder = epath.Path(tmp_path / "disk" / "states")
        with (
            pytest.raises(ValueError, match="no space is left on the device"),
            steps.StepWriter(folder) as writer,
        ):
            writer.save(1, {"params": {"x": np.ones(2**10, np.float32)}}, {"tokens": 10})
            writer.save(2, {"params": {"x": np.ones(2**20, np.float32)}}, {"tokens": 20})
            writer.finish()
            raise AssertionError("the step does not fit")
        assert [path.name for path in steps.published_steps(folder)] == ["1"] and list(writer.published) == [1]
        with steps.StepWriter(folder) as writer:
            writer.save(2, {"params": {"x": np.ones(2**10, np.float32)}}, {"tokens": 20})
        assert [path.name for path in steps.published_steps(folder)] == ["1", "2"]


def test_full_disk_before_a_merge_publishes_nothing(finished, tmp_path, capsys):
    with mounted(tmp_path / "disk", "size=32k"):
        error = read_error(capsys, "merge", finished.path, "--last", 3, "--out", tmp_path / "disk" / "merged")
        assert "bytes are free and the merge needs" in error
        assert not (tmp_path / "disk" / "merged").exists()


@pytest.mark.mesh
def test_full_disk_during_a_merge_publishes_nothing(finished, tmp_path, capsys, monkeypatch):
    from pma_jax.merging.engine import merge as engine

    monkeypatch.setattr(engine, "check_outputs", lambda *_: None)  # Another process fills the disk after the check.
    with mounted(tmp_path / "disk", "size=32k"):
        error = read_error(capsys, "merge", finished.path, "--last", 3, "--out", tmp_path / "disk" / "merged")
        assert "No space left on device" in error
        assert not (tmp_path / "disk" / "merged").exists()


def test_full_disk_during_data_preparation_leaves_no_tokens(workspace, tmp_path, capsys):
    config = tiny.write_config(tmp_path / "config.py", workspace, data__cache_dir=str(tmp_path / "disk" / "cache"))
    with mounted(tmp_path / "disk", "size=16k"):
        error = read_error(capsys, "train", "--config", config, "--workdir", tmp_path / "run")
        assert "cannot write tokens" in error and "No space left on device" in error
        assert [p.name for p in (tmp_path / "disk" / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_read_only_run_is_one_line(finished, workspace, tmp_path, capsys):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    disk = tmp_path / "disk"
    with mounted(disk, "size=8m"):
        shutil.copytree(finished.path, disk / "run")
        shutil.rmtree(disk / "run" / "states" / "24")
        before = tiny.contents(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        error = read_error(capsys, "train", "--config", file, "--workdir", disk / "run")
        assert "Read-only file system" in error and str(disk / "run") in error
        for arguments in (
            ("merge", disk / "run", "--last", 3, "--out", disk / "merged"),
            ("fork", disk / "run", "--at-tokens", 4096, "--workdir", disk / "fork"),
            ("sweep", disk / "run", "--recipes", "sma", "--windows", 2),
        ):
            error = read_error(capsys, *arguments)
            assert "Read-only file system" in error or "the file system is read-only" in error, error
        assert tiny.contents(disk) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root ignores permissions")
def test_run_without_permission_is_one_line(finished, workspace, tmp_path, capsys):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    (tmp_path / "closed").mkdir(mode=0o500)
    error = read_error(capsys, "train", "--config", file, "--workdir", tmp_path / "closed" / "run")
    assert "Permission denied" in error
