"""Conversion between `ModelConfig` and the config.json of Hugging Face models.

Each field of a config.json that affects the logits is either converted exactly or rejected with its name.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pma_jax import config as configuration
from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError

T = TypeVar("T", bool, int, float, list)

LLAMA, MISTRAL, SMOLLM3 = "LlamaForCausalLM", "MistralForCausalLM", "SmolLM3ForCausalLM"
OLMO2, QWEN3, QWEN3_MOE = "Olmo2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
MODEL_TYPES = {
    LLAMA: "llama",
    MISTRAL: "mistral",
    SMOLLM3: "smollm3",
    OLMO2: "olmo2",
    QWEN3: "qwen3",
    QWEN3_MOE: "qwen3_moe",
}
_QWEN = (QWEN3, QWEN3_MOE)
# Architectures that are close to the decoder -> what differs, for the message that refuses them.
_DIFFERENCES = {
    "Olmo3ForCausalLM": "only some of its layers have a window",
    "Qwen2ForCausalLM": "its queries, keys and values have biases",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_LAYERS = 10_000

# Fields that `ModelConfig` lacks -> the only accepted value, which an absent field has.
_ONLY_VALUES: dict[str, Any] = {
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
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
# Fields that correspond to a key of `ModelConfig` -> (key, value if the field is absent; None: that of
# `_class_defaults`, and a field that it lacks is required).
_FIELDS: dict[str, tuple[str, Any]] = {
    "head_dim": ("head_dim", None),
    "hidden_size": ("width", None),
    "intermediate_size": ("hidden", None),
    "num_attention_heads": ("heads", None),
    "num_hidden_layers": ("layers", None),
    "num_key_value_heads": ("kv_heads", None),
    "rms_norm_eps": ("norm_epsilon", None),
    "tie_word_embeddings": ("tie_embeddings", None),
    "vocab_size": ("vocabulary_size", None),
}
_MIXTURE_FIELDS: dict[str, tuple[str, Any]] = {
    "moe_intermediate_size": ("expert_hidden", 768),
    "norm_topk_prob": ("router_normalized", False),
    "num_experts": ("experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
}
# Fields that are converted by code below.
_SPECIAL_FIELDS = """architectures layer_types max_position_embeddings model_type max_window_layers no_rope_layers
    rope_parameters rope_scaling rope_theta sliding_window use_qk_norm use_sliding_window"""
# Further fields of a mixture of experts. The router's auxiliary loss is used only in training.
_OTHER_MIXTURE_FIELDS = "num_local_experts output_router_logits router_aux_loss_coef"
# Architecture -> keys of `ModelConfig` whose value it fixes. (A router bias is exported if all its values are zero.)
_FIXED_KEYS: dict[str, dict[str, Any]] = {
    LLAMA: {},
    MISTRAL: {},
    SMOLLM3: {"attention_window_tokens": 0},
    OLMO2: {
        "norm_position": "after",
        "qk_norm": True,
        "qk_norm_over": "projection",
        "attention_window_tokens": 0,
        "no_rope_interval": 0,
    },
    QWEN3: {"qk_norm": True, "no_rope_interval": 0},
    QWEN3_MOE: {
        "qk_norm": True,
        "qk_norm_over": "head",
        "no_rope_interval": 0,
        "router_scores": "softmax",
        "shared_experts": 0,
    },
}
# Fields that do not affect the logits.
_IGNORED_FIELDS = """attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label
    initializer_range is_decoder label2id name_or_path output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type return_dict tokenizer_class torch_dtype transformers_version unk_token_id use_cache"""
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Type of a field -> (its description in messages, function that validates a value).
_FIELD_TYPES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer above 0", lambda value: type(value) is int and 0 < value < 2**40),
    # Bounded, because JSON allows 1e999 and integers of 400 digits.
    float: ("a finite number", lambda value: type(value) in (int, float) and abs(value) < 1e300),
    list: ("a list", lambda value: isinstance(value, list)),
}


def architecture_of(model: ModelConfig) -> str:
    """Return the name of the transformers class that computes the same function as the model."""
    if model.experts:
        return QWEN3_MOE
    if model.norm_position == "after" or model.qk_norm_over == "projection":
        return OLMO2
    if model.qk_norm:
        return QWEN3
    if model.no_rope_interval:
        return SMOLLM3
    # Without a window, both compute the same function, and more programs load Llama.
    return MISTRAL if model.attention_window_tokens else LLAMA


def parse_hf_config(fields: Mapping[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    """Convert the fields of a config.json to a `ModelConfig`. Absent fields have the defaults of transformers.

    Returns:
        The model's configuration, and one-line notes for the user.

    Raises:
        UserError: The architecture or a field is not supported, or a value is invalid; the message names it.
    """
    architecture = _parse_architecture(fields)
    for name, neutral in (_ONLY_VALUES | {"use_qk_norm": architecture in _QWEN}).items():
        if name in fields and fields[name] not in (neutral, None):
            raise UserError(f"{name} is {_short(fields[name])}, which the decoder does not have")
    layers = _read(fields, "num_hidden_layers", int)
    if layers > MAX_LAYERS:
        raise UserError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    shared = _fields_of(architecture)
    defaults = {name: default for name, (_, default) in shared.items()} | _class_defaults(fields, architecture)
    sizes: dict[str, Any] = {
        key: _read(fields, name, type(getattr(ModelConfig(), key)), defaults[name]) for name, (key, _) in shared.items()
    }
    sizes |= _FIXED_KEYS[architecture] | {
        "attention_window_tokens": _parse_window(fields, architecture, layers),
        "no_rope_interval": _parse_no_rope_interval(fields, architecture, layers),
        "rope_theta": _parse_rope_theta(fields, default=2_000_000.0 if architecture == SMOLLM3 else 10_000.0),
    }
    known = {*_ONLY_VALUES, *shared, *_SPECIAL_FIELDS.split(), *_IGNORED_FIELDS.split()}
    if architecture == SMOLLM3:
        known.add("no_rope_layer_interval")
    if architecture == QWEN3_MOE:
        if _read(fields, "num_local_experts", int, sizes["experts"]) != sizes["experts"]:
            raise UserError(f"num_experts is {sizes['experts']} but num_local_experts is {fields['num_local_experts']}")
        sizes |= {"router_bias": False}
        known |= {*_OTHER_MIXTURE_FIELDS.split()}
    model = configuration.resolve({"model": sizes}).model
    unknown = sorted(name for name in fields if name not in known and not name.startswith("_"))
    notes = (f"config.json's {', '.join(unknown)} was not read: {architecture} has no such field",) if unknown else ()
    return model, notes


def make_hf_config(
    model: ModelConfig, *, dtype: str, max_position_embeddings: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the fields of a model's config.json, for transformers 4 and 5.

    Args:
        model: The model's configuration.
        dtype: Dtype of the weights, such as "bfloat16".
        max_position_embeddings: Context length in tokens that the model was trained with.
        others: Further fields to add, which do not affect the logits, such as `TOKEN_IDS`.

    Raises:
        UserError: No class of transformers computes the same function (see `check_exportable`).
    """
    check_exportable(model)
    architecture = architecture_of(model)
    fields = {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": max_position_embeddings,
        "model_type": MODEL_TYPES[architecture],
        "rope_theta": model.rope_theta,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    fields |= {name: getattr(model, key) for name, (key, _) in _fields_of(architecture).items()}
    fields |= others
    if architecture == LLAMA:
        fields |= {"mlp_bias": False, "pretraining_tp": 1}
    if architecture == MISTRAL:
        fields |= {"sliding_window": model.attention_window_tokens}
    if architecture == SMOLLM3:
        interval = model.no_rope_interval
        fields |= {"mlp_bias": False, "sliding_window": None, "use_sliding_window": False}
        fields |= {"no_rope_layer_interval": interval, "no_rope_layers": _no_rope_layers(interval, model.layers)}
    if architecture in _QWEN:
        window = model.attention_window_tokens
        fields |= {"sliding_window": window or None, "use_sliding_window": window > 0}
        fields |= {"max_window_layers": 0 if window else model.layers}  # this layer and all later ones have the window
    if architecture == QWEN3_MOE:
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False}
    return dict(sorted(fields.items()))


