"""Plan the files of an Orbax checkpoint with uncompressed zarr 2 arrays, in which each byte has a known offset.

Orbax writes the same layout with use_ocdbt=False, use_zarr3=False and no compression, so Orbax and any zarr reader can
open it. Because no OCDBT database must be kept consistent, threads, processes and a resumed merge can write in any
order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.orbax_read import INDICATOR_FILE
from pma_jax.storage.formats.orbax_tree import NUMPY_ARRAY, OrbaxItem, flat_tree, structure_differences, tree_texts
from pma_jax.storage.formats.source import ML_DTYPES, ByteRange, CheckpointSource, LeafInfo

# Small enough that a host which restores its shard reads few other bytes; large enough for the disk's full rate.
CHUNK_BYTES = 64 * 2**20
_V1_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_V0_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def orbax_layout(
    leaves: Mapping[str, LeafInfo], item: OrbaxItem | None, custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of an Orbax checkpoint.

    Args:
        leaves: The leaves to write, by name.
        item: The tree of the leaves. If None, they become one flat dictionary of NumPy arrays, as
            `orbax.checkpoint.v1.save` writes it.
        custom_metadata: The checkpoint's custom metadata.

    Raises:
        UserError: A leaf's name cannot be a path.
    """
    item = item or OrbaxItem("state", flat_tree(leaves, NUMPY_ARRAY))
    folder = f"{item.name}/" if item.name else ""
    texts: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
    shapes = {}
    for name, leaf in leaves.items():
        _check_name(name)
        chunk = _chunk_shape(leaf)
        shapes[name] = (leaf.shape, chunk)
        texts[f"{folder}{name}/.zarray"] = _json_bytes(_zarr_metadata(leaf, chunk))
        byte_ranges[name] = tuple(_chunk_ranges(folder + name, leaf, chunk))
        sizes |= {str(part.path): LeafInfo(chunk, leaf.dtype).nbytes for part in byte_ranges[name]}
    texts |= {folder + path: _json_bytes(value) for path, value in tree_texts(item.tree, shapes).items()}
    if item.sharding:
        texts[f"{folder}_sharding"] = _json_bytes(item.sharding)
    handler = item.handler or (_V1_HANDLER if item.name and item.is_v1 else _V0_HANDLER)
    texts["_CHECKPOINT_METADATA"] = _json_bytes(
        {
            "item_handlers": {item.name: handler} if item.name else handler,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 0,
            "custom_metadata": dict(custom_metadata),
        }
    )
    texts["commit_success.txt"] = b""
    if item.is_v1:
        texts[INDICATOR_FILE] = b""
    _check_paths([*texts, *sizes])
    return OutputLayout(texts, sizes, byte_ranges)


def merged_item(sources: Sequence[CheckpointSource]) -> OrbaxItem | None:
    """Return the item of the first source that is Orbax, which a merged checkpoint has too; None if none is.

    Raises:
        UserError: The sources differ in leaves that are no arrays.
    """
    items = [(source.origin, source.metadata["item"]) for source in sources if source.format == "orbax"]
    if not items:
        return None
    origin, first = items[0]
    for other, item in items[1:]:
        differences = structure_differences(first.tree, item.tree)
        if differences:
            raise UserError(
                f"{other} differs from {origin} in {len(differences)} leaves that cannot be averaged: "
                f"{'; '.join(differences[:10])}; merge a subtree without them (--subtree)"
            )
    # The text of a typed tree also has shapes and types of leaves; it is left out unless all sources agree on it.
    is_same = all(item.tree.typed_tree == first.tree.typed_tree for _, item in items)
    return first if is_same else replace(first, tree=replace(first.tree, typed_tree=None))


def _check_name(name: str) -> None:
    parts = name.split("/")
    if "\0" in name or any(part in {"", ".", ".."} or len(part.encode()) > 240 for part in parts):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a directory; write it as safetensors (--format safetensors)"
        )


def _check_paths(paths: Sequence[str]) -> None:
    """Check that no file is also a directory: a leaf's name may contain a slash, and continue another leaf's name."""
    folders = {str(parent) for path in paths for parent in Path(path).parents}
    if clash := next((path for path in paths if path in folders), None):
        raise UserError(
            f"{clash[:80]!r} would be a file and a directory; write the leaves as safetensors (--format safetensors)"
        )


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chunk_shape(leaf: LeafInfo) -> tuple[int, ...]:
    """Return the shape of a chunk of complete rows of the leading axis, so that it is a contiguous part of the leaf."""
    if not leaf.shape or not leaf.elements:
        return tuple(max(1, size) for size in leaf.shape)
    rows = leaf.shape[0]
    count = min(rows, max(1, -(-leaf.nbytes // CHUNK_BYTES)))
    # A number of chunks that divides the rows avoids padding. If there is none near `count` (the rows may be prime), a
    # padded last chunk costs less than one file per row.
    exact = next((parts for parts in range(count, min(rows, 4 * count) + 1) if rows % parts == 0), count)
    return (-(-rows // exact), *leaf.shape[1:])


def _zarr_metadata(leaf: LeafInfo, chunk: tuple[int, ...]) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": list(leaf.shape),
        "chunks": list(chunk),
        "dtype": _zarr_dtype(leaf.dtype),
        "compressor": None,
        "dimension_separator": ".",
        "fill_value": None,
        "filters": None,
        "order": "C",
    }


def _zarr_dtype(dtype: str) -> str:
    """Return zarr 2's code of a dtype. Those that NumPy lacks (bfloat16) have their name, as in tensorstore."""
    return dtype if dtype in ML_DTYPES else np.dtype(dtype).str


def _chunk_ranges(folder: str, leaf: LeafInfo, chunk: tuple[int, ...]) -> list[ByteRange]:
    if not leaf.elements:
        return []
    if not leaf.shape:
        return [ByteRange(Path(folder, "0"), 0, leaf.nbytes)]
    chunk_nbytes = LeafInfo(chunk, leaf.dtype).nbytes
    tail = ".0" * (len(leaf.shape) - 1)
    return [
        ByteRange(Path(folder, f"{number}{tail}"), 0, min(chunk_nbytes, leaf.nbytes - start))
        for number, start in enumerate(range(0, leaf.nbytes, chunk_nbytes))
    ]
