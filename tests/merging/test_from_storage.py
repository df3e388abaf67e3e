"""`pma merge` on users' inputs: directories of any trainer's checkpoints, runs, and every option."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from pma_jax import cli
from pma_jax.merging import from_storage, gather
from pma_jax.runs.snapshots import read_snapshot

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture
def suite(tmp_path):
    """Write a directory as another trainer leaves it: step100 … step500, not sorted by name."""
    for step in STEPS:
        write(tmp_path / "suite" / f"step{step}", step)
    (tmp_path / "suite" / "logs").mkdir()
    (tmp_path / "suite" / "README.md").write_text("notes")
    return tmp_path / "suite"


def leaf(step, dtype=np.float32):
    return (np.random.default_rng(step).standard_normal((300, 70)) + 3).astype(dtype)


def write(folder: Path, step: int, dtype=np.float32):
    folder.mkdir(parents=True)
    save_file({"model.w": leaf(step, dtype), "ids": np.arange(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"torch_dtype": "float32", "hidden_size": 70}')
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def pma(capsys):
    def call(*arguments):
        status = cli.main([str(word) for word in arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def fails(pma):
    def call(*arguments):
        status, out, err = pma(*arguments)
        lines = err.strip().splitlines()
        assert (status, out) == (1, "") and lines[-1].startswith("error: ") and "Traceback" not in err
        return lines[-1]

    return call


def merged(out):
    return load_file(out / "model.safetensors")["model.w"]


def mean(steps, weights):
    return sum(w * leaf(step).astype(np.float64) for step, w in zip(steps, weights, strict=True))


def test_directory_of_checkpoints_is_merged_in_order_of_steps(pma, suite, tmp_path):
    status, output, err = pma("merge", suite, "--last", 3, "--recipe", "wma", "--out", tmp_path / "out")
    assert status == 0 and "wma of 3 checkpoints" in output and "directory of 5 checkpoints" in err
    np.testing.assert_allclose(merged(tmp_path / "out"), mean(STEPS[-3:], [1 / 6, 2 / 6, 3 / 6]), rtol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 70
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert pma("inspect", tmp_path / "out", "--verify", "--with-sources")[0] == 0


def test_several_recipes_are_merged_in_one_pass(pma, suite, tmp_path):
    recipes = ["--recipe", "sma:2", "--recipe", "ema:alpha=0.5"]
    assert pma("merge", suite, *recipes, "--out", tmp_path / "out")[0] == 0
    np.testing.assert_allclose(merged(tmp_path / "out" / "sma-2"), mean(STEPS[-2:], [0.5, 0.5]), rtol=1e-6)
    weights = [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2]
    np.testing.assert_allclose(merged(tmp_path / "out" / "ema-alpha=0.5"), mean(STEPS, weights), rtol=1e-6)


def test_checkpoints_with_zero_weight_are_not_read(pma, suite, tmp_path):
    (suite / "step100" / "model.safetensors").write_bytes((suite / "step100" / "model.safetensors").read_bytes()[:-4])
    assert "step100" in str(pma("merge", suite, "--out", tmp_path / "out")[2]), "the checkpoint is corrupt"
    save_file(
        {"model.w": np.full((300, 70), np.nan, np.float32), "ids": np.arange(4)},
        suite / "step100" / "model.safetensors",
    )
    status, output, _ = pma("merge", suite, "--recipe", "sma:4", "--out", tmp_path / "out", "--json")
    assert status == 0 and len(json.loads(output)["inputs"]) == 4


def test_dry_run_reports_the_merge_and_writes_nothing(pma, suite, tmp_path):
    before = tiny.contents(tmp_path)
    arguments = ["merge", suite, "--last", 2, "--recipe", "ema:alpha=0.2", "--out", tmp_path / "out", "--dry-run"]
    status, output, _ = pma(*arguments)
    assert status == 0 and "+0.800000  step 400" in output and "+0.200000  step 500" in output
    assert "would write" in output and "of memory" in output
    facts = json.loads(pma(*arguments, "--json")[1])
    assert [entry["coefficients"] for entry in facts["inputs"]] == [[pytest.approx(0.8)], [pytest.approx(0.2)]]
    assert facts["read_bytes"] == 2 * (300 * 70 * 4 + 4 * 8)
    assert tiny.contents(tmp_path) == before


def test_dry_run_refuses_what_the_merge_refuses(fails, suite, tmp_path):
    before = tiny.contents(tmp_path)
    assert "exists already" in fails("merge", suite, "--out", suite, "--dry-run")
    assert tiny.contents(tmp_path) == before


def test_tokens_select_checkpoints_when_tokens_per_step_are_given(pma, fails, suite, tmp_path):
    arguments = ["merge", suite, "--tokens", "2e5:5e5", "--every", "2e5", "--out", tmp_path / "out", "--json"]
    assert "--tokens-per-step" in fails(*arguments)
    facts = json.loads(pma(*arguments, "--tokens-per-step", 1000)[1])
    assert [entry["tokens"] for entry in facts["inputs"]] == [300_000, 500_000]
    assert any("every 200,000 tokens" in note for note in facts["notes"])


@pytest.mark.parametrize(("given", "stored"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)])
def test_dtype_option_sets_the_stored_dtype(pma, suite, tmp_path, given, stored):
    assert pma("merge", suite, "--dtype", given, "--out", tmp_path / "out")[0] == 0
    assert merged(tmp_path / "out").dtype == stored
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == given


def test_rounding_larger_than_the_merge_gain_is_reported(pma, tmp_path):
    base = np.random.default_rng(0).standard_normal((200, 50))
    for step in (1, 2, 3):
        noise = np.random.default_rng(step).standard_normal(base.shape) * 1e-5
        (tmp_path / "near" / f"step{step}").mkdir(parents=True)
        save_file({"w": (base + noise).astype(np.float32)}, tmp_path / "near" / f"step{step}" / "model.safetensors")
    quiet = pma("merge", tmp_path / "near", "--out", tmp_path / "kept")
    reports = pma("merge", tmp_path / "near", "--dtype", "bfloat16", "--out", tmp_path / "rounded")
    assert quiet[0] == reports[0] == 0
    assert "rounding to" not in quiet[2] and "rounding to bfloat16" in reports[2]


def test_shard_size_splits_the_output_and_the_shards_merge_again(pma, suite, tmp_path):
    assert pma("merge", suite, "--shard-size", "50KB", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert pma("merge", tmp_path / "out", suite / "step100", "--out", tmp_path / "again")[0] == 0
    expected = (mean(STEPS, [0.2] * 5) + leaf(100).astype(np.float64)) / 2
    np.testing.assert_allclose(merged(tmp_path / "again"), expected, rtol=1e-5)


def test_format_option_sets_the_stored_format(pma, suite, tmp_path):
    assert pma("merge", suite, "--format", "orbax", "--out", tmp_path / "out")[0] == 0
    np.testing.assert_allclose(ocp.load(tmp_path / "out")["model.w"], mean(STEPS, [0.2] * 5), rtol=1e-6)


def test_subtree_option_selects_by_name(pma, fails, tmp_path):
    for step in (1, 2):
        ocp.save(
            tmp_path / "flax" / str(step), {"ema": {"w": np.full(3, step, np.float32)}, "step": np.zeros((), np.int32)}
        )
    assert "name the subtree" in fails("merge", tmp_path / "flax", "--out", tmp_path / "out")
    assert pma("merge", tmp_path / "flax", "--subtree", "ema", "--out", tmp_path / "out")[0] == 0
    shown = json.loads(pma("inspect", tmp_path / "flax" / "1", "--subtree", "ema", "--json")[1])
    assert shown["kind"] == "orbax" and shown["parameters"] == 3


def test_too_small_memory_limit_is_reported(fails, suite, tmp_path):
    assert "memory" in fails("merge", suite, "--memory-limit", "1MiB", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parallel_runs_are_merged_only_when_allowed(pma, fails, suite, tmp_path):
    write(tmp_path / "other" / "step600", 600)
    write(tmp_path / "other" / "step700", 700)
    arguments = ["merge", suite, tmp_path / "other", "--out", tmp_path / "out", "--last", 3]
    assert "crosses a boundary" in fails(*arguments)
    status, _, err = pma(*arguments, "--across-stages")
    assert status == 0 and "crosses a boundary" in err
    named = ["merge", suite / "step500", tmp_path / "other" / "step600", "--out", tmp_path / "soup"]
    assert "crosses a boundary" in fails(*named)
    assert pma(*named, "--across-stages")[0] == 0


def test_duplicates_at_one_position_are_merged_only_with_equal_weights(pma, fails, suite, tmp_path):
    write(tmp_path / "twin" / "step500", 501)
    arguments = [
        "merge",
        suite / "step500",
        tmp_path / "twin" / "step500",
        "--across-stages",
        "--out",
        tmp_path / "out",
    ]
    status, _, err = pma(*arguments)
    assert status == 0 and "the same position" in err
    np.testing.assert_allclose(merged(tmp_path / "out"), mean((500, 501), (0.5, 0.5)), rtol=1e-6)
    assert "computes weights from tokens" in fails(*arguments[:-1], tmp_path / "no", "--recipe", "power:sigma_rel=0.1")
    assert "the same position" in fails(*arguments[:-1], tmp_path / "no", "--recipe", "wma")


def test_copy_of_another_input_is_reported(pma, suite, tmp_path):
    shutil.copytree(suite / "step500", suite / "step600")
    status, _, err = pma("merge", suite, "--last", 3, "--out", tmp_path / "out")
    assert status == 0 and f"{suite / 'step600'} has the same values as {suite / 'step500'}" in err
    assert (
        "same values" not in pma("merge", suite, "--tokens-per-step", 1, "--tokens", ":500", "--out", tmp_path / "b")[2]
    )


def test_run_cannot_be_mixed_with_other_sources(fails, finished, tmp_path):
    odd = tmp_path / "odd"
    ocp.save(odd, {"w": np.zeros(3, np.float32)})
    assert "no metadata of pma_jax" in fails("merge", finished.snapshots[0].path, odd, "--out", tmp_path / "out")


def test_merges_of_a_run_are_snapshots_for_any_number_of_recipes(pma, finished, tmp_path):
    arguments = ["merge", finished.path, "--recipe", "sma:3", "--recipe", "wma", "--out", tmp_path / "out"]
    assert pma(*arguments)[0] == 0
    for name, count in (("sma-3", 6), ("wma", 6)):
        snapshot = read_snapshot(tmp_path / "out" / name)
        assert snapshot.tokens == tiny.HORIZON and snapshot.merge["recipe"].startswith(name[:3])
        assert len(snapshot.merge["sources"]) == count and snapshot.config == finished.config
    expected = [tiny.named(tiny.read(s)) for s in finished.snapshots[-3:]]
    stored = tiny.named(tiny.read(read_snapshot(tmp_path / "out" / "sma-3")))
    for name, value in stored.items():
        np.testing.assert_allclose(value, np.mean([e[name].astype(np.float64) for e in expected], axis=0), atol=1e-6)
    assert pma("inspect", tmp_path / "out" / "wma", "--verify")[0] == 0


def test_verify_names_the_change(pma, fails, finished, tmp_path):
    assert pma("merge", finished.path, "--out", tmp_path / "out")[0] == 0
    file = max((p for p in (tmp_path / "out" / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "does not match its digest" in fails("inspect", tmp_path / "out", "--verify")
    assert pma("inspect", finished.snapshots[0].path, "--verify")[0] == 0
    (tmp_path / "out" / "provenance.json").unlink()
    assert "has no digests" in fails("inspect", tmp_path / "out", "--verify")


def test_selection_is_reported(suite):
    actual = gather.open_checkpoints([suite])
    assert (actual.unit, actual.positions.tolist()) == ("steps", list(STEPS))
    assert set(actual.stages) == {str(suite)}
    assert [path.name for path in from_storage.output_paths("out", ["sma:3", "lagfree:lag=0.5,order=1"])] == [
        "sma-3",
        "lagfree-lag=0.5,order=1",
    ]


@pytest.mark.parametrize("arguments", [["nothing"], ["nothing", "--kind", "point"]])
def test_missing_source_is_one_line(fails, tmp_path, arguments):
    assert "nothing" in fails("merge", tmp_path / arguments[0], *arguments[1:], "--out", tmp_path / "out")
