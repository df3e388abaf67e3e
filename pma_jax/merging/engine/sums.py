"""NumPy kernels of a merge: weighted sums of blocks that are small enough to stay in the CPU's caches.

Sums are float32 (float64 for float64 leaves). A bfloat16 value is the upper half of a float32, so a shift by 16 bits
converts it exactly, and rounding back to bfloat16 is integer arithmetic. This is several times as fast as NumPy's
conversions of ml_dtypes.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pma_jax.merging.engine.rounding import RowFactors
from pma_jax.storage.formats.source import ITEM_BYTES, SUMMED_DTYPES, numpy_dtype

_BF16_SHIFT = np.uint32(16)
_UPPER_HALF = np.uint32(0xFFFF0000)
# Bits of the largest float32 that is finite in each dtype after rounding.
_LARGEST_BITS = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F7FFF}
_HUGE_PAGE_BYTES = 2**21
# `squared_changes` measures this many elements of a unit: 1 in 512, enough to estimate a ratio of two sums.
_SAMPLE_ELEMENTS = 2**12
# With several rows, the sums are computed in strips of the block: small enough for the caches, and long enough that
# NumPy's calls cost little. Strips of 2^13 took up to 8% more time (an AMD EPYC, 4 recipes of 10 checkpoints).
_STRIP_ELEMENTS = 2**15


class Scratch(NamedTuple):
    """The buffers of one thread, reused for all blocks, because page faults cost more than the arithmetic.

    Attributes:
        raw: uint8; one source's block as stored.
        rounded: uint8; one finished block in the output dtype.
        wide: uint8; temporary values.
        totals: uint8 [R, …]; the sums of R rows, viewed as float32 or float64.
        stack: uint8 [K, …]; the blocks of all K sources in the accumulation dtype, for `combine_staged`. Empty if there
            is one row.
    """

    raw: np.ndarray
    rounded: np.ndarray
    wide: np.ndarray
    totals: np.ndarray
    stack: np.ndarray


def new_scratch(rows: int, sources: int, block_elements: int, dtypes: set[str]) -> Scratch:
    """Allocate one thread's buffers.

    Args:
        rows: Number of recipes.
        sources: Number of checkpoints.
        block_elements: Maximum number of elements of a block.
        dtypes: Dtypes of the sources' leaves. A result has one of them, or at most 4 bytes per element.
    """
    stacked = sources if rows > 1 else 0
    raw_width, width = _buffer_bytes(block_elements, dtypes), _sum_bytes(block_elements, dtypes)
    # All buffers are in one array that starts at a multiple of the size of a huge page, so that they take few pages.
    flat = np.zeros(raw_width + (2 + rows + stacked) * width + _HUGE_PAGE_BYTES, np.uint8)
    skip = -flat.ctypes.data % _HUGE_PAGE_BYTES
    raw, rest = np.split(flat[skip : len(flat) - _HUGE_PAGE_BYTES + skip], [raw_width])
    buffers = rest.reshape(-1, width)
    return Scratch(raw, buffers[0], buffers[1], buffers[2 : 2 + rows], buffers[2 + rows :])


def scratch_bytes(rows: int, sources: int, block_elements: int, dtypes: set[str]) -> int:
    """Return an upper bound of the bytes that one thread's buffers use, for the arguments of `new_scratch`."""
    # Several recipes read blocks that need no conversion to the stack, so that `raw` takes no pages.
    is_raw_used = rows == 1 or any(dtype != accumulation_dtype(dtype) for dtype in dtypes)
    raw_bytes = _buffer_bytes(block_elements, dtypes) if is_raw_used else 0
    buffers = 2 + rows + (sources if rows > 1 else 0)
    return raw_bytes + buffers * _sum_bytes(block_elements, dtypes) + _HUGE_PAGE_BYTES


def _sum_bytes(block_elements: int, dtypes: set[str]) -> int:
    """Return the size of a buffer other than `raw`: leaves that are not summed only pass through `raw`."""
    return _buffer_bytes(block_elements, dtypes & SUMMED_DTYPES)


