"""Read Orbax checkpoints of a pytree as untrusted input: their metadata, and single arrays.

These layouts of a checkpoint directory are supported:

    v0, without items   _METADATA and the arrays
    v0 and v1, items    {params,state,default,…}/_METADATA; one of the items holds the parameters
    before _METADATA    only arrays, as T5X and early versions of Flax wrote them

Orbax itself is not imported, because it restores complete trees and needs their structure in advance.
"""

import base64
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.runtime.failures import as_read_error
from pma_jax.storage.digests import check_metadata_digest
from pma_jax.storage.formats.orbax_tree import (
    ARRAY_METADATA_FOLDER,
    NUMPY_ARRAY,
    SCALAR,
    STRINGS_FILE,
    TREE_FILE,
    OrbaxItem,
    TreeStructure,
    inline_leaf_names,
    nested_tree,
    read_tree,
)
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.formats.zarr import ArrayLayout, open_store, read_array_layout
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import match_files

_CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
# Orbax v1 identifies its checkpoints by this empty file.
INDICATOR_FILE = "orbax.checkpoint"
# A msgpack file with the structure of a tree without `_METADATA`.
_INLINE_FILE = "checkpoint"
# A directory that holds a tree of arrays has at least one of these.
_TREE_PATTERNS = (TREE_FILE, "manifest.ocdbt", "*/.zarray", "*/zarr.json")
# Top-level keys of the subtree that holds the parameters, in order of preference.
PARAMETER_KEYS = ("params", "target", "model", "weights")
# Top-level keys of trees that hold more than the parameters.
STATE_KEYS = frozenset(
    {"opt_state", "opt", "optim", "optimizer", "optimizer_state", "param_states", "state", "tx"}
    | {"step", "global_step", "rng", "rngs", "ema", "ema_params", "iterator", "data_iter"}
)
# Items that may hold the parameters, in order of preference.
_PARAMETER_ITEMS = ("params", "model", "default", "state", "train_state", "items")


def is_orbax(path: Path) -> bool:
    """Return whether a directory has the files of an Orbax checkpoint, or has subdirectories that do."""
    return has_file(path, *_TREE_PATTERNS, _CHECKPOINT_FILE, f"*/{TREE_FILE}", f"*/{_CHECKPOINT_FILE}")


def has_file(path: Path, *patterns: str) -> bool:
    """Return whether a directory holds a file that matches one of the patterns."""
    return any(next(match_files(path, pattern), None) is not None for pattern in patterns)


def open_orbax(path: Path, subtree: str | None = None) -> CheckpointSource:
    """Open an Orbax checkpoint: read its metadata and none of its arrays.

    Args:
        path: The checkpoint's directory.
        subtree: Item and keys that hold the parameters, joined by "/". If None they are guessed, and `notes` of the
            result reports the guess.

    Raises:
        UserError: The checkpoint is incomplete or corrupt, or the parameters cannot be located.
    """
    if ".orbax-checkpoint-tmp" in path.name:
        raise UserError(f"{path}: is still being written, or its writing was interrupted; take a finished one")
    keys = [part for part in (subtree or "").split("/") if part]
    directory, item, notes = _find_item(path, keys)
    tree = _read_optional(directory / TREE_FILE)
    store = open_store(directory, stores_all_chunks=_stores_all_chunks(tree))
    if "tree_metadata" in tree:
        structure = read_tree(directory, tree)
    else:
        _check_never_had_metadata(path, directory)
        structure = nested_tree(store.array_names(), NUMPY_ARRAY)
    if not any(leaf.is_array for leaf in structure.leaves):
        raise UserError(f"{directory}: holds no arrays; it is empty, or parts of it are missing")
    prefix, note = _find_subtree(directory, structure, keys)
    notes += [note] if note else []
    structure = structure.below(prefix)
    if not tree and (directory / _INLINE_FILE).is_file():
        _check_no_leaf_is_inline(directory / _INLINE_FILE, prefix)
    arrays = {leaf.name: read_array_layout(store, leaf.name) for leaf in structure.leaves if leaf.is_array}
    notes += _absent_chunks_note(directory, arrays)
    for leaf in structure.leaves:
        if leaf.value_type == SCALAR:
            arrays[leaf.name] = replace(arrays[leaf.name], leaf=replace(arrays[leaf.name].leaf, is_python_number=True))
    checkpoint = _read_optional(path / _CHECKPOINT_FILE)
    custom = checkpoint.get("custom_metadata")
    custom = custom if isinstance(custom, dict) else {}
    check_metadata_digest(custom, path / _CHECKPOINT_FILE)
    handlers = checkpoint.get("item_handlers")
    handler = handlers.get(item) if item and isinstance(handlers, dict) else handlers
    # A JSON object keyed by the arrays' names in base64, which Orbax uses if the caller of restore gives no shardings.
    sharding = _read_optional(directory / "_sharding")
    encoded_names = {base64.b64encode(name.encode()).decode() for name in arrays}
    orbax_item = OrbaxItem(
        item,
        structure,
        handler if isinstance(handler, str) and len(handler) < 1000 else None,
        (path / INDICATOR_FILE).exists(),
        {key: value for key, value in sharding.items() if key in encoded_names},
    )
    return _make_source(path, arrays, orbax_item, custom, notes)


