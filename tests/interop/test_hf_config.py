import dataclasses

import pytest

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.interop.hf_config import make_hf_config, parse_hf_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
MIXTURE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 12}
OURS = ModelConfig(vocabulary_size=128, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=48, rope_theta=5e5)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_configuration_round_trips(qk_norm, tie):
    window = 9 if tie else 0
    model = dataclasses.replace(
        OURS, qk_norm=qk_norm, tie_embeddings=tie, norm_epsilon=3e-5, attention_window_tokens=window
    )
    fields = make_hf_config(
        model, dtype="bfloat16", max_position_embeddings=64, others={"eos_token_id": 3, "bos_token_id": None}
    )
    assert parse_hf_config(fields) == (model, ())
    assert fields["eos_token_id"] == 3 and fields["bos_token_id"] is None
    assert fields["torch_dtype"] == "bfloat16" and fields["max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has the type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has the type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters has the type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has 'full_attention'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 70.0}}, "rope_scaling differ"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', not a finite number"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf, not a finite number"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "the decoder has one for all"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "'Gemma3ForCausalLM' is not supported"),
        ({"architectures": ["Olmo3ForCausalLM"]}, "only some of its layers have a window"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "queries, keys and values have biases"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral', but architectures is"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"architectures": [["x"]]}, "[['x']], not one class"),
        ({"architectures": None}, "architectures is []"),
        ({"architectures": ["LlamaForCausalLM", "x"]}, "not one class"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0, not an integer"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, more than"),
        ({"num_key_value_heads": 3}, "(3) must divide"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ],
)
@pytest.mark.parametrize(
    "base",
    [LLAMA, MISTRAL | {"sliding_window": None}, SMOLLM3, OLMO2, QWEN3, MIXTURE],
    ids=["llama", "mistral", "smollm3", "olmo2", "qwen3", "mixture"],
)
def test_unsupported_fields_are_named(base, fields, message):
    with pytest.raises(ValueError) as raised:
        parse_hf_config(base | fields)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4 but num_local_experts is 8"),
        ({"num_experts_per_tok": 9}, "experts_per_token (9) is more than the 8"),
        ({"num_experts_per_tok": 2.0}, "num_experts_per_tok is 2.0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers is 2: versions of transformers"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, "the decoder has one for all"),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ],
)
def test_invalid_mixture_fields_are_named(fields, message):
    with pytest.raises(ValueError) as raised:
        parse_hf_config(MIXTURE | fields)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"no_rope_interval": 2},
        {"no_rope_interval": 1, "tie_embeddings": True, "norm_epsilon": 1e-5},
        {"norm_position": "after", "qk_norm": True, "qk_norm_over": "projection"},
    ],
    ids=str,
)
def test_other_blocks_round_trip(keys):
    model = dataclasses.replace(OURS, **keys)
    fields = make_hf_config(model, dtype="float32", max_position_embeddings=64, others={})
    assert parse_hf_config(fields) == (model, ())
    # Nothing depends on a default that another version of transformers may change.
    assert (
        parse_hf_config({name: value for name, value in fields.items() if name != "no_rope_layer_interval"})[0] == model
    )


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 2),
        ({"no_rope_layer_interval": None}, 4),
        ({"no_rope_layer_interval": 5}, 0),
        ({"no_rope_layers": None}, 2),
        ({"no_rope_layers": [1, 1, 1, 1]}, 0),
        ({"no_rope_layers": [1, 1, 0, 1]}, 3),
        ({"no_rope_layers": [1, 1, 1, 0, 0, 0]}, 4),
        ({"no_rope_layers": [0, 0, 0, 0]}, 1),
    ],
    ids=str,
)
def test_layers_without_rotary_positions_are_read(fields, interval):
    model, notes = parse_hf_config(SMOLLM3 | {"num_hidden_layers": 4} | fields)
    assert model.no_rope_interval == interval and notes == () and model.tie_embeddings and model.rope_theta == 2e6


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (
            SMOLLM3,
            {"no_rope_layers": [0, 1, 1]},
            "no_rope_layers is [0, 1, 1]: the decoder has rotary positions in all 3",
        ),
        (SMOLLM3, {"no_rope_layers": [1, 1]}, "no_rope_layers is [1, 1]: the decoder"),
        (SMOLLM3, {"no_rope_layers": [2, 1, 1]}, "no_rope_layers is [2, 1, 1]"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, not an integer above 0"),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 9}, "for layers without rotary positions only"),
        (OLMO2, {"no_rope_layers": [1, 1, 0]}, "no_rope_layers is [1, 1, 0], which Olmo2ForCausalLM does not have"),
        (OLMO2, {"sliding_window": 9}, "sliding_window is 9, which Olmo2ForCausalLM does not have"),
    ],
    ids=str,
)
def test_other_blocks_that_the_decoder_lacks_are_named(base, fields, message):
    with pytest.raises(UserError) as raised:
        parse_hf_config(base | {"num_hidden_layers": 3} | fields)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"no_rope_interval": 2, "attention_window_tokens": 9},
            "SmolLM3ForCausalLM, differs: model.attention_window_tok",
        ),
        (
            {"no_rope_interval": 2, "qk_norm": True},
            "Qwen3ForCausalLM, differs: model.no_rope_interval is 2 instead of 0",
        ),
        ({"norm_position": "after"}, "differs: model.qk_norm is False instead of True, model.qk_norm_over is 'head'"),
        ({"qk_norm": True, "qk_norm_over": "projection"}, "model.norm_position is 'before' instead of 'after'"),
        (
            {"experts": 4, "experts_per_token": 2, "expert_hidden": 8, "hidden": 0, "no_rope_interval": 1},
            "Qwen3MoeForCausalLM, differs: model.qk_norm is False instead of True, model.no_rope_interval is 1",
        ),
    ],
    ids=str,
)
def test_models_that_transformers_lacks_are_not_exported(keys, message):
    with pytest.raises(UserError) as raised:
        make_hf_config(dataclasses.replace(OURS, **keys), dtype="float32", max_position_embeddings=64, others={})
    assert message in str(raised.value)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("window", [0, 9])
