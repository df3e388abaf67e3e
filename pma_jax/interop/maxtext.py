"""The arrays of MaxText's trees of Llama, Qwen3 and Qwen3-MoE, and how they differ from pma_jax's leaves.

Names and layouts are those of MaxText 0.2.5: `checkpoint_conversion/utils/param_mapping.py` (names, conversion to
Hugging Face), `layers/attentions.py` (queries, rotary positions), `layers/nnx_decoders.py` (logits), `layers/moe.py`.

Shape suffixes: T layers, D width, N query heads, K key and value heads, H head dim, F hidden, E experts, V vocabulary.

Arrays have inputs before outputs, as pma_jax's leaves. Scanned layers are stacked along dim 1 (`param_scan_axis`), so a
query is [D, T, N, H]; experts are [E, T, D, F]. Layers that are not scanned are named `layers_0` (Linen) or `layers.0`
(NNX). These depend on MaxText's configuration, which the tree does not contain:

- With `decoder_block` llama2 or mistral, queries are not scaled by 1 / sqrt(H): the factor is part of their projection.
  With qwen2 and qwen3 they are, also if the tree has neither biases nor norms of queries, and so looks like Llama's.
- With `rope_type: llama3.1` the rotary pairs are (x[2i], x[2i + 1]); with `default` they are (x[i], x[i + H/2]), as in
  Hugging Face.
- With `logits_via_embedding` the logits are divided by sqrt(D) if `normalize_embedding_logits` is true.
"""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.interop.hf_config import MAX_LAYERS
from pma_jax.interop.hf_weights import LeafMapping, map_leaves
from pma_jax.interop.trainer_trees import EXPERT, LAYER, StoredArray
from pma_jax.storage.formats.source import LeafInfo

_UNSCALED_BLOCKS = ("llama2", "mistral")
SETTINGS: dict[str, tuple[str, ...]] = {
    "decoder_block": (*_UNSCALED_BLOCKS, "qwen2", "qwen3"),
    "rope_type": ("default", "llama3.1"),
    "normalize_embedding_logits": ("true", "false"),
}
# Leaf of pma_jax -> path of the array below `decoder`, or below a layer.
_TOP = {
    "embedding_VxD": "token_embedder.embedding",
    "final_norm_D": "decoder.decoder_norm.scale",
    "unembedding_DxV": "decoder.logits_dense.kernel",
}
_IN_LAYER = {
    "attention_norm_D": "pre_self_attention_layer_norm.scale",
    "query_DxNxH": "self_attention.query.kernel",
    "key_DxKxH": "self_attention.key.kernel",
    "value_DxKxH": "self_attention.value.kernel",
    "output_NxHxD": "self_attention.out.kernel",
    "query_norm_H": "self_attention.query_norm.scale",
    "key_norm_H": "self_attention.key_norm.scale",
    "mlp_norm_D": "post_self_attention_layer_norm.scale",
    "gate_DxF": "mlp.wi_0.kernel",
    "up_DxF": "mlp.wi_1.kernel",
    "down_FxD": "mlp.wo.kernel",
    "moe.router_DxE": "moe_block.gate.kernel",
    "moe.expert_gate_ExDxF": "moe_block.wi_0",
    "moe.expert_up_ExDxF": "moe_block.wi_1",
    "moe.expert_down_ExFxD": "moe_block.wo",
}
_SCAN_DIM = 1
# Of an array's name: the collections around the decoder, and the leaf's own key in trees of NNX.
_NAME = re.compile(r"(?:params\.){0,2}(?:base\.)?(.*?)(?:\.value)?")


def is_maxtext(leaves: Mapping[str, LeafInfo]) -> bool:
    """Return whether the names of a tree's arrays are those of MaxText."""
    return any(_short_name(name).startswith(("decoder.layers", "decoder.decoder_norm")) for name in leaves)


