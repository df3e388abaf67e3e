"""Stored numbers that are not parameters: quantised weights, adapters, and leaves that cannot be averaged."""

import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.storage.formats.open import open_source

F32 = np.ones((4, 4), np.float32)
CODES = {
    "fp8": {"a.weight": F32.astype(ml_dtypes.float8_e4m3fn)},
    "int8": {"a.weight": F32.astype(np.int8)},
    "uint8": {"a.weight": F32.astype(np.uint8)},
}


def write_pair(folder, leaves, files=None, change=None):
    """Write two directories with `leaves`, the second with `change`, and with `files`; return their paths."""
    for name, extra in (("one", {}), ("two", change or {})):
        (folder / name).mkdir()
        save_file(leaves | extra, folder / name / "model.safetensors")
        for file, content in (files or {}).items():
            (folder / name / file).write_text(json.dumps(content))
    return [folder / "one", folder / "two"]


def run(paths, out, **options):
    return merge(plan([open_source(path) for path in paths], np.array([0.5, 0.5]), **options), [out])


def refused(paths, out, match, **options):
    with pytest.raises(UserError, match=match) as error:
        run(paths, out, **options)
    assert "\n" not in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("leaves", "match"),
    [
        (CODES["fp8"] | {"a.weight_scale_inv": F32}, "a.weight_scale_inv beside a.weight"),
        (CODES["fp8"] | {"a.weight_scale": F32, "a.input_scale": F32}, "quantised"),
        (CODES["fp8"] | {"other.k_scale": F32}, "quantised"),
        (CODES["int8"] | {"a.SCB": F32}, "a.SCB beside a.weight"),
        (CODES["uint8"] | {"a.weight.absmax": F32, "a.weight.quant_map": F32}, "a.weight.absmax"),
        ({"a.qweight": F32.astype(np.int32), "a.qzeros": F32.astype(np.int32), "a.scales": F32}, "quantised"),
        ({"a.weight_packed": F32.astype(np.int32), "a.weight_scale": F32}, "quantised"),
        ({"e.up_blocks": F32.astype(np.uint8), "e.up_scales": F32.astype(np.uint8)}, "e.up_scales beside e.up_blocks"),
        ({"a.kernel.qvalue": F32.astype(np.int8), "a.kernel.scale.0": F32}, "a.kernel.scale.0"),
        ({"w:qdata": F32.astype(np.int8), "w:scale": F32}, "quantised"),
        ({"a.weight": F32.astype(np.uint32), "a.scales": F32, "a.biases": F32}, "quantised"),
    ],
)
def test_quantised_leaves_are_refused(tmp_path, leaves, match):
    refused(write_pair(tmp_path, leaves), tmp_path / "out", match)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"quantization_config": {"quant_method": "fp8"}}},
        {"config.json": {"text_config": {"quantization_config": {"quant_method": "gptq"}}}},
        {"config.json": {"quantization": {"bits": 4}}},
        {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
    ],
)
def test_quantisation_in_configuration_files_is_refused(tmp_path, files):
    refused(write_pair(tmp_path, {"w": F32}, files), tmp_path / "out", "quantised, as .* shows")


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.q_proj.lora_A.weight",
        "lora_B",
        "q.lora_embedding_A.default",
        "q_proj.lora_magnitude_vector",
        "lora_unet_up.lora_down.weight",
        "q.hada_w1_a",
        "layers.0.q.lora_a",
    ],
)
def test_adapters_are_refused(tmp_path, name):
    refused(write_pair(tmp_path, {"w": F32, name: F32}), tmp_path / "out", "mean of the factors A and B is not")


def test_adapter_configuration_is_refused(tmp_path):
    paths = write_pair(tmp_path, {"w": F32}, {"adapter_config.json": {"peft_type": "LORA"}})
    refused(paths, tmp_path / "out", "adapter_config.json")


@pytest.mark.parametrize(
    "leaves",
    [
        CODES["fp8"],  # plain float8 numbers
        {"norm.scale": F32.astype(np.float64), "norm.kernel": F32.astype(np.float64), "k_scale": F32},
        {"norm.scale": F32, "norm.count": np.array(3, np.int32), "logit_scale": F32},
        {"attn.relative_position_index": F32.astype(np.int64), "attn.logit_scale": F32},
        {"attn.bias": F32.astype(np.uint8), "attn.masked_bias": F32},
        {"exploration.weight": F32, "flora_bias": F32, "color_b": F32},
    ],
)
def test_other_leaves_are_merged(tmp_path, leaves):
    run(write_pair(tmp_path, leaves, {"config.json": {"quantization_config": None}}), tmp_path / "out")
    assert open_source(tmp_path / "out").leaves.keys() == leaves.keys()


