"""Merging one unit of work: blocks that stay in cache, every source's in turn, each byte digested as it goes by."""

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
from pma_jax.storage.formats.byte_ranges import open_files, prefetch, read_range, write_range
from pma_jax.storage.formats.open import read_leaf, read_leaf_bytes
from pma_jax.storage.formats.source import ITEM_BYTES, ByteRange, CheckpointSource
from pma_jax.storage.formats.zstd import ZstdReader

# Rounding is measured on the first elements of every unit: one in five hundred, far more than its estimate needs.
_SAMPLE_ELEMENTS = 2**12


@dataclass(frozen=True)
class MergeJob:
    """What every thread and process of a merge shares.

    Attributes:
        plan: the merge.
        weights: its coefficients, as the kernels use them.
        places: for each recipe, where its leaves are written.
    """

    plan: MergePlan
    weights: sums.KernelWeights
    places: Sequence[Mapping[str, Sequence[ByteRange]]]


def merge_plain(job: MergeJob, number: int, unit: Unit, scratch: sums.Scratch) -> Record:
    """Merges a segment of a leaf that lies in files, or a whole leaf of zstd frames: block by block, all sources."""
    plan, leaf = job.plan, job.plan.sources[0].leaves[unit.name]
    width = ITEM_BYTES[leaf.dtype]
    outs = [place[unit.name] for place in job.places]
    read = [SegmentHasher(ITEM_BYTES[leaf.dtype], plan.checksum) for _ in plan.sources]
    written = [SegmentHasher(ITEM_BYTES[plan.leaves[unit.name].dtype], plan.checksum) for _ in plan.recipes]
    squares: list[list[float]] = [[0.0, 0.0] for _ in plan.recipes]
    with ExitStack() as stack:
        targets = stack.enter_context(
            open_files([byte_range.path for runs in outs for byte_range in runs], os.O_WRONLY)
        )
        readers = [_reader(source, unit, stack) for source in plan.sources]
        for start, elements in _blocks(plan, unit.start, unit.stop):
            raw = scratch.raw[: elements * width]
            for k, reader in enumerate(readers):
                reader(start * width, raw)
                read[k].update(raw)
                _add(job, unit.name, scratch, elements, k)
            for r, runs in enumerate(outs):
                data = _finish(job, unit, start, scratch, elements, r, squares[r] if start == unit.start else None)
                written[r].update(data)
                write_range(targets, runs, start * ITEM_BYTES[plan.leaves[unit.name].dtype], data)
    return Record(
        number, [hasher.hexdigests() for hasher in read], [hasher.hexdigests() for hasher in written], squares
    )


def _reader(source: CheckpointSource, unit: Unit, stack: ExitStack) -> Callable[[int, np.ndarray], None]:
    """What reads bytes of a unit's leaf from an offset on into an array; called for one block after the other."""
    width = ITEM_BYTES[source.leaves[unit.name].dtype]
    if unit.name in source.zstd_frames:
        assert unit.start == 0, "a frame is decoded from its beginning"
        frames = stack.enter_context(closing(ZstdReader(source.zstd_frames[unit.name])))
        return lambda start, into: frames.read(into)
    runs = source.byte_ranges[unit.name]
    paths = [byte_range.path for byte_range in _touched(runs, unit, width)]
    descriptors = stack.enter_context(open_files(paths, os.O_RDONLY))
    prefetch(descriptors, runs, unit.start * width, unit.stop * width)
    return lambda start, into: read_range(descriptors, runs, start, into)


def _touched(byte_ranges: Sequence[ByteRange], unit: Unit, width: int) -> list[ByteRange]:
    begin, touched = 0, []
    for byte_range in byte_ranges:
        if begin < unit.stop * width and begin + byte_range.nbytes > unit.start * width:
            touched.append(byte_range)
        begin += byte_range.nbytes
    return touched


