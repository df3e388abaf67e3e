"""How a merge divides its work: blocks, threads, worker processes, decoded regions, and the memory that they take."""

import functools
import heapq
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import sums
from pma_jax.runtime.memory import resident_bytes
from pma_jax.storage.digests import SEGMENT_ELEMENTS
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource, LeafInfo
from pma_jax.storage.formats.unpack import box_shape, grid_bytes
from pma_jax.storage.formats.zstd import decoder_bytes
from pma_jax.storage.paths import RangeReader, is_bucket

# Elements per block with one recipe: small enough for one core's share of the caches, large enough that threads seldom
# contend for the GIL.
BLOCK_ELEMENTS = 2**18
# With several recipes, one block of every source and one of every recipe are in use at once. Their total number of
# elements, so that they stay in the caches together; each may be larger than `BLOCK_ELEMENTS`.
_CACHED_ELEMENTS = 16 * BLOCK_ELEMENTS
# Lower bound for merges with many recipes: smaller blocks cost more in Python than they save in cache misses.
MIN_BLOCK_ELEMENTS = 2**12
# The interpreter, numpy and thread stacks, in addition to the buffers.
_BASE_BYTES = 44 * 2**20
# Provenance of a leaf: once, for each source, and for each recipe (measured with 20,000 to 200,000 leaves).
_LEAF_BYTES, _SOURCE_LEAF_BYTES, _RECIPE_LEAF_BYTES = 100, 330, 260
# Journal of a leaf that is no part of a pack: for each source, and for each recipe.
_SOURCE_UNIT_BYTES, _RECIPE_UNIT_BYTES = 570, 120
# Names and headers of a leaf, before it is merged: once, and for each source.
_OPENED_LEAF_BYTES, _OPENED_SOURCE_LEAF_BYTES = 610, 290
# Starting a worker process takes a fifth of a second, which pays off only if it reads at least this much.
MIN_READ_BYTES_PER_PROCESS = 2**30
# More threads only wait for the GIL.
_MAX_THREADS = 2
_REGION_BYTES = 32 * 2**20
# A leaf whose regions are larger is unpacked to a file, box by box.
_MAX_REGION_BYTES = 2 * _REGION_BYTES
BOX_BYTES = 2**24
# Memory of the tensorstore library and its dependencies.
_TENSORSTORE_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Schedule:
    """The division of a merge's work.

    Attributes:
        block_elements: Number of elements that are summed at a time.
        threads: Threads per process that merge the leaves which can be read sequentially.
        processes: Processes that merge the leaves which can be read sequentially, including this one.
        zstd_leaves: Names of the leaves that some source stores as zstd frames, which are decoded block by block.
        unpacked_leaves: Names of the leaves that are unpacked to files before they are merged (`formats.unpack`).
        region_elements: Maps the name of each leaf that tensorstore decodes to the number of elements per region.
        max_regions_in_flight: Maximum number of regions that are decoded or being decoded at once.
        memory_bytes: Estimate of the peak resident memory, for a process that does nothing but merge.
    """

    block_elements: int
    threads: int
    processes: int
    zstd_leaves: frozenset[str]
    unpacked_leaves: frozenset[str]
    region_elements: dict[str, int]
    max_regions_in_flight: int
    memory_bytes: int