def test_integers_are_those_of_the_newest_if_asked(tmp_path):
    change = {"n": np.array(7), "mask": np.array([True, False])}
    paths = write_pair(tmp_path, {"w": F32, "n": np.array(5), "mask": np.array([True, True])}, change=change)
    refused(paths, tmp_path / "out", "2 integer or boolean leaves .*--integers newest")
    notes = run(paths, tmp_path / "out", integers="newest").notes
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert (merged["n"], merged["mask"].tolist()) == (7, [True, False])
    assert any("2 integer leaves differ" in note and "mask" in note for note in notes)
    with pytest.raises(UserError, match="integers='oldest' is not one of"):
        run(paths, tmp_path / "other", integers="oldest")


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [
        ("F4", [3, 8], 12),
        ("F6_E2M3", [4], 3),
        ("F8_E8M0", [5], 5),
        ("C64", [2, 2], 32),
        ("U16", [3], 6),
        ("U64", [], 8),
    ],
)
def test_leaves_of_any_dtype_pass_through_if_they_are_equal(tmp_path, code, shape, nbytes):
    def write(name, content):
        entries = {
            "c": {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]},
            "w": {"dtype": "F32", "shape": [2], "data_offsets": [nbytes, nbytes + 8]},
        }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        (tmp_path / name).mkdir()
        data = struct.pack("<Q", len(header)) + header + content + np.array([1, 2], np.float32).tobytes()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        return tmp_path / name

    content = bytes(range(1, nbytes + 1))
    one, two, other = write("one", content), write("two", content), write("other", content[::-1])
    run([one, two], tmp_path / "out")
    merged = open_source(tmp_path / "out")
    assert merged.leaves["c"] == open_source(one).leaves["c"]
    part = merged.byte_ranges["c"][0]
    assert part.path.read_bytes()[part.offset : part.offset + part.nbytes] == content
    refused([one, other], tmp_path / "unequal", "1 .*leaves are not equal .*: c ")
    if not code.startswith("U"):
        refused([one, other], tmp_path / "unequal", "cannot be averaged: c .*remove", integers="newest")
    if code.startswith(("F4", "F6")):
        refused([one, two], tmp_path / "as-orbax", "cannot be stored as orbax", format="orbax")


def test_overflow_of_a_smaller_dtype_is_refused(tmp_path):
    (tmp_path / "large").mkdir()
    paths = write_pair(tmp_path / "large", {"fits": F32, "large": F32 * 1e5})
    refused(paths, tmp_path / "out", "large: .*overflows float16", dtype="float16")
    paths = write_pair(tmp_path, {"w": F32 / 3}, {"config.json": {"dtype": "float32"}})
    run(paths, tmp_path / "out", dtype="float16")
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["w"], (F32 / 3).astype(np.float16))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16"}


@pytest.mark.slow
def test_memory_of_many_leaves_counts(tmp_path):
    leaves = {f"layers.{i}": np.zeros(1, np.float32) for i in range(20_000)}
    sources = [open_source(path) for path in write_pair(tmp_path, leaves)]
    (tmp_path / "few").mkdir()
    few = plan([open_source(path) for path in write_pair(tmp_path / "few", {"w": F32})], np.array([0.5, 0.5]), cores=1)
    many = plan(sources, np.array([0.5, 0.5]), cores=1)
    assert 35 < (many.schedule.memory_bytes - few.schedule.memory_bytes) / 2**20 < 60  # 44 MiB were measured
    with pytest.raises(UserError, match=r"needs [0-9]+ MiB of memory"):
        plan(sources, np.array([0.5, 0.5]), memory_limit_bytes=60 * 2**20)


@pytest.mark.slow
def test_names_that_exceed_the_memory_limit_are_refused_while_they_are_read(tmp_path):
    """Before the second checkpoint is opened; in a process of its own, whose memory counts."""
    names = [f"layers.{i}" for i in range(60_000)]
    for folder in ("step1", "step2"):
        save_file(dict.fromkeys(names[1:], np.zeros(1, np.int8)) | {names[0]: F32}, tmp_path / f"{folder}.safetensors")
    paths = [tmp_path / "step1.safetensors", tmp_path / "step2.safetensors"]
    command = ["-m", "pma_jax.cli", "merge", *map(str, paths), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *command, "--memory-limit", "96MiB"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.startswith(
        "error: the names of 60,000 tensors per checkpoint need more"
    )
    assert len(done.stderr.splitlines()) == 1 and sorted(tmp_path.iterdir()) == paths


def test_provenance_that_cannot_be_read_is_an_error_before_anything_is_written(tmp_path):
    paths = write_pair(tmp_path, {"w": F32})
    (tmp_path / "one" / "provenance.json").symlink_to("provenance.json")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match=r"provenance\.json"):
        run(paths, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