def _add(job: MergeJob, name: str, scratch: sums.Scratch, elements: int, source: int) -> None:
    """Adds the block in `scratch.raw`; a leaf that is not summed is kept from the first source, and compared.

    Raises:
        ValueError: an integer leaf differs between sources.
    """
    leaf = job.plan.sources[0].leaves[name]
    if leaf.is_summed:
        if len(job.plan.recipes) == 1:
            sums.add_block(scratch, leaf.dtype, elements, job.weights, source)
        else:
            sums.stage_block(scratch, leaf.dtype, elements, source)
            if source == len(job.plan.sources) - 1:
                sums.combine_staged(scratch, leaf.dtype, elements, job.weights)
        return
    nbytes = elements * ITEM_BYTES[leaf.dtype]
    if source == 0:
        scratch.rounded[:nbytes] = scratch.raw[:nbytes]
    elif not np.array_equal(scratch.rounded[:nbytes], scratch.raw[:nbytes]):
        raise ValueError(_unequal(name, leaf.dtype, job.plan.sources[source].origin))


def _finish(
    job: MergeJob, unit: Unit, start: int, scratch: sums.Scratch, elements: int, row: int, squares: list[float] | None
) -> np.ndarray:
    """The bytes of a finished block; measures rounding into `squares` if given.

    Raises:
        ValueError: the result is not finite; names the leaf and the source it comes from.
    """
    leaf, out = job.plan.sources[0].leaves[unit.name], job.plan.leaves[unit.name]
    if not leaf.is_summed:
        return scratch.rounded[: elements * ITEM_BYTES[leaf.dtype]]
    is_sampled = squares is not None and ITEM_BYTES[out.dtype] < 4
    sample = min(elements, _SAMPLE_ELEMENTS)
    exact = sums.exact_values(scratch, leaf.dtype, elements, job.weights, row, sample) if is_sampled else None
    data = sums.finish_block(scratch, leaf.dtype, out.dtype, elements, job.weights, row)
    if data is None:
        raise ValueError(_not_finite(job.plan, unit.name, start, start + elements))
    if squares is not None and exact is not None:
        squares[:] = sums.squared_changes(scratch, leaf.dtype, out.dtype, sample, exact)
    return data


def _not_finite(plan: MergePlan, name: str, start: int, stop: int) -> str:
    for source in plan.sources:
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = read_leaf(source, name, start, stop).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            return f"{source.origin}: {name} has {values[bad[0]]} at element {start + bad[0]}; only finite values merge"
    return f"{name}: the weighted sum overflows {plan.leaves[name].dtype} between elements {start} and {stop}"


def merge_decoded(job: MergeJob, todo: Sequence[tuple[int, Unit]], note: Callable[[int, Record], None]) -> None:
    """Merges leaves that tensorstore decodes, and notes each; the next regions are read while one is added."""
    if not todo:
        return
    plan = job.plan
    largest = max(plan.decoded[unit.name] for _, unit in todo)
    totals = np.zeros((len(plan.recipes), 8 * largest + 64), np.uint8)
    scratch = sums.new_scratch(len(plan.recipes), len(plan.sources), plan.block_elements)
    with ThreadPoolExecutor(plan.reads_ahead) as pool:
        # One region is being added while the others are in flight.
        regions = _ahead(pool, plan, todo, plan.reads_ahead)
        for number, unit in todo:
            note(number, _merge_regions(job, number, unit, regions, scratch, totals))


def _regions(plan: MergePlan, unit: Unit) -> Iterator[tuple[int, int]]:
    step = plan.decoded[unit.name]
    for start in range(unit.start, unit.stop, step):
        yield start, min(start + step, unit.stop)


def _ahead(
    pool: ThreadPoolExecutor, plan: MergePlan, todo: Sequence[tuple[int, Unit]], depth: int
) -> Iterator[np.ndarray]:
    """The bytes of every region of every unit and source, in order, with at most `depth` read or being read."""
    wanted = (
        (source, unit.name, start, stop)
        for _, unit in todo
        for start, stop in _regions(plan, unit)
        for source in plan.sources
    )
    flying: deque[Future[np.ndarray]] = deque()
    try:
        for job in wanted:
            flying.append(pool.submit(read_leaf_bytes, *job))
            if len(flying) == depth:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    finally:
        for future in flying:
            future.cancel()


