"""Open a checkpoint of any supported format, and read its leaves. The format is detected here and nowhere else."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.formats import big_vision, easydel, hub, levanter, npz, orbax_read, publish, t5x, zarr_read
from pma_jax.storage.formats import safetensors as safetensors_file
from pma_jax.storage.formats.byte_ranges import open_files, read_range
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import ITEM_BYTES, PACKED_BITS, CheckpointSource, numpy_dtype
from pma_jax.storage.formats.unread import describe_unread
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import match_files
from pma_jax.storage.paths import as_path, check_supported, exists, is_bucket

# One of several shards, as in model-00001-of-00002.safetensors.
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


class _Layout(NamedTuple):
    """A layout of checkpoints that a trainer or library writes.

    Attributes:
        name: The `format` of its sources.
        is_layout: Whether a path has it, as the names of its files tell.
        open: Opens the checkpoint at a path that has it, given the subtrees to read.
    """

    name: str
    is_layout: Callable[[Path], bool]
    open: Callable[[Path, Sequence[str]], CheckpointSource]


# In the order in which they are tried, after safetensors: the last are the least specific.
_LAYOUTS = (
    _Layout("big_vision", big_vision.is_big_vision, big_vision.open_big_vision),
    _Layout("t5x", t5x.is_t5x, t5x.open_t5x),
    _Layout("easydel", easydel.is_easydel, easydel.open_easydel),
    _Layout("levanter", levanter.is_levanter, levanter.open_levanter),
    _Layout("orbax", orbax_read.is_orbax, orbax_read.open_orbax),
    _Layout("npz", npz.is_npz, npz.open_npz),
)


def find_layout(path: Path) -> _Layout | None:
    """Return the layout of a checkpoint other than safetensors; None if there is none."""
    return next((layout for layout in _LAYOUTS if layout.is_layout(path)), None)


def open_source(address: str | Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open a checkpoint without reading its arrays into memory. An hf:// address is downloaded first.

    Args:
        address: A directory with one .safetensors file or with shards and their index, a .safetensors file, a
            .safetensors.index.json, an Orbax checkpoint of a pytree, an .npz file, or hf://org/repo@revision.
        subtrees: Paths of the subtrees to read of a checkpoint with a training state ("params", "target/model"). If
            there are none, the parameters are located, and `notes` of the result reports where. Must be empty for
            safetensors.

    Raises:
        UserError: There is no readable checkpoint, or it is corrupt.
        OSError: It cannot be read.
    """
    text = str(address)
    if text.startswith(hub.PREFIX):
        folder = hub.download(text)
        repo, _ = hub.parse_address(text)
        name = hub.parse_progress(text)
        opened = open_source(folder, subtrees)
        notes = opened.notes
        if None not in (name.step, opened.step) and name.step != opened.step:
            notes += (f"{text}: its name says step {name.step:,} and its files {opened.step:,}; {name.step:,} is used",)
        # The download folder is named after the commit, so `origin` identifies the exact revision.
        return replace(
            opened,
            origin=f"{hub.PREFIX}{repo}@{folder.name}",
            step=opened.step if name.step is None else name.step,
            tokens=name.tokens,
            epoch=name.epoch,
            notes=notes,
        )
    path = as_path(address)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    # Make the path absolute, so that it names the same files in processes with another working directory.
    path = path.absolute()
    check_supported(path)
    if is_bucket(path) and exists(path / publish.IN_PROGRESS_FILE):
        raise UserError(
            f"{path}: is still being uploaded, or its upload was interrupted ({publish.IN_PROGRESS_FILE}); repeat the "
            "command that writes it"
        )
    try:
        return _open_file(path, subtrees) if path.is_file() else _open_directory(path, subtrees)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from error


