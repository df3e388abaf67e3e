"""Corrupt files of a run are detected, named and survived, when resuming, merging and verifying."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import pma_jax as pma
from pma_jax import cli
from pma_jax.merging.verify import verify
from pma_jax.model.decoder import abstract_params
from pma_jax.runs import integrity, restore, snapshots, steps
from pma_jax.runs.directory import open_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import digests
from pma_jax.storage.formats.open import open_source
from pma_jax.training.loop import train


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    return open_run(tmp_path / "run")


def array_file(step) -> Path:
    """Return the file that holds the arrays of a snapshot's or state's largest item."""
    files = [p for p in Path(step).rglob("d/*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "a flipped bit in an array": lambda step: flip(array_file(step)),
    "a cut array": lambda step: cut(array_file(step)),
    "no array": lambda step: array_file(step).unlink(),
    "no metadata": lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
    "cut metadata": lambda step: cut(step / "_CHECKPOINT_METADATA"),
    "a changed digit": lambda step: (step / "_CHECKPOINT_METADATA").write_text(
        re.sub(r'("tokens": ?)\d', r"\g<1>9", (step / "_CHECKPOINT_METADATA").read_text())
    ),
    "no tree": lambda step: next(p for p in step.iterdir() if p.is_dir()).joinpath("_METADATA").unlink(),
    "an empty item": lambda step: [shutil.rmtree(p) or p.mkdir() for p in step.iterdir() if p.is_dir()],
}


def read_stderr(capsys) -> str:
    return capsys.readouterr().err


QUICK = ("a flipped bit in an array",)


@pytest.mark.parametrize(
    "damage", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES]
)
def test_corrupt_state_is_skipped_and_reported(finished, copy, damage, capsys):
    shutil.rmtree(copy.path / "snapshots" / "24")
    states = Path(copy.path / "states")
    shutil.rmtree(states / "24")
    DAMAGES[damage](states / "16")
    run = train(copy.config, copy.path)
    reports = [line for line in read_stderr(capsys).splitlines() if line.startswith("skipped: ")]
    assert len(reports) == 1 and str(states / "16") in reports[0]
    assert [s.step for s in run.states] == [8, 16, 24], "the corrupt state was written again"
    assert [p.name for p in Path(run.path / "damaged").iterdir()] == ["states-16.0"]
    assert tiny.numbers(run) == tiny.numbers(finished)
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))
    assert verify(run.path) == []


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow) if "cut" in name else name for name in DAMAGES]
)
def test_corrupt_snapshot_is_refused_by_name(copy, tmp_path, damage, capsys):
    snapshot = Path(copy.path / "snapshots" / "20")
    DAMAGES[damage](snapshot)
    out = tmp_path / "merged"
    assert cli.main(["merge", str(copy.path), "--last", "3", "--out", str(out)]) == 1
    error = read_stderr(capsys)
    assert error.startswith("error: ") and error.count("\n") == 1 and str(snapshot) in error
    assert not out.exists() and not list(tmp_path.glob(".merged*"))
    with pytest.raises(ValueError, match=str(snapshot)):
        pma.average([read_snapshot(copy.path / "snapshots" / "24"), read_snapshot(snapshot)], [0.5] * 2)
    assert any(str(snapshot) in problem for problem in verify(copy.path))
    assert cli.main(["inspect", str(copy.path), "--verify"]) == 1
    assert read_stderr(capsys).startswith(f"error: {copy.path} is corrupt: ")


@pytest.mark.slow
def test_corrupt_snapshots_are_written_again_when_the_run_reaches_them(finished, copy, capsys):
    shutil.rmtree(copy.path / "states" / "24")
    flip(array_file(copy.path / "snapshots" / "20"))
    (copy.path / "snapshots" / "24" / "_CHECKPOINT_METADATA").unlink()
    run = train(copy.config, copy.path)
    assert read_stderr(capsys).count("skipped: ") == 2
    assert verify(run.path) == [] and tiny.numbers(run) == tiny.numbers(finished)
    for a, e in zip(run.snapshots, finished.snapshots, strict=True):
        tiny.assert_equal(tiny.read(a), tiny.read(e))


def test_corrupt_earlier_snapshot_affects_previews_only(finished, copy, capsys):
    for root in ("states", "snapshots"):
        shutil.rmtree(copy.path / root / "24")
    shutil.rmtree(copy.path / "snapshots" / "20")
    flip(array_file(copy.path / "snapshots" / "12"))
    run = train(copy.config, copy.path)
    assert str(copy.path / "snapshots" / "12") in read_stderr(capsys)
    left_out = [r for r in tiny.numbers(finished) if r not in tiny.numbers(run)]
    # From step 16 on the window holds 16, then 16 and 20: `sma:3` at step 20 would include the corrupt snapshot.
    assert [(r["kind"], r["step"], r["recipe"]) for r in left_out] == [("preview", 20, "sma:3")]
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(finished.snapshots[-1]))


def test_run_with_only_corrupt_states_does_not_restart_by_itself(copy):
    for step in (8, 16, 24):
        flip(array_file(copy.path / "states" / str(step)))
    shutil.rmtree(copy.path / "states" / "24")
    before = tiny.contents(Path(copy.path))
    with pytest.raises(ValueError, match=r"no state of .* is intact .*states/16 is corrupt"):
        train(copy.config, copy.path)
    assert tiny.contents(Path(copy.path)) == before


@pytest.mark.slow
def test_run_that_lost_only_its_first_state_starts_over(finished, copy, capsys):
    for step in (16, 24):
        shutil.rmtree(copy.path / "states" / str(step))
    flip(array_file(copy.path / "states" / "8"))
    run = train(copy.config, copy.path)
    assert str(copy.path / "states" / "8") in read_stderr(capsys)
    assert tiny.numbers(run) == tiny.numbers(finished) and verify(run.path) == []
    assert [p.name for p in (copy.path / "damaged").iterdir()] == ["states-8.0"]
    # It was set aside; a power failure before the state was written again must not stop the run either.
    for step in (8, 16, 24):
        shutil.rmtree(copy.path / "states" / str(step))
    assert tiny.numbers(train(copy.config, copy.path)) == tiny.numbers(finished)


def test_leftovers_are_removed(finished, copy):
    shutil.rmtree(copy.path / "states" / "24")
    (copy.path / "states" / "24").mkdir()  # An empty directory.
    half = copy.path / "snapshots" / "24"  # A kill during its removal, which removes the marker first.
    (half / steps.COMMIT_MARKER).unlink()
    (copy.path / "states" / "16.orbax-checkpoint-tmp").mkdir()
    run = train(copy.config, copy.path)
    assert tiny.numbers(run) == tiny.numbers(finished)
    assert sorted(p.name for p in Path(run.path / "states").iterdir()) == ["16", "24", "8"]
    assert not (run.path / "damaged").exists() and verify(run.path) == []


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl"])
@pytest.mark.parametrize("how", ["cut", "zeros", "text"])
def test_corrupt_run_record_is_one_clear_line(copy, name, how, capsys, workspace, tmp_path):
    file = tiny.write_config(tmp_path / "config.py", workspace)
    path = Path(copy.path / name)
    content = path.read_bytes()
    damaged = {"cut": content[:50] + b"\n" + content[90:], "zeros": b"\0" * len(content) + b"\n", "text": b"no\n"}[how]
    path.write_bytes(damaged)
    shutil.rmtree(copy.path / "states" / "24")
    assert cli.main(["train", "--config", file, "--workdir", str(copy.path)]) == 1
    error = read_stderr(capsys).splitlines()[-1]
    assert error.startswith("error: ") and str(path) in error, error
    assert path.read_bytes() == damaged


def test_non_finite_arrays_are_neither_saved_nor_restored(finished, copy):
    snapshot = finished.snapshots[-1]
    params = snapshots.restore_params(snapshot, abstract_params(snapshot.config.model, make_mesh(snapshot.config.mesh)))
    for value in (np.nan, np.inf, -np.inf):
        bad = dict(params) | {"embedding_VxD": params["embedding_VxD"] * value}
        message = r"1 leaves contain NaN or infinity; .*: embedding_VxD"
        with copy.writer("snapshots") as writer, pytest.raises(ValueError, match=message):
            snapshots.save_snapshot(writer, bad, dataclasses.replace(snapshot, step=28))
    assert not (copy.path / "snapshots" / "28").exists()


def test_digest_covers_every_bit_of_the_arrays(finished, tmp_path):
    shutil.copytree(finished.snapshots[0].path, tmp_path / "4")
    rng = np.random.default_rng(0)
    for name, byte_ranges in open_source(tmp_path / "4").byte_ranges.items():
        for byte_range in byte_ranges:
            complete = byte_range.path.read_bytes()
            for place in {0, byte_range.nbytes - 1, *rng.integers(0, byte_range.nbytes, 8).tolist()}:
                damaged = bytearray(complete)
                damaged[byte_range.offset + place] ^= 1 << rng.integers(8)
                byte_range.path.write_bytes(damaged)
                (problem,) = verify(tmp_path / "4")
                assert f"{name} does not match its digest ({byte_range.path})" in problem
            byte_range.path.write_bytes(complete)
    assert verify(tmp_path / "4") == []


@pytest.mark.slow
@pytest.mark.mesh
def test_digests_equal_those_of_merging_on_any_mesh(finished, workspace):
    snapshot = finished.snapshots[0]
    stored = restore.read_digests(snapshot.path)
    for axes in ({}, {"mesh__data": 1, "mesh__fsdp": 4, "mesh__tensor": 2}):
        config = tiny.config(workspace, **axes)
        params = snapshots.restore_params(snapshot, abstract_params(config.model, make_mesh(config.mesh)))
        assert integrity.tree_digests(params) == stored
    for name, leaf in tiny.named(params).items():
        hasher = digests.SegmentHasher(leaf.itemsize)
        hasher.update(leaf.tobytes())
        assert digests.leaf_digest(hasher.finish()) == stored[name.replace("/", ".")]


@pytest.mark.mesh
def test_segments_distributed_over_devices_have_the_same_checksums():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    values = np.random.default_rng(0).normal(size=(2048, 2056)).astype(np.float32)
    hasher = digests.SegmentHasher(4)
    hasher.update(values.reshape(-1))
    expected = hasher.finish()
    assert len(expected) == 3
    for spec in (jax.P("a", "b"), jax.P(None, ("a", "b")), jax.P()):
        leaf = jax.device_put(values, jax.NamedSharding(mesh, spec))
        assert integrity.collective_segment_checksums(leaf) == expected
