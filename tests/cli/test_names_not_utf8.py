"""Names and arguments that are not UTF-8, which no JSON file can hold, are refused in one line before the work."""

import os
import subprocess

import numpy as np
import pytest
import tiny
from trainer_trees import save_big_vision, save_easydel

import pma_jax as pma
from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.merging.from_storage import plan_merge
from pma_jax.merging.gather import open_checkpoints

NOT_UTF8 = os.fsdecode(b"\xff")


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, w=np.ones(3, np.float32))
    return str(path)


@pytest.mark.parametrize("place", ["input", "output", "recipe", "subtree", "inspect"])
def test_arguments(tmp_path, capsys, place):
    one, two = (write(tmp_path / f"step_{step}.npz") for step in (1, 2))
    arguments = {
        "input": ["merge", write(tmp_path / f"{NOT_UTF8}_step_3.npz"), two, "--out", str(tmp_path / "out")],
        "output": ["merge", one, two, "--out", str(tmp_path / f"out{NOT_UTF8}")],
        "recipe": ["merge", one, two, "--recipe", f"sma{NOT_UTF8}", "--out", str(tmp_path / "out")],
        "subtree": ["merge", one, two, "--subtree", NOT_UTF8, "--out", str(tmp_path / "out")],
        "inspect": ["inspect", str(tmp_path / NOT_UTF8)],
    }[place]
    before = sorted(tmp_path.iterdir())
    assert main(arguments) == 2
    assert sorted(tmp_path.iterdir()) == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is not UTF-8 text: rename the file" in error


@pytest.mark.slow
def test_files_that_are_found(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    write(run / f"step{NOT_UTF8}_3" / "model.npz")
    write(run / "step_2" / "model.npz")
    for verb in (["inspect", str(run)], ["merge", str(run), "--out", str(tmp_path / "out")]):
        # In a process: standard error escapes what it cannot encode, and pytest's does not.
        ended = subprocess.run(tiny.command(*verb), capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
        assert "step\\udcff_3" in ended.stdout + ended.stderr
    monkeypatch.chdir(run / f"step{NOT_UTF8}_3")
    assert main(["inspect", "model.npz"]) == 1
    assert "is not UTF-8 text, as the JSON files are that record it" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not UTF-8 text"):
        pma.merge(["model.npz"], [1.0], str(tmp_path / "out2"))


def test_arrays_and_files_of_checkpoints(tmp_path):
    path = save_big_vision(tmp_path, 1)
    (path / "params~embedding").rename(path / f"params~{NOT_UTF8}")
    with pytest.raises(UserError, match="its name is not UTF-8 text, as the JSON files are that list it"):
        open_checkpoints([path])
    path = save_easydel(tmp_path, 1)
    (path / f"tokenizer{NOT_UTF8}.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not named in UTF-8, as provenance\.json is: rename it"):
        plan_merge(open_checkpoints([path]), ["sma"])
