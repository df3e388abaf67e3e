"""Digests of checkpoint contents, independent of the file format that stores them.

A leaf's bytes (little-endian, C order) are cut into segments of `SEGMENT_ELEMENTS` elements. The leaf's digest is the
sha256 of the concatenated checksums (xxh3_128) of its segments. Several threads or processes can therefore
checksum segments while merging them, and a resumed merge need not read finished segments again. A checkpoint's digest
covers the name, dtype, shape and digest of every leaf.

xxh3_128 detects corruption but does not resist deliberate tampering. It is about thirty times as fast as sha256, which
on few cores would cost more than the merge itself.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

CHECKSUM = "xxh3_128"  # the name of the checksum in metadata
# A segment is also the unit of work of threads and processes; a resumed merge skips finished segments.
SEGMENT_ELEMENTS = 2**21
# Key of the digest that covers all other metadata of a checkpoint; "facts" is the format's older word for metadata.
METADATA_DIGEST_KEY = "facts_digest"
_DIGEST_KEYS = ("checksum", "leaves", METADATA_DIGEST_KEY)


class SegmentHasher:
    """Computes the checksum of each segment of one leaf, whose bytes are added in order in pieces of any size."""

    def __init__(self, item_bytes: int):
        self._segment_bytes = SEGMENT_ELEMENTS * item_bytes
        self._filled = 0
        self._current = xxhash.xxh3_128()
        self._done: list[str] = []

    def update(self, data: Any) -> None:
        """Add the next bytes of the leaf.

        Args:
            data: A bytes-like object (contiguous buffer). View a bfloat16 array, which has no buffer, as uint16 first.
        """
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self._segment_bytes - self._filled]
            self._current.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._segment_bytes:
                self._finish_segment()

    def finish(self) -> list[str]:
        """End the leaf and return the checksum (hex) of each segment; the last segment may be shorter.

        Do not call `update` afterwards.
        """
        if self._filled:
            self._finish_segment()
        return self._done

    def _finish_segment(self) -> None:
        self._done.append(self._current.hexdigest())
        self._current, self._filled = xxhash.xxh3_128(), 0


def leaf_digest(segments: Iterable[str]) -> str:
    """Compute a leaf's sha256 (hex) from the checksums (hex) of its segments, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(segment) for segment in segments)).hexdigest()


def checkpoint_digest(leaves: Mapping[str, Any], leaf_digests: Mapping[str, str]) -> str:
    """Compute a checkpoint's sha256 (hex) over one JSON line [name, dtype, shape, digest] per leaf, sorted by name.

    Args:
        leaves: Leaf name -> object with `dtype` (its numpy name) and `shape`.
        leaf_digests: Leaf name -> digest (hex).
    """
    total = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        total.update((json.dumps([name, leaf.dtype, list(leaf.shape), leaf_digests[name]]) + "\n").encode())
    return total.hexdigest()


def file_sha256(path: Path) -> str:
    """Compute the sha256 (hex) of a small file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_metadata_digest(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata with their own digest added."""
    return {**metadata, METADATA_DIGEST_KEY: _metadata_digest(metadata)}


def check_metadata_digest(metadata: Mapping[str, Any], file: object) -> None:
    """Check metadata read from `file` against the digest that they contain.

    Metadata without digests are accepted: merges record their digests in provenance.json instead, and earlier versions
    and other libraries wrote none.

    Raises:
        ValueError: The digest does not match, or it is missing although the metadata list digests of leaves.
    """
    content = {key: value for key, value in metadata.items() if key != METADATA_DIGEST_KEY}
    is_covered = METADATA_DIGEST_KEY in metadata or {"checksum", "leaves"} <= metadata.keys()
    if is_covered and metadata.get(METADATA_DIGEST_KEY) != _metadata_digest(content):
        raise ValueError(f"{file} is corrupt: it does not match the digest in its {METADATA_DIGEST_KEY}, or has none")


def drop_digests(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without `_DIGEST_KEYS` (digests, checksum and leaves), for a checkpoint with other arrays."""
    return {key: value for key, value in metadata.items() if key not in _DIGEST_KEYS}


def _metadata_digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
