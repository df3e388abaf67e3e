"""Our `ModelConfig` and Hugging Face's config.json, each from the other.

Every field of a config.json that would change the numbers is read, or refused by name: nothing is approximated.
"""

from collections.abc import Mapping
from typing import Any

from pma_jax import config as configuration
from pma_jax.config import ModelConfig

LLAMA, QWEN3, QWEN3_MOE = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3", QWEN3_MOE: "qwen3_moe"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_LAYERS = 10_000

# Field -> the value that leaves the numbers as our decoder computes them; absent is that value too.
_NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
    "auto_map": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "clip_qkv": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "no_rope_layers": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
# Fields that are read below, and those that say nothing about the numbers of a forward pass.
_READ = """architectures head_dim hidden_size intermediate_size layer_types max_position_embeddings model_type
    max_window_layers num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window tie_word_embeddings use_qk_norm use_sliding_window vocab_size"""
# A router's auxiliary loss is trained with, and has no part in the logits.
_MIXTURE = """moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
    output_router_logits router_aux_loss_coef"""
# What Qwen3-MoE always does, and our mixtures may do otherwise. (A router's bias is in the weights, if it is not zero.)
_MIXTURE_IS = {"qk_norm": True, "router_scores": "softmax", "shared_experts": 0}
_HARMLESS = """attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_decoder label2id name_or_path output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type return_dict tokenizer_class torch_dtype transformers_version unk_token_id use_cache"""
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def architecture_of(model: ModelConfig) -> str:
    """The transformers class that computes what our decoder does."""
    if model.experts:
        return QWEN3_MOE
    return QWEN3 if model.qk_norm else LLAMA


