"""Which Hugging Face tensor is which part of which leaf of ours, and how its dims lie.

Legend: T layers, D width, N query heads, K key and value heads, H head dim, F hidden, E experts, V vocabulary.

Ours are stacked over layers (and experts) and map inputs to outputs (`query_DxNxH`); theirs are one a layer (and
expert) and torch's way round, outputs by inputs (`q_proj.weight`, [N * H, D]). Heads and the rotary halves of H are in
the same order in both: no row is permuted.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.storage.formats.source import LeafInfo

# What either side may store: our snapshots are float32, merged ones may be bfloat16.
DTYPES = ("float32", "bfloat16", "float16")
_MOST_NAMED = 4  # of each kind of difference
# The one leaf of ours without a home: it is no part of a Qwen3-MoE, and must be zero.
ROUTER_BIAS_LEAF = "blocks.moe.router_bias_E"


@dataclass(frozen=True)
class LeafMapping:
    """One leaf of ours and the tensors that it consists of.

    Attributes:
        leaf: our leaf's name in storage.
        name: theirs, with a `{}` for each dim of `stack`.
        shape: of one item of the leaf: what one tensor holds.
        inputs: how many leading dims of `shape` are the matrix's inputs; 0 where the tensor is no transposed matrix.
        stack: leading dims of the leaf, over its items: (T,), of experts (T, E), or () where the leaf is one tensor.
    """

    leaf: str
    name: str
    shape: tuple[int, ...]
    inputs: int = 0
    stack: tuple[int, ...] = ()

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of our leaf."""
        return self.stack + self.shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of theirs."""
        if not self.inputs:
            return self.shape
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])

    @property
    def tensors(self) -> list[str]:
        """Their names, in the order in which their items lie in the leaf."""
        return [self.name.format(*index) for index in itertools.product(*map(range, self.stack))]

    def to_item(self, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Their tensor as an item of our leaf: C order, `dtype`, one copy."""
        return (tensor.T if self.inputs else tensor).astype(dtype, order="C").reshape(self.shape)

    def to_tensor(self, item: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """An item of our leaf as their tensor: C order, `dtype`, one copy."""
        rows = item.reshape(self.tensor_shape[::-1]).T if self.inputs else item
        return rows.astype(dtype, order="C")


def map_leaves(model: ModelConfig) -> list[LeafMapping]:
    """The home of every parameter, in the order in which transformers writes its tensors.

    That order has layers outermost; here a leaf's layers follow each other.
    """
    return [
        LeafMapping("embedding_VxD", "model.embed_tokens.weight", (model.vocabulary_size, model.width)),
        *_attention_mappings(model),
        *_mlp_mappings(model),
        LeafMapping("final_norm_D", "model.norm.weight", (model.width,)),
        *_unembedding_mappings(model),
    ]


def _attention_mappings(model: ModelConfig) -> list[LeafMapping]:
    D, N, K, H = model.width, model.heads, model.kv_heads, model.head_dim
    found = [
        _block(model, "attention_norm_D", "input_layernorm", (D,)),
        _block(model, "query_DxNxH", "self_attn.q_proj", (D, N, H), inputs=1),
        _block(model, "key_DxKxH", "self_attn.k_proj", (D, K, H), inputs=1),
        _block(model, "value_DxKxH", "self_attn.v_proj", (D, K, H), inputs=1),
        _block(model, "output_NxHxD", "self_attn.o_proj", (N, H, D), inputs=2),
        _block(model, "mlp_norm_D", "post_attention_layernorm", (D,)),
    ]
    if model.qk_norm:
        found.append(_block(model, "query_norm_H", "self_attn.q_norm", (H,)))
        found.append(_block(model, "key_norm_H", "self_attn.k_norm", (H,)))
    return found


def _mlp_mappings(model: ModelConfig) -> list[LeafMapping]:
    D, E, F = model.width, model.experts, model.expert_hidden if model.experts else model.hidden
    if E:
        return [
            _block(model, "moe.router_DxE", "mlp.gate", (D, E), inputs=1),
            _block(model, "moe.expert_gate_ExDxF", "mlp.experts.{}.gate_proj", (D, F), inputs=1, each=(E,)),
            _block(model, "moe.expert_up_ExDxF", "mlp.experts.{}.up_proj", (D, F), inputs=1, each=(E,)),
            _block(model, "moe.expert_down_ExFxD", "mlp.experts.{}.down_proj", (F, D), inputs=1, each=(E,)),
        ]
    return [
        _block(model, "gate_DxF", "mlp.gate_proj", (D, F), inputs=1),
        _block(model, "up_DxF", "mlp.up_proj", (D, F), inputs=1),
        _block(model, "down_FxD", "mlp.down_proj", (F, D), inputs=1),
    ]


def _unembedding_mappings(model: ModelConfig) -> list[LeafMapping]:
    if model.tie_embeddings:
        return []
    return [LeafMapping("unembedding_DxV", "lm_head.weight", (model.width, model.vocabulary_size), inputs=1)]


def _block(
    model: ModelConfig, leaf: str, module: str, shape: tuple[int, ...], inputs: int = 0, each: tuple[int, ...] = ()
) -> LeafMapping:
    return LeafMapping(f"blocks.{leaf}", f"model.layers.{{}}.{module}.weight", shape, inputs, (model.layers, *each))


def check_leaves(origin: str, have: Mapping[str, LeafInfo], wanted: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Checks that `have` is exactly `wanted`, in a dtype that can be converted exactly or as asked.

    Raises:
        ValueError: leaves that are missing, unknown, or of another shape or dtype; the first of each kind are named.
    """
    both = [(name, leaf) for name, leaf in have.items() if name in wanted]
    wrong = [
        [f"{name} is missing" for name in wanted if name not in have],
        [f"{name[:80]} has no home in {whose}" for name in have if name not in wanted],
        [f"{name} is {leaf.shape}, not {wanted[name]}" for name, leaf in both if leaf.shape != wanted[name]],
        [f"{name} is {leaf.dtype}, not {', '.join(DTYPES)}" for name, leaf in both if leaf.dtype not in DTYPES],
    ]
    count, named = sum(map(len, wrong)), [text for kind in wrong for text in kind[:_MOST_NAMED]]
    if count:
        raise ValueError(f"{origin} does not fit {whose}: {count} differ: {'; '.join(named)}")
