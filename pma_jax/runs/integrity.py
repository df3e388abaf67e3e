"""Digests of the leaves of a pytree: computed from the arrays before they are written, and checked after they are read.

The digest of a leaf (`storage/digests.py`) covers its elements in C order and does not depend on mesh, sharding or file
layout. Training checks it when it resumes, even on another mesh, and a merge checks it in its one pass over the bytes.
A change of any bit between writing and reading is thus detected. Names, shapes and dtypes are compared with the model;
the other metadata have a separate digest.
"""

import functools
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental import multihost_utils

from pma_jax.storage.digests import CHECKSUM, SEGMENT_ELEMENTS, SegmentHasher, leaf_digest

_SMALL_BYTES = 2**20  # below this a thread costs more than the checksum
_GATHERED_BYTES = 2**24  # leaves up to this size are gathered to every process


def tree_digests(tree: Any) -> dict[str, str]:
    """Map the name of each leaf to its digest (hex). A collective operation: all processes must call it."""
    leaves = named_leaves(tree)
    small = sum(leaf.nbytes for leaf in leaves.values()) <= _SMALL_BYTES
    if small or not all(_is_local(leaf) for leaf in leaves.values()):
        return {name: _digest(leaf) for name, leaf in leaves.items()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(leaves, pool.map(_digest, leaves.values()), strict=True))


def named_leaves(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Map the name of each leaf (its keys joined by `separator`, "." as in the merging engine) to the leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves}


def mismatched_leaves(tree: Any, stored: Mapping[str, str], prefix: str = "") -> list[str]:
    """List the leaves whose digest differs from `stored[prefix + name]` or is missing; none if `stored` is empty."""
    if not stored:
        return []
    return [name for name, digest in tree_digests(tree).items() if stored.get(prefix + name) != digest]


def non_finite_leaves(tree: Any) -> list[str]:
    """List the floating-point leaves that contain a NaN or an infinity; waits until the arrays are computed."""
    leaves = {n: leaf for n, leaf in named_leaves(tree).items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    if not leaves:
        return []
    finite = np.asarray(_all_finite(tuple(leaves.values())))
    return [name for name, is_finite in zip(leaves, finite, strict=True) if not is_finite]


def check_finite(params: Any, step: int, tokens: int) -> None:
    """Raise ValueError if a leaf of `params` is not finite; the message names the leaves, the step and the tokens."""
    bad = non_finite_leaves(params)
    if bad:
        raise ValueError(
            f"step {step:,} ({tokens:,} tokens): {len(bad)} leaves of the parameters are not finite and are not saved: "
            f"{', '.join(bad[:10])}"
        )


def digests_as_metadata(tree: Any) -> dict[str, Any]:
    """Compute the digests of the leaves, in the form in which a checkpoint's metadata contain them."""
    return {"checksum": CHECKSUM, "leaves": tree_digests(tree)}


@jax.jit
def _all_finite(leaves: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def _is_local(leaf: jax.Array | np.ndarray) -> bool:
    """Return whether this process holds all elements of the leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _digest(leaf: jax.Array | np.ndarray) -> str:
    if isinstance(leaf, jax.Array) and not _is_local(leaf):
        if leaf.nbytes > _GATHERED_BYTES:
            return leaf_digest(segment_checksums_on_devices(leaf))
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    host = np.ascontiguousarray(leaf)
    hasher = SegmentHasher(host.dtype.itemsize)
    hasher.update(host.reshape(-1).view(np.uint8))
    return leaf_digest(hasher.finish())


def segment_checksums_on_devices(leaf: jax.Array) -> list[str]:
    """Compute the checksums (hex) of the segments of a leaf that no process holds completely.

    The segments are redistributed over the devices, so that each process reads and hashes only its share.
    """
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding), leaf.sharding
    devices = leaf.sharding.mesh.devices.reshape(-1)
    # Segments are split over a mesh with one axis, whatever the sharding of the leaf is.
    flat = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "all"), jax.sharding.PartitionSpec("all"))
    count = -(-leaf.size // SEGMENT_ELEMENTS)
    rows = _as_segments(leaf, leaf.sharding, -(-count // len(devices)) * len(devices), flat)
    checksums = np.zeros((rows.shape[0], xxhash.xxh3_128().digest_size), np.uint8)
    for shard in rows.addressable_shards:
        first = shard.index[0].start or 0
        for row, segment in enumerate(np.asarray(shard.data), start=first):
            elements = min(SEGMENT_ELEMENTS, leaf.size - row * SEGMENT_ELEMENTS)
            if elements > 0:
                data = np.ascontiguousarray(segment[:elements]).data
                checksums[row] = np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8)
    if jax.process_count() > 1:
        checksums = np.max(multihost_utils.process_allgather(checksums), axis=0)
    return [row.tobytes().hex() for row in checksums[:count]]


def _as_segments(
    leaf: jax.Array, sharding: jax.sharding.NamedSharding, rows: int, wanted: jax.sharding.NamedSharding
) -> jax.Array:
    """Reshape a leaf to [rows, SEGMENT_ELEMENTS], padded with zeros, with the sharding `wanted`."""
    # On a mesh with automatic axes, because a reshape of sharded dims is ambiguous on explicit axes.
    auto = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    placed = jax.sharding.NamedSharding(auto, sharding.spec)
    shards = [shard.data for shard in leaf.addressable_shards]
    plain = jax.make_array_from_single_device_arrays(leaf.shape, placed, shards)
    with jax.set_mesh(auto):
        return _segment_rows(rows, wanted)(plain)


@functools.cache
def _segment_rows(rows: int, sharding: jax.sharding.NamedSharding) -> Any:
    def cut(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf.reshape(-1), (0, rows * SEGMENT_ELEMENTS - math.prod(leaf.shape)))
        return padded.reshape(rows, SEGMENT_ELEMENTS)

    return jax.jit(cut, out_shardings=sharding)