def make_schedule(
    sources: Sequence[CheckpointSource],
    leaf_count: int,
    recipe_count: int,
    memory_limit_bytes: int,
    cores: int | None,
    is_alone: bool = False,
) -> Schedule:
    """Divide the work of merging `sources` with `recipe_count` recipes within a memory limit.

    Args:
        sources: The inputs, with packs as leaves; all have the same leaves.
        leaf_count: Number of leaves of a checkpoint, without packs.
        recipe_count: Number of merged checkpoints.
        memory_limit_bytes: Maximum resident memory.
        cores: Cores to use; None for those that this process may use.
        is_alone: Whether this process does nothing but merge, so that the memory that it has taken counts. If not, it
            is estimated, because a notebook's other memory has no part in a merge.

    Raises:
        UserError: The memory limit is too low. The message states how much is needed.
    """
    leaves, count = sources[0].leaves, len(sources)
    base_bytes = _base_bytes(leaf_count, len(leaves), count, recipe_count, is_alone)
    budget_bytes = memory_limit_bytes - base_bytes
    library_bytes = 0 if is_alone and "tensorstore" in sys.modules else _TENSORSTORE_BYTES
    unpacked, unpack_bytes = _plan_unpacking(sources, library_bytes)
    decoded, in_flight, decode_bytes = _plan_decoding(sources, recipe_count, budget_bytes, unpacked, library_bytes)
    block_elements = _block_elements(sources, recipe_count)
    sequential = {name: leaf for name, leaf in leaves.items() if name not in decoded and name not in unpacked}
    zstd_leaves = frozenset(name for name in sequential if not all(name in source.byte_ranges for source in sources))
    thread_bytes = functools.partial(_thread_bytes, sources, recipe_count, block_elements, _decoder_bytes(sources))
    sequential_units = _largest_units(sequential, zstd_leaves, _MAX_THREADS)
    largest_unpacked = max((leaves[name].elements for name in unpacked), default=0)
    # The leaves that tensorstore decodes, and then those that are unpacked, are merged when the threads have ended.
    needed_bytes = base_bytes + max(
        thread_bytes(max(sequential_units, default=0)),
        decode_bytes + thread_bytes(max(decoded.values(), default=0)),
        # The buffers stay when a second leaf is unpacked.
        unpack_bytes + thread_bytes(largest_unpacked) * (len(unpacked) > 1),
        thread_bytes(largest_unpacked),
    )
    if needed_bytes > memory_limit_bytes:
        raise UserError(
            f"the merge needs {needed_bytes // 2**20 + 1} MiB of memory; raise the memory limit, or merge fewer "
            "recipes or checkpoints at once"
        )
    sequential_bytes = count * sum(leaf.nbytes for leaf in sequential.values())
    unit_bytes = thread_bytes(max(sequential_units, default=0))
    threads, processes = _plan_parallelism(unit_bytes, cores, sequential_bytes, budget_bytes)
    parallel_bytes = sum(map(thread_bytes, sequential_units[:threads])) + (processes - 1) * (_BASE_BYTES + unit_bytes)
    memory_bytes = max(needed_bytes, base_bytes + parallel_bytes)
    return Schedule(block_elements, threads, processes, zstd_leaves, unpacked, decoded, in_flight, memory_bytes)


def _base_bytes(leaves: int, units: int, sources: int, recipes: int, is_alone: bool) -> int:
    """Return the memory of the process, and of the journal and provenance that it will hold, without buffers.

    `units` are the leaves and packs that are merged one by one.
    """
    opened = leaves * (_OPENED_LEAF_BYTES + sources * _OPENED_SOURCE_LEAF_BYTES)
    measured = resident_bytes(is_peak=True) if is_alone else None
    base_bytes = _BASE_BYTES + opened if measured is None else measured
    base_bytes += leaves * (_LEAF_BYTES + sources * _SOURCE_LEAF_BYTES + recipes * _RECIPE_LEAF_BYTES)
    return base_bytes + units * (sources * _SOURCE_UNIT_BYTES + recipes * _RECIPE_UNIT_BYTES)


