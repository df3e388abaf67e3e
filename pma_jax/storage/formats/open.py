"""Opening checkpoints to merge: what is there and where its bytes lie, for every format the engine reads."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.storage.formats import safetensors as safetensors_file
from pma_jax.storage.formats.byte_ranges import opened, read_run
from pma_jax.storage.formats.leaves import ITEM_BYTES, Source, numpy_dtype
from pma_jax.storage.json_files import read_object
from pma_jax.storage.paths import locate

_STEP = re.compile(r"(?:^|[^a-z])(?:step|iter|ckpt)[-_]?(\d+)(k?)(?![a-z0-9])", re.IGNORECASE)
# A size alone ("-1B") is a model's size: only what says tokens, BT, or follows a step is a count of tokens.
_TOKENS = re.compile(
    r"(?:tokens[-_]?|[-_](?=[\d.]+[KMBT]T$)|step[-_]?\d+k?[-_])(\d+(?:\.\d+)?)([KMBT])T?$", re.IGNORECASE
)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_source(address: str | Path, subtree: str | None = None) -> Source:
    """Opens a checkpoint: reads its metadata and none of its data.

    Args:
        address: a directory of safetensors (one file, or shards with their index), a .safetensors file, an Orbax
            checkpoint of a pytree, or hf://org/repo@revision.
        subtree: which part of an Orbax tree holds the parameters ("params", "target/model"); guessed, and told, if
            None.

    Raises:
        ValueError: nothing readable is there, or what is there is damaged; one line with what to do.
    """
    text = str(address)
    if text.startswith("hf://"):
        from pma_jax.storage.formats import hub

        return hub.open_revision(text, subtree)
    path = locate(address)
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    # Absolute, so that a plan means the same files wherever its process is.
    path = path.absolute()
    try:
        if path.is_file():
            return _open_file(path, subtree)
        return _open_directory(path, subtree)
    except OSError as error:
        raise ValueError(f"{error.filename or path}: {error.strerror or error}") from None


def _open_file(path: Path, subtree: str | None) -> Source:
    if path.name.endswith(".safetensors.index.json"):
        return _safetensors_source(path.parent, safetensors_file.read_sharded(path), subtree)
    if path.suffix == ".safetensors":
        return _safetensors_source(path, safetensors_file.read_header(path), subtree)
    if any(path.match(pattern) for pattern in _PICKLES):
        raise ValueError(_pickle_refusal(path))
    raise ValueError(f"{path}: not a checkpoint; give a directory, a .safetensors file or hf://org/repo@revision")


def _open_directory(path: Path, subtree: str | None) -> Source:
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) > 1:
        raise ValueError(
            f"{path}: has {len(indexes)} indexes; name one of {', '.join(index.name for index in indexes)}"
        )
    if indexes:
        return _safetensors_source(path, safetensors_file.read_sharded(indexes[0]), subtree)
    if len(files) == 1:
        return _safetensors_source(path, safetensors_file.read_header(files[0]), subtree)
    if files:
        raise ValueError(f"{path}: has {len(files)} safetensors files and no index; name one of them, or add the index")
    from pma_jax.storage.formats import orbax_read

    if orbax_read.is_orbax(path):
        return orbax_read.open_tree(path, subtree)
    pickles = [file for pattern in _PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise ValueError(_pickle_refusal(pickles[0]))
    raise ValueError(f"{path}: holds neither safetensors nor an Orbax checkpoint")


def _pickle_refusal(path: Path) -> str:
    return (
        f"{path}: a pickle can run any code when it is opened, so it is not; convert it where you trust it: "
        "python -c \"from transformers import AutoModel; AutoModel.from_pretrained('DIR').save_pretrained('OUT')\""
    )


def _safetensors_source(path: Path, header: safetensors_file.Header, subtree: str | None) -> Source:
    if subtree is not None:
        raise ValueError(f"{path}: a safetensors checkpoint has no subtree {subtree!r}; leave the option out")
    directory = path if path.is_dir() else path.parent
    # A lone file named by the user says nothing about its neighbours.
    beside = sorted(file for file in directory.iterdir() if file.is_file()) if path.is_dir() else []
    files = tuple(
        file
        for file in beside
        if not file.name.endswith((".safetensors", ".safetensors.index.json", ".lock"))
        and file.name not in {"provenance.json", ".gitattributes"}
    )
    step, tokens = progress_from_name(path.stem if path.is_file() else path.name)
    tokens = _tokens_from_provenance(directory) or tokens
    return Source(
        "safetensors", path, str(path), header.leaves, header.extents, tokens, step, files, dict(header.metadata)
    )


def _tokens_from_provenance(directory: Path) -> int | None:
    path = directory / "provenance.json"
    tokens = read_object(path).get("tokens") if path.is_file() else None
    return tokens if type(tokens) is int else None


def progress_from_name(name: str) -> tuple[int | None, int | None]:
    """(step, tokens) as public suites write them in a name: step3000, stage1-step140000-tokens294B, step-001000-2BT."""
    step, tokens = _STEP.search(name), _TOKENS.search(name)
    return (
        int(step[1]) * (1000 if step[2] else 1) if step else None,
        round(float(tokens[1]) * _UNITS[tokens[2].upper()]) if tokens else None,
    )


def read_leaf(source: Source, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Elements [start, stop) of a leaf in C order; the whole leaf, in its shape, by default.

    Raises:
        ValueError: the stored bytes are missing or damaged.
    """
    leaf = source.leaves[name]
    is_whole = start == 0 and stop is None
    stop = leaf.elements if stop is None else stop
    data = read_bytes(source, name, start, stop).view(numpy_dtype(leaf.dtype))
    return data.reshape(leaf.shape) if is_whole else data


def read_bytes(source: Source, name: str, start: int, stop: int) -> np.ndarray:
    """The bytes of elements [start, stop) of a leaf, little-endian in C order: uint8 [(stop - start) * item size]."""
    leaf = source.leaves[name]
    if name not in source.extents:
        from pma_jax.storage.formats import orbax_read

        return orbax_read.read_elements(source, name, start, stop)
    width = ITEM_BYTES[leaf.dtype]
    data = np.empty((stop - start) * width, np.uint8)
    extents = source.extents[name]
    with opened([extent.path for extent in extents], os.O_RDONLY) as descriptors:
        read_run(descriptors, extents, start * width, data)
    return data


def summary(source: Source) -> dict[str, Any]:
    """What `pma inspect` prints of a source, ready for JSON."""
    return {
        "kind": source.kind,
        "path": source.origin,
        "tokens": source.tokens,
        "step": source.step,
        "nbytes": source.nbytes,
        "leaves": {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in source.leaves.items()},
        "notes": list(source.notes),
    }