def _merge_regions(
    job: MergeJob, number: int, unit: Unit, regions: Iterator[np.ndarray], scratch: sums.Scratch, totals: np.ndarray
) -> Record:
    plan, leaf, out = job.plan, job.plan.sources[0].leaves[unit.name], job.plan.leaves[unit.name]
    read = [SegmentHasher(ITEM_BYTES[leaf.dtype], plan.checksum) for _ in plan.sources]
    written = [SegmentHasher(ITEM_BYTES[out.dtype], plan.checksum) for _ in plan.recipes]
    squares: list[list[float]] = [[0.0, 0.0] for _ in plan.recipes]
    width = ITEM_BYTES[leaf.dtype]
    for start, stop in _regions(plan, unit):
        newest = _add_region(job, unit, (start, stop), regions, read, scratch, totals)
        with open_files(
            [byte_range.path for place in job.places for byte_range in place[unit.name]], os.O_WRONLY
        ) as targets:
            for r, place in enumerate(job.places):
                for at, elements in _blocks(plan, start, stop):
                    part = slice((at - start) * width, (at - start + elements) * width)
                    is_sample = at == unit.start
                    if is_sample:
                        scratch.raw[: elements * width] = newest[part]
                    if not leaf.is_summed:
                        scratch.rounded[: elements * width] = newest[part]
                    block = _over(scratch, totals, at - start)
                    merged = _finish(job, unit, at, block, elements, r, squares[r] if is_sample else None)
                    written[r].update(merged)
                    write_range(targets, place[unit.name], at * ITEM_BYTES[out.dtype], merged)
    return Record(
        number, [hasher.hexdigests() for hasher in read], [hasher.hexdigests() for hasher in written], squares
    )


def _add_region(
    job: MergeJob,
    unit: Unit,
    region: tuple[int, int],
    regions: Iterator[np.ndarray],
    read: Sequence[SegmentHasher],
    scratch: sums.Scratch,
    totals: np.ndarray,
) -> np.ndarray:
    """Adds every source's bytes of a region to the sums; returns the newest source's (uint8).

    Raises:
        ValueError: an integer leaf differs between sources.
    """
    start, stop = region
    plan, leaf = job.plan, job.plan.sources[0].leaves[unit.name]
    width = ITEM_BYTES[leaf.dtype]
    newest = next(regions)
    kept = None if leaf.is_summed else newest
    for k, source in enumerate(plan.sources):
        newest = newest if k == 0 else next(regions)
        if kept is not None and not np.array_equal(newest, kept):
            raise ValueError(_unequal(unit.name, leaf.dtype, source.origin))
        for at, elements in _blocks(plan, start, stop):
            part = newest[(at - start) * width : (at - start + elements) * width]
            # Digested block by block: what is then added is in cache already.
            read[k].update(part)
            if leaf.is_summed:
                block = _over(scratch, totals, at - start)
                if elements % 2:
                    # The kernel pads an odd block in place.
                    scratch.raw[: part.size] = part
                else:
                    block = replace(block, raw=part)
                sums.add_block(block, leaf.dtype, elements, job.weights, k)
    return newest


def _unequal(name: str, dtype: str, origin: str) -> str:
    return f"{name} ({dtype}) is not equal in {origin}, and is not a floating-point leaf that could be averaged"


def _blocks(plan: MergePlan, start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, plan.block_elements):
        yield at, min(plan.block_elements, stop - at)


def _over(scratch: sums.Scratch, totals: np.ndarray, offset: int) -> sums.Scratch:
    """The same buffers, but with the sums of the block that begins `offset` elements into the region."""
    return replace(scratch, sums=totals[:, 8 * offset : 8 * offset + scratch.sums.shape[1]])
