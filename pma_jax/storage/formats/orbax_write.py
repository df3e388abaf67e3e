"""Writing an Orbax checkpoint as plain files: zarr3 arrays without compression, every byte at a known place.

Orbax reads it like one of its own (it is what Orbax writes with use_ocdbt=False and no codec), and so does anything
that reads zarr3. There is no database to keep consistent: threads, processes and a resumed merge write where they like.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pma_jax.storage.formats.source import ByteRange, CheckpointSource, LeafInfo

# Small enough that a host which restores its shard reads little else, large enough to be read at the disk's speed.
CHUNK_BYTES = 64 * 2**20
_V1_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_V0_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def orbax_files(
    leaves: Mapping[str, LeafInfo], first: CheckpointSource, custom: Mapping[str, Any]
) -> tuple[dict[str, bytes], dict[str, int], dict[str, tuple[ByteRange, ...]]]:
    """The small files, the sizes of the files that hold chunks, and the places of the leaves, all by relative path.

    Args:
        leaves: the leaves to write, by name.
        first: the source whose layout is kept: key paths and the item that holds the tree; for another format one flat
            dictionary, as `orbax.checkpoint.v1.save` lays it out.
        custom: the checkpoint's custom metadata.

    Raises:
        ValueError: a name cannot be a directory of its own.
    """
    texts: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    places: dict[str, tuple[ByteRange, ...]] = {}
    tree = {}
    is_orbax = first.kind == "orbax"
    keys_of = first.metadata["keys"] if is_orbax else {}
    item = first.metadata["item"] if is_orbax else "state"
    folder = f"{item}/" if item else ""
    for name, leaf in leaves.items():
        if "/" in name or "\0" in name or name in {"", ".", ".."} or len(name.encode()) > 255:
            raise ValueError(
                f"{name[:80]!r} cannot be the name of a directory; write it as safetensors (--format safetensors)"
            )
        keys = keys_of.get(name) or [{"key": name, "key_type": 2}]
        # Without devices to go by, what comes from another format is restored as numpy unless the reader says where to.
        value = {
            "value_type": "jax.Array" if is_orbax else "np.ndarray",
            "skip_deserialize": False,
            "write_shape": list(leaf.shape),
        }
        tree[str(tuple(str(key["key"]) for key in keys))] = {"key_metadata": keys, "value_metadata": value}
        chunk = _chunk_shape(leaf)
        texts[f"{folder}{name}/zarr.json"] = _json(_array_metadata(leaf, chunk))
        places[name] = tuple(_chunks(folder + name, leaf, chunk))
        sizes |= {str(byte_range.path): _chunk_nbytes(leaf, chunk) for byte_range in places[name]}
    if is_orbax and first.metadata["sharding"]:
        texts[f"{folder}_sharding"] = _json(first.metadata["sharding"])
    texts[f"{folder}_METADATA"] = _json(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )
    texts["_CHECKPOINT_METADATA"] = _json(
        {
            "item_handlers": {item: _V1_HANDLER} if item else _V0_HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 0,
            "custom_metadata": dict(custom),
        }
    )
    texts["commit_success.txt"] = b""
    if item == "state":
        texts["orbax.checkpoint"] = b""
    return texts, sizes, places


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chunk_shape(leaf: LeafInfo) -> tuple[int, ...]:
    """Whole rows of the leading axis, as many as divide it and fit; a chunk is then a run of the leaf's bytes."""
    if not leaf.shape or not leaf.elements:
        return tuple(max(1, size) for size in leaf.shape)
    rows, row_bytes = leaf.shape[0], leaf.nbytes // leaf.shape[0]
    count = min(rows, max(1, -(-leaf.nbytes // CHUNK_BYTES)))
    # A prime number of rows has no such divisor: then one padded chunk too many is cheaper than a file for every row.
    exact = next((parts for parts in range(count, min(rows, 4 * count) + 1) if rows % parts == 0), count)
    return (-(-rows // exact) if row_bytes else rows, *leaf.shape[1:])


def _array_metadata(leaf: LeafInfo, chunk: tuple[int, ...]) -> dict[str, Any]:
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


def _chunk_nbytes(leaf: LeafInfo, chunk: tuple[int, ...]) -> int:
    return LeafInfo(chunk, leaf.dtype).nbytes


def _chunks(folder: str, leaf: LeafInfo, chunk: tuple[int, ...]) -> list[ByteRange]:
    if not leaf.elements:
        return []
    if not leaf.shape:
        return [ByteRange(Path(folder, "c"), 0, leaf.nbytes)]
    chunk_nbytes = _chunk_nbytes(leaf, chunk)
    tail = "/0" * (len(leaf.shape) - 1)
    starts = itertools.count(0, chunk_nbytes)
    return [
        ByteRange(Path(folder, f"c/{number}{tail}"), 0, min(chunk_nbytes, leaf.nbytes - start))
        for number, start in zip(range(-(-leaf.shape[0] // chunk[0])), starts, strict=False)
    ]
