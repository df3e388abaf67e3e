import json

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

import pma_jax as pma
from pma_jax.merging.inspect import format_description, inspect


def test_inspect_describes_a_run(finished):
    facts = inspect(finished.path)
    assert facts["kind"] == "run"
    text = finished.metadata["evaluation"]
    assert facts["snapshots"] == [
        {"step": s.step, "tokens": s.tokens, "loss": s.loss, "text": text} for s in finished.snapshots
    ]
    assert [s["step"] for s in facts["states"]] == tiny.STATES
    assert facts["facts"]["corpus"] == finished.metadata["corpus"]
    text = format_description(facts)
    assert "6 snapshots, 1,024 to 6,144 tokens" in text and f"{finished.snapshots[-1].loss:.4f}" in text


def test_inspect_describes_a_snapshot_as_stored(finished):
    facts = inspect(finished.snapshots[2].path)
    leaves = tiny.named(tiny.read(finished.snapshots[2]))
    assert facts["kind"] == "snapshot" and facts["merge"] is None
    assert (facts["step"], facts["tokens"], facts["loss"]) == (12, 3072, finished.snapshots[2].loss)
    assert facts["parameters"] == sum(leaf.size for leaf in leaves.values())
    stored = {name: (tuple(leaf["shape"]), leaf["dtype"]) for name, leaf in facts["leaves"].items()}
    assert stored == {name: (leaf.shape, str(leaf.dtype)) for name, leaf in leaves.items()}
    assert "blocks/gate_DxF  float32 (2, 16, 32)" in format_description(facts)


def test_inspect_shows_the_sources_and_coefficients_of_a_merge(finished, tmp_path):
    pma.merge(finished.snapshots[-3:], pma.recipes.wma(3), tmp_path / "merged", recipe="wma")
    facts = inspect(tmp_path / "merged")
    assert facts["kind"] == "merged snapshot"
    text = format_description(facts)
    assert "wma of 3 snapshots" in text and "+0.333333  5,120 tokens" in text
    assert np.isclose(sum(facts["merge"]["coefficients"]), 1)
    json.dumps(facts)


def test_inspect_lists_a_directory_of_checkpoints(tmp_path):
    for name in ("checkpoint-1500", "checkpoint-500", "stage2-step100", "final", "tmp-checkpoint-2000"):
        (tmp_path / name).mkdir()
        save_file({"w": np.zeros(3, np.float32)}, tmp_path / name / "model.safetensors")
    facts = inspect(tmp_path)
    assert facts["kind"] == "3 checkpoints" and facts["ordered_by"] is None, "stage 2 and no stage"
    (tmp_path / "stage2-step100").rename(tmp_path / "v2")
    facts = inspect(tmp_path)
    assert [(c["path"], c["step"], c["nbytes"]) for c in facts["checkpoints"]] == [
        (str(tmp_path / f"checkpoint-{step}"), step, 12) for step in (500, 1500)
    ]
    assert facts["ordered_by"] == "steps"
    assert {name: reason[:9] for name, reason in facts["left_out"].items()} == {
        "final": "no step i",
        "tmp-checkpoint-2000": "temporary",
        "v2": "no step i",
    }
    text = format_description(facts)
    assert "oldest first, by steps" in text and text.index("step 500") < text.index("step 1,500")
    assert "left out: final (no step in the name)" in text
    json.dumps(facts)


def test_other_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint in a format that is read"):
        inspect(tmp_path)