def _buffer_bytes(block_elements: int, dtypes: set[str]) -> int:
    # 64 more bytes, so that the same element of two buffers is not in the same set of a cache.
    return max([4, *map(ITEM_BYTES.__getitem__, dtypes)]) * block_elements + 64


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype in which leaves of a dtype are summed: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def _widen(raw: np.ndarray, dtype: str, into: np.ndarray) -> np.ndarray:
    """Return a block's bytes in the accumulation dtype; if they must be converted, the result is written to `into`.

    Pairs of bfloat16 values are converted as 32-bit words, which takes three quarters of the time: the result holds the
    first values of all pairs, then the second ones. `in_order` restores their order.
    """
    elements = len(raw) // ITEM_BYTES[dtype]
    if _is_paired(dtype, elements):
        words, bits = raw.view(np.uint32), into[: 4 * elements].view(np.uint32)
        np.left_shift(words, _BF16_SHIFT, out=bits[: len(words)])
        np.bitwise_and(words, _UPPER_HALF, out=bits[len(words) :])
        return bits.view(np.float32)
    values = raw.view(numpy_dtype(dtype))
    if dtype == accumulation_dtype(dtype):
        return values
    wide = into[: 4 * elements].view(np.float32)
    np.copyto(wide, values, casting="unsafe")
    return wide


def buffer_for(scratch: Scratch, dtype: str, weights: RowFactors, source: int) -> np.ndarray:
    """Return the buffer (uint8) into which to read a block of source number `source`.

    Blocks of the accumulation dtype are read to where `stage_block` (several recipes) or the start of the sum (one
    recipe) would copy them.
    """
    if dtype != accumulation_dtype(dtype):
        return scratch.raw
    if len(weights.first) > 1:
        return scratch.stack[source]
    return scratch.totals[0] if source == weights.first[0] else scratch.raw


def _is_paired(dtype: str, elements: int) -> bool:
    return dtype == "bfloat16" and elements % 2 == 0