def test_mixture_configuration_round_trips(normalized, window):
    model = dataclasses.replace(
        OURS,
        qk_norm=True,
        experts=6,
        experts_per_token=3,
        expert_hidden=20,
        router_normalized=normalized,
        router_bias=False,
        attention_window_tokens=window,
    )
    fields = make_hf_config(
        model, dtype="float32", max_position_embeddings=64, others={"eos_token_id": 3, "router_aux_loss_coef": 0.0}
    )
    assert parse_hf_config(fields) == (model, ())
    assert fields["model_type"] == "qwen3_moe" and fields["router_aux_loss_coef"] == 0


def test_fields_of_models_on_the_hub_are_known():
    """Read all fields of the config.json of two mixtures on the hub: 30B-A3B's, and those that Coder adds."""
    base = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    model, notes = parse_hf_config(base)
    assert notes == ()
    assert (model.experts, model.experts_per_token, model.expert_hidden, model.layers) == (128, 8, 768, 48)
    assert model.router_normalized and not model.router_bias and not model.shared_experts and model.qk_norm
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert parse_hf_config(base | coder) == (model, ())


def test_all_obstacles_to_exporting_a_mixture_are_named():
    other = dataclasses.replace(OURS, experts=4, shared_experts=1, router_scores="sigmoid")
    with pytest.raises(ValueError) as raised:
        make_hf_config(other, dtype="float32", max_position_embeddings=64, others={})
    for message in ("model.qk_norm is False", "model.router_scores is 'sigmoid'", "model.shared_experts is 1"):
        assert message in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 7e4},
        {"rope_theta": 7e4, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 1e4},
        {"rope_scaling": {"type": "default", "rope_theta": 7e4}},
    ],
)
def test_theta_is_read_in_every_form(fields):
    assert parse_hf_config(LLAMA | fields)[0].rope_theta == 7e4


