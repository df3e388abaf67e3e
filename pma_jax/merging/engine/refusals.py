"""Refuse checkpoints whose stored numbers are not the parameters: quantised weights and low-rank adapters.

A weighted sum of such numbers is not the weighted sum of the models. Quantised weights are codes that other leaves
scale, and the update of an adapter is a product B·A, whose mean is not the product of the means of its factors.
"""

import re
from collections.abc import Mapping
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo
from pma_jax.storage.json_files import read_json_object

# Keys of config.json (or of the configuration of a part of the model in it) that describe how weights are stored.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_CODE_DTYPES = ("float8_", "float6_", "float4_", "int8", "uint8")
# Also used for codes, several of which are packed into one number, but only as matrices.
_PACKED_CODE_DTYPES = frozenset({"int32", "uint32", "int16"})
# Words in the name of a leaf that scales codes.
_SCALE_WORDS = frozenset(
    ("scale", "scales", "scb", "absmax", "qzeros", "zeros", "zero", "zp", "codebook", "codebooks", "centroids")
)
_FP8_SCALE = re.compile(r"(?:weight|input|output|k|v|q|kv|act|activation)_scale(?:_inv|_2)?$|scale_inv$")
_SEPARATORS = re.compile(r"[./:]")
_LOW_RANK = re.compile(
    r"(?:^|[./:_])(?:lora_?[ab]|lora_embedding_[ab]|lora_(?:up|down|magnitude_vector|magnitude)|dora_scale"
    r"|hada_[wt][12](?:_[ab])?|lokr_[wt][12](?:_[ab])?|oft_r|boft_r|vera_lambda_[bd])(?:$|[./:_\d])",
    re.IGNORECASE,
)


def check_leaves_are_parameters(source: CheckpointSource) -> None:
    """Check that the leaves of a checkpoint are parameters, as its names, dtypes and configuration files tell.

    Raises:
        UserError: The checkpoint is quantised, or an adapter; the message names what shows it.
    """
    directory = source.path if source.path.is_dir() else source.path.parent
    adapter = next((name for name in source.leaves if _LOW_RANK.search(name)), None)
    if source.format == "safetensors" and adapter is None:
        is_adapter = source.path.is_dir() or source.path.name.startswith("adapter_")
        config = directory / "adapter_config.json"
        adapter = config.name if is_adapter and config.is_file() else None
    if adapter is not None:
        raise UserError(
            f"{source.origin}: is an adapter, as {adapter} shows: the mean of the factors A and B is not the mean of "
            "their product BA; merge each adapter into its base model (peft's merge_and_unload) and average these"
        )
    evidence = _find_quantized_leaf(source.leaves) or _find_quantization_config(source)
    if evidence is not None:
        raise UserError(
            f"{source.origin}: is quantised, as {evidence} shows: the mean of codes and of their scales is not the "
            "mean of the weights; dequantise each checkpoint (in transformers: model.dequantize()) and average these"
        )


def _find_quantization_config(source: CheckpointSource) -> str | None:
    """Return what in the configuration files of a Hugging Face model says that it is quantised; None if nothing."""
    for path in source.other_files:
        if path.name in _QUANTIZATION_FILES:
            return path.name
        if path.name == "config.json" and (key := _find_quantization_key(read_json_object(path))):
            return f"{key} in {path.name}"
    return None


def _find_quantization_key(config: Mapping[str, Any]) -> str | None:
    for key in _QUANTIZATION_KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return key
    # A model of several parts (text, vision) has a configuration for each.
    parts = [value for value in config.values() if isinstance(value, dict)]
    return next((key for part in parts for key in _QUANTIZATION_KEYS if part.get(key)), None)


def _find_quantized_leaf(leaves: Mapping[str, LeafInfo]) -> str | None:
    """Return the name of a leaf that scales codes, and that of the codes; None if there is none."""
    codes = [name for name, leaf in leaves.items() if _may_hold_codes(leaf)]
    if not codes:
        return None
    fp8 = next((name for name in codes if leaves[name].dtype.startswith("float")), None)
    groups: dict[tuple[str, ...], list[str]] = {}  # path of a module or of a leaf -> the codes in it
    for name in codes:
        parts = tuple(_SEPARATORS.split(name))
        for group in (parts, parts[:-1]):
            groups.setdefault(group, []).append(name)
    for name in leaves:
        if fp8 is not None and _FP8_SCALE.search(name):
            return f"{name} beside {fp8} ({leaves[fp8].dtype})"
        parts = _SEPARATORS.split(name)
        for i, part in enumerate(parts):
            code = next((code for code in groups.get(tuple(parts[:i]), []) if code != name), None)
            if code is not None and not _SCALE_WORDS.isdisjoint(part.lower().split("_")):
                return f"{name} beside {code} ({leaves[code].dtype})"
    return None


def _may_hold_codes(leaf: LeafInfo) -> bool:
    if leaf.dtype in _PACKED_CODE_DTYPES:
        return len(leaf.shape) >= 2
    return leaf.dtype.startswith(_CODE_DTYPES) and leaf.elements > 1
