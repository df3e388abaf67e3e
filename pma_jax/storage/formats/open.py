"""Open a checkpoint of any supported format, and read its leaves. The format is detected here and nowhere else."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.formats import hub, orbax_read
from pma_jax.storage.formats import safetensors as safetensors_file
from pma_jax.storage.formats.byte_ranges import open_files, read_range
from pma_jax.storage.formats.names import progress_from_name
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, numpy_dtype
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.paths import as_path

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_source(address: str | Path, subtree: str | None = None) -> CheckpointSource:
    """Open a checkpoint without reading its arrays into memory. An hf:// address is downloaded first.

    Args:
        address: A directory with one .safetensors file or with shards and their index, a .safetensors file, a
            .safetensors.index.json, an Orbax checkpoint of a pytree, or hf://org/repo@revision.
        subtree: Path of the parameters in an Orbax tree ("params", "target/model"). If None, it is inferred and
            reported in `notes` of the result. Must be None for safetensors.

    Raises:
        UserError: There is no readable checkpoint, or it is corrupt.
    """
    text = str(address)
    if text.startswith(hub.PREFIX):
        folder = hub.download(text)
        repo, revision = hub.parse_address(text)
        step, tokens = progress_from_name(revision)
        # The download folder is named after the commit, so `origin` identifies the exact revision.
        return replace(
            open_source(folder, subtree), origin=f"{hub.PREFIX}{repo}@{folder.name}", step=step, tokens=tokens
        )
    path = as_path(address)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    # Make the path absolute, so that it names the same files in processes with another working directory.
    path = path.absolute()
    try:
        return _open_file(path, subtree) if path.is_file() else _open_directory(path, subtree)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from None


def describe_hub_revision(address: str, subtree: str | None = None) -> CheckpointSource:
    """Describe a hub revision from its name alone, without a download; `open_if_deferred` downloads and opens it.

    Use it to select among many revisions by step and tokens. `leaves` of the result is empty.
    """
    step, tokens = progress_from_name(hub.parse_address(address)[1])
    return CheckpointSource("deferred", Path(), address, {}, {}, tokens, step, metadata={"subtree": subtree})


def open_if_deferred(source: CheckpointSource) -> CheckpointSource:
    """Download and open a source that `describe_hub_revision` returned; return any other source unchanged.

    The step and the tokens of `source` are kept.

    Raises:
        UserError: The same as `open_source`.
    """
    if source.format != "deferred":
        return source
    return replace(open_source(source.origin, source.metadata["subtree"]), tokens=source.tokens, step=source.step)


def _open_file(path: Path, subtree: str | None) -> CheckpointSource:
    if path.name.endswith(".safetensors.index.json"):
        return _open_safetensors(path.parent, safetensors_file.read_sharded_header(path), subtree)
    if path.suffix == ".safetensors":
        return _open_safetensors(path, safetensors_file.read_header(path), subtree)
    if any(path.match(pattern) for pattern in _PICKLE_PATTERNS):
        raise UserError(_pickle_message(path))
    raise UserError(f"{path}: not a checkpoint; give a directory, a .safetensors file or hf://org/repo@revision")


def _open_directory(path: Path, subtree: str | None) -> CheckpointSource:
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) > 1:
        raise UserError(
            f"{path}: has {len(indexes)} indexes; give the path of one: {', '.join(index.name for index in indexes)}"
        )
    if indexes:
        return _open_safetensors(path, safetensors_file.read_sharded_header(indexes[0]), subtree)
    if len(files) == 1:
        return _open_safetensors(path, safetensors_file.read_header(files[0]), subtree)
    if files:
        raise UserError(f"{path}: has {len(files)} safetensors files and no index; name one of them, or add the index")
    if orbax_read.is_orbax(path):
        return orbax_read.open_orbax(path, subtree)
    pickles = [file for pattern in _PICKLE_PATTERNS for file in sorted(path.glob(pattern))]
    if pickles:
        raise UserError(_pickle_message(pickles[0]))
    raise UserError(f"{path}: holds neither safetensors nor an Orbax checkpoint")


def _pickle_message(path: Path) -> str:
    return (
        f"{path}: is a pickle, which can run any code when opened, so it is refused; convert it where you trust it: "
        "python -c \"from transformers import AutoModel; AutoModel.from_pretrained('DIR').save_pretrained('OUT')\""
    )


def _open_safetensors(path: Path, header: safetensors_file.Header, subtree: str | None) -> CheckpointSource:
    if subtree is not None:
        raise UserError(f"{path}: subtree {subtree!r} is for Orbax checkpoints only; do not set it for safetensors")
    # Only a directory has sidecar files (config, tokenizer): files beside a single file may belong to another model.
    siblings = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    sidecar_files = tuple(
        file
        for file in siblings
        if not file.name.endswith((".safetensors", ".safetensors.index.json", ".lock"))
        and file.name not in {"provenance.json", ".gitattributes"}
    )
    step, tokens = progress_from_name(path.stem if path.is_file() else path.name)
    return CheckpointSource(
        "safetensors",
        path,
        str(path),
        header.leaves,
        header.byte_ranges,
        _tokens_from_provenance(path if path.is_dir() else path.parent) or tokens,
        step,
        sidecar_files,
        dict(header.metadata),
    )


def _tokens_from_provenance(directory: Path) -> int | None:
    path = directory / "provenance.json"
    tokens = read_json_object(path).get("tokens") if path.is_file() else None
    return tokens if type(tokens) is int else None


def read_leaf(
    source: CheckpointSource, name: str, start_element: int = 0, stop_element: int | None = None
) -> np.ndarray:
    """Read a complete leaf in its shape, or elements [start_element, stop_element) in C order as a flat array.

    Raises:
        KeyError: `source` has no leaf `name`.
        UserError: The stored bytes are missing or corrupt.
    """
    leaf = source.leaves[name]
    stop = leaf.elements if stop_element is None else stop_element
    data = read_leaf_bytes(source, name, start_element, stop).view(numpy_dtype(leaf.dtype))
    return data.reshape(leaf.shape) if start_element == 0 and stop_element is None else data


def read_leaf_bytes(source: CheckpointSource, name: str, start_element: int, stop_element: int) -> np.ndarray:
    """Read elements [start_element, stop_element) of a leaf in C order as little-endian bytes.

    Returns:
        uint8 [(stop_element - start_element) * bytes per element].

    Raises:
        KeyError: `source` has no leaf `name`.
        UserError: The stored bytes are missing or corrupt.
    """
    if name not in source.byte_ranges:
        return orbax_read.read_with_tensorstore(source, name, start_element, stop_element)
    item_bytes = ITEM_BYTES[source.leaves[name].dtype]
    data = np.empty((stop_element - start_element) * item_bytes, np.uint8)
    ranges = source.byte_ranges[name]
    with open_files([part.path for part in ranges], os.O_RDONLY) as files:
        read_range(files, ranges, start_element * item_bytes, data)
    return data