def parse_hf_config(fields: Mapping[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model that a config.json describes, and notes, one line each.

    What a field's absence means is what transformers takes it to mean.

    Raises:
        ValueError: an architecture or a field that our decoder does not have, or a value that cannot be; it is named.
    """
    architecture = _architecture(fields)
    for name, neutral in (_NEUTRAL | {"use_qk_norm": architecture != LLAMA}).items():
        if name in fields and fields[name] not in (neutral, None):
            raise ValueError(f"{name} is {_short(fields[name])}, which the decoder does not have")
    heads = _whole(fields, "num_attention_heads")
    width = _whole(fields, "hidden_size")
    head_dim = _whole(fields, "head_dim", 128 if architecture == QWEN3 else width // max(heads, 1))
    # Where the field is absent, the class's own default holds; null means as many as there are queries.
    kv_heads = heads if "num_key_value_heads" in fields else {LLAMA: heads, QWEN3: 32, QWEN3_MOE: 4}[architecture]
    layers = _whole(fields, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {MOST_LAYERS}")
    sizes = {
        "vocabulary_size": _whole(fields, "vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": _whole(fields, "num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "hidden": _whole(fields, "intermediate_size"),
        "qk_norm": architecture != LLAMA,
        "tie_embeddings": _flag(fields, "tie_word_embeddings"),
        "attention_window_tokens": _window(fields, architecture, layers),
        "rope_theta": _rope_theta(fields),
        "norm_epsilon": _number(fields, "rms_norm_eps", 1e-6),
    }
    known = {*_NEUTRAL, *_READ.split(), *_HARMLESS.split()}
    if architecture == QWEN3_MOE:
        sizes |= _mixture(fields)
        known |= {*_MIXTURE.split()}
    model = configuration.resolve({"model": sizes}).model
    unknown = sorted(name for name in fields if name not in known and not name.startswith("_"))
    notes = (f"config.json's {', '.join(unknown)} was not read: {architecture} has no such field",) if unknown else ()
    return model, notes


def make_hf_config(
    model: ModelConfig, *, dtype: str, max_position_embeddings: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of our model: what transformers 4 and 5 both read.

    Args:
        model: ours.
        dtype: of the weights, such as "bfloat16".
        max_position_embeddings: tokens of context that the model was trained on.
        others: fields that have no part in the logits, `TOKEN_IDS` among them; where one is absent, transformers takes
            its own default.

    Raises:
        ValueError: as `check_exportable` does.
    """
    check_exportable(model)
    architecture = architecture_of(model)
    fields = {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.width,
        "initializer_range": 0.02,
        "intermediate_size": model.hidden,
        "max_position_embeddings": max_position_embeddings,
        "model_type": MODEL_TYPES[architecture],
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.vocabulary_size,
    }
    fields |= others
    if architecture == LLAMA:
        fields |= {"mlp_bias": False, "pretraining_tp": 1}
    else:
        window = model.attention_window_tokens
        fields |= {"sliding_window": window or None, "use_sliding_window": window > 0}
        fields |= {"max_window_layers": 0 if window else model.layers}  # the layers from there on have the window
    if architecture == QWEN3_MOE:
        fields |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": model.expert_hidden,
            "norm_topk_prob": model.router_normalized,
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "output_router_logits": False,
        }
    return dict(sorted(fields.items()))


def check_exportable(model: ModelConfig) -> None:
    """Checks that transformers has a class that computes what this model does.

    Raises:
        ValueError: it has none, or refuses such a shape; each key and value that is in the way is named.
    """
    architecture = architecture_of(model)
    if architecture == LLAMA and model.width % model.heads:
        raise ValueError(
            f"model.width ({model.width}) does not divide by model.heads ({model.heads}): {LLAMA} of transformers "
            "refuses that"
        )
    if architecture == LLAMA and model.attention_window_tokens:
        raise ValueError(
            f"model.attention_window_tokens is {model.attention_window_tokens}, and {LLAMA} has no window ({QWEN3}, "
            "model.qk_norm=True, has)"
        )
    other = [
        f"model.{key} is {getattr(model, key)!r} (there: {there!r})"
        for key, there in _MIXTURE_IS.items()
        if architecture == QWEN3_MOE and getattr(model, key) != there
    ]
    if other:
        raise ValueError(f"a mixture of experts goes out as {QWEN3_MOE}, which is another model: {', '.join(other)}")


def _architecture(fields: Mapping[str, Any]) -> str:
    named = _list(fields, "architectures")
    if len(named) != 1 or not isinstance(named[0], str):
        raise ValueError(f"architectures is {_short(named)}, not one class such as {LLAMA}")
    if named[0] not in MODEL_TYPES:
        raise ValueError(f"the architecture {_short(named[0])} is not supported: {', '.join(MODEL_TYPES)} are")
    # transformers goes by this one alone.
    model_type = fields.get("model_type", MODEL_TYPES[named[0]])
    if model_type != MODEL_TYPES[named[0]]:
        raise ValueError(f"model_type is {_short(model_type)}, and architectures says {named[0]}")
    return named[0]


def _mixture(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a mixture of experts; its router has no bias."""
    experts = _whole(fields, "num_experts", _whole(fields, "num_local_experts", 128))
    if _whole(fields, "num_local_experts", experts) != experts:  # the name that transformers 5 writes
        raise ValueError(f"num_experts is {experts} and num_local_experts is {fields['num_local_experts']}")
    return {
        "experts": experts,
        "experts_per_token": _whole(fields, "num_experts_per_tok", 8),
        "expert_hidden": _whole(fields, "moe_intermediate_size", 768),
        "router_normalized": _flag(fields, "norm_topk_prob"),
        "router_bias": False,
        **_MIXTURE_IS,
    }


def _window(fields: Mapping[str, Any], architecture: str, layers: int) -> int:
    """Positions that each sees, in every layer; 0 where they see all before them."""
    # Qwen3 reads sliding_window where use_sliding_window is set, and then in the layers from max_window_layers on. Of a
    # mixture, older versions of transformers read it so too, and today's gives the window to all layers.
    is_qwen, is_mixture = architecture != LLAMA, architecture == QWEN3_MOE
    window = fields.get("sliding_window", 4096 if is_qwen else None)
    is_used = window is not None and _flag(fields, "use_sliding_window", not is_qwen)
    first = fields.get("max_window_layers", 0 if is_mixture else 28) if is_used else layers
    if type(first) is not int:
        raise ValueError(f"max_window_layers is {_short(first)}, not a whole number")
    by_number = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = _list(fields, "layer_types") or by_number
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other or len(kinds) != layers:
        raise ValueError(
            f"layer_types has {_short(other[0] if other else len(kinds))}, which the decoder does not have"
        )
    if is_used and not is_qwen:
        raise ValueError(f"sliding_window is {_short(window)}, which {architecture} does not have")
    if is_used and is_mixture and first:
        raise ValueError(
            f"max_window_layers is {first}: versions of transformers read that differently in {architecture}"
        )
    if "sliding_attention" not in kinds and not (is_used and is_mixture):
        return 0
    if "full_attention" in kinds or not is_used:
        raise ValueError("layer_types and sliding_window give a window to some layers: the decoder has one for all")
    return _whole(fields, "sliding_window", window)


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """The base of the wavelengths, from the top level or, as transformers 5 writes it, from `rope_parameters`."""
    theta = _number(fields, "rope_theta", 10_000.0)
    for place in ("rope_parameters", "rope_scaling"):
        rope = fields.get(place) or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{place} is {_short(rope)}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{place} is of the type {_short(kind)}: the decoder's rotary positions are not scaled")
        unknown = sorted(map(str, rope.keys() - _ROPE_KEYS))
        if unknown:
            raise ValueError(f"{place} has {_short(unknown[0])}, which the decoder does not have")
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise ValueError(f"{place} has partial_rotary_factor {_short(rope['partial_rotary_factor'])}, not 1")
        theta = _number(rope, "rope_theta", theta)
    if theta <= 0:
        raise ValueError(f"rope_theta is {theta}, not above 0")
    return theta


def _whole(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**40:
        raise ValueError(f"{name} is {_short(value)}, not a whole number above 0")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not abs(value) < 1e300:  # 1e999 is JSON too, and so are 400 digits
        raise ValueError(f"{name} is {_short(value)}, not a finite number")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_short(value)}, not true or false")
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}, not a list")
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]
