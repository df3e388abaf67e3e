"""Decode stored zarr arrays with tensorstore, and describe them as the leaves of a checkpoint."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.runtime.failures import as_read_error
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.formats.subtree import is_below
from pma_jax.storage.formats.zarr import ArrayLayout, Store


def source_fields(arrays: Mapping[str, ArrayLayout]) -> dict[str, Any]:
    """Return the fields of a `CheckpointSource` that say where its leaves are, given the array of each leaf."""
    return {
        "leaves": {name: array.leaf for name, array in arrays.items()},
        "byte_ranges": {name: array.byte_ranges for name, array in arrays.items() if array.byte_ranges is not None},
        "zstd_frames": {name: array.zstd_frames for name, array in arrays.items() if array.zstd_frames is not None},
        "grids": {name: array.grid for name, array in arrays.items() if array.grid is not None},
        "tensorstore_specs": {name: array.spec for name, array in arrays.items()},
    }


def check_arrays_have_metadata(store: Store, prefixes: Sequence[Sequence[str]], separator: str = "/") -> None:
    """Check that no array is lost, where the names of the arrays are those that have zarr metadata.

    Args:
        store: The storage.
        prefixes: Key paths of the subtrees that are read.
        separator: Text between the keys in the names of the arrays.

    Raises:
        DamageError: There are chunks of an array in these subtrees, and not its metadata.
    """
    names = [name for name in store.names_without_metadata() if is_below(name.split(separator), prefixes)]
    if names:
        raise DamageError(
            f"{store.directory}: {len(names)} arrays have no metadata, such as {names[0][:80]!r}; the checkpoint is "
            "not complete, fetch or save it again"
        )


def absent_chunks_notes(directory: Path, arrays: Mapping[str, ArrayLayout]) -> list[str]:
    """Return a note on the chunks that are not stored and are read as the fill value; none if all are stored."""
    absent = {name: array.absent_chunks for name, array in arrays.items() if array.absent_chunks}
    if not absent:
        return []
    names = ", ".join(list(absent)[:5]) + (", …" if len(absent) > 5 else "")
    return [
        f"{directory}: {sum(absent.values())} chunks of {names} are not stored; they are read as the fill value, which "
        "this checkpoint's writer leaves out"
    ]


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