def list_arrays(
    leaves: Mapping[str, LeafInfo], model: ModelConfig, settings: Mapping[str, str]
) -> tuple[list[StoredArray], list[str]]:
    """List the arrays that a tree of the model has.

    Args:
        leaves: The arrays of the tree.
        model: The model's configuration.
        settings: The keys of MaxText's configuration that matter (`SETTINGS`).

    Returns:
        The arrays, by the names that they have in `leaves` if it has them; and notes for the user.

    Raises:
        UserError: A key is missing or unknown, or the model is one that MaxText does not compute.
    """
    _check_settings(model, settings)
    stored_names = {_short_name(name): name for name in leaves}
    if len(stored_names) < len(leaves):
        raise UserError("the tree has two arrays of one name in several collections: choose one when it is merged")
    is_scanned = any(name.startswith("decoder.layers.") for name in stored_names)
    if is_scanned and model.layers == model.width:
        raise UserError(
            f"the width is the number of layers ({model.layers}), so the dim that stacks layers is not known"
        )
    converters, notes = _converters(model, settings)
    arrays = []
    for mapping in map_leaves(model):
        name = mapping.leaf_name.removeprefix("blocks.")
        convert = converters.get(name, _keep)
        if name in _TOP:
            path = stored_names.get(_TOP[name], _TOP[name])
            arrays.append(StoredArray(path, mapping.leaf_shape, mapping, {}, None, convert))
        elif is_scanned:
            path = f"decoder.layers.{_IN_LAYER[name]}"
            arrays.append(_scanned(stored_names.get(path, path), mapping, convert))
        else:
            for layer in range(model.layers):
                path = f"decoder.layers_{layer}.{_IN_LAYER[name]}"
                stacked = {0: EXPERT} if len(mapping.stack_shape) == 2 else {}
                shape = mapping.leaf_shape[1:]
                arrays.append(StoredArray(stored_names.get(path, path), shape, mapping, stacked, layer, convert))
    return arrays, notes


def _scanned(name: str, mapping: LeafMapping, convert: Callable[[np.ndarray], np.ndarray]) -> StoredArray:
    """Return the array of all layers: the layers are dim 1, also of experts, [E, T, D, F]."""
    layers, *rest = mapping.leaf_shape
    shape = (rest[0], layers, *rest[1:])
    stacked = {0: EXPERT, _SCAN_DIM: LAYER} if len(mapping.stack_shape) == 2 else {_SCAN_DIM: LAYER}
    return StoredArray(name, shape, mapping, stacked, None, convert)


def _converters(
    model: ModelConfig, settings: Mapping[str, str]
) -> tuple[dict[str, Callable[[np.ndarray], np.ndarray]], list[str]]:
    """Return leaf of pma_jax -> conversion of a stored slice, for the leaves whose values differ, and notes."""
    is_interleaved = settings["rope_type"] == "llama3.1"
    order = _half_split if is_interleaved else _keep
    query_scale = math.sqrt(model.head_dim) if settings.get("decoder_block") in _UNSCALED_BLOCKS else 1.0
    converters: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "query_DxNxH": lambda stored: _scale(order(stored), query_scale),
        "key_DxKxH": order,
    }
    if model.qk_norm:
        converters |= {"query_norm_H": order, "key_norm_H": order}
    if not model.tie_embeddings or settings["normalize_embedding_logits"] == "false":
        return converters, []
    converters["final_norm_D"] = lambda stored: _scale(stored, 1 / math.sqrt(model.width))
    return converters, ["normalize_embedding_logits: the scale of the final norm is divided by the root of the width"]


def _check_settings(model: ModelConfig, settings: Mapping[str, str]) -> None:
    needed = ["rope_type", *([] if model.qk_norm else ["decoder_block"])]
    needed += ["normalize_embedding_logits"] if model.tie_embeddings else []
    for name, value in settings.items():
        if name not in SETTINGS:
            raise UserError(f"--maxtext {name}: is not one of {', '.join(SETTINGS)}")
        if value not in SETTINGS[name]:
            raise UserError(f"--maxtext {name}={value}: is not supported; it is one of {', '.join(SETTINGS[name])}")
    for name in needed:
        if name not in settings:
            values = " or ".join(f"--maxtext {name}={value}" for value in SETTINGS[name])
            raise UserError(
                f"the weights of MaxText's tree depend on {name}, which it does not contain: pass {values}, as in the "
                "run's configuration (a model_name that begins with llama3.1 has rope_type llama3.1)"
            )
    if model.qk_norm and settings.get("decoder_block", "qwen3") != "qwen3":
        raise UserError(f"--maxtext decoder_block={settings['decoder_block']}: has no norms of queries, but Qwen3 has")
    if model.experts and not model.router_normalized:
        raise UserError("norm_topk_prob is false, but MaxText's routers always normalise the chosen experts' weights")


def _short_name(name: str) -> str:
    """Return the name of an array below its collections, in Linen's form: `decoder.layers_0.mlp.wo.kernel`."""
    match = _NAME.fullmatch(name)
    short = match[1] if match else name
    return re.sub(rf"^decoder\.layers\.(\d{{1,{len(str(MAX_LAYERS))}}})\.", r"decoder.layers_\1.", short)


def _keep(stored: np.ndarray) -> np.ndarray:
    return stored


def _scale(stored: np.ndarray, factor: float) -> np.ndarray:
    """Scale in float32, which the export rounds to its dtype."""
    return stored if factor == 1 else stored.astype(np.float32) * np.float32(factor)


def _half_split(stored: np.ndarray) -> np.ndarray:
    """Reorder the last dim from pairs (2i, 2i + 1) to pairs (i, i + H/2)."""
    return np.concatenate([stored[..., ::2], stored[..., 1::2]], axis=-1)
