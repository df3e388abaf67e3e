"""Export of checkpoints that other trainers wrote: what their trees and pma_jax's mapping to Hugging Face share.

A trainer's file (`maxtext.py`, `levanter.py`) lists the arrays of its tree, and how each is cut into the slices that
`hf_weights.LeafMapping` converts. The tree does not contain the model's configuration: it is a config.json of the user,
in which every value that changes the logits and is not a shape must be present, and whose sizes must be the tree's.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config import ModelConfig
from pma_jax.config.errors import UserError
from pma_jax.interop import hf_config
from pma_jax.interop.hf_weights import LeafMapping
from pma_jax.storage.formats.open import read_leaf
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.json_files import read_json_object

FAMILIES = (hf_config.LLAMA, hf_config.QWEN3, hf_config.QWEN3_MOE)
LAYER, EXPERT = "layer", "expert"  # what a dim of an array stacks
# Fields whose absence `parse_hf_config` replaces by a default, which may not be the trainer's.
_REQUIRED = ("hidden_act", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
_REQUIRED += ("tie_word_embeddings",)
_REQUIRED_OF_MIXTURE = ("moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok")


@dataclass(frozen=True)
class StoredArray:
    """An array of a trainer's tree, which holds slices of one leaf of pma_jax.

    Attributes:
        name: Its name in the tree.
        shape: Its shape.
        mapping: The leaf of pma_jax.
        stacked: Dim -> `LAYER` or `EXPERT`: the dims that stack slices.
        layer: The layer of its slices, if no dim stacks layers.
        convert: Converts a stored slice (without the stacked dims) to a slice of the leaf, up to its shape.
    """

    name: str
    shape: tuple[int, ...]
    mapping: LeafMapping
    stacked: Mapping[int, str]
    layer: int | None = None
    convert: Callable[[np.ndarray], np.ndarray] = lambda stored_slice: stored_slice

    @property
    def tensor_names(self) -> list[str]:
        """Names of the Hugging Face tensors that the array holds, in no particular order."""
        sizes = [self.shape[dim] for dim in self.stacked]
        return [self._tensor_name(dict(zip(self.stacked, index, strict=True))) for index in np.ndindex(*sizes)]

    def _tensor_name(self, index: Mapping[int, int]) -> str:
        """Return the name of the tensor at `index` (stacked dim -> index)."""
        numbers = {self.stacked[dim]: number for dim, number in index.items()}
        layer = [] if self.layer is None else [self.layer]
        return self.mapping.name_pattern.format(*layer, *(numbers[kind] for kind in (LAYER, EXPERT) if kind in numbers))


def read_slices(source: CheckpointSource, array: StoredArray) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yield the name of each tensor that `array` holds, its slice of pma_jax's leaf, and the bytes read for it.

    Slices that are stacked along the first dim are read one at a time. Other arrays are read as a whole, because each
    slice is spread over all of the array.
    """
    step = array.shape[0] if 0 in array.stacked else 1
    elements = math.prod(array.shape) // step
    for first in range(step):
        if 0 in array.stacked:
            part = read_leaf(source, array.name, first * elements, (first + 1) * elements).reshape(1, *array.shape[1:])
        else:
            part = read_leaf(source, array.name)
        inner = [dim for dim in array.stacked if dim]
        for index in np.ndindex(*(array.shape[dim] for dim in inner)):
            numbers = dict(zip(inner, index, strict=True)) | ({0: first} if 0 in array.stacked else {})
            at = {dim: 0 if dim == 0 else number for dim, number in numbers.items()}
            stored_slice = part[tuple(at.get(dim, slice(None)) for dim in range(part.ndim))]
            converted = array.convert(stored_slice).reshape(array.mapping.slice_shape)
            yield array._tensor_name(numbers), converted, stored_slice.nbytes


def read_model_config(path: str | Path | None, trainer: str) -> tuple[ModelConfig, dict[str, Any], tuple[str, ...]]:
    """Read the config.json that describes the model of a trainer's tree.

    Args:
        path: The file.
        trainer: The trainer's name, for messages.

    Returns:
        The model's configuration, the fields of the file, and one-line notes for the user.

    Raises:
        UserError: There is no file, the decoder cannot represent the model, a value is missing, or the family is not
            one of `FAMILIES`. The message names the field.
    """
    if path is None:
        raise UserError(
            f"the checkpoint is {trainer}'s, whose tree does not contain the model's configuration: describe the model "
            "in a config.json of Hugging Face, and pass it with --model-config"
        )
    fields = read_json_object(Path(path))
    try:
        model, notes = hf_config.parse_hf_config(fields)
        architecture = fields["architectures"][0]
        if architecture not in FAMILIES:
            raise UserError(
                f"a tree of {trainer} is exported as one of {', '.join(FAMILIES)}, and architectures is {architecture}"
            )
        required = _REQUIRED + (_REQUIRED_OF_MIXTURE if model.experts else ())
        missing = [name for name in required if fields.get(name) is None]
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        missing += [] if fields.get("rope_theta") or rope.get("rope_theta") else ["rope_theta"]
        if missing:
            raise UserError(f"{', '.join(missing)} is missing, which {trainer}'s tree does not contain: add it")
        if model.attention_window_tokens:
            window = model.attention_window_tokens
            raise UserError(f"sliding_window is {window}, but the layers of {trainer} that are exported have no window")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return model, fields, notes
