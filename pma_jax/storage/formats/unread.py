"""Recognize checkpoint formats that are not read, and say how to convert them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pma_jax.storage.matching import match_files

_CAUSAL_LM = (
    "python -c \"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('DIR'{options})"
    ".save_pretrained('OUT')\" (with the model's own class if it is no causal language model)"
)
HF_CONVERSION = _CAUSAL_LM.format(options="")
_FROM_STATE_DICT = (
    "python -c \"import torch; from safetensors.torch import save_file; save_file(torch.load('FILE', "
    "weights_only=True), 'OUT/model.safetensors')\", with the state dict of the parameters only"
)


class _Format(NamedTuple):
    """A format that is not read.

    Attributes:
        patterns: Glob patterns of its files, relative to the checkpoint's directory.
        description: What such a file is.
        conversion: How to convert a checkpoint to safetensors.
    """

    patterns: tuple[str, ...]
    description: str
    conversion: str


# In the order in which they are tried: Megatron and DeepSpeed also write files with the suffix .pt.
_FORMATS = (
    _Format(
        ("common.pt", "mp_rank_*/model_*rng.pt", "iter_*/mp_rank_*", "latest_checkpointed_iteration.txt"),
        "a Megatron checkpoint",
        "export it to Hugging Face's layout with Megatron Bridge or Megatron-LM's tools/checkpoint/convert.py",
    ),
    _Format(
        ("mp_rank_*_model_states.pt", "*zero_pp_rank_*.pt", "zero_to_fp32.py", "global_step*/*_model_states.pt"),
        "a DeepSpeed checkpoint",
        "python zero_to_fp32.py DIR OUT --safe_serialization",
    ),
    _Format(
        (".metadata", "*.distcp", "pytorch_model_fsdp_*/.metadata"),
        "a PyTorch distributed checkpoint (DCP)",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR model.pt, then save its parameters with "
        "safetensors.torch.save_file",
    ),
    _Format(
        ("*.gguf",),
        "a GGUF file, which is mostly quantised",
        "take the safetensors that it was made from, or dequantise it: "
        + _CAUSAL_LM.format(options=", gguf_file='FILE'"),
    ),
    _Format(
        ("*.msgpack",),
        "a Flax msgpack file",
        'python -c "import pathlib; from flax import serialization, traverse_util; from safetensors.numpy import '
        "save_file; save_file(traverse_util.flatten_dict(serialization.msgpack_restore(pathlib.Path('FILE')"
        ".read_bytes()), sep='.'), 'OUT/model.safetensors')\"",
    ),
    _Format(
        ("*.npy",),
        "a NumPy file of one array",
        "python -c \"import numpy; numpy.savez('OUT/model.npz', NAME=numpy.load('FILE'))\", with all of the arrays",
    ),
    _Format(("*.npz",), "one of several .npz files", "none is needed: name each file that is a checkpoint"),
    _Format(
        ("*.h5", "*.hdf5", "*.keras"),
        "a Keras (HDF5) file",
        "load it in Keras and save its weights with safetensors.numpy.save_file",
    ),
    _Format(
        ("*.ckpt.index", "*.data-*-of-*", "saved_model.pb"),
        "a TensorFlow checkpoint",
        "load it in TensorFlow and save its variables with safetensors.numpy.save_file",
    ),
    _Format(("*.nemo",), "a NeMo archive", "export it to Hugging Face's layout with NeMo or Megatron Bridge"),
    _Format(("*.onnx",), "an ONNX graph", "take the checkpoint that it was exported from"),
    _Format(("*.pdparams",), "a PaddlePaddle file", "load it in PaddlePaddle and save it with safetensors"),
    _Format(
        ("pytorch_model*.bin", "adapter_model.bin", "model*.bin"),
        "a pickle, which can run any code when opened",
        f"where you trust it: {HF_CONVERSION}",
    ),
    _Format(
        ("*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.bin"),
        "a pickle, which can run any code when opened",
        f"where you trust it: {_FROM_STATE_DICT}; or, for a Hugging Face model, {HF_CONVERSION}",
    ),
)
# Beside weights in any format, and not weights themselves.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "random_states_*")


def describe_unread(path: Path) -> str | None:
    """Return a one-line message if a file, a directory or its subdirectories are in a format that is not read.

    Args:
        path: An existing file, or a directory that holds no checkpoint in a format that is read.

    Returns:
        The message names a file, its format and the way to convert it; None if no format is recognized.
    """
    for is_weights in (True, False):
        for form in _FORMATS:
            if found := _find(path, form.patterns, is_weights):
                return f"{found}: is {form.description}, and is not read; convert it: {form.conversion}"
    return None


def _find(path: Path, patterns: Sequence[str], is_weights: bool) -> Path | None:
    """Return the first file that matches a pattern: `path` itself, or one in the directory or in its subdirectories."""
    if path.is_file():
        return path if any(path.match(pattern) for pattern in patterns) else None
    for prefix in ("", "*/"):
        for pattern in patterns:
            for file in sorted(match_files(path, prefix + pattern)):
                if is_weights != any(file.match(name) for name in _NOT_WEIGHTS):
                    return file
    return None
