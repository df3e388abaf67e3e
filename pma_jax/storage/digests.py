"""Digests of contents: the same for the same numbers, whatever format they are stored in.

A leaf's bytes (little-endian, C order) are cut into segments of `SEGMENT_ELEMENTS`; the leaf's digest is the sha256 of
its segments' checksums (xxh3_128 or sha256) one after the other. Segments can so be summed up by several threads or
processes, in the pass that merges them, and a merge that is resumed need not read again what it has read. A
checkpoint's digest covers every leaf's name, dtype, shape and digest.

xxh3_128 tells contents apart at thirty times the rate of sha256, which on few cores costs more than the whole merge;
sha256 also withstands somebody who means to deceive.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

CHECKSUMS = ("xxh3_128", "sha256")
# Also the unit that threads and processes share the work by, and that a resumed merge does not repeat.
SEGMENT_ELEMENTS = 2**21
SEAL = "facts_digest"  # the key of a digest of all other facts of a checkpoint
_KEYS = ("checksum", "leaves", SEAL)


def new_checksum(kind: str) -> Any:
    """An object with `update` and `hexdigest`, for a kind of `CHECKSUMS`."""
    return xxhash.xxh3_128() if kind == "xxh3_128" else hashlib.sha256()


class SegmentHasher:
    """Sums up a leaf's bytes, given in order in pieces of any size, as one checksum (hex) a segment."""

    def __init__(self, item_bytes: int, kind: str):
        self._kind = kind
        self._segment_bytes = SEGMENT_ELEMENTS * item_bytes
        self._filled = 0
        self._current = new_checksum(kind)
        self._done: list[str] = []

    def update(self, data: Any) -> None:
        """Adds the next piece (anything with a contiguous buffer of bytes)."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self._segment_bytes - self._filled]
            self._current.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._segment_bytes:
                self._close()

    def hexdigests(self) -> list[str]:
        """The segments' digests; the last may be shorter than a segment. Ends the leaf."""
        if self._filled:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(self._current.hexdigest())
        self._current, self._filled = new_checksum(self._kind), 0


def leaf_digest(segments: Iterable[str]) -> str:
    """A leaf's sha256 (hex) from its segments' checksums (hex), in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(segment) for segment in segments)).hexdigest()


def checkpoint_digest(leaves: Mapping[str, Any], leaf_digests: Mapping[str, str]) -> str:
    """A checkpoint's sha256 (hex): over one JSON line [name, dtype, shape, digest] a leaf, sorted by name.

    `leaves` has the `dtype` (its numpy name) and `shape` of each.
    """
    total = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        total.update((json.dumps([name, leaf.dtype, list(leaf.shape), leaf_digests[name]]) + "\n").encode())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """The plain sha256 (hex) of a small file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with a digest of their own."""
    return {**facts, SEAL: _facts_digest(facts)}


def check_seal(facts: Mapping[str, Any], file: object) -> None:
    """Raise ValueError when the facts, read from `file`, are not as they were when they were sealed.

    Facts without digests are of a merge, whose provenance has them, of an earlier version, or not ours.
    """
    unsealed = {key: value for key, value in facts.items() if key != SEAL}
    is_ours = SEAL in facts or {"checksum", "leaves"} <= facts.keys()
    if is_ours and facts.get(SEAL) != _facts_digest(unsealed):
        raise ValueError(f"{file} is damaged: it is not what was written")


def without_digests(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts for another checkpoint, whose arrays are others."""
    return {key: value for key, value in facts.items() if key not in _KEYS}


def _facts_digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
