"""Merge one unit of work: block by block, all sources in turn, with checksums of every byte read and written."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np

from pma_jax.merging.engine import sums
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.storage.digests import SegmentHasher
from pma_jax.storage.formats.byte_ranges import open_files, prefetch, read_range, split_range, write_range
from pma_jax.storage.formats.open import read_leaf, read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource, LeafInfo
from pma_jax.storage.formats.zstd import ZstdReader

# Rounding is measured on the first elements of every unit: 1 in 512, which is ample for a ratio of two sums.
_SAMPLE_ELEMENTS = 2**12


@dataclass(frozen=True)
class MergeJob:
    """What all threads and processes of a merge share.

    Attributes:
        plan: The merge.
        weights: Its coefficients as the kernels use them.
        output_ranges: For each recipe, where its leaves are written.
    """

    plan: MergePlan
    weights: sums.KernelWeights
    output_ranges: Sequence[Mapping[str, Sequence[ByteRange]]]

    def new_scratch(self) -> sums.Scratch:
        """Allocate the buffers of one thread."""
        return sums.new_scratch(len(self.plan.recipes), len(self.plan.sources), self.plan.schedule.block_elements)


class _UnitStatistics:
    """Checksums and rounding statistics of one unit, collected while it is merged."""

    def __init__(self, plan: MergePlan, unit: Unit):
        width, out_width = (ITEM_BYTES[leaves[unit.name].dtype] for leaves in (plan.sources[0].leaves, plan.leaves))
        self.read = [SegmentHasher(width) for _ in plan.sources]
        self.written = [SegmentHasher(out_width) for _ in plan.recipes]
        self.squares = [[0.0, 0.0] for _ in plan.recipes]

    def to_record(self, number: int) -> Record:
        read, written = ([hasher.hexdigests() for hasher in hashers] for hashers in (self.read, self.written))
        return Record(number, read, written, self.squares)


def merge_sequential_unit(job: MergeJob, number: int, unit: Unit, scratch: sums.Scratch) -> Record:
    """Merge a segment of a leaf that is stored as raw bytes, or a complete leaf that is stored as zstd frames."""
    plan, leaf = job.plan, job.plan.sources[0].leaves[unit.name]
    width, out_width = ITEM_BYTES[leaf.dtype], ITEM_BYTES[plan.leaves[unit.name].dtype]
    output_ranges = [ranges[unit.name] for ranges in job.output_ranges]
    statistics = _UnitStatistics(plan, unit)
    with ExitStack() as stack:
        targets = stack.enter_context(open_files([part.path for parts in output_ranges for part in parts], os.O_WRONLY))
        readers = [_open_reader(source, unit, stack) for source in plan.sources]
        for start, elements in _blocks(plan, unit.start, unit.stop):
            raw = scratch.raw[: elements * width]
            for k, reader in enumerate(readers):
                reader(start * width, raw)
                statistics.read[k].update(raw)
                _add_block(job, leaf, scratch, elements, k)
            for row, ranges in enumerate(output_ranges):
                squares = statistics.squares[row] if start == unit.start else None
                data = _finish_block(job, unit, start, scratch, elements, row, squares)
                statistics.written[row].update(data)
                write_range(targets, ranges, start * out_width, data)
    return statistics.to_record(number)


def _open_reader(source: CheckpointSource, unit: Unit, stack: ExitStack) -> Callable[[int, np.ndarray], None]:
    """Return a function (byte offset in the leaf, uint8 array to fill), to be called for consecutive blocks."""
    if unit.name in source.zstd_frames:
        assert unit.start == 0, "a frame is decoded from its beginning"
        frames = stack.enter_context(closing(ZstdReader(source.zstd_frames[unit.name])))
        return lambda start, into: frames.read(into)
    ranges = source.byte_ranges[unit.name]
    start, stop = (elements * ITEM_BYTES[source.leaves[unit.name].dtype] for elements in (unit.start, unit.stop))
    files = stack.enter_context(open_files([part.path for part in split_range(ranges, start, stop)], os.O_RDONLY))
    prefetch(files, ranges, start, stop)
    return lambda start, into: read_range(files, ranges, start, into)


def _add_block(job: MergeJob, leaf: LeafInfo, scratch: sums.Scratch, elements: int, source: int) -> None:
    """Add the block in `scratch.raw` to the sums; a leaf that is not summed has none."""
    if not leaf.is_summed:
        return
    if len(job.plan.recipes) == 1:
        sums.add_block(scratch, leaf.dtype, elements, job.weights, source)
        return
    sums.stage_block(scratch, leaf.dtype, elements, source)
    if source == len(job.plan.sources) - 1:
        sums.combine_staged(scratch, leaf.dtype, elements, job.weights)


def _finish_block(
    job: MergeJob, unit: Unit, start: int, scratch: sums.Scratch, elements: int, row: int, squares: list[float] | None
) -> np.ndarray:
    """Return the bytes of a finished block; measure the rounding into `squares` if given.

    Raises:
        ValueError: The result is not finite; names the leaf and the source it comes from.
    """
    leaf, out = job.plan.sources[0].leaves[unit.name], job.plan.leaves[unit.name]
    if not leaf.is_summed:
        # All sources have the same bytes: `merge` compares them before it merges.
        return scratch.raw[: elements * ITEM_BYTES[leaf.dtype]]
    is_sampled = squares is not None and ITEM_BYTES[out.dtype] < 4
    sample = min(elements, _SAMPLE_ELEMENTS)
    exact = sums.exact_values(scratch, leaf.dtype, elements, job.weights, row, sample) if is_sampled else None
    data = sums.finish_block(scratch, leaf.dtype, out.dtype, elements, job.weights, row)
    if data is None:
        raise ValueError(_not_finite_message(job.plan, unit.name, start, start + elements))
    if squares is not None and exact is not None:
        squares[:] = sums.squared_changes(scratch, leaf.dtype, out.dtype, sample, exact)
    return data


def _not_finite_message(plan: MergePlan, name: str, start: int, stop: int) -> str:
    for source in plan.sources:
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = read_leaf(source, name, start, stop).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            return f"{source.origin}: {name} has {values[bad[0]]} at element {start + bad[0]}; only finite values merge"
    return f"{name}: the weighted sum overflows {plan.leaves[name].dtype} between elements {start} and {stop}"


def merge_decoded_units(
    job: MergeJob, todo: Sequence[tuple[int, Unit]], finish_unit: Callable[[Unit, Record], None]
) -> None:
    """Merge leaves that tensorstore decodes; the next regions are read while one is added."""
    if not todo:
        return
    schedule = job.plan.schedule
    largest = max(schedule.decoded_regions[unit.name] for _, unit in todo)
    totals = np.zeros((len(job.plan.recipes), 8 * largest + 64), np.uint8)
    scratch = job.new_scratch()
    with ThreadPoolExecutor(schedule.regions_in_flight) as pool:
        regions = _read_ahead(pool, job.plan, todo)
        for number, unit in todo:
            finish_unit(unit, _merge_decoded_unit(job, number, unit, regions, scratch, totals))


def _regions(plan: MergePlan, unit: Unit) -> Iterator[tuple[int, int]]:
    step = plan.schedule.decoded_regions[unit.name]
    for start in range(unit.start, unit.stop, step):
        yield start, min(start + step, unit.stop)


def _read_ahead(pool: ThreadPoolExecutor, plan: MergePlan, todo: Sequence[tuple[int, Unit]]) -> Iterator[np.ndarray]:
    """Yield the bytes of every region of every unit and source, in order, with a bounded number in flight."""
    requests = (
        (source, unit.name, start, stop)
        for _, unit in todo
        for start, stop in _regions(plan, unit)
        for source in plan.sources
    )
    in_flight: deque[Future[np.ndarray]] = deque()
    try:
        for request in requests:
            in_flight.append(pool.submit(read_leaf_bytes, *request))
            if len(in_flight) == plan.schedule.regions_in_flight:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        for future in in_flight:
            future.cancel()


def _merge_decoded_unit(
    job: MergeJob, number: int, unit: Unit, regions: Iterator[np.ndarray], scratch: sums.Scratch, totals: np.ndarray
) -> Record:
    plan, leaf, out = job.plan, job.plan.sources[0].leaves[unit.name], job.plan.leaves[unit.name]
    statistics = _UnitStatistics(plan, unit)
    width = ITEM_BYTES[leaf.dtype]
    for start, stop in _regions(plan, unit):
        newest = _add_region(job, unit, (start, stop), regions, statistics.read, scratch, totals)
        paths = [part.path for ranges in job.output_ranges for part in ranges[unit.name]]
        with open_files(paths, os.O_WRONLY) as targets:
            for row, ranges in enumerate(job.output_ranges):
                for at, elements in _blocks(plan, start, stop):
                    block = _block_of_region(scratch, totals, newest, at - start, elements, width)
                    squares = statistics.squares[row] if at == unit.start else None
                    merged = _finish_block(job, unit, at, block, elements, row, squares)
                    statistics.written[row].update(merged)
                    write_range(targets, ranges[unit.name], at * ITEM_BYTES[out.dtype], merged)
    return statistics.to_record(number)


def _add_region(
    job: MergeJob,
    unit: Unit,
    region: tuple[int, int],
    regions: Iterator[np.ndarray],
    hashers: Sequence[SegmentHasher],
    scratch: sums.Scratch,
    totals: np.ndarray,
) -> np.ndarray:
    """Add every source's bytes of a region to the sums; return the newest source's (uint8)."""
    start, stop = region
    leaf = job.plan.sources[0].leaves[unit.name]
    newest = np.empty(0, np.uint8)
    for k, hasher in enumerate(hashers):
        newest = next(regions)
        for at, elements in _blocks(job.plan, start, stop):
            block = _block_of_region(scratch, totals, newest, at - start, elements, ITEM_BYTES[leaf.dtype])
            # The checksum is computed per block, so that the block is in cache when it is added.
            hasher.update(block.raw)
            if leaf.is_summed:
                sums.add_block(block, leaf.dtype, elements, job.weights, k)
    return newest


def _blocks(plan: MergePlan, start: int, stop: int) -> Iterator[tuple[int, int]]:
    step = plan.schedule.block_elements
    for at in range(start, stop, step):
        yield at, min(step, stop - at)


def _block_of_region(
    scratch: sums.Scratch, totals: np.ndarray, data: np.ndarray, offset: int, elements: int, width: int
) -> sums.Scratch:
    """Return the same buffers, with the stored bytes and the sums of the block at `offset` elements in a region."""
    raw = data[offset * width : (offset + elements) * width]
    return replace(scratch, raw=raw, sums=totals[:, 8 * offset : 8 * offset + scratch.sums.shape[1]])