def test_absent_fields_take_the_defaults_of_transformers():
    llama = parse_hf_config({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"})[0]
    assert (llama.kv_heads, llama.head_dim, llama.rope_theta, llama.norm_epsilon) == (4, 8, 1e4, 1e-6)
    assert not llama.tie_embeddings and not llama.qk_norm
    mistral = {name: value for name, value in MISTRAL.items() if name != "num_key_value_heads"}
    assert parse_hf_config(mistral | {"num_attention_heads": 16})[0].kv_heads == 8
    qwen3 = parse_hf_config({name: value for name, value in QWEN3.items() if name != "head_dim"})[0]
    assert qwen3.head_dim == 128 and qwen3.qk_norm
    few = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    mixture = parse_hf_config({name: MIXTURE[name] for name in few} | {"num_attention_heads": 8})[0]
    assert (mixture.experts, mixture.experts_per_token, mixture.expert_hidden) == (128, 8, 768)
    assert (mixture.head_dim, mixture.kv_heads, mixture.router_normalized) == (4, 4, False)
    assert parse_hf_config(MIXTURE | {"num_experts": None, "num_local_experts": 16})[0].experts == 16


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}, 0),
        ({"sliding_window": 4096, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 4096}, 0),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "sliding_window": 4096, "layer_types": ["sliding_attention"] * 2}, 4096),
    ],
)
def test_window_is_that_of_the_layers_that_use_it(fields, window):
    assert parse_hf_config(QWEN3 | fields) == (
        dataclasses.replace(parse_hf_config(QWEN3)[0], attention_window_tokens=window),
        (),
    )


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 9, "max_window_layers": 2}, 0),
        ({"use_sliding_window": True, "sliding_window": None}, 0),
        ({"use_sliding_window": True}, 4096),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 9),
    ],
)
def test_window_of_a_mixture_applies_to_all_layers(fields, window):
    assert parse_hf_config(MIXTURE | fields)[0].attention_window_tokens == window


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096"),
        (LLAMA, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window is 4096"),
        (MISTRAL, {"sliding_window": 9, "max_window_layers": 1}, "max_window_layers is 1"),
        (MISTRAL, {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, "one for all"),
        (MISTRAL, {"sliding_window": 9, "use_sliding_window": False}, "use_sliding_window is False"),
        (MISTRAL, {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "one for all"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, "one for all"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": -1, "max_window_layers": 0}, "sliding_window is -1"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": "x"}, "max_window_layers"),
    ],
)
def test_window_of_some_or_no_layers_is_refused_by_name(base, fields, message):
    with pytest.raises(ValueError, match=message):
        parse_hf_config(base | fields)


def test_unread_fields_are_reported():
    (note,) = parse_hf_config(LLAMA | {"unsloth_version": "1", "_name_or_path": "x", "use_cache": True})[1]
    assert "unsloth_version" in note and "name_or_path" not in note and "use_cache" not in note
    (note,) = parse_hf_config(QWEN3 | {"num_experts": 4, "router_aux_loss_coef": 0.1})[1]
    assert "num_experts, router_aux_loss_coef" in note and "Qwen3ForCausalLM has no such" in note


@pytest.mark.parametrize(("fields", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 9}, 9)])
def test_window_of_mistral_applies_to_all_layers(fields, window):
    llama = parse_hf_config(LLAMA)[0]
    assert parse_hf_config(MISTRAL | fields) == (dataclasses.replace(llama, attention_window_tokens=window), ())
    made = make_hf_config(
        dataclasses.replace(llama, attention_window_tokens=window),
        dtype="float32",
        max_position_embeddings=64,
        others={},
    )
    assert made["architectures"] == ["MistralForCausalLM" if window else "LlamaForCausalLM"]
    assert made.get("sliding_window") == (window or None)


def test_shape_that_transformers_refuses_is_not_exported():
    odd = dataclasses.replace(OURS, width=30)
    with pytest.raises(ValueError, match=r"model.width \(30\)"):
        make_hf_config(odd, dtype="float32", max_position_embeddings=64, others={})
    assert make_hf_config(
        dataclasses.replace(odd, qk_norm=True), dtype="float32", max_position_embeddings=64, others={}
    )
