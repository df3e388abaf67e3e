"""Compare with transformers itself where torch and transformers are installed (`pip install -e '.[torch]'`)."""

import json

import hf_models
import numpy as np
import pytest
from hf_models import KINDS, TOKENS, assert_logits, config, pma_logits, read_hf_tensors, write_pma_snapshot

from pma_jax.data.tokenizer import byte_tokenizer
from pma_jax.interop.hf import export_snapshot, import_model
from pma_jax.interop.hf_config import parse_hf_config
from pma_jax.merging.from_storage import merge

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def their_logits(path) -> np.ndarray:
    """Return the logits of a directory by transformers in float32; every weight must come from the files."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


def random_transformers_model(kind: str):
    """Return a model of transformers with all weights random."""
    made = hf_models.model(kind)
    sizes = {
        "vocab_size": made.vocabulary_size,
        "hidden_size": made.width,
        "intermediate_size": made.hidden,
        "num_hidden_layers": made.layers,
        "num_attention_heads": made.heads,
        "num_key_value_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "rms_norm_eps": made.norm_epsilon,
        "tie_word_embeddings": made.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": made.rope_theta},
        "max_position_embeddings": 64,
    }
    if made.attention_window_tokens:
        window = made.attention_window_tokens
        sizes |= {"sliding_window": window}
        sizes |= {"use_sliding_window": True, "max_window_layers": 0} if made.qk_norm else {}
    if made.no_rope_interval:
        # The default of pad_token_id is larger than the vocabulary.
        sizes |= {"no_rope_layer_interval": made.no_rope_interval, "pad_token_id": None}
    if made.experts:
        sizes |= {"num_experts": made.experts, "num_experts_per_tok": made.experts_per_token}
        sizes |= {"moe_intermediate_size": made.expert_hidden, "norm_topk_prob": made.router_normalized}
    name = hf_models.ARCHITECTURES[hf_models.model_type(made)]
    model = getattr(transformers, name)(getattr(transformers, name.replace("ForCausalLM", "Config"))(**sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) / 4
            parameter.copy_(noise + 0.5 * (parameter.ndim == 1))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_import_computes_what_transformers_does_and_exports_bitwise(tmp_path, kind):
    random_transformers_model(kind).save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    made = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert [note[:17] for note in made["notes"]] == ["no tokenizer.json"]
    assert_logits(pma_logits(tmp_path / "ours"), their_logits(tmp_path / "theirs"))

    export_snapshot(tmp_path / "ours", tmp_path / "back")
    before, after = read_hf_tensors(tmp_path / "theirs"), read_hf_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_export_computes_what_the_decoder_does(tmp_path, kind, dtype):
    write_pma_snapshot(tmp_path / "ours", config(kind))
    export_snapshot(tmp_path / "ours", tmp_path / "theirs", dtype=dtype, shard_bytes=20_000)
    if dtype == "bfloat16":  # Rounding makes another model, whose tokens may be routed to other experts.
        import_model(tmp_path / "theirs", tmp_path / "rounded")
    assert_logits(
        their_logits(tmp_path / "theirs"), pma_logits(tmp_path / ("ours" if dtype == "float32" else "rounded"))
    )


@pytest.mark.parametrize("kind", ["llama", "smollm3", "olmo2", "qwen3 tied", "mixture"])
def test_exported_merge_loads_and_generates_like_the_decoder(tmp_path, kind):
    for seed in (0, 1):
        # Without a tokenizer no token ends a document, so that generation reaches its full length.
        write_pma_snapshot(tmp_path / str(seed), config(kind, tokenizer="nowhere/tokenizer.json"), seed=seed)
    merge([tmp_path / "0", tmp_path / "1"], [0.3, 0.7], tmp_path / "merged")
    export_snapshot(tmp_path / "merged", tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    start = TOKENS[:, :4]
    written = model.generate(torch.from_numpy(start.astype(np.int64)), max_new_tokens=6, do_sample=False).numpy()
    ours = np.pad(start, ((0, 0), (0, 6)))  # Later positions do not matter: attention is causal.
    for position in range(start.shape[1], ours.shape[1]):
        ours[:, position] = pma_logits(tmp_path / "merged", ours)[:, position - 1].argmax(axis=-1)
    np.testing.assert_array_equal(written, ours)


def test_bytes_tokenizer_is_exported(tmp_path):
    write_pma_snapshot(tmp_path / "ours", config("llama"))
    export_snapshot(tmp_path / "ours", tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in ("import os\n\tx = 1  # é 漢 🙂", "", "  a  "):
        ids = theirs(text)["input_ids"]
        assert ids == byte_tokenizer().encode_many([text])[0].tolist() == list(text.encode())
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == 0 == json.loads((tmp_path / "theirs" / "config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "SmolLM3", "Olmo2", "Qwen3", "Qwen3Moe"])
def test_config_fields_and_their_defaults_match_transformers(name):
    kind = getattr(transformers, f"{name}Config")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2}
    few = sizes | {"num_attention_heads": 32, "architectures": [f"{name}ForCausalLM"]}
    few |= {"num_hidden_layers": 6} if name == "SmolLM3" else {}  # so that one layer has no rotary positions
    complete = kind(**few)
    model, notes = parse_hf_config(few)
    assert notes == ()
    # Where a configuration has no head dim, attention takes width / heads.
    assert model.head_dim == (2 if name in ("Qwen3Moe", "SmolLM3", "Olmo2") else complete.head_dim)
    assert model.no_rope_interval == (4 if name == "SmolLM3" else 0)
    assert model.kv_heads == complete.num_key_value_heads
    if model.experts:
        assert (model.experts, model.experts_per_token) == (complete.num_experts, complete.num_experts_per_tok)
        assert (model.expert_hidden, model.router_normalized) == (
            complete.moe_intermediate_size,
            complete.norm_topk_prob,
        )
    assert model.norm_epsilon == complete.rms_norm_eps and model.tie_embeddings == complete.tie_word_embeddings
    assert model.rope_theta == complete.rope_parameters["rope_theta"]
    # Every field of this version is known: none is ignored.
    assert parse_hf_config(json.loads(complete.to_json_string(use_diff=False)) | few)[1] == ()
    assert parse_hf_config(json.loads(complete.to_json_string()) | few) == (model, ())
