import dataclasses
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import hf_models
import jax
import ml_dtypes
import numpy as np
import pytest
import reference
import tiny
import tokenizers
from hf_models import (
    KINDS,
    TOKENS,
    as_reference,
    assert_logits,
    config,
    pma_logits,
    read_hf_tensors,
    shapes,
    write_hf_tensors,
    write_pma_snapshot,
    write_random_hf_model,
)

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.config import MeshConfig
from pma_jax.config.errors import UserError
from pma_jax.data import shards
from pma_jax.data import tokenizer as tokenizing
from pma_jax.interop import hf, hf_weights, output_directory
from pma_jax.merging.from_storage import merge
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import create_run
from pma_jax.runs.snapshots import read_snapshot
from pma_jax.runtime.mesh import data_parallel_mesh
from pma_jax.storage import digests
from pma_jax.storage.formats import hub

QWEN3 = hf_models.model("qwen3")

# Other kinds have a window, and both norms of queries and keys and tied embeddings.
SLOW_KINDS = (
    "qwen3 tied",
    "mixture, a window",
    "mixture tied",
    "olmo2, grouped queries",
    "smollm3, no rotary positions",
)
QUICK_KINDS = [pytest.param(k, marks=pytest.mark.slow) if k in SLOW_KINDS else k for k in KINDS]


