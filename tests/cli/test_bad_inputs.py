"""A fast part of experiments/faults/bad_inputs.py: mutated files of a run, in this process."""

import importlib.util
import itertools
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

from pma_jax.cli import main

FAULTS = Path(__file__).parents[2] / "experiments" / "faults"
SNAPSHOT = "snapshots/24/_CHECKPOINT_METADATA"
# Each file with a command that reads it. JAX is not needed, or only for shapes.
CASES = {
    "config.json": ("inspect", "run"),
    "run.json": ("inspect", "run", "--json"),
    SNAPSHOT: ("merge", "run", "--last", "2", "--out", "new"),
    "states/24/_CHECKPOINT_METADATA": ("fork", "run", "--at-tokens", "6144", "--workdir", "new"),
}
REFUSED = {
    "empty",
    "half",
    "zeros",
    "random bytes",
    "UTF-16",
    "nested",
    "one object more",
    "128 GiB of zeros",
    "directory",
}
REFUSED |= {"named pipe", "socket", "endless device", "link to itself", "byte order mark"}


def load(name):
    spec = importlib.util.spec_from_file_location(name, FAULTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


mutations = load("mutations")


@pytest.fixture(scope="module")
def original(finished, tmp_path_factory):
    """Return a folder with a copy of the finished run."""
    folder = tmp_path_factory.mktemp("bad_inputs")
    shutil.copytree(finished.path, folder / "run")
    return folder


def names(folder):
    return sorted((str(path.relative_to(folder)), path.lstat().st_size) for path in folder.rglob("*"))


def run(folder, file, mutation, command, capsys):
    """Mutate a file, run the command, check what it prints and writes, restore the file, and return the status."""
    path = folder / "run" / file
    kept = path.read_bytes()
    mutation.apply(path)
    before = names(folder)
    signal.alarm(20)
    try:
        status = main(list(command))
    finally:
        signal.alarm(0)
        after = names(folder)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(kept)
        shutil.rmtree(folder / "new", ignore_errors=True)
    error = capsys.readouterr().err
    assert status in (0, 1)
    if status:
        assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2000, error
        assert after == before
    return status


@pytest.mark.parametrize("file", CASES)
def test_mutated_file_is_one_line_and_nothing_is_written(original, file, monkeypatch, capsys):
    monkeypatch.chdir(original)
    for mutation in mutations.FILE_MUTATIONS:
        if mutation.name == "absent" and file == "run.json":
            continue  # then it is no run
        status = run(original, file, mutation, CASES[file], capsys)
        if mutation.name in REFUSED:
            assert status == 1, mutation.name


@pytest.mark.parametrize("file", CASES)
def test_mutated_field_is_one_line_and_nothing_is_written(original, file, monkeypatch, capsys):
    monkeypatch.chdir(original)
    cases = list(mutations.json_mutations(original / "run" / file))
    random.Random(0).shuffle(cases)
    refused = [run(original, file, mutation, CASES[file], capsys) for _, mutation in itertools.islice(cases, 25)]
    assert sum(refused) >= 5, "most values are refused"
