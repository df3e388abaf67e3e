"""Merges on devices (`pma merge --on mesh`): the bits, provenance and refusals of the engine on the host."""

import json

import ml_dtypes
import numpy as np
import processes
import pytest
import tiny
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from pma_jax.cli import main
from pma_jax.merging.engine import provenance
from pma_jax.storage.digests import SEGMENT_ELEMENTS

COLUMNS = 2**10  # of which a part of a leaf can have 2048 rows


def make_tree(seed: int, rows: int = 300) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tree = {
        "w": rng.standard_normal((rows, COLUMNS), np.float32),
        "half": rng.standard_normal((701, 33)).astype(ml_dtypes.bfloat16),
        "scale": np.float32(rng.standard_normal()),
        "f16": rng.standard_normal(129).astype(np.float16),
        "counts": np.arange(7),
        "empty": np.zeros((0, 4), np.float32),
        "same": np.full(5000, 0.1, np.float32),
    }
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def write(folder, count: int = 3, rows: int = 300, **changes):
    """Write safetensors of `make_tree`; return their paths, oldest first."""
    for step in range(1, count + 1):
        (folder / f"step{step}").mkdir(parents=True)
        own = {name: change(step) for name, change in changes.items()}
        save_file(make_tree(step, rows) | own, folder / f"step{step}" / "model.safetensors")
    return [folder / f"step{step}" for step in range(1, count + 1)]


def assert_same_merge(one, other) -> None:
    """Assert that two merges have equal files, and equal provenance but for the command."""
    files = [tiny.contents(path) for path in (one, other)]
    texts = [json.loads(content.pop("provenance.json")) for content in files]
    assert files[0] == files[1]
    # The sample that measures rounding is added in float64 by one, and in float32 by the other.
    ratios = [text.pop("rounding_over_moved") or 0.0 for text in texts]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-4)
    assert texts[0] | {"command": ""} == texts[1] | {"command": ""}


@pytest.mark.parametrize(
    "options",
    [
        ["--recipe", "sma"],
        ["--recipe", "ema:alpha=0.3", "--dtype", "bfloat16"],
        ["--recipe", "weights:1.5,-0.75,0.25", "--dtype", "float32"],
        ["--recipe", "sma", "--format", "orbax"],
        ["--recipe", "sma", "--recipe", "wma"],
    ],
)
def test_merge_on_mesh_is_bytewise_that_on_the_host(tmp_path, options):
    write(tmp_path / "models")
    for place in ("host", "mesh"):
        assert main(["merge", str(tmp_path / "models"), *options, "--on", place, "--out", str(tmp_path / place)]) == 0
    outs = sorted(path.parent.relative_to(tmp_path / "host") for path in (tmp_path / "host").rglob("provenance.json"))
    assert len(outs) == options.count("--recipe")
    for out in outs:
        assert_same_merge(tmp_path / "host" / out, tmp_path / "mesh" / out)
        assert main(["inspect", str(tmp_path / "mesh" / out), "--with-sources"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"models", "host", "mesh"}


@pytest.mark.parametrize("is_compressed", [True, False])
def test_orbax_checkpoints_merge_on_mesh(tmp_path, is_compressed):
    trees = [make_tree(step) for step in (1, 2, 3)]
    for step, tree in enumerate(trees, start=1):
        del tree["empty"]  # Orbax saves none
        context = ocp.Context()
        context.array.saving.use_compression = is_compressed
        with context:
            ocp.save(tmp_path / "models" / str(step), {"params": tree})
    for place in ("host", "mesh"):
        assert main(["merge", str(tmp_path / "models"), "--on", place, "--out", str(tmp_path / place)]) == 0
    assert_same_merge(tmp_path / "host", tmp_path / "mesh")
    restored = ocp.load(tmp_path / "mesh")["params"]
    mean = np.mean([tree["w"].astype(np.float64) for tree in trees], axis=0)
    np.testing.assert_allclose(restored["w"], mean, rtol=1e-6, atol=1e-7)


def test_merge_on_mesh_refuses_what_the_host_refuses(tmp_path, capsys):
    nan = write(tmp_path / "nan", half=lambda step: np.full(9, np.nan if step == 2 else 1, np.float32))
    different = write(tmp_path / "different", counts=lambda step: np.arange(7) + step)
    codes = write(tmp_path / "codes", codes=lambda step: np.full(3, step, np.complex64))
    wide = write(tmp_path / "wide", w=lambda step: np.ones(4))
    out = str(tmp_path / "out")
    for folder, message in (
        (nan, f"{nan[1]}: half has nan at element 0; only finite values merge"),
        (different, "1 integer or boolean leaves are not equal in all checkpoints"),
        (codes, "1 leaves are not equal in all checkpoints, and their dtypes cannot be averaged: codes (complex64)"),
        (wide, "w is float64 (1 such leaves), which devices do not add: give --on host"),
    ):
        capsys.readouterr()
        assert main(["merge", str(folder[0].parent), "--on", "mesh", "--out", out]) == 1
        assert message in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"nan", "different", "codes", "wide"}, "nothing is left"
    arguments = ["merge", str(different[0].parent), "--on", "mesh", "--out", out]
    assert main([*arguments, "--integers", "newest"]) == 0
    assert "1 integer leaves differ" in capsys.readouterr().err
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["counts"], np.arange(7) + 3)
    assert main([*arguments, "--integers", "newest"]) == 1
    assert "never overwrites" in capsys.readouterr().err


def test_source_that_changed_since_its_digests_were_recorded_is_refused(tmp_path, capsys):
    write(tmp_path / "models", 2)
    merge = ["merge", str(tmp_path / "models"), "--across-stages"]
    assert main([*merge, "--out", str(tmp_path / "first" / "step1")]) == 0
    file = tmp_path / "first" / "step1" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    arguments = [str(tmp_path / "first" / "step1"), str(tmp_path / "models" / "step2"), "--across-stages"]
    assert main(["merge", *arguments, "--on", "mesh", "--out", str(tmp_path / "out")]) == 1
    assert "is corrupt: 1 leaves do not match their digests" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_two_processes_with_four_devices_give_the_bits_of_the_host(tmp_path, format):
    write(tmp_path / "models", rows=3 * SEGMENT_ELEMENTS // COLUMNS + 100)
    options = [str(tmp_path / "models"), "--format", format, "--recipe", "ema:alpha=0.3"]
    assert main(["merge", *options, "--out", str(tmp_path / "host")]) == 0
    job = processes.pma(["merge", *options, "--on", "mesh", "--out", tmp_path / "mesh"], 2, devices=4).check()
    assert "written to" in job.out(0) and job.out(1) == ""
    digests = [provenance.read(tmp_path / name)["leaves"] for name in ("host", "mesh")]
    assert digests[0] == digests[1]
    if format == "safetensors":
        assert_same_merge(tmp_path / "host", tmp_path / "mesh")
    assert main(["inspect", str(tmp_path / "mesh"), "--verify"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"models", "host", "mesh"}


@pytest.mark.slow
def test_refusal_by_one_process_leaves_nothing(tmp_path):
    write(tmp_path / "models", half=lambda step: np.full(9, np.nan if step == 2 else 1, np.float32))
    job = processes.pma(["merge", tmp_path / "models", "--on", "mesh", "--out", tmp_path / "out"], 2, devices=2)
    assert job.wait() == [1, 1]
    assert "only finite values merge" in job.error(0) and "only finite values merge" in job.error(1)
    assert [p.name for p in tmp_path.iterdir()] == ["models"]
