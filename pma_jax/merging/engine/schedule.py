"""How a merge divides its work: blocks, threads, worker processes, decoded regions, and the memory that they take."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import sums
from pma_jax.storage.formats.source import ITEM_BYTES, CheckpointSource
from pma_jax.storage.formats.unpack import box_shape
from pma_jax.storage.formats.zstd import DECODER_BYTES
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
_BASE_BYTES = 48 * 2**20
# Names, headers, journal and provenance of a leaf: once, and for each source (measured with 20,000 leaves).
_LEAF_BYTES, _SOURCE_LEAF_BYTES = 1800, 1100
# Starting a worker process takes a fifth of a second, which pays off only if it reads at least this much.
MIN_READ_BYTES_PER_PROCESS = 2**30
# More threads only wait for the GIL.
_MAX_THREADS = 2
# tensorstore holds an array's compressed bytes and the decoded result at once.
_DECODE_FACTOR = 2
_REGION_BYTES = 32 * 2**20
# A leaf whose regions are larger is unpacked to a file, box by box.
_MAX_REGION_BYTES = 2 * _REGION_BYTES
BOX_BYTES = 2**24
# tensorstore holds the compressed bytes, the decoded chunk and the result of a box at once.
_BOX_FACTOR = 3
# Memory of the tensorstore library while it decodes one box at a time.
_BOX_BASE_BYTES = 64 * 2**20
# Memory of the tensorstore library and its dependencies.
_TENSORSTORE_BYTES = 160 * 2**20


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
        memory_bytes: Upper estimate of the peak resident memory.
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
    sources: Sequence[CheckpointSource], recipe_count: int, memory_limit_bytes: int, cores: int | None
) -> Schedule:
    """Divide the work of merging `sources` with `recipe_count` recipes within a memory limit.

    Args:
        sources: The inputs; all have the same leaves.
        recipe_count: Number of merged checkpoints.
        memory_limit_bytes: Maximum resident memory.
        cores: Cores to use; None for those that this process may use.

    Raises:
        UserError: The memory limit is too low. The message states how much is needed, or how much more.
    """
    unpacked, unpack_bytes = _plan_unpacking(sources)
    decoded, in_flight, decode_bytes = _plan_decoding(sources, recipe_count, memory_limit_bytes, unpacked)
    leaves = sources[0].leaves
    metadata_bytes = len(leaves) * (_LEAF_BYTES + len(sources) * _SOURCE_LEAF_BYTES)
    decode_bytes = max(decode_bytes, unpack_bytes) + metadata_bytes
    shared_cache_elements = max(MIN_BLOCK_ELEMENTS, _CACHED_ELEMENTS // (recipe_count + len(sources)))
    block_elements = BLOCK_ELEMENTS if recipe_count == 1 else shared_cache_elements
    zstd_leaves = frozenset(
        name
        for name in leaves
        if name not in decoded and name not in unpacked and not all(name in source.byte_ranges for source in sources)
    )
    dtypes = {leaf.dtype for leaf in leaves.values()}
    thread_bytes = sums.scratch_bytes(recipe_count, len(sources), block_elements, dtypes)
    thread_bytes += len(sources) * DECODER_BYTES if zstd_leaves else 0
    thread_bytes += sum(is_bucket(source.path) for source in sources) * RangeReader.READ_AHEAD_BYTES
    sequential_bytes = len(sources) * sum(leaf.nbytes for name, leaf in leaves.items() if name not in decoded)
    budget_bytes = memory_limit_bytes - _BASE_BYTES - decode_bytes
    threads, processes = _plan_parallelism(thread_bytes, cores, sequential_bytes, budget_bytes)
    memory_bytes = decode_bytes + processes * (_BASE_BYTES + threads * thread_bytes)
    return Schedule(block_elements, threads, processes, zstd_leaves, unpacked, decoded, in_flight, memory_bytes)


def _plan_parallelism(
    thread_bytes: int, cores: int | None, sequential_bytes: int, budget_bytes: int
) -> tuple[int, int]:
    """Return (threads per process, processes): single-threaded processes if each has enough to read, else threads."""
    cores = cores or len(os.sched_getaffinity(0))
    if budget_bytes < thread_bytes:
        missing = (thread_bytes - budget_bytes) // 2**20 + 1
        raise UserError(
            f"{missing} MiB more memory is needed; raise the limit, or merge fewer recipes or checkpoints at once"
        )
    affordable = (budget_bytes + _BASE_BYTES) // (thread_bytes + _BASE_BYTES)
    processes = min(cores, sequential_bytes // MIN_READ_BYTES_PER_PROCESS, affordable)
    if processes > 1:
        return 1, processes
    return min(cores, _MAX_THREADS, budget_bytes // thread_bytes), 1


def _is_sequential(source: CheckpointSource, name: str) -> bool:
    return name in source.byte_ranges or name in source.zstd_frames


def _plan_unpacking(sources: Sequence[CheckpointSource]) -> tuple[frozenset[str], int]:
    """Return the names of the leaves to unpack to files, and the memory that decoding their boxes takes."""
    box_bytes: dict[str, int] = {}
    for name, leaf in sources[0].leaves.items():
        packed = [source for source in sources if not _is_sequential(source, name)]
        region = max((source.leaves[name].chunk_elements for source in packed), default=0) * ITEM_BYTES[leaf.dtype]
        if leaf.is_summed and min(region, leaf.nbytes) > _MAX_REGION_BYTES:
            boxes = [math.prod(box_shape(source, name, BOX_BYTES)) for source in packed]
            box_bytes[name] = max(boxes) * ITEM_BYTES[leaf.dtype]
    if not box_bytes:
        return frozenset(), 0
    return frozenset(box_bytes), _BOX_BASE_BYTES + _BOX_FACTOR * max(box_bytes.values())


def _plan_decoding(
    sources: Sequence[CheckpointSource], recipe_count: int, limit_bytes: int, unpacked: frozenset[str]
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
        total = _TENSORSTORE_BYTES + sum_bytes + in_flight * _DECODE_FACTOR * region_bytes
        if total + _BASE_BYTES <= limit_bytes:
            return regions, in_flight, total
    raise UserError(
        f"{largest} is decoded in regions of {region_bytes // 2**20} MiB, and merging it needs "
        f"{(total + _BASE_BYTES) // 2**20 + 1} MiB of memory; raise the memory limit"
    )
