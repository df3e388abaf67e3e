"""Merge units of work: sum each block over all sources, with checksums of all bytes read and written."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging.engine import sums
from pma_jax.merging.engine.journal import Record
from pma_jax.merging.engine.plan import MergePlan, Unit
from pma_jax.merging.engine.rounding import RowFactors, factor_rows, is_average, ulps_of_copies
from pma_jax.merging.engine.schedule import BOX_BYTES, buffer_elements
from pma_jax.storage.digests import SegmentHasher
from pma_jax.storage.formats.byte_ranges import (
    OpenFile,
    OpenFiles,
    prefetch,
    read_range,
    refuse_missing_files,
    slice_ranges,
    write_range,
)
from pma_jax.storage.formats.open import read_leaf, read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource, numpy_dtype
from pma_jax.storage.formats.unpack import unpack_leaf
from pma_jax.storage.formats.zstd import ZstdReader


@dataclass(frozen=True)
class MergeJob:
    """The inputs of a merge that all its threads and processes use.

    Attributes:
        plan: The merge, with packs as leaves.
        weights: The plan's coefficients as multipliers and divisors.
        output_ranges: For each recipe, where its leaves are written.
        ulps_of_copies: (dtype of a leaf, its output dtype) -> for each recipe, the result of `rounding.ulps_of_copies`.
    """

    plan: MergePlan
    weights: RowFactors
    output_ranges: Sequence[Mapping[str, Sequence[ByteRange]]]
    ulps_of_copies: Mapping[tuple[str, str], Sequence[int]]

    def new_scratch(self, elements: int) -> sums.Scratch:
        """Allocate the buffers of one thread, for blocks of at most `elements`."""
        dtypes = {leaf.dtype for leaf in self.plan.sources[0].leaves.values()}
        return sums.new_scratch(len(self.plan.recipes), len(self.plan.sources), elements, dtypes)


def new_job(plan: MergePlan, output_ranges: Sequence[Mapping[str, Sequence[ByteRange]]]) -> MergeJob:
    """Return the job of a plan whose recipes are written to `output_ranges`."""
    dtypes = {(leaf.dtype, plan.leaves[name].dtype) for name, leaf in plan.sources[0].leaves.items() if leaf.is_summed}
    ulps = {pair: [ulps_of_copies(row, *pair) for row in plan.coefficients] for pair in dtypes}
    return MergeJob(plan, factor_rows(plan.coefficients), output_ranges, ulps)


def merge_unpacked_units(
    job: MergeJob, todo: Sequence[tuple[int, Unit]], finish_unit: Callable[[Unit, Record], None], directory: Path
) -> None:
    """Merge leaves that are first unpacked to files in `directory`, one leaf of all sources at a time."""
    largest = max((unit.stop for _, unit in todo), default=0)
    scratch = job.new_scratch(buffer_elements(job.plan.schedule.block_elements, largest)) if todo else None
    for number, unit in todo:
        assert scratch is not None
        sources, unpacked = [], []
        try:
            for k, source in enumerate(job.plan.sources):
                if unit.name not in source.byte_ranges and unit.name not in source.zstd_frames:
                    path = directory / f"unpacked.{number}.{k}"
                    unpacked.append(path)
                    unpack_leaf(source, unit.name, path, BOX_BYTES)
                    whole = (ByteRange(path, 0, source.leaves[unit.name].nbytes),)
                    source = replace(source, byte_ranges={unit.name: whole})
                sources.append(source)
            with refuse_missing_files(), OpenFiles(os.O_RDONLY) as reading, OpenFiles(os.O_WRONLY) as writing:
                record = merge_sequential_unit(job, number, unit, scratch, reading, writing, sources)
            finish_unit(unit, record)
        finally:
            for path in unpacked:
                path.unlink(missing_ok=True)


@contextmanager
def sequential_merger(job: MergeJob) -> Iterator[Callable[[int, Unit], Record]]:
    """Yield a function that merges one unit after the other in one thread, with `merge_sequential_unit`.

    Its buffers are as large as the largest unit so far needs, because those of a thread that merges only small leaves
    would take as much memory as any others: a huge page is allocated as a whole when its first byte is written.
    """
    scratch, elements = None, 0
    with OpenFiles(os.O_RDONLY) as reading, OpenFiles(os.O_WRONLY) as writing:

        def merge_unit(number: int, unit: Unit) -> Record:
            nonlocal scratch, elements
            needed = buffer_elements(job.plan.schedule.block_elements, unit.stop - unit.start)
            if scratch is None or needed > elements:
                scratch = None  # frees its memory first
                scratch, elements = job.new_scratch(needed), needed
            with refuse_missing_files():
                return merge_sequential_unit(job, number, unit, scratch, reading, writing)

        yield merge_unit


def merge_sequential_unit(
    job: MergeJob,
    number: int,
    unit: Unit,
    scratch: sums.Scratch,
    reading: OpenFiles,
    writing: OpenFiles,
    sources: Sequence[CheckpointSource] | None = None,
) -> Record:
    """Merge a segment of a leaf that is stored as raw bytes, or a complete leaf that is stored as zstd frames.

    `sources` are read instead of the plan's, if they are given.
    """
    leaf = job.plan.sources[0].leaves[unit.name]
    width = ITEM_BYTES[leaf.dtype]
    sources = sources or job.plan.sources
    raw = [source.byte_ranges[unit.name] for source in sources if unit.name not in source.zstd_frames]
    parts = [part for ranges in raw for part in slice_ranges(ranges, unit.start * width, unit.stop * width)]
    files = reading.switch_to([part.path for part in parts])
    with ExitStack() as stack:
        readers = [_open_reader(source, unit, files, stack) for source in sources]

        def read(source: int, start: int, stop: int) -> np.ndarray:
            buffer = sums.buffer_for(scratch, leaf.dtype, job.weights, source) if leaf.is_summed else scratch.raw
            raw = buffer[: (stop - start) * width]
            readers[source](start * width, raw)
            return raw

        return _merge_unit(job, number, unit, job.plan.schedule.block_elements, read, scratch, scratch.totals, writing)


def _merge_unit(
    job: MergeJob,
    number: int,
    unit: Unit,
    region_elements: int,
    read: Callable[[int, int, int], np.ndarray],
    scratch: sums.Scratch,
    totals: np.ndarray,
    writing: OpenFiles,
) -> Record:
    """Merge a unit region by region: add every source's blocks to the sums, then finish and write the blocks.

    Args:
        job: The merge.
        number: The unit's number in the plan's order.
        unit: The unit.
        region_elements: How many elements of a source are read at once.
        read: (index of the source, start, stop) -> elements [start, stop) as stored, uint8.
        scratch: The buffers of this thread.
        totals: uint8 [R, …]; a buffer for the sums of one region.
        writing: The open outputs of this thread.

    Raises:
        UserError: A source is corrupt, or the result is not finite.
    """
    plan, leaf, out = job.plan, job.plan.sources[0].leaves[unit.name], job.plan.leaves[unit.name]
    width, out_width = ITEM_BYTES[leaf.dtype], ITEM_BYTES[out.dtype]
    output_ranges = [ranges[unit.name] for ranges in job.output_ranges]
    read_hashers = [SegmentHasher(width, plan.segments(unit.name)) for _ in plan.sources]
    write_hashers = [SegmentHasher(out_width, plan.segments(unit.name)) for _ in plan.recipes]
    squares = [[0.0, 0.0] for _ in plan.recipes]
    totals = totals.view(sums.accumulation_dtype(leaf.dtype))
    targets = writing.switch_to([part.path for parts in output_ranges for part in parts])
    # Overflow and NaN give no warning, because `finish_block` checks the result.
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in _split_range(unit.start, unit.stop, region_elements):
            # Of each block: its first element, its bytes in the region, and its sums.
            blocks = [
                (start + first, slice(first * width, last * width), totals[:, first:last])
                for first, last in _split_range(0, stop - start, plan.schedule.block_elements)
            ]
            data = np.empty(0, np.uint8)
            for k, hasher in enumerate(read_hashers):
                data = read(k, start, stop)
                for _, part, block_totals in blocks:
                    # The checksum is computed per block, so that the block is in cache when it is added.
                    hasher.update(data[part])
                    _add_block(job, unit.name, scratch, data[part], block_totals, k)
            for row, ranges in enumerate(output_ranges):
                for first, part, block_totals in blocks:
                    merged = _finish_block(job, unit.name, first, scratch, data[part], block_totals, row)
                    if first == unit.start and leaf.is_summed and out_width < 4:
                        squares[row] = sums.squared_changes(
                            merged, out.dtype, data[part], leaf.dtype, block_totals[row]
                        )
                    write_hashers[row].update(merged)
                    write_range(targets, ranges, first * out_width, merged)
    read_digests = [hasher.finish() for hasher in read_hashers]
    return Record(number, read_digests, [hasher.finish() for hasher in write_hashers], squares)


def _open_reader(
    source: CheckpointSource, unit: Unit, files: Mapping[Path, OpenFile], stack: ExitStack
) -> Callable[[int, np.ndarray], None]:
    """Return a function that reads consecutive blocks: (byte offset in the leaf, uint8 array to fill) -> None."""
    if unit.name in source.zstd_frames:
        assert unit.start == 0, "a frame is decoded from its beginning"
        frames = stack.enter_context(closing(ZstdReader(source.zstd_frames[unit.name])))
        return lambda start, into: frames.read(into)
    ranges = source.byte_ranges[unit.name]
    start, stop = (elements * ITEM_BYTES[source.leaves[unit.name].dtype] for elements in (unit.start, unit.stop))
    prefetch(files, ranges, start, stop)
    return lambda start, into: read_range(files, ranges, start, into)


def _add_block(
    job: MergeJob, name: str, scratch: sums.Scratch, raw: np.ndarray, totals: np.ndarray, source: int
) -> None:
    """Add a block to the sums; do nothing if the leaf is not summed."""
    leaf = job.plan.sources[0].leaves[name]
    if not leaf.is_summed:
        return
    ulps = job.ulps_of_copies[leaf.dtype, job.plan.leaves[name].dtype]
    # Staging needs the same block of all sources in turn, but a decoded region has several blocks of one source.
    is_staged = len(job.plan.recipes) > 1 and name not in job.plan.schedule.region_elements
    if not is_staged:
        sums.add_block(scratch, raw, leaf.dtype, totals, job.weights, source, ulps)
    else:
        sums.stage_block(scratch, raw, leaf.dtype, source)
        if source == len(job.plan.sources) - 1:
            sums.combine_staged(scratch, totals, job.weights, ulps)


def _finish_block(
    job: MergeJob, name: str, start: int, scratch: sums.Scratch, newest: np.ndarray, totals: np.ndarray, row: int
) -> np.ndarray:
    """Return the bytes of a finished block, given the newest source's block as stored and the sums.

    Raises:
        UserError: The result is not finite; the message names the leaf and the source with such a value.
    """
    leaf, out = job.plan.sources[0].leaves[name], job.plan.leaves[name]
    if not leaf.is_summed:
        # All sources have the same bytes: `merge` compares them before it merges.
        return newest
    data = sums.finish_block(scratch, leaf.dtype, out.dtype, totals, row)
    if data is None:
        means = sums.in_order(totals[row], leaf.dtype, totals.shape[1])
        return _finish_without_overflow(job.plan, name, start, means, row)
    return data


def _finish_without_overflow(plan: MergePlan, name: str, start: int, means: np.ndarray, row: int) -> np.ndarray:
    """Return the bytes of a block, of which the sums that overflowed are added again in a wider dtype.

    Args:
        plan: The merge.
        name: Name of the leaf.
        start: The block's first element.
        means: [elements]; the means in the accumulation dtype, of which some are not finite.
        row: Number of the recipe.

    Raises:
        UserError: A result is not finite, or a source has a value that is not.
    """
    stop, leaf, out = start + len(means), plan.sources[0].leaves[name], plan.leaves[name]
    used = [(source, c) for source, c in zip(plan.sources, plan.coefficients[row], strict=True) if c]
    wide = np.longdouble if leaf.dtype == "float64" else np.float64
    means, bad = means.copy(), np.flatnonzero(~np.isfinite(means))
    with np.errstate(all="ignore"):
        values = [read_leaf(source, name, start, stop)[bad].astype(wide) for source, _ in used]
        wide_means = sum(value * wide(c) for value, (_, c) in zip(values, used, strict=True))
        is_copied = np.logical_and.reduce([value == values[-1] for value in values])
        means[bad] = np.where(is_copied & is_average(plan.coefficients[row], leaf.dtype), values[-1], wide_means)
        merged = means.astype(numpy_dtype(out.dtype))
    is_finite = np.isfinite(merged)
    is_finite[bad] &= np.logical_and.reduce([np.isfinite(value) for value in values])
    if not is_finite.all():
        first = start + int(np.argmin(is_finite))
        raise UserError(not_finite_message(plan, name, first, first + 1))
    return merged.view(np.uint8)


def not_finite_message(plan: MergePlan, name: str, start: int, stop: int) -> str:
    """Return the message about a result between two elements of a leaf, naming a source with such a value, if any."""
    for source in plan.sources:
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = read_leaf(source, name, start, stop).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            leaf, element = plan.locate(name, start + int(bad[0]))
            return f"{source.origin}: {leaf} has {values[bad[0]]} at element {element}; only finite values merge"
    leaf, first = plan.locate(name, start)
    where = f"at element {first}" if stop == start + 1 else f"between elements {first} and {first + stop - start}"
    return f"{leaf}: the weighted sum overflows {plan.leaves[name].dtype} {where}"


def merge_decoded_units(
    job: MergeJob, todo: Sequence[tuple[int, Unit]], finish_unit: Callable[[Unit, Record], None]
) -> None:
    """Merge leaves that tensorstore decodes; later regions are read while one is added to the sums."""
    if not todo:
        return
    schedule = job.plan.schedule
    largest = max(schedule.region_elements[unit.name] for _, unit in todo)
    totals = np.zeros((len(job.plan.recipes), 8 * largest + 64), np.uint8)
    scratch = job.new_scratch(buffer_elements(schedule.block_elements, largest))
    with (
        ThreadPoolExecutor(schedule.max_regions_in_flight) as pool,
        refuse_missing_files(),
        OpenFiles(os.O_WRONLY) as writing,
    ):
        regions = _read_ahead(pool, job.plan, todo)
        for number, unit in todo:
            step = schedule.region_elements[unit.name]
            record = _merge_unit(job, number, unit, step, lambda *_: next(regions), scratch, totals, writing)
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
