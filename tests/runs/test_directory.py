import json

import pytest

from pma_jax import config as configuration
from pma_jax.config import Config
from pma_jax.runs import directory, steps
from pma_jax.runs.directory import create_run, open_run


def write_step(folder, step, loss=1.0):
    """Write a snapshot's metadata without arrays."""
    (folder / "params").mkdir(parents=True, exist_ok=True)
    metadata = {"step": step, "tokens": step * 100, "loss": loss, "kind": "point"}
    metadata["config"] = json.loads(configuration.to_json(Config()))
    (folder / steps.METADATA_FILE).write_text(json.dumps({"custom_metadata": metadata}))
    (folder / steps.COMMIT_MARKER).touch()


def test_metadata_are_read_once_and_again_after_a_change(tmp_path, monkeypatch):
    read = []
    read_snapshot = directory.read_snapshot
    counting = lambda path: read.append(path.name) or read_snapshot(path)  # noqa: E731
    monkeypatch.setattr(directory, "read_snapshot", counting)
    create_run(tmp_path / "run", Config(), {"corpus": "digest"})
    run = open_run(tmp_path / "run")
    folder = tmp_path / "run" / "snapshots"
    for step in (1, 2):
        write_step(folder / str(step), step)
    assert [s.step for s in run.snapshots] == [s.step for s in run.snapshots] == [1, 2]
    assert read == ["1", "2"]
    write_step(folder / "3", 3)
    assert [s.step for s in run.snapshots] == [1, 2, 3] and read == ["1", "2", "3"]
    write_step(folder / "2", 2, loss=0.25)
    assert run.snapshots[1].loss == 0.25
    (folder / "1" / steps.COMMIT_MARKER).unlink()
    assert [s.step for s in run.snapshots] == [2, 3]
    (folder / "3" / steps.METADATA_FILE).write_text("{")
    with pytest.raises(ValueError, match="corrupt"):
        _ = run.snapshots