def _check_never_had_metadata(path: Path, directory: Path) -> None:
    """Check that no file shows that the tree had a `_METADATA`, which would also list leaves that are no arrays.

    Raises:
        DamageError: One does.
    """
    later_files = [directory / "_sharding", directory / STRINGS_FILE, directory / ARRAY_METADATA_FOLDER]
    later_files += [path / _CHECKPOINT_FILE, path / INDICATOR_FILE]
    if present := next((file for file in later_files if file.exists()), None):
        raise DamageError(
            f"{directory / TREE_FILE}: is missing, although {present.name} is there; the checkpoint is not complete, "
            "fetch or save it again"
        )


def _check_no_leaf_is_inline(path: Path, prefix: list[str]) -> None:
    """Check that no parameter is stored in the msgpack file `path` instead of as an array.

    Raises:
        UserError: One is.
    """
    # T5X puts the tree below one more key.
    names = [name.removeprefix("optimizer.") for name in inline_leaf_names(path)]
    parameters = [name for name in names if name.split(".")[: len(prefix)] == prefix]
    if parameters:
        raise UserError(
            f"{path}: holds the values of {len(parameters)} leaves ({', '.join(parameters[:5])[:200]}), which are not "
            "read; restore the checkpoint with the program that saved it, and save it with a current Orbax"
        )


def _stores_all_chunks(tree: Mapping[str, Any]) -> bool | None:
    """Return whether the tree's writer stores chunks of zeros too; None if `_METADATA` does not say, as until 2024."""
    stores_all = tree.get("store_array_data_equal_to_fill_value")
    return stores_all if isinstance(stores_all, bool) else None


def _absent_chunks_note(directory: Path, arrays: Mapping[str, ArrayLayout]) -> list[str]:
    absent = {name: array.absent_chunks for name, array in arrays.items() if array.absent_chunks}
    if not absent:
        return []
    names = ", ".join(list(absent)[:5]) + (", …" if len(absent) > 5 else "")
    return [
        f"{directory}: {sum(absent.values())} chunks of {names} are not stored; they are read as the fill value, which "
        "this checkpoint's writer leaves out"
    ]


