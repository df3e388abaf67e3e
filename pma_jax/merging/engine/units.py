"""Merge units of work: sum each block over all sources, with checksums of all bytes read and written."""

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
from pma_jax.merging.engine.rounding import RowFactors
from pma_jax.storage.digests import SegmentHasher
from pma_jax.storage.formats.byte_ranges import open_files, prefetch, read_range, slice_ranges, write_range
from pma_jax.storage.formats.open import read_leaf, read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource
from pma_jax.storage.formats.zstd import ZstdReader


@dataclass(frozen=True)
class MergeJob:
    """The inputs of a merge that all its threads and processes use.

    Attributes:
        plan: The merge.
        weights: The plan's coefficients as multipliers and divisors.
        output_ranges: For each recipe, where its leaves are written.
    """

    plan: MergePlan
    weights: RowFactors
    output_ranges: Sequence[Mapping[str, Sequence[ByteRange]]]

    def new_scratch(self) -> sums.Scratch:
        """Allocate the buffers of one thread."""
        return sums.new_scratch(len(self.plan.recipes), len(self.plan.sources), self.plan.schedule.block_elements)


def merge_sequential_unit(job: MergeJob, number: int, unit: Unit, scratch: sums.Scratch) -> Record:
    """Merge a segment of a leaf that is stored as raw bytes, or a complete leaf that is stored as zstd frames."""
    width = ITEM_BYTES[job.plan.sources[0].leaves[unit.name].dtype]
    with ExitStack() as stack:
        readers = [_open_reader(source, unit, stack) for source in job.plan.sources]

        def read(source: int, start: int, stop: int) -> np.ndarray:
            raw = scratch.raw[: (stop - start) * width]
            readers[source](start * width, raw)
            return raw

        return _merge_unit(job, number, unit, job.plan.schedule.block_elements, read, scratch, scratch.sums)


def _merge_unit(
    job: MergeJob,
    number: int,
    unit: Unit,
    region_elements: int,
    read: Callable[[int, int, int], np.ndarray],
    scratch: sums.Scratch,
    totals: np.ndarray,
) -> Record:
    """Merge a unit region by region: add every source's blocks to the sums, then finish and write the blocks.

    Args:
        job: The merge.
        number: The unit's number in the plan's order.
        unit: The unit.
        region_elements: How many elements of a source are read at once.
        read: (index of the source, start, stop) -> elements [start, stop) as stored, uint8.
        scratch: The buffers of this thread.
        totals: uint8 [R, 8 * region_elements + padding]; the sums of one region.

    Raises:
        ValueError: A source is corrupt, or the result is not finite.
    """
    plan, leaf = job.plan, job.plan.sources[0].leaves[unit.name]
    width, out_width = ITEM_BYTES[leaf.dtype], ITEM_BYTES[plan.leaves[unit.name].dtype]
    output_ranges = [ranges[unit.name] for ranges in job.output_ranges]
    read_hashers = [SegmentHasher(width) for _ in plan.sources]
    write_hashers = [SegmentHasher(out_width) for _ in plan.recipes]
    squares = [[0.0, 0.0] for _ in plan.recipes]
    with open_files([part.path for parts in output_ranges for part in parts], os.O_WRONLY) as targets:
        for start, stop in _split_range(unit.start, unit.stop, region_elements):
            blocks = list(_split_range(start, stop, plan.schedule.block_elements))
            data = np.empty(0, np.uint8)
            for k, hasher in enumerate(read_hashers):
                data = read(k, start, stop)
                for first, last in blocks:
                    block = _region_block(scratch, totals, data, first - start, last - start, width)
                    # The checksum is computed per block, so that the block is in cache when it is added.
                    hasher.update(block.raw)
                    _add_block(job, unit.name, block, last - first, k)
            for row, ranges in enumerate(output_ranges):
                for first, last in blocks:
                    block = _region_block(scratch, totals, data, first - start, last - start, width)
                    sample = squares[row] if first == unit.start else None
                    merged = _finish_block(job, unit.name, first, block, last - first, row, sample)
                    write_hashers[row].update(merged)
                    write_range(targets, ranges, first * out_width, merged)
    read_digests = [hasher.finish() for hasher in read_hashers]
    return Record(number, read_digests, [hasher.finish() for hasher in write_hashers], squares)


