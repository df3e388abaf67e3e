"""Plan the files of an Orbax checkpoint with uncompressed zarr3 arrays, in which each byte has a known offset.

Orbax writes the same layout with use_ocdbt=False and without a codec, so Orbax and any zarr3 reader can open it.
Because no OCDBT database must be kept consistent, threads, processes and a resumed merge can write in any order.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.layout import OutputLayout
from pma_jax.storage.formats.source import ByteRange, CheckpointSource, LeafInfo

# Small enough that a host which restores its shard reads few other bytes; large enough for the disk's full rate.
CHUNK_BYTES = 64 * 2**20
_V1_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_V0_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def orbax_layout(
    leaves: Mapping[str, LeafInfo], template: CheckpointSource, custom_metadata: Mapping[str, Any]
) -> OutputLayout:
    """Plan the files of an Orbax checkpoint.

    Args:
        leaves: The leaves to write, by name.
        template: The source whose key paths and item name are used. If its format is not Orbax, the leaves become one
            flat dictionary, as `orbax.checkpoint.v1.save` writes it.
        custom_metadata: The checkpoint's custom metadata.

    Raises:
        UserError: A leaf's name cannot be a directory name.
    """
    texts: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
    tree = {}
    is_orbax = template.format == "orbax"
    item = template.metadata["item"] if is_orbax else "state"
    folder = f"{item}/" if item else ""
    for name, leaf in leaves.items():
        if "/" in name or "\0" in name or name in {"", ".", ".."} or len(name.encode()) > 255:
            raise UserError(
                f"{name[:80]!r} cannot be the name of a directory; write it as safetensors (--format safetensors)"
            )
        entry = _leaf_metadata(name, leaf, template)
        tree[str(tuple(str(key["key"]) for key in entry["key_metadata"]))] = entry
        chunk = _chunk_shape(leaf)
        texts[f"{folder}{name}/zarr.json"] = _json_bytes(_zarr_metadata(leaf, chunk))
        byte_ranges[name] = tuple(_chunk_ranges(folder + name, leaf, chunk))
        sizes |= {str(part.path): LeafInfo(chunk, leaf.dtype).nbytes for part in byte_ranges[name]}
    if is_orbax and template.metadata["sharding"]:
        texts[f"{folder}_sharding"] = _json_bytes(template.metadata["sharding"])
    texts[f"{folder}_METADATA"] = _json_bytes(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )
    texts["_CHECKPOINT_METADATA"] = _json_bytes(
        {
            "item_handlers": {item: _V1_HANDLER} if item else _V0_HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 0,
            "custom_metadata": dict(custom_metadata),
        }
    )
    texts["commit_success.txt"] = b""
    if item == "state":
        texts["orbax.checkpoint"] = b""
    return OutputLayout(texts, sizes, byte_ranges)


def _leaf_metadata(name: str, leaf: LeafInfo, template: CheckpointSource) -> dict[str, Any]:
    is_orbax = template.format == "orbax"
    keys = template.metadata["keys"].get(name) if is_orbax else None
    return {
        "key_metadata": keys or [{"key": name, "key_type": 2}],
        "value_metadata": {
            # Another format has no shardings, so Orbax restores NumPy arrays unless its caller gives shardings.
            "value_type": "jax.Array" if is_orbax else "np.ndarray",
            "skip_deserialize": False,
            "write_shape": list(leaf.shape),
        },
    }


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
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(leaf.shape),
        "data_type": leaf.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": False if leaf.dtype == "bool" else 0,
        "attributes": {},
    }


def _chunk_ranges(folder: str, leaf: LeafInfo, chunk: tuple[int, ...]) -> list[ByteRange]:
    if not leaf.elements:
        return []
    if not leaf.shape:
        return [ByteRange(Path(folder, "c"), 0, leaf.nbytes)]
    chunk_nbytes = LeafInfo(chunk, leaf.dtype).nbytes
    tail = "/0" * (len(leaf.shape) - 1)
    return [
        ByteRange(Path(folder, f"c/{number}{tail}"), 0, min(chunk_nbytes, leaf.nbytes - start))
        for number, start in enumerate(range(0, leaf.nbytes, chunk_nbytes))
    ]