def check_exportable(model: ModelConfig) -> None:
    """Check that transformers has a class that computes the same function as the model.

    Raises:
        UserError: There is no such class, or it rejects the shape; the message names the keys and values.
    """
    architecture = architecture_of(model)
    if architecture == LLAMA and model.width % model.heads:
        raise UserError(
            f"model.width ({model.width}) is not divisible by model.heads ({model.heads}), as {LLAMA} of "
            "transformers requires"
        )
    different = [
        f"model.{key} is {getattr(model, key)!r} instead of {value!r}"
        for key, value in _FIXED_KEYS[architecture].items()
        if getattr(model, key) != value
    ]
    if different:
        raise UserError(
            f"transformers has no class that computes this model; the closest, {architecture}, differs: "
            f"{', '.join(different)}"
        )


def _parse_architecture(fields: Mapping[str, Any]) -> str:
    names = _read(fields, "architectures", list, [])
    if len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"architectures is {_short(names)}, not one class such as {LLAMA}")
    name = names[0]
    if name not in MODEL_TYPES:
        difference = f", because {_DIFFERENCES[name]}" if name in _DIFFERENCES else ""
        raise UserError(
            f"the architecture {_short(name)} is not supported{difference}: use one of {', '.join(MODEL_TYPES)}"
        )
    # transformers selects the class by model_type only.
    model_type = fields.get("model_type", MODEL_TYPES[name])
    if model_type != MODEL_TYPES[name]:
        raise UserError(f"model_type is {_short(model_type)}, but architectures is {name}: they must agree")
    return name