def describe_hub_revision(address: str, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Describe a hub revision from its name alone, without a download; `open_if_deferred` downloads and opens it.

    Use it to select among many revisions by step and tokens. `leaves` of the result is empty.
    """
    name = hub.parse_progress(address)
    return CheckpointSource(
        "deferred", Path(), address, {}, {}, name.tokens, name.step, name.epoch, metadata={"subtrees": tuple(subtrees)}
    )


def open_if_deferred(source: CheckpointSource) -> CheckpointSource:
    """Download and open a source that `describe_hub_revision` returned; return any other source unchanged.

    The step, the tokens and the epoch of `source` are kept.

    Raises:
        UserError: The same as `open_source`.
    """
    if source.format != "deferred":
        return source
    opened = open_source(source.origin, source.metadata["subtrees"])
    return replace(opened, tokens=source.tokens, step=source.step, epoch=source.epoch)


def _open_file(path: Path, subtrees: Sequence[str]) -> CheckpointSource:
    if path.name.endswith(".safetensors.index.json"):
        return _open_safetensors(path.parent, safetensors_file.read_sharded_header(path), subtrees)
    if path.suffix == ".safetensors":
        _check_not_one_of_several(path)
        return _open_safetensors(path, safetensors_file.read_header(path), subtrees)
    if (layout := find_layout(path)) is not None:
        return layout.open(path, subtrees)
    raise UserError(
        describe_unread(path)
        or f"{path}: not a checkpoint; give a directory, a .safetensors file or hf://org/repo@revision"
    )


def _open_directory(path: Path, subtrees: Sequence[str]) -> CheckpointSource:
    indexes = sorted(match_files(path, "*.safetensors.index.json"))
    files = sorted(match_files(path, "*.safetensors"))
    if len(indexes) > 1:
        raise UserError(
            f"{path}: has {len(indexes)} indexes; give the path of one: {', '.join(index.name for index in indexes)}"
        )
    if indexes:
        return _open_by_index(indexes[0], files, subtrees)
    if len(files) == 1:
        _check_not_one_of_several(files[0])
        return _open_safetensors(path, safetensors_file.read_header(files[0]), subtrees)
    if files:
        raise UserError(
            f"{path}: has {len(files)} safetensors files and no index ({', '.join(file.name for file in files[:4])}); "
            "add the index of the shards, or name the one file that is a complete checkpoint"
        )
    if (layout := find_layout(path)) is not None:
        return layout.open(path, subtrees)
    raise UserError(describe_unread(path) or f"{path}: holds no checkpoint in a format that is read")


def _check_not_one_of_several(path: Path) -> None:
    """Raise UserError if a file's name says that it is one of several shards."""
    shard = _SHARD.search(path.name)
    if shard is not None and int(shard[2]) > 1:
        raise UserError(
            f"{path}: is shard {int(shard[1])} of {int(shard[2])}, not a complete checkpoint; fetch the other shards "
            "and their index (model.safetensors.index.json), and give the directory"
        )


def _open_by_index(index: Path, files: list[Path], subtrees: Sequence[str]) -> CheckpointSource:
    """Open the shards that an index lists; refuse other files that might be meant, and note the rest."""
    header = safetensors_file.read_sharded_header(index)
    shards = {part.path for ranges in header.byte_ranges.values() for part in ranges}
    others = [file.name for file in files if file not in shards]
    # transformers would load model.safetensors instead of the shards, and a shard that is not listed was forgotten.
    ambiguous = [name for name in others if name == index.name.removesuffix(".index.json") or _SHARD.search(name)]
    if ambiguous:
        raise UserError(
            f"{index}: does not list {ambiguous[0]}, which is beside it ({len(ambiguous)} such files): remove what "
            "does not belong to the checkpoint, or give the path of the index or of the file that is meant"
        )
    source = _open_safetensors(index.parent, header, subtrees)
    note = f"{index.parent}: read by its index, without {', '.join(others[:5])}"
    return replace(source, notes=(*source.notes, note)) if others else source


def _open_safetensors(path: Path, header: safetensors_file.Header, subtrees: Sequence[str]) -> CheckpointSource:
    if subtrees:
        raise UserError(f"{path}: safetensors have no subtrees; leave out --subtree {subtrees[0]}")
    # Only a directory has sidecar files (config, tokenizer): files beside a single file may belong to another model.
    siblings = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    sidecar_files = [
        file
        for file in siblings
        if not file.name.endswith((".safetensors", ".safetensors.index.json", ".lock"))
        and file.name not in {"provenance.json", ".gitattributes"}
    ]
    outside = [file for file in sidecar_files if _leaves_checkpoint(file)]
    outside_notes = [
        f"{file}: is a symbolic link to a file outside the checkpoint, and is left out" for file in outside
    ]
    progress = read_progress(path, tokens=_tokens_from_provenance(path if path.is_dir() else path.parent))
    return CheckpointSource(
        format="safetensors",
        path=path,
        origin=str(path),
        leaves=header.leaves,
        byte_ranges=header.byte_ranges,
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        other_files=tuple(file for file in sidecar_files if file not in outside),
        metadata=dict(header.metadata),
        notes=(*progress.notes, *outside_notes),
    )


def _leaves_checkpoint(file: Path) -> bool:
    """Return whether a file is a symbolic link out of its directory, which a checkpoint from others may abuse.

    The links of the Hugging Face hub's cache, from snapshots/REVISION to the directory blobs, do not count.
    """
    if not file.is_symlink():
        return False
    directory, target = file.parent.resolve(), Path(os.path.realpath(file))  # Path.resolve refuses loops
    snapshots = next((parent for parent in directory.parents if parent.name == "snapshots"), None)
    inside = [directory] if snapshots is None else [directory, snapshots.parent.resolve() / "blobs"]
    return not any(target.is_relative_to(folder) for folder in inside)


def _tokens_from_provenance(directory: Path) -> int | None:
    path = directory / "provenance.json"
    tokens = read_json_object(path).get("tokens") if path.is_file() else None
    return tokens if type(tokens) is int else None


def read_leaf(
    source: CheckpointSource, name: str, start_element: int = 0, stop_element: int | None = None
) -> np.ndarray:
    """Read a complete leaf in its shape, or elements [start_element, stop_element) in C order as a flat array.

    A leaf of a dtype in `PACKED_BITS` is returned as flat bytes, which are its elements.

    Raises:
        KeyError: `source` has no leaf `name`.
        UserError: The stored bytes are missing or corrupt.
    """
    leaf = source.leaves[name]
    stop = leaf.elements if stop_element is None else stop_element
    data = read_leaf_bytes(source, name, start_element, stop).view(numpy_dtype(leaf.dtype))
    is_whole = start_element == 0 and stop_element is None and leaf.dtype not in PACKED_BITS
    return data.reshape(leaf.shape) if is_whole else data


def read_leaf_bytes(source: CheckpointSource, name: str, start_element: int, stop_element: int) -> np.ndarray:
    """Read elements [start_element, stop_element) of a leaf in C order as little-endian bytes.

    Returns:
        uint8 [(stop_element - start_element) * bytes per element].

    Raises:
        KeyError: `source` has no leaf `name`.
        UserError: The stored bytes are missing or corrupt.
    """
    if name not in source.byte_ranges:
        return zarr_read.read_with_tensorstore(source, name, start_element, stop_element)
    item_bytes = ITEM_BYTES[source.leaves[name].dtype]
    data = np.empty((stop_element - start_element) * item_bytes, np.uint8)
    ranges = source.byte_ranges[name]
    with open_files([part.path for part in ranges], os.O_RDONLY) as files:
        read_range(files, ranges, start_element * item_bytes, data)
    return data
