"""Packs: small leaves that a merge reads, adds and writes as one.

A unit of work takes about as long as adding 100,000 elements, however small its leaf is. Consecutive small leaves that
every checkpoint stores in one file are therefore merged together, as one flat leaf; the merged values are the same.
Each leaf keeps its own checksums.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pma_jax.storage.formats.source import ByteRange, CheckpointSource, LeafInfo

# Larger leaves are units of their own.
_MAX_LEAF_ELEMENTS = 2**15
# Of a pack: as many as a merge with one recipe adds at a time.
_MAX_ELEMENTS = 2**18


@dataclass(frozen=True)
class Pack:
    """The names of a pack's leaves and the number of elements of each, in order. Every leaf has at least one."""

    names: tuple[str, ...]
    elements: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the pack: no leaf's name has a zero byte."""
        return f"{self.names[0]}\0{self.names[-1]}"

    def locate(self, element: int) -> tuple[str, int]:
        """Return the leaf of an element of the pack, and the number of the element in it."""
        ends = list(itertools.accumulate(self.elements))
        k = bisect_right(ends, element)
        return self.names[k], element - (ends[k] - self.elements[k])


@dataclass(frozen=True)
class Packed:
    """What a merge reads and writes, with packs as leaves.

    Attributes:
        sources: The inputs.
        leaves: Name -> shape and dtype of each merged leaf.
        byte_ranges: Name -> where the merged leaf is written.
        packs: Name -> pack.
    """

    sources: tuple[CheckpointSource, ...]
    leaves: Mapping[str, LeafInfo]
    byte_ranges: Mapping[str, tuple[ByteRange, ...]]
    packs: Mapping[str, Pack]


def pack(
    sources: Sequence[CheckpointSource],
    leaves: Mapping[str, LeafInfo],
    byte_ranges: Mapping[str, tuple[ByteRange, ...]],
) -> Packed:
    """Pack the small leaves of a merge; for the arguments, see `Packed`."""
    packs = _find_packs(sources, leaves, byte_ranges)
    if not packs:
        return Packed(tuple(sources), leaves, byte_ranges, {})
    packed = tuple(
        replace(source, leaves=_pack_leaves(source.leaves, packs), byte_ranges=_pack_ranges(source.byte_ranges, packs))
        for source in sources
    )
    by_name = {pack.name: pack for pack in packs.values()}
    return Packed(packed, _pack_leaves(leaves, packs), _pack_ranges(byte_ranges, packs), by_name)


def _find_packs(
    sources: Sequence[CheckpointSource],
    leaves: Mapping[str, LeafInfo],
    byte_ranges: Mapping[str, tuple[ByteRange, ...]],
) -> dict[str, Pack]:
    """Return the packs of a merge, by the name of the first leaf of each."""
    packs: dict[str, Pack] = {}
    places = [byte_ranges, *(source.byte_ranges for source in sources)]
    inputs = sources[0].leaves
    for key, names in itertools.groupby(inputs, lambda name: _pack_key(inputs[name], leaves[name], places, name)):
        for members in _split([*names], inputs) if key else ():
            packs[members[0]] = Pack(members, tuple(inputs[name].elements for name in members))
    return packs


def _pack_key(
    leaf: LeafInfo, merged: LeafInfo, places: Sequence[Mapping[str, tuple[ByteRange, ...]]], name: str
) -> tuple[Any, ...]:
    """Return what the leaves of a pack have in common; empty for a leaf that is no part of any."""
    if not leaf.is_summed or not 0 < leaf.elements <= _MAX_LEAF_ELEMENTS:
        return ()
    ranges = [of_one.get(name, ()) for of_one in places]
    # Compare paths by identity, which is faster: the ranges of one file share one path object.
    return (leaf.dtype, merged.dtype, *(id(r[0].path) for r in ranges)) if all(len(r) == 1 for r in ranges) else ()


def _split(names: list[str], leaves: Mapping[str, LeafInfo]) -> Iterator[tuple[str, ...]]:
    """Yield names in groups of two or more that together have at most `_MAX_ELEMENTS`."""
    group: list[str] = []
    total = 0
    for name in names:
        elements = leaves[name].elements
        if total + elements > _MAX_ELEMENTS:
            if len(group) > 1:
                yield tuple(group)
            group, total = [], 0
        group.append(name)
        total += elements
    if len(group) > 1:
        yield tuple(group)


def _pack_leaves(leaves: Mapping[str, LeafInfo], packs: Mapping[str, Pack]) -> dict[str, LeafInfo]:
    """Return leaves in the same order, each pack in the place of its first leaf."""
    packed: dict[str, LeafInfo] = {}
    inside = {name for pack in packs.values() for name in pack.names[1:]}
    for name, leaf in leaves.items():
        if name in packs:
            packed[packs[name].name] = LeafInfo((sum(packs[name].elements),), leaf.dtype)
        elif name not in inside:
            packed[name] = leaf
    return packed


def _pack_ranges(
    byte_ranges: Mapping[str, tuple[ByteRange, ...]], packs: Mapping[str, Pack]
) -> dict[str, tuple[ByteRange, ...]]:
    """Return where leaves and packs are stored; parts that follow each other in a file are joined."""
    inside = {name for pack in packs.values() for name in pack.names}
    packed = {name: ranges for name, ranges in byte_ranges.items() if name not in inside}
    for pack in packs.values():
        path, start, end = byte_ranges[pack.names[0]][0].path, -1, -1
        joined: list[ByteRange] = []
        for name in pack.names:
            _, offset, nbytes = byte_ranges[name][0]
            if offset != end:
                if end >= 0:
                    joined.append(ByteRange(path, start, end - start))
                start = offset
            end = offset + nbytes
        packed[pack.name] = (*joined, ByteRange(path, start, end - start))
    return packed