def _open_reader(source: CheckpointSource, unit: Unit, stack: ExitStack) -> Callable[[int, np.ndarray], None]:
    """Return a function that reads consecutive blocks: (byte offset in the leaf, uint8 array to fill) -> None."""
    if unit.name in source.zstd_frames:
        assert unit.start == 0, "a frame is decoded from its beginning"
        frames = stack.enter_context(closing(ZstdReader(source.zstd_frames[unit.name])))
        return lambda start, into: frames.read(into)
    ranges = source.byte_ranges[unit.name]
    start, stop = (elements * ITEM_BYTES[source.leaves[unit.name].dtype] for elements in (unit.start, unit.stop))
    files = stack.enter_context(open_files([part.path for part in slice_ranges(ranges, start, stop)], os.O_RDONLY))
    prefetch(files, ranges, start, stop)
    return lambda start, into: read_range(files, ranges, start, into)


def _add_block(job: MergeJob, name: str, scratch: sums.Scratch, elements: int, source: int) -> None:
    """Add the block in `scratch.raw` to the sums; do nothing if the leaf is not summed."""
    leaf = job.plan.sources[0].leaves[name]
    if not leaf.is_summed:
        return
    # Staging needs the same block of all sources in turn, but a decoded region has several blocks of one source.
    if len(job.plan.recipes) == 1 or name in job.plan.schedule.region_elements:
        sums.add_block(scratch, leaf.dtype, elements, job.weights, source)
        return
    sums.stage_block(scratch, leaf.dtype, elements, source)
    if source == len(job.plan.sources) - 1:
        sums.combine_staged(scratch, leaf.dtype, elements, job.weights)


def _finish_block(
    job: MergeJob, name: str, start: int, scratch: sums.Scratch, elements: int, row: int, squares: list[float] | None
) -> np.ndarray:
    """Return the bytes of a finished block, and write the measured rounding to `squares` if given.

    Raises:
        ValueError: The result is not finite; the message names the leaf and the source with such a value.
    """
    leaf, out = job.plan.sources[0].leaves[name], job.plan.leaves[name]
    if not leaf.is_summed:
        # All sources have the same bytes: `merge` compares them before it merges.
        return scratch.raw[: elements * ITEM_BYTES[leaf.dtype]]
    data = sums.finish_block(scratch, leaf.dtype, out.dtype, elements, job.weights, row)
    if data is None:
        raise ValueError(_not_finite_message(job.plan, name, start, start + elements))
    if squares is not None and ITEM_BYTES[out.dtype] < 4:
        squares[:] = sums.squared_changes(scratch, leaf.dtype, out.dtype, elements, row)
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
    """Merge leaves that tensorstore decodes; later regions are read while one is added to the sums."""
    if not todo:
        return
    schedule = job.plan.schedule
    largest = max(schedule.region_elements[unit.name] for _, unit in todo)
    totals = np.zeros((len(job.plan.recipes), 8 * largest + 64), np.uint8)
    scratch = job.new_scratch()
    with ThreadPoolExecutor(schedule.max_regions_in_flight) as pool:
        regions = _read_ahead(pool, job.plan, todo)
        for number, unit in todo:
            step = schedule.region_elements[unit.name]
            record = _merge_unit(job, number, unit, step, lambda *_: next(regions), scratch, totals)
            finish_unit(unit, record)


def _read_ahead(pool: ThreadPoolExecutor, plan: MergePlan, todo: Sequence[tuple[int, Unit]]) -> Iterator[np.ndarray]:
    """Yield the bytes of each region, by unit, region and source, with a bounded number of regions in flight."""
    requests = (
        (source, unit.name, start, stop)
        for _, unit in todo
        for start, stop in _split_range(unit.start, unit.stop, plan.schedule.region_elements[unit.name])
        for source in plan.sources
    )
    in_flight: deque[Future[np.ndarray]] = deque()
    try:
        for request in requests:
            in_flight.append(pool.submit(read_leaf_bytes, *request))
            if len(in_flight) == plan.schedule.max_regions_in_flight:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        for future in in_flight:
            future.cancel()


def _split_range(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _region_block(
    scratch: sums.Scratch, totals: np.ndarray, data: np.ndarray, start: int, stop: int, width: int
) -> sums.Scratch:
    """Return `scratch` with `raw` and `sums` replaced by views of elements [start, stop) of a region."""
    raw = data[start * width : stop * width]
    return replace(scratch, raw=raw, sums=totals[:, 8 * start : 8 * start + scratch.sums.shape[1]])
