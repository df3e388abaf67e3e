"""The share of each process in a merge: which parts of the leaves it reads, adds and writes.

A part consists of complete segments of a leaf's digest, and of complete files where the output is in a bucket, whose
objects are written as a whole. So no process needs values of another one, neither to add nor to hash nor to write.
"""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from pma_jax.config.errors import UserError
from pma_jax.merging.engine.plan import MergePlan
from pma_jax.storage.digests import SEGMENT_ELEMENTS
from pma_jax.storage.formats.source import ITEM_BYTES

# Parts of a leaf are at most this large where they may be, so that they can be shared evenly.
_PART_ELEMENTS = 8 * SEGMENT_ELEMENTS


class Part(NamedTuple):
    """Elements [start, stop) of the leaf `name`, in C order."""

    name: str
    start: int
    stop: int


def assign_parts(plan: MergePlan, processes: int, in_bucket: bool) -> list[list[Part]]:
    """Return the parts of each process, of about equally many bytes, in the order in which they are stored.

    Args:
        plan: The merge.
        processes: Number of processes.
        in_bucket: Whether an output is in a bucket.

    Raises:
        UserError: An output is in a bucket, and its format has files that hold several leaves or are assembled.
    """
    if in_bucket:
        _check_files_hold_one_leaf(plan)
    parts = list(_parts(plan, processes, in_bucket))
    sizes = [(part.stop - part.start) * ITEM_BYTES[plan.sources[0].leaves[part.name].dtype] for part in parts]
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for index in sorted(range(len(parts)), key=lambda index: -sizes[index]):
        load, process = heapq.heappop(loads)
        shares[process].append(index)
        heapq.heappush(loads, (load + sizes[index], process))
    return [[parts[index] for index in sorted(share)] for share in shares]


def _check_files_hold_one_leaf(plan: MergePlan) -> None:
    paths = [path for ranges in plan.layout.byte_ranges.values() for path in {part.path for part in ranges}]
    if plan.layout.assemble is not None or len(set(paths)) < len(paths) or plan.layout.headers:
        raise UserError(
            f"the files of {plan.format} cannot be written to a bucket by several devices: give --format orbax, an "
            "output on a disk, or --on host"
        )


def _parts(plan: MergePlan, processes: int, in_bucket: bool) -> Iterator[Part]:
    """Yield the parts of all leaves."""
    for name, leaf in plan.leaves.items():
        if processes == 1 or not leaf.elements:
            yield Part(name, 0, leaf.elements)
            continue
        # A part can begin where a segment does, where what the sources decode together does, and in a bucket a file.
        step = math.lcm(SEGMENT_ELEMENTS, *{source.leaves[name].chunk_elements for source in plan.sources})
        ends, end = [leaf.elements], 0
        if in_bucket:
            for part in plan.layout.byte_ranges[name]:
                end += part.nbytes // ITEM_BYTES[leaf.dtype]
                ends.append(end)
        else:
            ends += range(step, leaf.elements, step)
        start = 0
        for end in sorted({end for end in ends if end % step == 0 or end == leaf.elements}):
            if end == leaf.elements or end - start >= min(_PART_ELEMENTS, leaf.elements / processes):
                yield Part(name, start, end)
                start = end
