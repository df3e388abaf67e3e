"""Mapping between the leaves of pma_jax's parameters and the tensors of Hugging Face models.

Shape suffixes: T layers, D width, N query heads, K key and value heads, H head dim, F hidden, E experts, V vocabulary.

Leaves are stacked over layers (and experts) and have inputs before outputs (`query_DxNxH`). Hugging Face stores one
tensor per layer (and expert) with outputs before inputs, as PyTorch does (`q_proj.weight`, [N * H, D]). Heads and the
rotary halves of H have the same order in both, so no rows are permuted. A norm over all heads ([N, H]) is stored as a
vector [N * H].
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.interop.hf_config import QWEN3_MOE
from pma_jax.storage.formats.open import read_leaf, read_leaf_bytes
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo

# Stored dtypes that can be converted: snapshots of runs are float32, merged ones can be bfloat16.
DTYPES = ("float32", "bfloat16", "float16")
Messages = list[str]  # for the user, one line each
_MAX_LISTED = 4  # maximum number of mismatches of each kind that an error message lists
# The only leaf without a Hugging Face counterpart: Qwen3-MoE has no router bias, so it must be zero for export.
ROUTER_BIAS_LEAF = "blocks.moe.router_bias_E"
# The leaves of the blocks: (leaf, module of one layer, `LeafMapping.input_dims`).
_NORMS = {
    "before": (("attention_norm_D", "input_layernorm", 0), ("mlp_norm_D", "post_attention_layernorm", 0)),
    "after": (("attention_norm_D", "post_attention_layernorm", 0), ("mlp_norm_D", "post_feedforward_layernorm", 0)),
}
_ATTENTION = (
    ("query_DxNxH", "self_attn.q_proj", 1),
    ("key_DxKxH", "self_attn.k_proj", 1),
    ("value_DxKxH", "self_attn.v_proj", 1),
    ("output_NxHxD", "self_attn.o_proj", 2),
)
_QK_NORMS = {
    "head": (("query_norm_H", "self_attn.q_norm", 0), ("key_norm_H", "self_attn.k_norm", 0)),
    "projection": (("query_norm_NxH", "self_attn.q_norm", 2), ("key_norm_KxH", "self_attn.k_norm", 2)),
}
_MLP = (("gate_DxF", "mlp.gate_proj", 1), ("up_DxF", "mlp.up_proj", 1), ("down_FxD", "mlp.down_proj", 1))
_EXPERTS = (
    ("moe.router_DxE", "mlp.gate", 1),
    ("moe.expert_gate_ExDxF", "mlp.experts.{}.gate_proj", 1),
    ("moe.expert_up_ExDxF", "mlp.experts.{}.up_proj", 1),
    ("moe.expert_down_ExFxD", "mlp.experts.{}.down_proj", 1),
)


@dataclass(frozen=True)
class LeafMapping:
    """A leaf of pma_jax and the Hugging Face tensors that it is stacked from.

    Attributes:
        leaf_name: Name of the leaf in storage.
        name_pattern: Name of the tensors, with a `{}` for each dim of `stack_shape`.
        slice_shape: Shape of one slice of the leaf, which corresponds to one tensor.
        input_dims: Number of leading dims of `slice_shape` that are input dims; 0 if the tensor is not transposed. If
            all are, the tensor is a vector.
        stack_shape: Sizes of the leaf's leading dims, along which tensors are stacked: (T,) for layers, (T, E) for
            experts, () for a single tensor.
    """

    leaf_name: str
    name_pattern: str
    slice_shape: tuple[int, ...]
    input_dims: int = 0
    stack_shape: tuple[int, ...] = ()

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return self.stack_shape + self.slice_shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor."""
        if not self.input_dims:
            return self.slice_shape
        if self.input_dims == len(self.slice_shape):
            return (math.prod(self.slice_shape),)
        return math.prod(self.slice_shape[self.input_dims :]), math.prod(self.slice_shape[: self.input_dims])

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors, in the order of the slices of the leaf."""
        return [self.name_pattern.format(*index) for index in itertools.product(*map(range, self.stack_shape))]

    def to_slice(self, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Convert a tensor to a slice of the leaf, as a new array of `dtype` in C order."""
        return (tensor.T if self.input_dims else tensor).astype(dtype, order="C").reshape(self.slice_shape)

    def to_tensor(self, leaf_slice: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Convert a slice of the leaf to a tensor, as a new array of `dtype` in C order."""
        tensor = leaf_slice.reshape(self.tensor_shape[::-1]).T if self.input_dims else leaf_slice
        return tensor.astype(dtype, order="C")


def map_leaves(model: ModelConfig) -> list[LeafMapping]:
    """Return the mapping of every leaf of the model except the router bias."""
    norms = *_NORMS[model.norm_position], *(_QK_NORMS[model.qk_norm_over] if model.qk_norm else ())
    block = [*norms, *_ATTENTION, *(_EXPERTS if model.experts else _MLP)]
    return [
        _map_leaf(model, "embedding_VxD", "model.embed_tokens.weight"),
        *(
            _map_leaf(model, f"blocks.{leaf}", f"model.layers.{{}}.{name}.weight", inputs)
            for leaf, name, inputs in block
        ),
        _map_leaf(model, "final_norm_D", "model.norm.weight"),
        *([] if model.tie_embeddings else [_map_leaf(model, "unembedding_DxV", "lm_head.weight", 1)]),
    ]


def _map_leaf(model: ModelConfig, leaf: str, name_pattern: str, input_dims: int = 0) -> LeafMapping:
    """Map a leaf to tensors.

    The first `{}` of `name_pattern` stands for the layer. A second one stands for the expert; the first dim in the
    leaf's name is then E.
    """
    hidden = model.expert_hidden if model.experts else model.hidden
    sizes = {"D": model.width, "N": model.heads, "K": model.kv_heads, "H": model.head_dim, "F": hidden}
    sizes |= {"E": model.experts, "V": model.vocabulary_size}
    dims = (model.layers, *(sizes[dim] for dim in leaf.rpartition("_")[2].split("x")))
    stacked_dims = name_pattern.count("{}")
    return LeafMapping(leaf, name_pattern, dims[max(stacked_dims, 1) :], input_dims, dims[:stacked_dims])


def check_leaves(
    origin: str, leaves: Mapping[str, LeafInfo], expected: Mapping[str, tuple[int, ...]], model_name: str
) -> None:
    """Check that `leaves` has exactly the names and shapes of `expected`, and convertible dtypes (`DTYPES`).

    Args:
        origin: Address of the checkpoint, for messages.
        leaves: Leaves or tensors of the checkpoint.
        expected: Shape of each expected leaf or tensor.
        model_name: Name of the model that expects them, for messages.

    Raises:
        UserError: Leaves are missing, unexpected, or have another shape or dtype; the first of each kind are listed.
    """
    both = [(name, leaf) for name, leaf in leaves.items() if name in expected]
    differences = [
        [f"{name} is missing" for name in expected if name not in leaves],
        [f"{name[:80]} is unexpected in {model_name}" for name in leaves if name not in expected],
        [f"{name} has shape {leaf.shape}, not {expected[name]}" for name, leaf in both if leaf.shape != expected[name]],
        [f"{name} has dtype {leaf.dtype}, not {', '.join(DTYPES)}" for name, leaf in both if leaf.dtype not in DTYPES],
    ]
    count = sum(map(len, differences))
    listed = [text for kind in differences for text in kind[:_MAX_LISTED]]
    if count:
        raise UserError(f"{origin} does not match {model_name} (number of mismatches: {count}): {'; '.join(listed)}")


def drop_zero_router_bias(source: CheckpointSource, model: ModelConfig) -> tuple[dict[str, LeafInfo], Messages]:
    """Drop the router bias from the leaves of `source` if it is zero, because Qwen3-MoE has none.

    Returns:
        The other leaves, and messages for the user about what was dropped.

    Raises:
        UserError: The bias is not zero, so without it the router would select other experts.
    """
    leaves = dict(source.leaves)
    if not (model.experts and model.router_bias) or ROUTER_BIAS_LEAF not in leaves:
        return leaves, []
    largest = np.abs(read_leaf(source, ROUTER_BIAS_LEAF).astype("float32")).max()
    if largest != 0:  # also true for NaN
        raise UserError(
            f"{ROUTER_BIAS_LEAF} has values up to {largest:.2g}, but {QWEN3_MOE} has no router bias and would "
            "select other experts: train models for export with --config.model.router_bias=False"
        )
    del leaves[ROUTER_BIAS_LEAF]
    return leaves, ["the router bias is zero and was not exported: Qwen3-MoE has none"]


def drop_redundant_tensors(source: CheckpointSource, model: ModelConfig) -> tuple[dict[str, LeafInfo], Messages]:
    """Drop the tensors of `source` whose values follow from the configuration.

    Old Llama checkpoints store rotary frequencies, and some with tied embeddings also store `lm_head.weight`. Tensors
    with other values are kept, so that `check_leaves` rejects them.

    Returns:
        The other tensors, and messages for the user about what was dropped.
    """
    leaves, messages = dict(source.leaves), []
    if model.tie_embeddings and _is_tied(source):
        del leaves["lm_head.weight"]
        messages.append("lm_head.weight equals the embedding, to which it is tied: it was not imported")
    frequencies = [name for name in leaves if name.endswith(".rotary_emb.inv_freq")]
    redundant = [name for name in frequencies if _matches_rope_theta(source, name, model)]
    for name in redundant:
        del leaves[name]
    if redundant:
        messages.append(f"{len(redundant)} tensors of rotary frequencies were not imported: rope_theta implies them")
    return leaves, messages


def _is_tied(source: CheckpointSource) -> bool:
    """Return whether the stored output projection equals the embedding bitwise."""
    head, embedding = (source.leaves.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head is None or embedding is None or head != embedding:
        return False
    return np.array_equal(
        read_leaf_bytes(source, "lm_head.weight", 0, head.elements),
        read_leaf_bytes(source, "model.embed_tokens.weight", 0, head.elements),
    )


def _matches_rope_theta(source: CheckpointSource, name: str, model: ModelConfig) -> bool:
    """Return whether a tensor holds the rotary frequencies that `model.rope_theta` implies."""
    half = model.head_dim // 2
    # `is_summed` is true for floating-point dtypes.
    if source.leaves[name].shape != (half,) or not source.leaves[name].is_summed:
        return False
    implied = model.rope_theta ** -(np.arange(half) / half)
    # Tolerate half a unit in the last place of bfloat16, in which some checkpoints store them.
    return np.allclose(read_leaf(source, name).astype("float64"), implied, rtol=2**-8, atol=0)
