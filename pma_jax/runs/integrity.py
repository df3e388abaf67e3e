"""Digests of the leaves of a pytree: computed from the arrays before they are written, and checked after they are read.

The digest of a leaf (`storage/digests.py`) covers its elements in C order and does not depend on mesh, sharding or file
layout: it is the hash of the checksums of the leaf's segments. Training verifies the digests when it resumes, even on
another mesh; a merge verifies them while it reads the leaves, without a second pass. A change of any bit between
writing and reading is thus detected. The digests do not cover names, shapes and dtypes, which are compared with the
model's, nor the other metadata, which have their own digest.
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

from pma_jax.config.errors import DivergenceError
from pma_jax.storage.digests import CHECKSUM, SEGMENT_ELEMENTS, SegmentHasher, leaf_digest

_MAX_SERIAL_BYTES = 2**20  # smaller trees are hashed serially: starting threads takes longer than hashing them
_MAX_GATHERED_BYTES = 2**24  # leaves up to this size are gathered to every process


def tree_digests(tree: Any) -> dict[str, str]:
    """Map the name of each leaf to its digest (hex). A collective operation: all processes must call it."""
    leaves = named_leaves(tree)
    small = sum(leaf.nbytes for leaf in leaves.values()) <= _MAX_SERIAL_BYTES
    # Collectives must run in the same order in all processes: if any leaf is not local, hash all in one thread.
    if small or not all(_is_local(leaf) for leaf in leaves.values()):
        return {name: _digest(leaf) for name, leaf in leaves.items()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(leaves, pool.map(_digest, leaves.values()), strict=True))


def named_leaves(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Return a dict from name to leaf. The name is the keys of the leaf's path, joined by `separator`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves}


def mismatched_leaves(tree: Any, stored: Mapping[str, str], prefix: str = "") -> list[str]:
    """List the names of the leaves whose digest differs from `stored[prefix + name]` or is missing there.

    If `stored` is empty, no digests were saved: return an empty list. A collective operation: all processes must call
    it.
    """
    if not stored:
        return []
    return [name for name, digest in tree_digests(tree).items() if stored.get(prefix + name) != digest]


def non_finite_leaves(tree: Any) -> list[str]:
    """List the floating-point leaves that contain a NaN or an infinity. Blocks until the arrays are ready.

    If the arrays are sharded over processes, all processes must call it.
    """
    leaves = {n: leaf for n, leaf in named_leaves(tree).items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    if not leaves:
        return []
    finite = np.asarray(_all_finite(tuple(leaves.values())))
    return [name for name, is_finite in zip(leaves, finite, strict=True) if not is_finite]


def check_finite(params: Any, step: int, tokens: int) -> None:
    """Raise DivergenceError if a leaf of `params` is not finite, so that the caller does not save the parameters.

    The message gives the step, the tokens and the names of at most ten of these leaves. If the arrays are
    sharded over processes, all processes must call this function.
    """
    bad = non_finite_leaves(params)
    if bad:
        raise DivergenceError(
            f"step {step:,} ({tokens:,} tokens): {len(bad)} leaves contain NaN or infinity; parameters not saved: "
            f"{', '.join(bad[:10])}"
        )


def digests_as_metadata(tree: Any) -> dict[str, Any]:
    """Return the digests of the leaves as the dict stored in a checkpoint's metadata. A collective operation."""
    return {"checksum": CHECKSUM, "leaves": tree_digests(tree)}


@jax.jit
def _all_finite(leaves: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def _is_local(leaf: jax.Array | np.ndarray) -> bool:
    """Return whether this process holds all elements of the leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _digest(leaf: jax.Array | np.ndarray) -> str:
    if isinstance(leaf, jax.Array) and not _is_local(leaf):
        if leaf.nbytes > _MAX_GATHERED_BYTES:
            return leaf_digest(collective_segment_checksums(leaf))
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    host = np.ascontiguousarray(leaf)
    hasher = SegmentHasher(host.dtype.itemsize)
    hasher.update(host.reshape(-1).view(np.uint8))
    return leaf_digest(hasher.finish())


def collective_segment_checksums(leaf: jax.Array) -> list[str]:
    """Compute the checksums (hex) of the segments of a leaf that is sharded over processes.

    A collective operation: all processes must call it. The segments are redistributed evenly over the devices of all
    processes; each process then copies its own segments to its host, hashes them there, and gathers the checksums.
    """
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding), leaf.sharding
    devices = leaf.sharding.mesh.devices.reshape(-1)
    # Segments are split over a mesh with one axis, whatever the sharding of the leaf is.
    segment_sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "all"), jax.sharding.PartitionSpec("all"))
    count = -(-leaf.size // SEGMENT_ELEMENTS)
    segments = _as_segments(leaf, leaf.sharding, -(-count // len(devices)) * len(devices), segment_sharding)
    checksums = np.zeros((segments.shape[0], xxhash.xxh3_128().digest_size), np.uint8)
    for shard in segments.addressable_shards:
        first = shard.index[0].start or 0
        for row, segment in enumerate(np.asarray(shard.data), start=first):
            elements = min(SEGMENT_ELEMENTS, leaf.size - row * SEGMENT_ELEMENTS)
            if elements > 0:
                data = np.ascontiguousarray(segment[:elements]).data
                checksums[row] = np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8)
    if jax.process_count() > 1:
        # A checksum is all zeros except in the process that hashed the segment.
        checksums = np.max(multihost_utils.process_allgather(checksums), axis=0)
    return [row.tobytes().hex() for row in checksums[:count]]


def _as_segments(
    leaf: jax.Array, sharding: jax.sharding.NamedSharding, rows: int, segment_sharding: jax.sharding.NamedSharding
) -> jax.Array:
    """Reshape a leaf to [rows, SEGMENT_ELEMENTS], padded with zeros, with `segment_sharding`."""
    # Reshape on a mesh with `Auto` axes: with `Explicit` axes, the sharding of a reshaped dimension is ambiguous.
    auto = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    auto_sharding = jax.sharding.NamedSharding(auto, sharding.spec)
    shards = [shard.data for shard in leaf.addressable_shards]
    auto_leaf = jax.make_array_from_single_device_arrays(leaf.shape, auto_sharding, shards)
    with jax.set_mesh(auto):
        return _jit_to_segments(rows, segment_sharding)(auto_leaf)


@functools.cache
def _jit_to_segments(rows: int, sharding: jax.sharding.NamedSharding) -> Any:
    def pad_and_reshape(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf.reshape(-1), (0, rows * SEGMENT_ELEMENTS - math.prod(leaf.shape)))
        return padded.reshape(rows, SEGMENT_ELEMENTS)

    return jax.jit(pad_and_reshape, out_shardings=sharding)