def assert_refused(out: Path, message: str, call, *arguments, **options) -> None:
    """Assert that the call raises a ValueError of one line and creates no file at or beside `out`."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(ValueError) as raised:
        call(*arguments, out, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value), raised.value
    assert sorted(out.parent.iterdir()) == before


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Assert that two sets of tensors are bitwise equal."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        np.testing.assert_array_equal(actual[name].view(np.uint8), values.view(np.uint8), err_msg=name, strict=True)


# --- Mapping of leaves to tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_maps_to_tensors_and_every_tensor_to_a_leaf(kind):
    made = config(kind)
    mappings = hf_weights.map_leaves(made.model)
    abstract = jax.tree_util.tree_leaves_with_path(abstract_params(made.model, data_parallel_mesh()))
    expected_shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in abstract}
    assert {mapping.leaf_name: mapping.leaf_shape for mapping in mappings} == expected_shapes
    assert {name: mapping.tensor_shape for mapping in mappings for name in mapping.tensor_names} == shapes(made.model)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_export_equals_the_numpy_model(tmp_path, kind):
    params = write_pma_snapshot(tmp_path / "ours", config(kind))
    made = hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    tensors = read_hf_tensors(tmp_path / "theirs")
    assert {name: values.shape for name, values in tensors.items()} == shapes(config(kind).model)
    assert made["parameters"] == sum(values.size for values in tensors.values())
    model = hf_models.model(kind)
    expected = reference.logits(model, params, TOKENS)
    assert_logits(reference.logits(model, as_reference(model, tensors), TOKENS), expected, 1e-12)
    assert_logits(pma_logits(tmp_path / "ours"), expected)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_import_equals_the_numpy_model(tmp_path, kind):
    model = hf_models.model(kind)
    # Widest dtype first or not: a shard may store its tensors in any order.
    tensors = write_random_hf_model(tmp_path / "theirs", model, ("bfloat16", "float32", "float16"), shards=3)
    hf.import_model(tmp_path / "theirs", tmp_path / "ours")
    snapshot = read_snapshot(tmp_path / "ours")
    assert snapshot.config.model == model and snapshot.kind == "point"
    assert_logits(pma_logits(tmp_path / "ours"), reference.logits(model, as_reference(model, tensors), TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_export_then_import_is_bitwise(tmp_path, kind, dtype):
    tensors = write_random_hf_model(tmp_path / "theirs", hf_models.model(kind), (dtype,))
    hf.import_model(tmp_path / "theirs", tmp_path / "ours")
    hf.export_snapshot(tmp_path / "ours", tmp_path / "again", dtype=dtype, shard_bytes=10_000)
    assert_same(read_hf_tensors(tmp_path / "again"), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_import_then_export_is_bitwise(tmp_path, kind):
    params = write_pma_snapshot(tmp_path / "ours", config(kind))
    hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    hf.import_model(tmp_path / "theirs", tmp_path / "again")
    tiny.assert_equal(tiny.read(read_snapshot(tmp_path / "again")), params)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_values_are_rounded_to_nearest_even(tmp_path, dtype, expected):
    params = write_pma_snapshot(tmp_path / "ours", config("qwen3"))
    assert main(["export", str(tmp_path / "ours"), "--dtype", dtype, "--out", str(tmp_path / "theirs")]) == 0
    written = read_hf_tensors(tmp_path / "theirs")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(written, params["embedding_VxD"].astype(expected))
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == dtype


def test_values_that_overflow_are_refused(tmp_path):
    def enlarge(params):
        params["embedding_VxD"][3, 2] = 65_520  # rounds to infinity in float16

    write_pma_snapshot(tmp_path / "ours", config("qwen3"), change=enlarge)
    message = "model.embed_tokens.weight has values that overflow float16"
    assert_refused(tmp_path / "theirs", message, hf.export_snapshot, tmp_path / "ours", dtype="float16")


# --- What is exported and imported ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_point_block_mean_and_merge_can_be_exported(finished, tmp_path):
    newest = finished.snapshots[-1].path
    write_pma_snapshot(tmp_path / "mean", config("llama"), kind="block_mean")
    merge([s.path for s in finished.snapshots[-3:]], np.full(3, 1 / 3), tmp_path / "merged")
    for source in (finished.path, newest, tmp_path / "mean", tmp_path / "merged"):
        hf.export_snapshot(source, tmp_path / f"{source.name}-out")
    assert_same(read_hf_tensors(tmp_path / "24-out"), read_hf_tensors(tmp_path / f"{finished.path.name}-out"))
    model = finished.config.model
    for source in (newest, tmp_path / "merged"):
        tensors = read_hf_tensors(tmp_path / f"{source.name}-out")
        expected = reference.logits(model, as_reference(model, tensors), TOKENS)
        assert_logits(pma_logits(source), expected)


def test_merge_in_bfloat16_is_exported_in_bfloat16(tmp_path):
    for seed in (0, 1):
        write_pma_snapshot(tmp_path / str(seed), config("llama"), seed=seed)
    assert main(["merge", *(str(tmp_path / n) for n in "01"), "--dtype", "bfloat16", "--out", str(tmp_path / "m")]) == 0
    made = hf.export_snapshot(tmp_path / "m", tmp_path / "theirs")
    assert made["dtypes"] == ["bfloat16"]
    assert {str(values.dtype) for values in read_hf_tensors(tmp_path / "theirs").values()} == {"bfloat16"}
    wide = hf.export_snapshot(tmp_path / "m", tmp_path / "wide", dtype="float32")
    assert wide["bytes"] == 2 * made["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mixture"])
def test_every_verb_accepts_an_imported_model(tmp_path, workspace, capsys, kind):
    tensors = write_random_hf_model(tmp_path / "theirs", hf_models.model(kind))
    tokenizing.byte_tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    for name in ("one", "two"):
        assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / name)]) == 0
    assert f"{hf_models.ARCHITECTURES[hf_models.model_type(hf_models.model(kind))]}, " in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(values.size for values in tensors.values())
    assert main(["merge", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "merged")]) == 0
    data = tiny.keys(workspace)["data"]
    keys = [f"data.source={data['source']}", f"data.files={data['files'][0]}", f"data.cache_dir={data['cache_dir']}"]
    keys += ["data.held_out_percent=20", "evaluation.tokens=500"]
    capsys.readouterr()
    arguments = [
        "evaluate",
        str(tmp_path / "one"),
        str(tmp_path / "merged"),
        "--json",
        *(f"--config.{k}" for k in keys),
    ]
    assert main(arguments) == 0
    one, merged = json.loads(capsys.readouterr().out)
    assert one["loss"] == pytest.approx(merged["loss"], rel=1e-6)
    # A merge of the import exports the files that the import copied.
    assert main(["export", str(tmp_path / "merged"), "--out", str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] == ["tokenizer.json"]
    assert_same(read_hf_tensors(tmp_path / "back"), tensors)


def test_hub_revision_is_imported_with_its_step_and_tokens(tmp_path, monkeypatch):
    tensors = write_random_hf_model(tmp_path / "blobs", QWEN3)
    tokenizing.byte_tokenizer().save(tmp_path / "blobs" / "tokenizer.json")
    cached = tmp_path / "snapshots" / "c0ffee"  # The hub's client stores links to its blobs.
    cached.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (cached / file.name).symlink_to(file)
    monkeypatch.setattr(hub, "_call_api", lambda address, request: str(cached))
    made = hf.import_model("hf://org/suite@step100-tokens5B", tmp_path / "ours")
    assert (
        made["tokenizer"] == ["tokenizer.json"]
        and not (tmp_path / "ours" / "tokenizer" / "tokenizer.json").is_symlink()
    )
    snapshot = read_snapshot(tmp_path / "ours")
    assert (snapshot.step, snapshot.tokens) == (100, 5 * 10**9)
    hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    assert_same(read_hf_tensors(tmp_path / "theirs"), tensors)


@pytest.mark.parametrize(("kind", "last"), [("llama", "mlp.up_proj"), ("mixture", "mlp.experts.3.down_proj")])
def test_export_is_sharded_at_complete_layers(tmp_path, kind, last):
    write_pma_snapshot(tmp_path / "ours", config(kind))
    made = hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs", shard_bytes=20_000)
    index = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made["bytes"]
    assert index["weight_map"].keys() == shapes(hf_models.model(kind)).keys()
    files = [index["weight_map"][f"model.layers.{layer}.{last}.weight"] for layer in range(3)]
    assert files == sorted(files) and len(set(index["weight_map"].values())) > 2
    for file in set(index["weight_map"].values()):
        assert (tmp_path / "theirs" / file).stat().st_size < 25_000


@pytest.mark.parametrize(
    "sizes",
    [{"layers": 24, "hidden": 512}, hf_models.MIXTURE | {"layers": 6, "experts": 4, "expert_hidden": 512}],
    ids=["dense", "mixture"],
)
def test_export_holds_one_tensor_in_memory_at_a_time(tmp_path, sizes):
    made = configuration.resolve({"model": hf_models.SIZES | {"width": 128} | sizes})
    params = write_pma_snapshot(tmp_path / "ours", made)
    model_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    tensor_bytes = 4 * 128 * 512
    del params
    for call, names in ((hf.export_snapshot, ("ours", "theirs")), (hf.import_model, ("theirs", "again"))):
        tracemalloc.start()
        call(tmp_path / names[0], tmp_path / names[1])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * tensor_bytes < model_bytes / 10, (call.__name__, peak, tensor_bytes, model_bytes)


def test_neither_direction_imports_jax(tmp_path):
    write_pma_snapshot(tmp_path / "ours", config("llama"))
    code = "import sys; from pma_jax.cli import main; out = sys.argv[1]\n"
    code += "assert main(['export', f'{out}/ours', '--out', f'{out}/theirs']) == 0\n"
    code += "assert main(['import', f'{out}/theirs', '--out', f'{out}/again']) == 0\n"
    code += "print([m for m in ('jax', 'orbax', 'flax', 'torch', 'transformers') if m in sys.modules])"
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.mesh
@pytest.mark.slow
def test_snapshot_with_sharded_experts_is_exported_with_few_reads(tmp_path, monkeypatch):
    made = config("mixture")
    params = write_pma_snapshot(tmp_path / "whole", made)
    mesh = dataclasses.replace(made, mesh=MeshConfig(data=1, fsdp=2, expert=4))
    write_pma_snapshot(tmp_path / "split", mesh)
    reads, read_leaf_bytes = [], hf.read_leaf_bytes
    monkeypatch.setattr(hf, "read_leaf_bytes", lambda *args: reads.append(args) or read_leaf_bytes(*args))
    hf.export_snapshot(tmp_path / "split", tmp_path / "from-split")
    # Each leaf once: its chunks contain all layers.
    assert len(reads) == len(jax.tree.leaves(params))
    # The same, cut into bounded pieces.
    monkeypatch.setattr(hf, "_MAX_READ_BYTES", 4 * 3 * 16 * 12)
    hf.export_snapshot(tmp_path / "split", tmp_path / "in-pieces")
    hf.export_snapshot(tmp_path / "whole", tmp_path / "from-whole")
    for name in ("from-split", "in-pieces"):
        assert_same(read_hf_tensors(tmp_path / name), read_hf_tensors(tmp_path / "from-whole"))


# --- Router biases ----------------------------------------------------------------------------------------------------


def with_bias(tmp_path: Path, value: float) -> Path:
    """Return a snapshot of the mixture whose router bias has a single non-zero number."""
    made = configuration.resolve({"model": hf_models.SIZES | hf_models.MIXTURE | {"router_bias": True}})

    def zeroed(params):
        bias = np.zeros_like(params["blocks"]["moe"]["router_bias_E"])
        bias[1, 2] = value
        params["blocks"]["moe"]["router_bias_E"] = bias

    write_pma_snapshot(tmp_path / "ours", made, change=zeroed)
    return tmp_path / "ours"


def test_zero_bias_is_dropped_and_reported(tmp_path):
    expected_shapes = with_bias(tmp_path, 0.0)
    output = hf.export_snapshot(expected_shapes, tmp_path / "theirs")
    assert any("router bias" in note for note in output["notes"])
    hf.import_model(tmp_path / "theirs", tmp_path / "again")
    assert not read_snapshot(tmp_path / "again").config.model.router_bias
    assert_logits(pma_logits(tmp_path / "again"), pma_logits(expected_shapes), 1e-6)


@pytest.mark.parametrize("value", [1e-3, -1e-3])
def test_non_zero_bias_is_refused(tmp_path, value):
    expected_shapes = with_bias(tmp_path, value)
    assert_refused(
        tmp_path / "theirs", "blocks.moe.router_bias_E has values up to", hf.export_snapshot, expected_shapes
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"router_scores": "sigmoid"}, "model.router_scores is 'sigmoid'"),
        ({"shared_experts": 1}, "model.shared_experts is 1"),
        ({"qk_norm": False}, "model.qk_norm is False"),
    ],
)
def test_mixture_of_another_kind_is_refused(tmp_path, model, message):
    made = configuration.resolve({"model": hf_models.SIZES | hf_models.MIXTURE | model})
    write_pma_snapshot(tmp_path / "ours", made)
    assert_refused(tmp_path / "theirs", message, hf.export_snapshot, tmp_path / "ours")


# --- Refusals, which leave no files -----------------------------------------------------------------------------------


def changed(tensors, how):
    name = "model.layers.1.self_attn.k_proj.weight"
    if how == "missing":
        return {key: values for key, values in tensors.items() if key != name}, f"{name} is missing"
    if how == "unknown":
        return tensors | {
            "model.layers.0.mlp.gate.weight": np.zeros((4, 16), np.float32)
        }, "mlp.gate.weight is unexpected"
    if how == "bias":
        return tensors | {name.replace("weight", "bias"): np.zeros(16, np.float32)}, "k_proj.bias is unexpected"
    if how == "shape":
        return tensors | {name: tensors[name].T.copy()}, f"{name} has shape (16, 16), not"
    if how == "head":
        return tensors | {
            "lm_head.weight": tensors["lm_head.weight"][:-1]
        }, "lm_head.weight has shape (255, 16), not (256, 16)"
    return tensors | {name: tensors[name].astype(np.int8)}, f"{name} has dtype int8"


@pytest.mark.mesh
@pytest.mark.parametrize("how", ["missing", "unknown", "bias", "shape", "head", "dtype"])
def test_import_names_a_mismatched_tensor(tmp_path, how):
    made = hf_models.model("llama")
    if how == "shape":
        made = hf_models.ModelConfig(**hf_models.SIZES | {"kv_heads": 4, "head_dim": 6})
    tensors, message = changed(write_random_hf_model(tmp_path / "whole", made), how)
    if how == "shape":
        message = "k_proj.weight has shape (16, 24), not (24, 16)"
    write_hf_tensors(tmp_path / "theirs", made, tensors)
    assert_refused(tmp_path / "ours", message, hf.import_model, tmp_path / "theirs")


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"number of mismatches: 1): {EXPERT} is missing"),
        (lambda t: t.update({EXPERT.replace(".3.", ".4."): t[EXPERT]}), "experts.4.up_proj.weight is unexpected"),
        (lambda t: t.update({EXPERT: t[EXPERT].T.copy()}), f"{EXPERT} has shape (16, 12), not (12, 16)"),
        (lambda t: t.pop("model.layers.2.mlp.gate.weight"), "model.layers.2.mlp.gate.weight is missing"),
        (
            lambda t: t.update({"model.layers.2.mlp.gate.weight": np.zeros((5, 16), np.float32)}),
            "has shape (5, 16), not",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.e_score_correction_bias": np.zeros(4, np.float32)}),
            "model.layers.0.mlp.gate.e_score_correction_bias is unexpected in Qwen3MoeForCausalLM",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.shared_expert.up_proj.weight": t[EXPERT]}),
            "mlp.shared_expert.up_proj.weight is unexpected",
        ),
    ],
)
def test_import_names_a_mismatched_tensor_of_a_mixture(tmp_path, change, message):
    made = hf_models.model("mixture")
    tensors = write_random_hf_model(tmp_path / "whole", made)
    change(tensors)
    write_hf_tensors(tmp_path / "theirs", made, tensors)
    assert_refused(tmp_path / "ours", message, hf.import_model, tmp_path / "theirs")


@pytest.mark.mesh
def test_fused_experts_are_named_with_the_missing_tensors(tmp_path):
    made = hf_models.model("mixture")
    tensors = write_random_hf_model(tmp_path / "whole", made)
    left = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(made.layers):
        left[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.zeros((4, 24, 16), np.float32)
        left[f"model.layers.{layer}.mlp.experts.down_proj"] = np.zeros((4, 16, 12), np.float32)
    write_hf_tensors(tmp_path / "theirs", made, left)
    for message in ("experts.0.gate_proj.weight is missing", "experts.gate_up_proj is unexpected"):
        assert_refused(tmp_path / "ours", message, hf.import_model, tmp_path / "theirs")


@pytest.mark.mesh
def test_missing_expert_index_is_named(tmp_path):
    for count, message in (
        (3, "experts.3.gate_proj.weight is unexpected"),
        (5, "experts.4.gate_proj.weight is missing"),
    ):
        write_random_hf_model(tmp_path / str(count), hf_models.model("mixture"), num_experts=count)
        assert_refused(tmp_path / "ours", message, hf.import_model, tmp_path / str(count))
    write_random_hf_model(tmp_path / "many", hf_models.model("mixture"), num_experts=10**6)
    assert_refused(tmp_path / "ours", "3 layers of 1000000 experts", hf.import_model, tmp_path / "many")


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"qk_norm": True}, "blocks.query_norm_H is missing"),
        ({"tie_embeddings": True}, "unembedding_DxV is unexpected"),
        ({"kv_heads": 4}, "blocks.key_DxKxH has shape (3, 16, 2, 8), not (3, 16, 4, 8)"),
    ],
)
def test_export_names_a_mismatched_leaf(tmp_path, model, message):
    write_pma_snapshot(tmp_path / "ours", config("llama"))
    path = tmp_path / "ours" / "_CHECKPOINT_METADATA"
    facts = json.loads(path.read_text())
    custom = digests.drop_digests(facts["custom_metadata"])  # Edited metadata do not match their digest.
    custom["config"]["model"] |= model
    path.write_text(json.dumps(facts | {"custom_metadata": custom}))
    assert_refused(tmp_path / "theirs", message, hf.export_snapshot, tmp_path / "ours")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "config.json: rope_scaling has the type 'llama3'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "model_type is 'llama', but architectures is Qwen3Moe"),
        ({"num_hidden_layers": 9000}, "9000 layers"),
        ({"hidden_size": 8}, "model.embed_tokens.weight has shape (256, 16), not (256, 8)"),
    ],
)
def test_mismatched_configuration_is_named(tmp_path, fields, message):
    write_random_hf_model(tmp_path / "theirs", hf_models.model("llama"), **fields)
    assert_refused(tmp_path / "ours", message, hf.import_model, tmp_path / "theirs")


def test_directory_without_a_model_is_refused(tmp_path, finished):
    write_random_hf_model(tmp_path / "theirs", hf_models.model("llama"))
    (tmp_path / "theirs" / "config.json").unlink()
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "ours", "has no config.json", hf.import_model, tmp_path / "theirs")
    lone = tmp_path / "theirs" / "model.safetensors"
    assert_refused(tmp_path / "ours", "has no config.json", hf.import_model, lone)
    assert_refused(tmp_path / "ours", "has no config.json", hf.import_model, finished.snapshots[-1].path)
    assert_refused(
        tmp_path / "ours", "holds no checkpoint in a format that is read", hf.import_model, tmp_path / "empty"
    )
    (tmp_path / "theirs" / "config.json").write_text("[1]")
    assert_refused(tmp_path / "ours", "expected a JSON object", hf.import_model, tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text("{")
    assert_refused(tmp_path / "ours", "invalid JSON", hf.import_model, tmp_path / "theirs")
    assert_refused(tmp_path / "out", "is a Hugging Face model already", hf.export_snapshot, tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").unlink()
    assert_refused(tmp_path / "out", "is not a snapshot of pma_jax", hf.export_snapshot, tmp_path / "theirs")
    assert_refused(tmp_path / "out", "dtype 'int8'", hf.export_snapshot, finished.path, dtype="int8")


def test_nothing_is_overwritten_and_leftovers_of_a_kill_do_not_block(tmp_path):
    write_pma_snapshot(tmp_path / "ours", config("llama"))
    stale = tmp_path / ".theirs.partial" / "checkpoint"
    stale.mkdir(parents=True)
    (stale / "model-00007-of-00009.safetensors").write_text("half")
    hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    assert not stale.exists() and not list((tmp_path / "theirs").glob("*00007*"))
    before = tiny.contents(tmp_path)
    assert_refused(tmp_path / "theirs", "exists already", hf.export_snapshot, tmp_path / "ours")
    assert_refused(tmp_path / "ours", "exists already", hf.import_model, tmp_path / "theirs")
    # A process that was killed after it had published its output left its working directory.
    (tmp_path / ".theirs.partial" / "checkpoint").mkdir(parents=True)
    with pytest.raises(UserError, match="exists already"):
        hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / ".theirs.partial").exists()
    assert tiny.contents(tmp_path) == before


@pytest.mark.mesh
@pytest.mark.parametrize("error", [UserError("no"), OSError("disk full"), KeyboardInterrupt()])
def test_failure_half_way_leaves_no_files(tmp_path, monkeypatch, capsys, error):
    write_pma_snapshot(tmp_path / "ours", config("llama"))

    def fails(*_):
        raise error

    monkeypatch.setattr(output_directory, "write_range", fails)
    status = main(["export", str(tmp_path / "ours"), "--out", str(tmp_path / "deep" / "theirs")])
    err = capsys.readouterr().err
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 1) and len(err.splitlines()) == 1
    assert not list((tmp_path / "deep").iterdir())


def test_training_fields_of_a_mixture_are_exported_unchanged(tmp_path):
    for name, fields in {"said": {"router_aux_loss_coef": 0.0}, "silent": {}}.items():
        write_random_hf_model(
            tmp_path / name, hf_models.model("mixture"), **fields, num_experts=None, num_local_experts=4
        )
        hf.import_model(tmp_path / name, tmp_path / f"{name}-ours")
        hf.export_snapshot(tmp_path / f"{name}-ours", tmp_path / f"{name}-out")
        described = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert {key: described[key] for key in described if key == "router_aux_loss_coef"} == fields
        assert described["num_experts"] == 4 and described["architectures"] == ["Qwen3MoeForCausalLM"]


# --- Tensors that the configuration implies ---------------------------------------------------------------------------


@pytest.mark.mesh
def test_stored_tied_head_must_equal_the_embedding(tmp_path):
    made = hf_models.model("llama tied")
    tensors = write_random_hf_model(tmp_path / "plain", made)
    head = tensors["model.embed_tokens.weight"]
    write_hf_tensors(tmp_path / "same", made, tensors | {"lm_head.weight": head})
    output = hf.import_model(tmp_path / "same", tmp_path / "ours")
    assert any("lm_head.weight equals the embedding" in note for note in output["notes"])
    write_hf_tensors(tmp_path / "other", made, tensors | {"lm_head.weight": head + 1})
    assert_refused(tmp_path / "no", "lm_head.weight is unexpected", hf.import_model, tmp_path / "other")


@pytest.mark.mesh
def test_stored_frequencies_must_equal_those_of_theta(tmp_path):
    made = hf_models.model("llama")
    tensors = write_random_hf_model(tmp_path / "plain", made)
    half = made.head_dim // 2
    right = (1.0 / made.rope_theta ** (np.arange(half) / half)).astype("bfloat16")
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(made.layers)]
    write_hf_tensors(tmp_path / "right", made, tensors | dict.fromkeys(names, right))
    output = hf.import_model(tmp_path / "right", tmp_path / "ours")
    assert any("3 tensors of rotary frequencies" in note for note in output["notes"])
    write_hf_tensors(tmp_path / "wrong", made, tensors | dict.fromkeys(names, right * 2))
    assert_refused(tmp_path / "no", "inv_freq is unexpected", hf.import_model, tmp_path / "wrong")


# --- Tokenizers and small files ---------------------------------------------------------------------------------------


def test_small_files_are_copied_through_import_and_export(tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 2, "max_position_embeddings": 4096}
    write_random_hf_model(tmp_path / "theirs", QWEN3, **ids)
    small = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"model_max_length": 9}',
        "special_tokens_map.json": "{}",
        "merges.txt": "a b",
        "vocab.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": '{"temperature": 0.6, "eos_token_id": [2, 3]}',
        "README.md": "no",
    }
    for name, text in small.items():
        (tmp_path / "theirs" / name).write_text(text)
    made = hf.import_model(tmp_path / "theirs", tmp_path / "ours")
    kept = sorted(small.keys() - {"README.md", "generation_config.json"})
    assert made["tokenizer"] == kept == sorted(file.name for file in (tmp_path / "ours" / "tokenizer").iterdir())
    read = read_snapshot(tmp_path / "ours").config
    assert read.data.tokenizer == str(tmp_path / "ours" / "tokenizer" / "tokenizer.json")
    assert read.training.sequence_length_tokens == 1024

    merge([tmp_path / "ours"], [1.0], tmp_path / "merged")
    for source in ("ours", "merged"):
        hf.export_snapshot(tmp_path / source, tmp_path / f"{source}-out")
        for name in [*kept, "generation_config.json"]:
            written = (tmp_path / f"{source}-out" / name).read_text()
            if name.endswith("generation_config.json"):
                assert json.loads(written) == json.loads(small[name])
            else:
                assert written == small[name]
        described = json.loads((tmp_path / f"{source}-out" / "config.json").read_text())
        assert {name: described[name] for name in ids} == ids
        assert described["model_type"] == "qwen3"

    write_random_hf_model(tmp_path / "silent", QWEN3)
    hf.import_model(tmp_path / "silent", tmp_path / "quiet")
    hf.export_snapshot(tmp_path / "quiet", tmp_path / "quiet-out")
    described = json.loads((tmp_path / "quiet-out" / "config.json").read_text())
    assert not described.keys() & {"bos_token_id", "eos_token_id", "pad_token_id"}, "transformers' own defaults hold"


def test_trained_bpe_is_read_from_the_token_cache(tmp_path, workspace):
    data = tiny.config(workspace).data
    keys = {name: getattr(data, name) for name in ("source", "files", "held_out_percent", "cache_dir")}
    made = config("llama", **keys, tokenizer="bpe", bpe_vocabulary_size=257)
    made = configuration.resolve(dataclasses.asdict(made) | {"model": hf_models.SIZES | {"vocabulary_size": 260}})
    prepared = shards.prepare_tokens(made.data, progress=False)
    run = create_run(tmp_path / "run", made, {"corpus": prepared.digest})
    write_pma_snapshot(run.path / "snapshots" / "8", made)
    merge([run.path / "snapshots" / "8"], [1.0], tmp_path / "merged")
    expected = tokenizing.load_tokenizer(prepared.directory / "tokenizer.json")
    for source in (run.path / "snapshots" / "8", tmp_path / "merged"):
        hf.export_snapshot(source, tmp_path / f"{source.name}-out")
        mappings = tokenizing.load_tokenizer(tmp_path / f"{source.name}-out" / "tokenizer.json")
        assert mappings.digest == expected.digest
        described = json.loads((tmp_path / f"{source.name}-out" / "config.json").read_text())
        assert described["eos_token_id"] == described["bos_token_id"] == expected.end_of_document
    # The BPE of another corpus is another tokenizer; without the run nothing identifies the right one.
    (run.path / "run.json").write_text('{"corpus": "another"}')
    made = hf.export_snapshot(tmp_path / "merged", tmp_path / "without")
    assert made["tokenizer"] == [] and "no tokenizer is written" in made["notes"][0]
    assert json.loads((tmp_path / "without" / "generation_config.json").read_text()) == {}
    given = prepared.directory / "tokenizer.json"
    assert hf.export_snapshot(tmp_path / "merged", tmp_path / "with", tokenizer=given)["tokenizer"]


def test_tokenizer_given_by_the_user_is_exported(tmp_path):
    vocabulary = {"a": 0, "<eos>": 1, "?": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "config.json").write_text("of another model")
    write_pma_snapshot(tmp_path / "ours", config("llama", tokenizer=str(tmp_path / "words" / "tokenizer.json")))
    hf.export_snapshot(tmp_path / "ours", tmp_path / "made")
    described = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert described["eos_token"] == "<eos>" and described["model_max_length"] == 32
    assert json.loads((tmp_path / "made" / "config.json").read_text())["eos_token_id"] == 1
    assert json.loads((tmp_path / "made" / "generation_config.json").read_text())["pad_token_id"] == 1

    (tmp_path / "words" / "tokenizer_config.json").write_text('{"mine": true}')
    hf.export_snapshot(tmp_path / "ours", tmp_path / "beside")
    assert json.loads((tmp_path / "beside" / "tokenizer_config.json").read_text()) == {"mine": True}

    write_pma_snapshot(tmp_path / "lost", config("llama", tokenizer=str(tmp_path / "gone" / "tokenizer.json")))
    (note,) = hf.export_snapshot(tmp_path / "lost", tmp_path / "none")["notes"]
    assert "gone/tokenizer.json" in note and "--tokenizer" in note
    message = "no tokenizer file"
    assert_refused(tmp_path / "no", message, hf.export_snapshot, tmp_path / "lost", tokenizer=tmp_path / "nothing")


def test_model_with_separate_packed_documents_gets_no_begin_token(tmp_path):
    made = configuration.resolve({"model": hf_models.SIZES | {"separator_token": 0}})
    write_pma_snapshot(tmp_path / "ours", made)
    output = hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    assert "one document per sequence" in output["notes"][0]
    for name, key in (("config.json", "bos_token_id"), ("tokenizer_config.json", "bos_token")):
        assert json.loads((tmp_path / "theirs" / name).read_text())[key] is None


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    made = configuration.resolve({"model": hf_models.SIZES | {"vocabulary_size": 64}})
    write_pma_snapshot(tmp_path / "ours", made)
    assert_refused(tmp_path / "theirs", "ids up to 255", hf.export_snapshot, tmp_path / "ours")


def test_progress_reaches_the_total(tmp_path):
    reports: list[tuple[int, int]] = []
    write_pma_snapshot(tmp_path / "ours", config("llama"))
    hf.export_snapshot(tmp_path / "ours", tmp_path / "theirs", progress=lambda *args: reports.append(args))
    assert reports[-1][0] == reports[-1][1] == max(done for done, _ in reports)
    reports.clear()
    hf.import_model(tmp_path / "theirs", tmp_path / "again", progress=lambda *args: reports.append(args))
    assert reports[-1][0] == reports[-1][1]
