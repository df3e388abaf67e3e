"""Our `ModelConfig` and Hugging Face's config.json, each from the other.

Every field of a config.json that would change the numbers is read, or refused by name: nothing is approximated.
"""

from collections.abc import Mapping
from typing import Any

from pma_jax import config as configuration
from pma_jax.config import ModelConfig

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_LAYERS = 10_000

# Field -> the value that leaves the numbers as our decoder computes them; absent is that value too.
_NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
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
    rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size"""
_HARMLESS = """attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_decoder label2id name_or_path output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type return_dict tokenizer_class torch_dtype transformers_version unk_token_id use_cache"""
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def architecture_of(model: ModelConfig) -> str:
    """The transformers class that computes what our decoder does."""
    return QWEN3 if model.qk_norm else LLAMA


def from_hf(fields: Mapping[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model that a config.json describes, and notes, one line each.

    What a field's absence means is what transformers takes it to mean.

    Raises:
        ValueError: an architecture or a field that our decoder does not have, or a value that cannot be; it is named.
    """
    architecture = _architecture(fields)
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in (neutral, None):
            raise ValueError(f"{name} is {_short(fields[name])}, which the decoder does not have")
    heads = _whole(fields, "num_attention_heads")
    width = _whole(fields, "hidden_size")
    head_dim = _whole(fields, "head_dim", 128 if architecture == QWEN3 else width // max(heads, 1))
    layers = _whole(fields, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {MOST_LAYERS}")
    sizes = {
        "vocabulary_size": _whole(fields, "vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": _whole(fields, "num_key_value_heads", 32 if _lacks_kv_heads(fields, architecture) else heads),
        "head_dim": head_dim,
        "hidden": _whole(fields, "intermediate_size"),
        "qk_norm": architecture == QWEN3,
        "tie_embeddings": _flag(fields, "tie_word_embeddings"),
        "attention_window_tokens": _window(fields, architecture, layers),
        "rope_theta": _rope_theta(fields),
        "norm_epsilon": _number(fields, "rms_norm_eps", 1e-6),
    }
    model = configuration.resolve({"model": sizes}).model
    known = {*_NEUTRAL, *_READ.split(), *_HARMLESS.split()}
    unknown = sorted(name for name in fields if name not in known and not name.startswith("_"))
    notes = (f"config.json's {', '.join(unknown)} was not read: {architecture} has no such field",) if unknown else ()
    return model, notes


def to_hf(
    model: ModelConfig, *, dtype: str, max_position_embeddings: int, token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of our model: what transformers 4 and 5 both read.

    Args:
        model: ours.
        dtype: of the weights, such as "bfloat16".
        max_position_embeddings: tokens of context that the model was trained on.
        token_ids: of `TOKEN_IDS`; where one is absent, transformers takes its own default.

    Raises:
        ValueError: transformers refuses such a shape.
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
    fields |= token_ids
    if architecture == QWEN3:
        window = model.attention_window_tokens
        fields |= {"sliding_window": window or None, "use_sliding_window": window > 0}
        fields |= {"max_window_layers": 0 if window else model.layers}  # the layers from there on have the window
    else:
        fields |= {"mlp_bias": False, "pretraining_tp": 1}
    return dict(sorted(fields.items()))


def _architecture(fields: Mapping[str, Any]) -> str:
    named = _list(fields, "architectures")
    if len(named) != 1 or not isinstance(named[0], str):
        raise ValueError(f"architectures is {_short(named)}, not one class such as {LLAMA}")
    if named[0] == "Qwen3MoeForCausalLM":
        raise ValueError(f"{named[0]}, a mixture of experts, is not supported yet: {LLAMA} and {QWEN3} are")
    if named[0] not in MODEL_TYPES:
        raise ValueError(f"the architecture {_short(named[0])} is not supported: {LLAMA} and {QWEN3} are")
    return named[0]


def _lacks_kv_heads(fields: Mapping[str, Any], architecture: str) -> bool:
    # Where the field is absent, Qwen3's own default holds; null means as many as there are queries.
    return architecture == QWEN3 and "num_key_value_heads" not in fields


def _window(fields: Mapping[str, Any], architecture: str, layers: int) -> int:
    """Positions that each sees, in every layer; 0 where they see all before them."""
    # Qwen3 reads sliding_window where use_sliding_window is set, and then in the layers from max_window_layers on.
    is_used = fields.get("sliding_window") is not None and fields.get("use_sliding_window", architecture != QWEN3)
    first = fields.get("max_window_layers", 28) if is_used else layers
    if type(first) is not int:
        raise ValueError(f"max_window_layers is {_short(first)}, not a whole number")
    by_number = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = _list(fields, "layer_types") or by_number
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other or len(kinds) != layers:
        raise ValueError(
            f"layer_types has {_short(other[0] if other else len(kinds))}, which the decoder does not have"
        )
    if is_used and architecture != QWEN3:
        raise ValueError(f"sliding_window is {_short(fields['sliding_window'])}, which {architecture} does not have")
    if "sliding_attention" not in kinds:
        return 0
    if "full_attention" in kinds or not is_used:
        raise ValueError("layer_types and sliding_window give a window to some layers: the decoder has one for all")
    return _whole(fields, "sliding_window")


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


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name) or False
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
