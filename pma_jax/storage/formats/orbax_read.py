"""Reading Orbax checkpoints of a pytree, of any layout, as untrusted data: which arrays there are, and their bytes.

    v0, bare           STEP/_METADATA, arrays beside it
    v0 and v1, items   STEP/{params,state,default,…}/_METADATA; one of them holds the parameters
    before _METADATA   arrays alone: what T5X and early Flax wrote

Orbax itself is not imported: it restores whole trees, and needs to be told their structure.
"""

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.storage.digests import METADATA_DIGEST_KEY, check_metadata_digest
from pma_jax.storage.formats.names import progress_from_name
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.formats.zarr import Array, open_store, read_array
from pma_jax.storage.json_files import read_object

_TREE, _CHECKPOINT = "_METADATA", "_CHECKPOINT_METADATA"
# Where parameters are kept, in order of preference, and what tells that a tree holds more than parameters.
PARAMETER_KEYS = ("params", "target", "model", "weights")
STATE_KEYS = frozenset({"opt_state", "opt", "optimizer", "state", "step", "param_states", "rng", "tx", "ema"})
_ITEMS = ("params", "model", "default", "state", "train_state", "items")


def is_orbax(path: Path) -> bool:
    """Whether a directory looks like an Orbax checkpoint, or like several."""
    marks = (_TREE, _CHECKPOINT, "manifest.ocdbt", "*/_METADATA", "*/_CHECKPOINT_METADATA", "*/.zarray", "*/zarr.json")
    return any(next(path.glob(mark), None) is not None for mark in marks)


def open_orbax(path: Path, subtree: str | None = None) -> CheckpointSource:
    """Opens an Orbax checkpoint: its metadata, none of its arrays.

    Args:
        path: the checkpoint's directory.
        subtree: the item and keys that hold the parameters, joined by "/"; guessed, and told, if None.

    Raises:
        ValueError: it is not complete, is damaged, or it is not clear which part holds the parameters; one line.
    """
    if ".orbax-checkpoint-tmp" in path.name:
        raise ValueError(f"{path}: is still being written, or its writing was interrupted; take a finished one")
    wanted = [part for part in (subtree or "").split("/") if part]
    directory, item, notes = _choose_item(path, wanted)
    tree = _object_if_there(directory / _TREE)
    store = open_store(directory, fills_missing=tree.get("store_array_data_equal_to_fill_value") is not True)
    paths = (
        _tree_keys(directory, tree) if "tree_metadata" in tree else {key: _split(key) for key in store.array_names()}
    )
    if not paths:
        raise ValueError(f"{directory}: holds no arrays; it is empty, or parts of it are missing")
    chosen, note = _choose_subtree(directory, paths, wanted)
    arrays = {name: read_array(store, name) for name in paths if _keys(paths[name])[: len(chosen)] == chosen}
    custom = _object_if_there(path / _CHECKPOINT).get("custom_metadata") or {}
    if isinstance(custom, dict):
        check_metadata_digest(custom, path / _CHECKPOINT)
        if METADATA_DIGEST_KEY in custom and not tree:
            raise ValueError(f"{directory / _TREE}: is missing; the checkpoint is damaged")
    sharding = _object_if_there(directory / "_sharding")
    encoded = {_base64(name) for name in arrays}
    metadata = {
        "item": item,
        "keys": {name: paths[name] for name in arrays},
        "custom": custom if isinstance(custom, dict) else {},
        # Keyed by the base64 of the arrays' names: how a reader who names no devices places them.
        "sharding": {key: value for key, value in sharding.items() if key in encoded},
    }
    return _source(path, arrays, metadata, [*notes, note] if note else notes)


def _base64(name: str) -> str:
    return base64.b64encode(name.encode()).decode()


def _source(path: Path, arrays: Mapping[str, Array], metadata: dict[str, Any], notes: list[str]) -> CheckpointSource:
    custom = metadata["custom"]
    step, tokens = progress_from_name(path.name)
    step = int(path.name) if path.name.isdecimal() and len(path.name) < 19 else step
    return CheckpointSource(
        kind="orbax",
        path=path,
        origin=str(path),
        leaves={name: array.leaf for name, array in arrays.items()},
        byte_ranges={name: array.byte_ranges for name, array in arrays.items() if array.byte_ranges is not None},
        tokens=custom["tokens"] if type(custom.get("tokens")) is int else tokens,
        step=custom["step"] if type(custom.get("step")) is int else step,
        metadata=metadata,
        notes=tuple(notes),
        zstd_frames={name: array.zstd_frames for name, array in arrays.items() if array.zstd_frames is not None},
        tensorstore_specs={name: array.spec for name, array in arrays.items()},
    )