def _fields_of(architecture: str) -> dict[str, tuple[str, Any]]:
    return _FIELDS | (_MIXTURE_FIELDS if architecture == QWEN3_MOE else {})


def _class_defaults(fields: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the defaults that depend on the architecture or on other fields."""
    heads, width = _read(fields, "num_attention_heads", int), _read(fields, "hidden_size", int)
    # In a present num_key_value_heads, null means one key and value head per query head.
    absent = {MISTRAL: 8, SMOLLM3: 4, QWEN3: 32, QWEN3_MOE: 4}.get(architecture, heads)
    kv_heads = heads if "num_key_value_heads" in fields else absent
    defaults = {
        "head_dim": 128 if architecture == QWEN3 else width // heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5 if architecture == OLMO2 else 1e-6,
        "tie_word_embeddings": architecture == SMOLLM3,
    }
    if architecture == QWEN3_MOE:
        experts = _MIXTURE_FIELDS["num_experts"][1]
        defaults["num_experts"] = _read(fields, "num_local_experts", int, experts)  # the name in transformers 5
    return defaults


def _parse_window(fields: Mapping[str, Any], architecture: str, layers: int) -> int:
    """Return the attention window in tokens, the same in all layers; 0 if there is none."""
    # Mistral has the window in all layers. Qwen3 has it in layers max_window_layers and later, if use_sliding_window is
    # true. Qwen3-MoE does too in older versions of transformers, but has it in all layers in current ones.
    is_qwen, has_one_window = architecture in _QWEN, architecture in (QWEN3_MOE, MISTRAL)
    window = fields.get("sliding_window", 4096 if is_qwen or architecture == MISTRAL else None)
    is_off = is_qwen or architecture == SMOLLM3  # by default
    is_used = window is not None and _read(fields, "use_sliding_window", bool, not is_off)
    if architecture == MISTRAL and is_used != (window is not None):
        raise UserError(
            f"use_sliding_window is False and sliding_window {_short(window)}: {MISTRAL} has only the latter"
        )
    first = fields.get("max_window_layers", 0 if has_one_window else 28) if is_used else layers
    if type(first) is not int:
        raise UserError(f"max_window_layers is {_short(first)}, not an integer")
    default_kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    kinds = _read(fields, "layer_types", list, []) or default_kinds
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(kinds) != layers:
        raise UserError(
            f"layer_types has {_short(unknown[0] if unknown else len(kinds))}, which the decoder does not have"
        )
    if is_used and architecture == SMOLLM3:
        raise UserError(
            "use_sliding_window is True, for layers without rotary positions only: the decoder has one for all"
        )
    if is_used and architecture in (LLAMA, OLMO2):
        raise UserError(f"sliding_window is {_short(window)}, which {architecture} does not have")
    if is_used and has_one_window and first:
        raise UserError(
            f"max_window_layers is {first}: versions of transformers interpret it differently in {architecture}"
        )
    if "sliding_attention" not in kinds and not (is_used and has_one_window):
        return 0
    if "full_attention" in kinds or not is_used:
        raise UserError("layer_types and sliding_window set a window for some layers only: the decoder has one for all")
    return _read(fields, "sliding_window", int, window)


def _no_rope_layers(interval: int, layers: int) -> list[int]:
    """Return SmolLM3's list with 1 for each layer that has rotary positions, and 0 for every `interval`-th."""
    return [int(not interval or (layer + 1) % interval != 0) for layer in range(layers)]


def _parse_no_rope_interval(fields: Mapping[str, Any], architecture: str, layers: int) -> int:
    """Return n if every n-th layer has no rotary positions; 0 if all have them."""
    listed = _read(fields, "no_rope_layers", list, [])
    if architecture != SMOLLM3:
        if listed:
            raise UserError(f"no_rope_layers is {_short(listed)}, which {architecture} does not have")
        return 0
    interval = _read(fields, "no_rope_layer_interval", int, 4)
    interval = interval if interval <= layers else 0
    if not listed:
        return interval
    listed = listed[:layers]  # transformers reads no more of them
    interval = listed.index(0) + 1 if 0 in listed else 0
    if listed != _no_rope_layers(interval, layers):
        raise UserError(
            f"no_rope_layers is {_short(listed)}: the decoder has rotary positions in all {layers} layers, or in all "
            "but every n-th"
        )
    return interval


def _parse_rope_theta(fields: Mapping[str, Any], default: float) -> float:
    """Return the base of the rotary wavelengths, from the top level or from `rope_parameters` (transformers 5)."""
    theta = _read(fields, "rope_theta", float, default)
    both = [fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    if len(both) == 2 and both[0] != both[1]:  # transformers then reads rope_scaling only
        raise UserError("rope_parameters and rope_scaling differ: leave one of them out")
    for location in ("rope_parameters", "rope_scaling"):
        rope = fields.get(location) or {}
        if not isinstance(rope, Mapping):
            raise UserError(f"{location} is {_short(rope)}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(f"{location} has the type {_short(kind)}: the decoder does not scale rotary positions")
        unknown = sorted(map(str, rope.keys() - _ROPE_KEYS))
        if unknown:
            raise UserError(f"{location} has {_short(unknown[0])}, which the decoder does not have")
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise UserError(f"{location} has partial_rotary_factor {_short(rope['partial_rotary_factor'])}, not 1")
        theta = _read(rope, "rope_theta", float, theta)
    if theta <= 0:
        raise UserError(f"rope_theta is {theta}, not above 0")
    return theta


def _read(fields: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of a field as `kind`, one of `_FIELD_TYPES`; `default` if the field is absent or null."""
    value = fields.get(name)
    value = default if value is None else value
    description, is_valid = _FIELD_TYPES[kind]
    if not is_valid(value):
        raise UserError(f"{name} is {_short(value)}, not {description}")
    return kind(value)


def _short(value: Any) -> str:
    return repr(value)[:80]
