import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import pma_jax as pma
from pma_jax.cli import main
from pma_jax.config import MeshConfig
from pma_jax.config.errors import UserError
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage.paths import absolute_path


def by_numpy(snapshots, weights):
    """Return the weighted sum of the stored arrays in float64."""
    return jax.tree.map(
        lambda *leaves: sum(w * leaf.astype(np.float64) for w, leaf in zip(weights, leaves, strict=True)),
        *[tiny.read(s) for s in snapshots],
    )


@pytest.mark.mesh
@pytest.mark.parametrize(
    "sizes", [None, MeshConfig(2, 2, 2), pytest.param(MeshConfig(1, 8, 1), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [-1.0, 0.5, 1.5]], ids=str)
def test_average_equals_numpy_on_any_mesh(finished, sizes, weights):
    chosen = finished.snapshots[-3:]
    mesh = make_mesh(sizes) if sizes else None
    merged = pma.average(chosen, weights, mesh=mesh)
    # float32 sums of 3: the error is a few units in the last place of the largest term.
    tiny.assert_close(merged, by_numpy(chosen, weights), rtol=1e-5, atol=1e-6)
    for leaf in jax.tree.leaves(merged):
        assert leaf.dtype == np.float32 and len(leaf.sharding.device_set) == 8
    if sizes:
        assert merged["blocks"]["gate_DxF"].sharding.mesh == mesh
        assert not merged["blocks"]["gate_DxF"].sharding.is_fully_replicated


def test_average_of_one_snapshot_is_the_snapshot(finished):
    tiny.assert_equal(pma.average(finished.snapshots[:1], [1.0]), tiny.read(finished.snapshots[0]))


def test_counts_of_snapshots_and_weights_must_agree(finished):
    with pytest.raises(ValueError, match="2 weights for 3 checkpoints"):
        pma.average(finished.snapshots[:3], [0.5, 0.5])


def test_snapshots_of_another_model_are_refused_by_key(finished, workspace, tmp_path):
    other = tiny.config(workspace, model__hidden=48)
    with jax.set_mesh(make_mesh(other.mesh)):
        params = jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
            abstract_params(other.model, make_mesh(other.mesh)),
        )
    odd = Snapshot(absolute_path(tmp_path / "odd"), 1, 256, None, other)
    tiny.write_snapshot(params, odd)
    with pytest.raises(UserError, match=r"are different models: model.hidden is 32 and 48; merge them apart$"):
        pma.merge([*finished.snapshots[:2], odd], [0.4, 0.3, 0.3], tmp_path / "out")
    assert not (tmp_path / "out").exists(), "a failed merge leaves no files"


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"no_rope_interval": 2, "norm_epsilon": 1e-5}], ids=str)
def test_snapshots_of_equal_shapes_that_compute_other_functions_are_refused(finished, tmp_path, changes, capsys):
    newest = finished.snapshots[-1]
    for name, model in (("other", changes), ("same", {"remat": "full", "scan_layers": False})):
        config = dataclasses.replace(newest.config, model=dataclasses.replace(newest.config.model, **model))
        tiny.write_snapshot(tiny.read(newest), Snapshot(absolute_path(tmp_path / name), 1, 256, None, config))
    paths = [str(tmp_path / "other"), str(newest.path)]
    with pytest.raises(UserError, match=f"are different models: model.{next(iter(changes))} is "):
        pma.average(paths, [0.5, 0.5])
    assert main(["merge", *paths, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert all(f"model.{key} is {value} and " in error for key, value in changes.items()) and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main(["merge", str(tmp_path / "same"), str(newest.path), "--out", str(tmp_path / "out")]) == 0


def test_merge_is_a_snapshot_that_records_its_provenance(finished, tmp_path):
    chosen, weights = finished.snapshots[-3:], pma.recipes.wma(3)
    merged = pma.merge(chosen, weights, tmp_path / "out", recipe="wma")
    stored = pma.read_snapshot(tmp_path / "out")
    assert stored == merged
    assert (stored.step, stored.tokens, stored.loss) == (24, tiny.HORIZON, None)
    assert stored.config == finished.config
    assert stored.merge["recipe"] == "wma"
    assert stored.merge["coefficients"] == [1 / 6, 2 / 6, 3 / 6]
    assert [(s["path"], s["tokens"]) for s in stored.merge["sources"]] == [(str(s.path), s.tokens) for s in chosen]
    tiny.assert_close(tiny.read(stored), by_numpy(chosen, [1 / 6, 2 / 6, 3 / 6]), rtol=1e-5, atol=1e-6)


def test_merge_can_be_copied_and_merged_again(finished, tmp_path):
    a = pma.merge(finished.snapshots[:2], pma.recipes.sma(2), tmp_path / "a")
    b = pma.merge(finished.snapshots[4:], pma.recipes.sma(2), tmp_path / "b")
    shutil.move(tmp_path / "a", tmp_path / "moved")
    again = pma.merge([pma.read_snapshot(tmp_path / "moved"), b], [0.25, 0.75], tmp_path / "c")
    expected = by_numpy(finished.snapshots[:2] + finished.snapshots[4:], [0.125, 0.125, 0.375, 0.375])
    tiny.assert_close(tiny.read(again), expected, rtol=1e-5, atol=1e-6)
    assert a.tokens == 2048 and again.tokens == tiny.HORIZON


@pytest.mark.parametrize("kind", ["folder", "file", "merge"])
def test_existing_output_is_never_overwritten(finished, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        pma.merge(finished.snapshots[:1], [1.0], out)
    before = tiny.contents(tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        pma.merge(finished.snapshots[:2], [0.5, 0.5], out)
    assert tiny.contents(tmp_path) == before


def test_sources_are_unchanged(finished, tmp_path):
    before = tiny.contents(finished.path / "snapshots")
    pma.merge(finished.snapshots, pma.recipes.sma(6), tmp_path / "out")
    assert tiny.contents(finished.path / "snapshots") == before
    assert json.loads(json.dumps(pma.read_snapshot(tmp_path / "out").merge))["coefficients"] == [1 / 6] * 6


def test_paths_do_as_well_as_snapshots(finished, tmp_path):
    chosen, weights = finished.snapshots[1:4], [0.2, 0.3, 0.5]
    made = pma.merge(chosen, weights, tmp_path / "a")
    for k, convert in enumerate((str, lambda path: path, lambda path: pathlib.Path(str(path)))):
        from_paths = pma.merge([convert(s.path) for s in chosen], weights, tmp_path / f"b{k}")
        tiny.assert_equal(tiny.read(from_paths), tiny.read(made))
        tiny.assert_equal(pma.average([convert(s.path) for s in chosen], weights), pma.average(chosen, weights))


def test_weights_stay_with_their_paths_in_any_order(finished, tmp_path):
    chosen, weights = [finished.snapshots[k] for k in (4, 0, 2)], [0.5, 0.2, 0.3]
    merged = pma.merge([s.path for s in chosen], weights, tmp_path / "out")
    tiny.assert_close(tiny.read(merged), by_numpy(chosen, weights), rtol=1e-5, atol=1e-6)
    assert (merged.step, merged.tokens) == (20, 5120), "those of the newest, which is not the last of the list"
    recorded = zip(merged.merge["sources"], merged.merge["coefficients"], strict=True)
    assert {source["tokens"]: weight for source, weight in recorded} == {5120: 0.5, 1024: 0.2, 3072: 0.3}
    tiny.assert_equal(pma.average(chosen, weights), tiny.read(merged))


def test_foreign_checkpoints_are_merged_by_path(tmp_path):
    values = {100: 1.0, 500: 2.0, 300: 4.0}
    for step, value in values.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": np.full(3, value, np.float32)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text(json.dumps({"step": step}))
    made = pma.merge([tmp_path / f"checkpoint-{step}" for step in values], [0.5, 0.25, 0.25], tmp_path / "out")
    assert str(made) == str(tmp_path / "out")
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["w"], np.full(3, 2.0, np.float32))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["step"] == 500, "the newest one's"


def test_ambiguous_inputs_are_refused(finished, tmp_path):
    path, out = finished.snapshots[0].path, tmp_path / "out"
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "a").mkdir()
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "a" / "model.safetensors")
    refused = [
        (str(path), [1.0], "is one checkpoint: give a list"),
        (finished.snapshots[0], [1.0], "is one checkpoint: give a list"),
        ([], [], "nothing to merge"),
        ([3], [1.0], "neither a snapshot nor a path"),
        ([path, path], [0.5, 0.5], "is given twice"),
        ([path, tmp_path / "link"], [0.5, 0.5], "is given twice"),
        ([finished.path], [1.0], "is a run with many|holds 6 checkpoints"),
        ([finished.path / "snapshots"], [1.0], "is not a snapshot|holds 6 checkpoints"),
        ([tmp_path / "gone"], [1.0], "gone"),
    ]
    for inputs, weights, message in refused:
        for merge in (pma.average, lambda *arguments: pma.merge(*arguments, out)):
            with pytest.raises(ValueError, match=message):
                merge(inputs, weights)
    with pytest.raises(ValueError, match=r"use pma_jax\.merge"):
        pma.average([tmp_path / "a"], [1.0])
    assert not out.exists()