def _object_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _choose_item(path: Path, wanted: list[str]) -> tuple[Path, str, list[str]]:
    """(the tree's directory, its item's name or "", notes); takes the item's name off `wanted`."""
    if any((path / mark).exists() for mark in (_TREE, "manifest.ocdbt")) or _has_arrays(path):
        return path, "", []
    children = sorted(child for child in path.iterdir() if child.is_dir())
    items = {c.name: c for c in children if (c / _TREE).exists() or (c / "manifest.ocdbt").exists() or _has_arrays(c)}
    if wanted and wanted[0] in items:
        return items[wanted[0]], wanted.pop(0), []
    steps = [child.name for child in children if (child / _CHECKPOINT).exists() and child.name not in items]
    if steps and not items:
        raise ValueError(f"{path}: holds {len(steps)} checkpoints; name them: {path / steps[0]} …")
    if not items:
        raise ValueError(f"{path}: holds no tree of arrays; parts of the checkpoint are missing")
    if len(items) == 1:
        name = next(iter(items))
        return items[name], name, []
    name = next((name for name in _ITEMS if name in items), None)
    if name is None:
        raise ValueError(f"{path}: which of {', '.join(items)} holds the parameters? name it as the subtree")
    return items[name], name, [f"the parameters are taken from {name!r} (of {', '.join(items)})"]


def _has_arrays(path: Path) -> bool:
    return any(next(path.glob(mark), None) is not None for mark in ("*/.zarray", "*/zarr.json"))


def _tree_keys(directory: Path, tree: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Array name -> its key path, from `_METADATA`; leaves without an array (None, empty nodes, text) are left out."""
    what = directory / _TREE
    paths: dict[str, list[dict[str, Any]]] = {}
    entries = tree["tree_metadata"]
    for entry in entries.values() if isinstance(entries, dict) else [None]:
        entry = entry if isinstance(entry, dict) else {}
        keys = entry.get("key_metadata")
        if not isinstance(keys, list) or not all(isinstance(key, dict) and "key" in key for key in keys):
            raise ValueError(f"{what}: is damaged: {str(entry)[:80]}")
        value = entry.get("value_metadata")
        kind = value.get("value_type", "jax.Array") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"{what}: is damaged: {str(entry)[:80]}")
        if not ("Array" in kind or "ndarray" in kind or kind == "scalar"):
            continue
        name = ".".join(str(key["key"]) for key in keys)
        if not name.isprintable() or not name or ".." in name.split("/") or name.startswith("/"):
            raise ValueError(f"{what}: names an array {name[:80]!r}, which cannot be")
        if name in paths:
            raise ValueError(f"{what}: two leaves are both named {name[:80]!r}")
        paths[name] = keys
    return paths


def _split(name: str) -> list[dict[str, Any]]:
    return [{"key": part, "key_type": 2} for part in name.split(".")]


def _keys(path: list[dict[str, Any]]) -> list[str]:
    return [str(key["key"]) for key in path]


def _choose_subtree(
    directory: Path, paths: Mapping[str, list[dict[str, Any]]], wanted: list[str]
) -> tuple[list[str], str | None]:
    """(the keys under which the parameters lie, what to tell of a guess)."""
    top = list(dict.fromkeys(_keys(path)[0] for path in paths.values()))
    if wanted:
        if not any(_keys(path)[: len(wanted)] == wanted for path in paths.values()):
            raise ValueError(f"{directory}: has no subtree {'/'.join(wanted)!r}; it has {', '.join(top[:10])}")
        return wanted, None
    others = [key for key in top if key in STATE_KEYS]
    found = next((key for key in PARAMETER_KEYS if key in top), None)
    if found is not None and len(top) > 1:
        return [found], f"the parameters are taken from the subtree {found!r} (of {', '.join(top[:10])})"
    if found is None and others:
        raise ValueError(
            f"{directory}: holds {', '.join(others[:5])} and it is not clear where the parameters are; "
            f"name the subtree, one of {', '.join(top[:10])}"
        )
    return [], None


@cache
def _context() -> Any:
    import tensorstore as ts

    # No cache: every chunk is wanted once, and a cache would hold what the memory limit counts.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def read_with_tensorstore(source: CheckpointSource, name: str, start: int, stop: int) -> np.ndarray:
    """Decodes elements [start, stop) of a leaf: uint8, little-endian in C order. Cheap where they are whole chunks.

    Raises:
        ValueError: the stored array is missing or damaged; one line.
    """
    import tensorstore as ts

    leaf, width = source.leaves[name], ITEM_BYTES[source.leaves[name].dtype]
    row = leaf.elements // leaf.shape[0] if leaf.shape and leaf.elements else 1
    try:
        array = ts.open(ts.Spec(dict(source.tensorstore_specs[name])), open=True, context=_context()).result()
        first = start // row
        values = array[first : -(-stop // row)] if leaf.shape and leaf.elements else array
        data = np.ascontiguousarray(values.read().result())
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = (str(error).splitlines() or ["too large"])[0].split(" [")[0][:200]
        raise ValueError(f"{source.origin}: {name} cannot be read: {reason}") from None
    if data.dtype.itemsize != width:
        raise ValueError(f"{source.origin}: {name} is stored as {data.dtype}, not as {leaf.dtype}")
    skip = start - first * row
    return data.reshape(-1).view(np.uint8)[skip * width : (skip + stop - start) * width]