def _block_elements(sources: Sequence[CheckpointSource], recipe_count: int) -> int:
    shared_cache_elements = max(MIN_BLOCK_ELEMENTS, _CACHED_ELEMENTS // (recipe_count + len(sources)))
    # A power of two, so that reads and writes start at multiples of a page.
    block_elements = BLOCK_ELEMENTS if recipe_count == 1 else 1 << shared_cache_elements.bit_length() - 1
    largest_elements = max((leaf.elements for leaf in sources[0].leaves.values()), default=0)
    return min(block_elements, max(MIN_BLOCK_ELEMENTS, largest_elements))


def buffer_elements(block_elements: int, unit_elements: int) -> int:
    """Return the elements per buffer for a unit: a power of two, so that they seldom grow from unit to unit."""
    return min(block_elements, 1 << max(0, unit_elements - 1).bit_length())


def _thread_bytes(
    sources: Sequence[CheckpointSource], recipe_count: int, block_elements: int, decoder_bytes: int, unit_elements: int
) -> int:
    """Return the memory of a thread whose largest unit has `unit_elements`: buffers, decoders, bytes read ahead."""
    dtypes = {leaf.dtype for leaf in sources[0].leaves.values()}
    elements = buffer_elements(block_elements, unit_elements)
    thread_bytes = sums.scratch_bytes(recipe_count, len(sources), elements, dtypes)
    thread_bytes += min(decoder_bytes, len(sources) * unit_elements * max(map(ITEM_BYTES.__getitem__, dtypes)))
    return thread_bytes + sum(is_bucket(source.path) for source in sources) * RangeReader.READ_AHEAD_BYTES


def _decoder_bytes(sources: Sequence[CheckpointSource]) -> int:
    """Return the memory of the decoders of one leaf's zstd frames in all sources that store any."""
    largest = [max(s.zstd_frames.values(), key=lambda frames: frames.nbytes) for s in sources if s.zstd_frames]
    return sum(decoder_bytes(leaf.byte_ranges[0]) for leaf in largest)


def _largest_units(leaves: Mapping[str, LeafInfo], zstd_leaves: Collection[str], count: int) -> list[int]:
    """Return the elements of the `count` largest units of leaves that are read sequentially; of all, if fewer."""
    elements: list[int] = []
    for name, leaf in leaves.items():
        complete, rest = (1, 0) if name in zstd_leaves else divmod(leaf.elements, SEGMENT_ELEMENTS)
        step = leaf.elements if name in zstd_leaves else SEGMENT_ELEMENTS
        elements += [step] * min(complete, count) + [rest] * (rest > 0)
    return heapq.nlargest(count, elements)


def _plan_parallelism(
    thread_bytes: int, cores: int | None, sequential_bytes: int, budget_bytes: int
) -> tuple[int, int]:
    """Return (threads per process, processes): single-threaded processes if each has enough to read, else threads.

    `budget_bytes` is the memory for threads and for other processes.
    """
    cores = cores or len(os.sched_getaffinity(0))
    affordable = (budget_bytes + _BASE_BYTES) // (thread_bytes + _BASE_BYTES)
    processes = min(cores, sequential_bytes // MIN_READ_BYTES_PER_PROCESS, affordable)
    if processes > 1:
        return 1, processes
    return min(cores, _MAX_THREADS, budget_bytes // thread_bytes), 1


def _is_sequential(source: CheckpointSource, name: str) -> bool:
    return name in source.byte_ranges or name in source.zstd_frames


def _plan_unpacking(sources: Sequence[CheckpointSource], library_bytes: int) -> tuple[frozenset[str], int]:
    """Return the names of the leaves to unpack to files, and the memory that this takes."""
    unpack_bytes: dict[str, int] = {}
    for name, leaf in sources[0].leaves.items():
        packed = [source for source in sources if not _is_sequential(source, name)]
        region = max((source.leaves[name].chunk_elements for source in packed), default=0) * ITEM_BYTES[leaf.dtype]
        is_large = min(region, leaf.nbytes) > _MAX_REGION_BYTES
        if leaf.is_summed and packed and (is_large or all(name in source.grids for source in packed)):
            unpack_bytes[name] = max(_unpack_bytes(source, name, library_bytes) for source in packed)
    return frozenset(unpack_bytes), max(unpack_bytes.values(), default=0)


def _unpack_bytes(source: CheckpointSource, name: str, library_bytes: int) -> int:
    if name in source.grids:
        return grid_bytes(source, name)
    box_bytes = math.prod(box_shape(source, name, BOX_BYTES)) * ITEM_BYTES[source.leaves[name].dtype]
    return library_bytes + _tensorstore_bytes(box_bytes, 0)


def _plan_decoding(
    sources: Sequence[CheckpointSource],
    recipe_count: int,
    budget_bytes: int,
    unpacked: frozenset[str],
    library_bytes: int,
) -> tuple[dict[str, int], int, int]:
    """Return the elements per region of each leaf that tensorstore decodes, the regions in flight, and their memory."""
    leaves = sources[0].leaves
    regions: dict[str, int] = {}
    for name, leaf in leaves.items():
        if name in unpacked or all(_is_sequential(source, name) for source in sources):
            continue
        # Regions are multiples of the largest chunk. Smaller chunks of other sources may be decoded twice, which costs
        # time and no accuracy.
        chunk = max(source.leaves[name].chunk_elements for source in sources)
        regions[name] = min(leaf.elements, max(1, _REGION_BYTES // ITEM_BYTES[leaf.dtype] // chunk) * chunk)
    if not regions:
        return {}, 0, 0
    largest = max(regions, key=lambda name: regions[name] * ITEM_BYTES[leaves[name].dtype])
    dtype = leaves[largest].dtype
    region_bytes = regions[largest] * ITEM_BYTES[dtype]
    sum_bytes = regions[largest] * ITEM_BYTES[sums.accumulation_dtype(dtype)] * recipe_count
    for in_flight in (3, 2, 1):
        total = library_bytes + sum_bytes + _tensorstore_bytes(region_bytes, in_flight)
        if total <= budget_bytes:
            return regions, in_flight, total
    return regions, 1, total


def _tensorstore_bytes(region_bytes: int, in_flight: int) -> int:
    """Return an upper bound of the memory for regions that tensorstore decodes; 0 in flight for one after the other.

    It is measured: tensorstore's threads free what they allocate, and malloc keeps up to 32 MiB of each size for the
    next region of the same thread. The memory that is used is therefore between half of this and all of it.
    """
    return max((9 + 2 * in_flight) * min(region_bytes, 2**25), (2 + in_flight) * region_bytes)