def in_order(sums: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Return the first `count` sums of blocks of `dtype`, as `_widen` arranges them, in the order of the leaf."""
    return sums.reshape(2, -1)[:, : count // 2].T.ravel() if _is_paired(dtype, len(sums)) else sums[:count]


def add_block(
    scratch: Scratch,
    raw: np.ndarray,
    dtype: str,
    totals: np.ndarray,
    weights: RowFactors,
    source: int,
    ulps: Sequence[int],
) -> None:
    """Add a block of source number `source` to each row's sum with its multiplier; divide the sums that are complete.

    Args:
        scratch: The buffers; `wide` and `rounded` are overwritten.
        raw: uint8; the block as stored.
        dtype: Dtype of the block.
        totals: [R, elements]; the sums, in the accumulation dtype, arranged as `_widen` arranges the block.
        weights: Multipliers and divisors of the R rows.
        source: The source's number; the oldest is 0.
        ulps: For each row, the result of `rounding.ulps_of_copies` for the leaf.
    """
    wide = _widen(raw, dtype, scratch.wide)
    for strip in _strips(totals):
        _add_source(scratch, totals[:, strip], wide[strip], weights, source)
    for row, last in enumerate(weights.last):
        if last == source:
            _divide(totals[row], weights, row)
            _take_copied_values(scratch, totals[row], wide, weights, row, ulps[row])


def stage_block(scratch: Scratch, raw: np.ndarray, dtype: str, source: int) -> None:
    """Convert a block and store it in `scratch.stack[source]`, for `combine_staged`."""
    into = scratch.stack[source]
    wide = _widen(raw, dtype, into)
    if dtype == accumulation_dtype(dtype) and not np.may_share_memory(into, raw):
        into[: wide.nbytes] = raw


def combine_staged(scratch: Scratch, totals: np.ndarray, weights: RowFactors, ulps: Sequence[int]) -> None:
    """Compute all rows' means [R, elements] of the staged blocks, strip by strip so that a strip stays in cache."""
    staged = scratch.stack[:, : totals[0].nbytes].view(totals.dtype)
    multipliers = weights.multipliers.astype(totals.dtype)
    is_exact = _einsum_rounds_products()
    bits = np.dtype(f"u{totals.itemsize}")
    for strip in _strips(totals):
        part = totals[:, strip]
        # Takes a third of the time of one NumPy call per row and source.
        np.einsum("rk,kn->rn", multipliers, staged[:, strip], out=part)
        # einsum starts from +0.0, so that sums of -0.0 become +0.0. Sums with a +0.0 are therefore computed again.
        if not is_exact or not part.view(bits).min():
            for source, wide in enumerate(staged[:, strip]):
                _add_source(scratch, part, wide, weights, source)
        for row, total in enumerate(part):
            _divide(total, weights, row)
    for row, last in enumerate(weights.last):
        _take_copied_values(scratch, totals[row], staged[last], weights, row, ulps[row])


@functools.cache
def _einsum_rounds_products() -> bool:
    """Return whether `np.einsum` rounds products before it adds them, as `rounding` requires; False if it uses FMA."""
    x = np.float32(1 + 2**-12)
    terms = np.full((2, 67), [[-(x * x)], [x]], np.float32)  # 67: full vectors and a remainder
    return not np.einsum("rk,kn->rn", np.array([[1, x]], np.float32), terms).any()


def _strips(totals: np.ndarray) -> list[slice]:
    """Return slices that cover the last axis of `totals` [R, elements]; of several rows, strips that stay in cache."""
    elements = totals.shape[-1]
    step = _STRIP_ELEMENTS if len(totals) > 1 else max(elements, 1)
    return [slice(start, min(start + step, elements)) for start in range(0, elements, step)]


def _add_source(scratch: Scratch, totals: np.ndarray, wide: np.ndarray, weights: RowFactors, source: int) -> None:
    """Add one source's values [elements] to the sums of all rows [R, elements], as `rounding` defines."""
    product = scratch.rounded[: wide.nbytes].view(wide.dtype)
    multipliers = weights.multipliers[:, source].astype(totals.dtype)
    for total, multiplier, first in zip(totals, multipliers, weights.first, strict=True):
        if source == first:
            # The sum starts with its first term, because 0.0 + -0.0 would lose the sign. It may be in place already.
            if multiplier != 1 or total.ctypes.data != wide.ctypes.data:
                np.multiply(wide, multiplier, out=total)
        elif multiplier == 1:
            np.add(total, wide, out=total)
        elif multiplier:
            np.multiply(wide, multiplier, out=product)
            np.add(total, product, out=total)


def _divide(total: np.ndarray, weights: RowFactors, row: int) -> None:
    """Divide a complete sum of row number `row` in place."""
    if weights.divisors[row] != 1:
        np.divide(total, total.dtype.type(weights.divisors[row]), out=total)


def _take_copied_values(
    scratch: Scratch, means: np.ndarray, newest: np.ndarray, weights: RowFactors, row: int, ulps: int
) -> None:
    """Where a mean is the mean of copies of the newest value, replace it by that value (see `rounding`).

    Args:
        scratch: The buffers; `rounded` is overwritten.
        means: [elements]; the means of row number `row`.
        newest: [elements]; the values of its newest source, in the accumulation dtype.
        weights: Multipliers and divisors of the rows.
        row: The row's number.
        ulps: The result of `rounding.ulps_of_copies` for the row and the leaf. Only means this close to the newest
            value can be those of its copies; if it is 0, nothing is compared.
    """
    if not ulps:
        return
    bits = np.dtype(f"u{means.itemsize}")
    mean_bits, newest_bits = means.view(bits), newest.view(bits)
    # With very large weights, every value is near.
    limit = bits.type(min(ulps, 2 ** (8 * bits.itemsize - 1)))
    twice = bits.type(min(2 * ulps, 2 ** (8 * bits.itemsize) - 1))
    # Numbers of one sign are ordered as their bits are, so the difference of the bits counts ulps.
    distances = np.subtract(mean_bits, newest_bits, out=scratch.rounded[: means.nbytes].view(bits))
    np.add(distances, limit, out=distances)
    if weights.has_negative[row]:  # the mean of copies of a tiny value may have another sign
        np.minimum(distances, np.left_shift(newest_bits, bits.type(1)), out=distances)
    near = np.flatnonzero(distances <= twice)
    near = near[mean_bits[near] != newest_bits[near]]
    if not near.size:
        return
    copied = newest[near]
    multipliers = weights.multipliers[row][weights.multipliers[row] != 0].astype(means.dtype)
    mean = copied * multipliers[0]
    for multiplier in multipliers[1:]:
        mean += copied * multiplier
    mean /= means.dtype.type(weights.divisors[row])
    equal = (mean.view(bits) == mean_bits[near]) & np.isfinite(mean)
    means[near[equal]] = copied[equal]


def finish_block(scratch: Scratch, dtype: str, out_dtype: str, totals: np.ndarray, row: int) -> np.ndarray | None:
    """Round the means in row number `row` of `totals` to the nearest values of `out_dtype`, ties to even.

    Returns:
        The bytes, a view of `scratch.rounded` or `totals`; None if a value is not finite in `out_dtype`.
    """
    sums, elements, is_paired = totals[row], totals.shape[1], _is_paired(dtype, totals.shape[1])
    out = scratch.rounded[: ITEM_BYTES[out_dtype] * elements]
    if dtype == out_dtype == "bfloat16":
        # A NaN of bfloat16 has no bits that rounding could carry over, so that the rounded values tell.
        _round_to_bf16(sums.view(np.uint32), out, scratch, is_paired)
        return out if _all_within(out.view(np.uint16), 0x7F7F) else None
    is_checked = sums.dtype == np.float32 and out_dtype in _LARGEST_BITS
    if is_checked and not _all_within(sums.view(np.uint32), _LARGEST_BITS[out_dtype]):
        return None
    if sums.dtype == out_dtype and not is_paired:
        return sums.view(np.uint8) if is_checked or np.isfinite(sums).all() else None
    if is_checked and out_dtype == "bfloat16":
        _round_to_bf16(sums.view(np.uint32), out, scratch, is_paired)
        return out
    narrow = out.view(numpy_dtype(out_dtype))
    if is_paired:
        # Two assignments take a fraction of the time of one copy of a transposed array.
        narrow.reshape(-1, 2)[:, 0], narrow.reshape(-1, 2)[:, 1] = sums.reshape(2, -1)
    else:
        np.copyto(narrow, sums, casting="unsafe")
    return out if is_checked or np.isfinite(narrow).all() else None


def _all_within(bits: np.ndarray, largest: int) -> bool:
    """Return whether numbers of unsigned `bits` have magnitudes up to that of the bits `largest`; False for NaN."""
    # Signed integers are ordered as positive numbers are, and unsigned ones as the magnitudes of negative numbers.
    sign = 2 ** (8 * bits.itemsize - 1)
    highest, lowest = bits.view(f"i{bits.itemsize}").max(initial=0), bits.max(initial=0)
    return bool(highest <= largest and (lowest < sign or lowest <= sign + largest))


def _round_to_bf16(bits: np.ndarray, into: np.ndarray, scratch: Scratch, is_paired: bool) -> None:
    """Round float32 bits to nearest, ties to even: add 0x7fff plus the last kept bit, and keep the upper half.

    Args:
        bits: uint32 [elements].
        into: uint8 [2 * elements].
        scratch: The buffers; `wide` is overwritten.
        is_paired: Whether `bits` holds the first values of all pairs, then the second ones.
    """
    rounded = np.right_shift(bits, _BF16_SHIFT, out=scratch.wide[: bits.nbytes].view(np.uint32))
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    if is_paired:
        first, second = rounded.reshape(2, -1)
        np.right_shift(first, _BF16_SHIFT, out=first)
        np.bitwise_and(second, _UPPER_HALF, out=second)
        np.bitwise_or(first, second, out=into.view(np.uint32))
    else:
        np.right_shift(rounded, _BF16_SHIFT, out=rounded)
        np.copyto(into.view(np.uint16), rounded, casting="unsafe")


def squared_changes(
    rounded: np.ndarray, out_dtype: str, newest: np.ndarray, dtype: str, sums: np.ndarray
) -> list[float]:
    """Measure how much rounding and merging change the first 4,096 elements of a block.

    Args:
        rounded: uint8; the finished block, in `out_dtype`.
        out_dtype: Dtype of the result.
        newest: uint8; the newest source's block, in `dtype`.
        dtype: Dtype of the sources.
        sums: [elements]; the row of `finish_block`, divided.

    Returns:
        [sum of (rounded - merged)^2, sum of (newest source - merged)^2], computed in float64.
    """
    sample = min(len(sums), _SAMPLE_ELEMENTS)
    after = rounded[: ITEM_BYTES[out_dtype] * sample].view(numpy_dtype(out_dtype)).astype(np.float64)
    before = newest[: ITEM_BYTES[dtype] * sample].view(numpy_dtype(dtype)).astype(np.float64)
    merged = in_order(sums, dtype, sample).astype(np.float64)
    merged = np.where(np.isfinite(merged), merged, after)  # a sum that overflowed
    return [float(np.sum((after - merged) ** 2)), float(np.sum((before - merged) ** 2))]
