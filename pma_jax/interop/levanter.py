"""The arrays of levanter's trees of Llama, Qwen3 and Qwen3-MoE, and how they differ from pma_jax's leaves.

Names and layouts are those of marin-levanter 0.2.20: `models/llama.py`, `models/qwen.py`, `models/qwen3_moe.py`,
`layers/attention.py`, and haliax's `nn/linear.py` and `nn/scan.py`.

Shape suffixes: T layers, D width, N query heads, K key and value heads, G = N / K, H head dim, F hidden, E experts.

Matrices have outputs before inputs, as in PyTorch, except experts ([E, D, F]). Their dims are not flattened: a query is
[K, G, H, D], the output [D, N, H]. Query head n is (n // G, n % G), and rotary pairs are (x[i], x[i + H/2]), so no
values differ from those of Hugging Face. Layers are stacked along dim 0 (`layers/stacked`), or stored one by one
(`layers/blocks/0`) if `scan_layers` is false.
"""

from collections.abc import Mapping

import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.interop.hf_weights import LeafMapping, map_leaves
from pma_jax.interop.trainer_trees import EXPERT, LAYER, StoredArray
from pma_jax.storage.formats.source import LeafInfo

# Leaf of pma_jax -> path of the array, or its path below a layer.
_TOP = {
    "embedding_VxD": "embeddings/token_embeddings/weight",
    "final_norm_D": "transformer/norm/weight",
    "unembedding_DxV": "lm_head/weight",
}
_IN_LAYER = {
    "attention_norm_D": "input_layernorm/weight",
    "query_DxNxH": "self_attn/q_proj/weight",
    "key_DxKxH": "self_attn/k_proj/weight",
    "value_DxKxH": "self_attn/v_proj/weight",
    "output_NxHxD": "self_attn/o_proj/weight",
    "query_norm_H": "self_attn/q_norm/weight",
    "key_norm_H": "self_attn/k_norm/weight",
    "mlp_norm_D": "post_attention_layernorm/weight",
    "gate_DxF": "mlp/gate_proj/weight",
    "up_DxF": "mlp/up_proj/weight",
    "down_FxD": "mlp/down_proj/weight",
    "moe.router_DxE": "mlp/gate/weight",
    "moe.expert_gate_ExDxF": "mlp/experts/gate_proj/weight",
    "moe.expert_up_ExDxF": "mlp/experts/up_proj/weight",
    "moe.expert_down_ExFxD": "mlp/experts/down_proj/weight",
}


def is_levanter(leaves: Mapping[str, LeafInfo]) -> bool:
    """Return whether the names of a tree's arrays are those of levanter's decoders."""
    return any("transformer/layers/" in name for name in leaves)


def list_arrays(leaves: Mapping[str, LeafInfo], model: ModelConfig) -> list[StoredArray]:
    """List the arrays that a tree of the model has, by the names that they have in `leaves` if it has them."""
    prefix = next((name.partition("transformer/layers/")[0] for name in leaves if "transformer/layers/" in name), "")
    is_stacked = any(name.startswith(f"{prefix}transformer/layers/stacked/") for name in leaves)
    arrays = []
    for mapping in map_leaves(model):
        name = mapping.leaf_name.removeprefix("blocks.")
        has_experts = len(mapping.stack_shape) == 2
        shape = _stored_shape(name, mapping, model)

        def convert(stored: np.ndarray, mapping: LeafMapping = mapping, has_experts: bool = has_experts) -> np.ndarray:
            return stored if has_experts or not mapping.input_dims else stored.reshape(mapping.tensor_shape).T

        if name in _TOP:
            arrays.append(StoredArray(prefix + _TOP[name], shape, mapping, {}, None, convert))
        elif is_stacked:
            stacked = {0: LAYER, 1: EXPERT} if has_experts else {0: LAYER}
            path = f"{prefix}transformer/layers/stacked/{_IN_LAYER[name]}"
            arrays.append(StoredArray(path, (model.layers, *shape), mapping, stacked, None, convert))
        else:
            stacked = {0: EXPERT} if has_experts else {}
            for layer in range(model.layers):
                path = f"{prefix}transformer/layers/blocks/{layer}/{_IN_LAYER[name]}"
                arrays.append(StoredArray(path, shape, mapping, stacked, layer, convert))
    return arrays


def _stored_shape(name: str, mapping: LeafMapping, model: ModelConfig) -> tuple[int, ...]:
    """Return the shape of one layer's array (of all its experts)."""
    if len(mapping.stack_shape) == 2:
        return (model.experts, *mapping.slice_shape)
    if not mapping.input_dims:
        return mapping.slice_shape
    if name == "query_DxNxH":
        return (model.kv_heads, model.heads // model.kv_heads, model.head_dim, model.width)
    inputs, outputs = mapping.slice_shape[: mapping.input_dims], mapping.slice_shape[mapping.input_dims :]
    return (*outputs, *inputs)