def _make_source(
    path: Path, arrays: Mapping[str, ArrayLayout], item: OrbaxItem, custom: dict[str, Any], notes: list[str]
) -> CheckpointSource:
    progress = read_progress(path, step=custom.get("step"), tokens=custom.get("tokens"))
    return CheckpointSource(
        format="orbax",
        path=path,
        origin=str(path),
        leaves={name: array.leaf for name, array in arrays.items()},
        byte_ranges={name: array.byte_ranges for name, array in arrays.items() if array.byte_ranges is not None},
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        metadata={"item": item, "custom": custom},
        notes=(*notes, *progress.notes),
        zstd_frames={name: array.zstd_frames for name, array in arrays.items() if array.zstd_frames is not None},
        grids={name: array.grid for name, array in arrays.items() if array.grid is not None},
        tensorstore_specs={name: array.spec for name, array in arrays.items()},
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _find_item(path: Path, keys: list[str]) -> tuple[Path, str, list[str]]:
    """Return (directory of the tree, name of its item or "", notes); remove the item's name from `keys`."""
    if has_file(path, *_TREE_PATTERNS):
        return path, "", []
    children = sorted(child for child in path.iterdir() if child.is_dir())
    items = {child.name: child for child in children if has_file(child, *_TREE_PATTERNS)}
    if keys and keys[0] in items:
        return items[keys[0]], keys.pop(0), []
    steps = [child.name for child in children if (child / _CHECKPOINT_FILE).exists() and child.name not in items]
    if steps and not items:
        raise UserError(f"{path}: holds {len(steps)} checkpoints; name them: {path / steps[0]} …")
    if not items:
        raise UserError(f"{path}: holds no tree of arrays; parts of the checkpoint are missing")
    if len(items) == 1:
        name = next(iter(items))
        return items[name], name, []
    name = next((name for name in _PARAMETER_ITEMS if name in items), None)
    if name is None:
        raise UserError(f"{path}: which of {', '.join(items)} holds the parameters? name it as the subtree")
    return items[name], name, [f"the parameters are taken from {name!r} (of {', '.join(items)})"]


def _find_subtree(directory: Path, structure: TreeStructure, keys: list[str]) -> tuple[list[str], str | None]:
    """Return (the keys of the subtree that holds the parameters, a note if it was guessed)."""
    paths = [leaf.key_names for leaf in structure.leaves if leaf.is_array]
    top = list(dict.fromkeys(path[0] for path in paths))
    if keys:
        if not any(path[: len(keys)] == keys for path in paths):
            raise UserError(f"{directory}: has no subtree {'/'.join(keys)!r}; it has {', '.join(top[:10])}")
        return keys, None
    state = [key for key in top if key in STATE_KEYS]
    if not state:
        return [], None
    parameters = next((key for key in PARAMETER_KEYS if key in top), None)
    if parameters is None:
        raise UserError(
            f"{directory}: holds {', '.join(state[:5])} and it is not clear where the parameters are; "
            f"name the subtree, one of {', '.join(top[:10])}"
        )
    return [parameters], f"the parameters are taken from the subtree {parameters!r} (of {', '.join(top[:10])})"


@cache
def _tensorstore_context() -> Any:
    import tensorstore as ts

    # No cache: each chunk is read only once, and a merge's memory limit would have to include the cache.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def read_with_tensorstore(source: CheckpointSource, name: str, start: int, stop: int) -> np.ndarray:
    """Decode elements [start, stop) of a leaf; efficient if `start` and `stop` are multiples of `chunk_elements`.

    Returns:
        The little-endian bytes in C order, uint8.

    Raises:
        DamageError: The stored array is missing or corrupt.
        StorageError: It cannot be read.
    """
    leaf, width = source.leaves[name], ITEM_BYTES[source.leaves[name].dtype]
    row = leaf.elements // leaf.shape[0] if leaf.shape and leaf.elements else 1
    first = start // row
    data = read_box(source, name, (slice(first, -(-stop // row)),) if leaf.shape and leaf.elements else ())
    skip = start - first * row
    return data.reshape(-1).view(np.uint8)[skip * width : (skip + stop - start) * width]


def read_box(source: CheckpointSource, name: str, box: tuple[slice, ...]) -> np.ndarray:
    """Decode a part of a leaf: a slice for each leading axis.

    Raises:
        DamageError: The stored array is missing or corrupt.
        StorageError: It cannot be read.
    """
    import tensorstore as ts

    leaf = source.leaves[name]
    try:
        spec = ts.Spec(dict(source.tensorstore_specs[name]))
        array = ts.open(spec, open=True, context=_tensorstore_context()).result()
        data = np.ascontiguousarray((array[box] if box else array).read().result())
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = error_line(error).split(" [")[0][:200]
        raise as_read_error(error, f"{source.origin}: {name} cannot be read: {reason}") from error
    if data.dtype.itemsize != ITEM_BYTES[leaf.dtype]:
        raise UserError(f"{source.origin}: {name} is stored as {data.dtype}, not as {leaf.dtype}")
    return data
