"""Read and write trees of zarr arrays whose names are the keys of the leaves, as trainers write them with JAX.

`jax.experimental.array_serialization` writes such arrays, one directory or one key prefix of a database each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import CheckpointSource, LeafInfo, are_sizes
from pma_jax.storage.formats.subtree import choose_subtrees, is_below, split_subtrees
from pma_jax.storage.formats.zarr import open_store, read_array_layout
from pma_jax.storage.formats.zarr_read import absent_chunks_notes, check_arrays_have_metadata, source_fields
from pma_jax.storage.formats.zarr_write import check_name, check_paths, plan_array


@dataclass(frozen=True)
class ArrayIndex:
    """A trainer's own list of the arrays of a checkpoint.

    Attributes:
        file: The file that holds it.
        entries: Name of each array -> (shape, dtype).
    """

    file: Path
    entries: Mapping[str, tuple[list[int], str]]


def parse_index(file: Path, entries: Iterable[Any]) -> ArrayIndex:
    """Parse a list of {"path": name, "shape": sizes, "dtype": name}, which `file` holds.

    Raises:
        DamageError: It is corrupt, or lists an array twice.
    """
    parsed: dict[str, tuple[list[int], str]] = {}
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        name, shape, dtype = (fields.get(key) for key in ("path", "shape", "dtype"))
        if not isinstance(name, str) or not isinstance(dtype, str) or not are_sizes(shape):
            raise DamageError(f"{file}: is corrupt: {str(entry)[:80]}")
        if name in parsed or any(part in ("", ".", "..") for part in name.split("/")):
            raise DamageError(f"{file}: lists {name[:80]!r}, which is no path of an array, or twice")
        parsed[name] = (shape, dtype)
    return ArrayIndex(file, parsed)


def open_zarr_tree(
    path: Path,
    format: str,
    subtrees: Sequence[str],
    separator: str = "/",
    index: ArrayIndex | None = None,
    step: Any = None,
    metadata: Mapping[str, Any] | None = None,
    other_files: tuple[Path, ...] = (),
) -> CheckpointSource:
    """Open a directory of zarr arrays, or of a database of them.

    Args:
        path: The directory.
        format: The `format` of the result.
        subtrees: The subtrees to read; if there are none, the parameters.
        separator: Text between the keys in the names of the arrays. Leaves have "/" instead.
        index: The trainer's list of the arrays; if None, all in the directory or database are read.
        step: The step, if metadata state it; else it is that of the directory's name.
        metadata: The `metadata` of the result.
        other_files: The `other_files` of the result.

    Raises:
        DamageError: The checkpoint is corrupt or not complete, or an array is not as the index says.
        UserError: An array is not supported, or the parameters cannot be located.
    """
    store = open_store(path, stores_all_chunks=None)
    names = store.array_names() if index is None else index.entries
    stored_names = {name.replace(separator, "/"): name for name in names}
    if not stored_names:
        raise UserError(f"{path}: holds no arrays; it is empty, or parts of it are missing")
    prefixes, notes = choose_subtrees(path, [name.split("/") for name in stored_names], split_subtrees(subtrees))
    check_arrays_have_metadata(store, prefixes, separator)
    arrays = {
        name: read_array_layout(store, stored)
        for name, stored in stored_names.items()
        if is_below(name.split("/"), prefixes)
    }
    if index is not None:
        _check_index(path, index, {name: array.leaf for name, array in arrays.items()})
    progress = read_progress(path, step=step)
    return CheckpointSource(
        format=format,
        path=path,
        origin=str(path),
        **source_fields(arrays),
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        other_files=other_files,
        metadata=metadata or {},
        notes=(*notes, *absent_chunks_notes(path, arrays), *progress.notes),
    )


def _check_index(path: Path, index: ArrayIndex, leaves: Mapping[str, LeafInfo]) -> None:
    """Check that the arrays are as a trainer's list says.

    Raises:
        DamageError: One has another shape or dtype.
    """
    for name, leaf in leaves.items():
        shape, dtype = index.entries[name]
        if (shape, dtype) != (list(leaf.shape), leaf.dtype):
            raise DamageError(
                f"{path}: {name[:80]!r} is {leaf.dtype} of shape {list(leaf.shape)}, and {index.file.name} says "
                f"{dtype[:40]} of shape {shape}; fetch or save the checkpoint again"
            )


def zarr_tree_layout(
    leaves: Mapping[str, LeafInfo],
    separator: str = "/",
    texts: Mapping[str, bytes] | None = None,
    copies: Mapping[str, Path] | None = None,
) -> OutputLayout:
    """Plan a directory of raw zarr arrays, named by the leaves with `separator` between the keys.

    Args:
        leaves: The leaves to write; their names have "/" between the keys.
        separator: Text between the keys in the names of the arrays.
        texts: Path -> content of further files.
        copies: Path -> an existing file to copy.

    Raises:
        UserError: A leaf's name cannot be a path, or contains the separator.
    """
    files = dict(texts or {})
    sizes: dict[str, int] = {}
    byte_ranges = {}
    for name, leaf in leaves.items():
        check_name(name)
        if separator != "/" and separator in name:
            raise UserError(f"{name[:80]!r} contains {separator!r}; write it as safetensors (--format safetensors)")
        array = plan_array(name.replace("/", separator), leaf)
        files |= dict([array.metadata])
        sizes |= array.sizes
        byte_ranges[name] = array.byte_ranges
    check_paths([*files, *sizes])
    return OutputLayout(files, sizes, byte_ranges, copies=copies or {})
