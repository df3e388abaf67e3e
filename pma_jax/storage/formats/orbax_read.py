"""Read Orbax checkpoints of a pytree as untrusted input: their metadata, and single arrays.

These layouts of a checkpoint directory are supported:

    v0, without items   _METADATA and the arrays
    v0 and v1, items    {params,state,default,…}/_METADATA; one of the items holds the parameters
    before _METADATA    only arrays, as early versions of Flax wrote them

Orbax itself is not imported, because it restores complete trees and needs their structure in advance.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError
from pma_jax.storage.digests import check_metadata_digest
from pma_jax.storage.formats.orbax_tree import (
    ARRAY_METADATA_FOLDER,
    EMPTY_TYPES,
    NUMPY_ARRAY,
    SCALAR,
    STRINGS_FILE,
    TREE_FILE,
    OrbaxItem,
    inline_leaf_names,
    nested_tree,
    read_tree,
)
from pma_jax.storage.formats.progress import read_progress
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.formats.subtree import choose_subtrees, is_below, split_subtrees
from pma_jax.storage.formats.zarr import ArrayLayout, open_store, read_array_layout
from pma_jax.storage.formats.zarr_read import absent_chunks_notes, check_arrays_have_metadata, source_fields
from pma_jax.storage.json_files import read_json_object
from pma_jax.storage.matching import match_files

_CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
# Orbax v1 identifies its checkpoints by this empty file.
INDICATOR_FILE = "orbax.checkpoint"
# A msgpack file with the structure of a tree without `_METADATA`.
_INLINE_FILE = "checkpoint"
# A directory that holds a tree of arrays has at least one of these.
_TREE_PATTERNS = (TREE_FILE, "manifest.ocdbt", "*/.zarray", "*/zarr.json")
# Items that may hold the parameters, in order of preference.
_PARAMETER_ITEMS = ("params", "model", "default", "state", "train_state", "items")


def is_orbax(path: Path) -> bool:
    """Return whether a directory has the files of an Orbax checkpoint, or has subdirectories that do."""
    return has_file(path, *_TREE_PATTERNS, _CHECKPOINT_FILE, f"*/{TREE_FILE}", f"*/{_CHECKPOINT_FILE}")


def has_file(path: Path, *patterns: str) -> bool:
    """Return whether a directory holds a file that matches one of the patterns."""
    return any(next(match_files(path, pattern), None) is not None for pattern in patterns)


def open_orbax(path: Path, subtrees: Sequence[str] = ()) -> CheckpointSource:
    """Open an Orbax checkpoint: read its metadata and none of its arrays.

    Args:
        path: The checkpoint's directory.
        subtrees: Item and keys of each subtree to read, joined by "/"; all are in one item. If there are none, the
            parameters are located, and `notes` of the result reports where.

    Raises:
        UserError: The checkpoint is incomplete or corrupt, or the parameters cannot be located.
    """
    if ".orbax-checkpoint-tmp" in path.name:
        raise UserError(f"{path}: is still being written, or its writing was interrupted; take a finished one")
    named = split_subtrees(subtrees)
    directory, item, notes = _find_item(path, named)
    tree = _read_optional(directory / TREE_FILE)
    store = open_store(directory, stores_all_chunks=_stores_all_chunks(tree))
    if "tree_metadata" in tree:
        structure = read_tree(directory, tree)
    else:
        _check_never_had_metadata(path, directory)
        names = store.array_names()
        _check_not_levanter(path, names)
        structure = nested_tree(names, NUMPY_ARRAY)
    if not any(leaf.is_array for leaf in structure.leaves):
        raise UserError(f"{directory}: holds no arrays; it is empty, or parts of it are missing")
    paths = [leaf.key_names for leaf in structure.leaves if leaf.is_array]
    empty_paths = [leaf.key_names for leaf in structure.leaves if leaf.value_type in EMPTY_TYPES and leaf.keys]
    prefixes, subtree_notes = choose_subtrees(directory, paths, named, empty_paths)
    notes += subtree_notes
    if "tree_metadata" not in tree:
        check_arrays_have_metadata(store, prefixes, ".")
    structure = structure.below(prefixes)
    if not tree and (directory / _INLINE_FILE).is_file():
        _check_no_leaf_is_inline(directory / _INLINE_FILE, prefixes)
    arrays = {leaf.name: read_array_layout(store, leaf.name) for leaf in structure.leaves if leaf.is_array}
    notes += absent_chunks_notes(directory, arrays)
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


def _check_not_levanter(path: Path, names: Sequence[str]) -> None:
    """Check that the names of arrays without `_METADATA` are not those of levanter.

    Raises:
        DamageError: They are, and levanter's own metadata is missing.
    """
    if nested := next((name for name in names if "/" in name), None):
        raise DamageError(
            f"{path}: has an array named {nested[:80]!r}, as levanter writes them, and no metadata.json, which it "
            "writes last; the checkpoint is not complete, fetch or save it again"
        )


def _check_no_leaf_is_inline(path: Path, prefixes: list[list[str]]) -> None:
    """Check that no parameter is stored in the msgpack file `path` instead of as an array.

    Raises:
        UserError: One is.
    """
    names = inline_leaf_names(path)
    parameters = [name for name in names if is_below(name.split("."), prefixes)]
    if parameters:
        raise UserError(
            f"{path}: holds the values of {len(parameters)} leaves ({', '.join(parameters[:5])[:200]}), which are not "
            "read; restore the checkpoint with the program that saved it, and save it with a current Orbax"
        )


def _stores_all_chunks(tree: Mapping[str, Any]) -> bool | None:
    """Return whether the tree's writer stores chunks of zeros too; None if `_METADATA` does not say, as until 2024."""
    stores_all = tree.get("store_array_data_equal_to_fill_value")
    return stores_all if isinstance(stores_all, bool) else None


def _make_source(
    path: Path, arrays: Mapping[str, ArrayLayout], item: OrbaxItem, custom: dict[str, Any], notes: list[str]
) -> CheckpointSource:
    progress = read_progress(path, step=custom.get("step"), tokens=custom.get("tokens"))
    return CheckpointSource(
        format="orbax",
        path=path,
        origin=str(path),
        **source_fields(arrays),
        tokens=progress.tokens,
        step=progress.step,
        epoch=progress.epoch,
        metadata={"item": item, "custom": custom},
        notes=(*notes, *progress.notes),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _find_item(path: Path, named: list[list[str]]) -> tuple[Path, str, list[str]]:
    """Return (directory of the tree, name of its item or "", notes); remove the item's name from the keys in `named`.

    Args:
        path: The checkpoint.
        named: Keys of the subtrees that the user named; an empty list of keys is removed.
    """
    if has_file(path, *_TREE_PATTERNS):
        return path, "", []
    children = sorted(child for child in path.iterdir() if child.is_dir())
    items = {child.name: child for child in children if has_file(child, *_TREE_PATTERNS)}
    chosen = list(dict.fromkeys(keys[0] for keys in named if keys[0] in items))
    if len(chosen) > 1:
        raise UserError(f"{path}: {' and '.join(chosen)} are different items; merge each of them alone")
    if chosen:
        if any(keys[0] != chosen[0] for keys in named):
            raise UserError(f"{path}: name all subtrees with their item, such as {chosen[0]}/{'/'.join(named[0][1:])}")
        named[:] = [rest for keys in named if (rest := keys[1:])]
        return items[chosen[0]], chosen[0], []
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
