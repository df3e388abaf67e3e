"""NumPy kernels of a merge: weighted sums of blocks that are small enough to stay in the CPU's caches.

Sums are float32 (float64 for float64 leaves). A bfloat16 value is the upper half of a float32, so a shift by 16 bits
converts it exactly, and rounding back to bfloat16 is integer arithmetic. This is several times as fast as NumPy's
conversions of ml_dtypes.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pma_jax.merging.engine.rounding import RowFactors
from pma_jax.storage.formats.source import ITEM_BYTES, numpy_dtype

_BF16_SHIFT = np.uint32(16)
_UPPER_HALF = np.uint32(0xFFFF0000)
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# The smallest float32 that rounds to infinity in bfloat16.
_BF16_OVERFLOW = 0x7F7F8000
# `squared_changes` measures this many elements of a unit: 1 in 512, enough to estimate a ratio of two sums.
_SAMPLE_ELEMENTS = 2**12
# With several rows, a strip of each source and of one row's sum fits into the second-level cache.
_STRIP_ELEMENTS = 2**13


@dataclass(frozen=True)
class Scratch:
    """The buffers of one thread, reused for all blocks, because page faults cost more than the arithmetic.

    The last axis of each buffer has 8 * block_elements + 64 bytes.

    Attributes:
        raw: uint8; one source's block as stored.
        rounded: uint8; one finished block in the output dtype.
        sums: uint8 [R, …]; the R rows' sums, viewed as float32 or float64.
        wide: uint8; temporary values.
        stack: uint8 [K, …]; the blocks of all K sources in the accumulation dtype, for `combine_staged`. Empty if there
            is one row.
    """

    raw: np.ndarray
    rounded: np.ndarray
    sums: np.ndarray
    wide: np.ndarray
    stack: np.ndarray


def new_scratch(rows: int, sources: int, block_elements: int) -> Scratch:
    """Allocate buffers for `rows` recipes, `sources` checkpoints, and blocks of up to `block_elements` elements."""
    widest = 8 * block_elements + 64

    def aligned(*shape: int) -> np.ndarray:
        flat = np.zeros(int(np.prod(shape)) + 4096, np.uint8)
        skip = -flat.ctypes.data % 4096
        return flat[skip : skip + int(np.prod(shape))].reshape(shape)

    # The kernel allocates a zeroed page when it is first written, so unused buffers take no memory.
    stack = aligned(sources if rows > 1 else 0, widest)
    return Scratch(aligned(widest), aligned(widest), aligned(rows, widest), aligned(widest), stack)


def scratch_bytes(rows: int, sources: int, block_elements: int, dtypes: set[str]) -> int:
    """Return an upper bound of the bytes that one thread's buffers use for leaves of these dtypes."""
    widest = 8 if "float64" in dtypes else 4
    return (rows + (sources if rows > 1 else 0) + 4) * (widest * block_elements + 4160)


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype in which leaves of a dtype are summed: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def _typed_sums(scratch: Scratch, dtype: str, elements: int) -> np.ndarray:
    width = ITEM_BYTES[accumulation_dtype(dtype)]
    return scratch.sums[:, : width * elements].view(accumulation_dtype(dtype))


def _widen(scratch: Scratch, dtype: str, elements: int, into: np.ndarray) -> np.ndarray:
    """Return the raw block in the accumulation dtype; if it must be converted, the result is written to `into`.

    Pairs of bfloat16 values are converted as 32-bit words, which takes three quarters of the time: the result holds the
    first values of all pairs, then the second ones. `_in_order` restores their order.
    """
    raw = scratch.raw[: ITEM_BYTES[dtype] * elements].view("uint16" if dtype == "bfloat16" else numpy_dtype(dtype))
    if dtype == accumulation_dtype(dtype):
        return raw
    if dtype == "bfloat16":
        bits = into[: 4 * elements].view(np.uint32)
        if _is_paired(dtype, elements):
            np.left_shift(raw.view(np.uint32), _BF16_SHIFT, out=bits[: elements // 2])
            np.bitwise_and(raw.view(np.uint32), _UPPER_HALF, out=bits[elements // 2 :])
        else:
            np.copyto(bits, raw)
            np.left_shift(bits, _BF16_SHIFT, out=bits)
        return bits.view(np.float32)
    wide = into[: 4 * elements].view(np.float32)
    np.copyto(wide, raw, casting="unsafe")
    return wide


def _is_paired(dtype: str, elements: int) -> bool:
    return dtype == "bfloat16" and elements % 2 == 0


def _in_order(sums: np.ndarray, dtype: str) -> np.ndarray:
    """Return the sums of blocks of `dtype`, as `_widen` arranges them, in the order of the leaf."""
    return sums.reshape(2, -1).T.ravel() if _is_paired(dtype, len(sums)) else sums


# Overflow and NaN are ignored here, because `finish_block` checks the result.
@np.errstate(over="ignore", invalid="ignore")
def add_block(scratch: Scratch, dtype: str, elements: int, weights: RowFactors, source: int) -> None:
    """Add the block in `scratch.raw`, which is from source number `source`, to each row's sum with its multiplier."""
    wide = _widen(scratch, dtype, elements, scratch.wide)
    sums = _typed_sums(scratch, dtype, elements)
    for strip in _strips(sums, weights):
        _add_source(scratch, sums[:, strip], wide[strip], weights, source)


@np.errstate(over="ignore", invalid="ignore")
def stage_block(scratch: Scratch, dtype: str, elements: int, source: int) -> None:
    """Convert the block in `scratch.raw` and store it in `scratch.stack[source]`, for `combine_staged`."""
    into = scratch.stack[source]
    wide = _widen(scratch, dtype, elements, into)
    if dtype == accumulation_dtype(dtype):
        into[: wide.nbytes] = scratch.raw[: wide.nbytes]


@np.errstate(over="ignore", invalid="ignore")
def combine_staged(scratch: Scratch, dtype: str, elements: int, weights: RowFactors) -> None:
    """Compute all rows' sums of the staged blocks, strip by strip so that a strip stays in cache."""
    sums = _typed_sums(scratch, dtype, elements)
    staged = scratch.stack[:, : sums[0].nbytes].view(sums.dtype)
    multipliers = weights.multipliers.astype(sums.dtype)
    is_exact = _einsum_rounds_products()
    for strip in _strips(sums, weights):
        totals = sums[:, strip]
        # Takes a third of the time of one NumPy call per row and source.
        np.einsum("rk,kn->rn", multipliers, staged[:, strip], out=totals)
        # einsum starts from zero, so that sums of -0.0 become +0.0. Sums with a zero are therefore computed again.
        if not is_exact or not totals.all():
            for source, wide in enumerate(staged[:, strip]):
                _add_source(scratch, totals, wide, weights, source)


@functools.cache
def _einsum_rounds_products() -> bool:
    """Return whether `np.einsum` rounds products before it adds them, as `rounding` requires; False if it uses FMA."""
    x = np.float32(1 + 2**-12)
    terms = np.full((2, 67), [[-(x * x)], [x]], np.float32)  # 67: full vectors and a remainder
    return not np.einsum("rk,kn->rn", np.array([[1, x]], np.float32), terms).any()


def _strips(sums: np.ndarray, weights: RowFactors) -> Iterator[slice]:
    """Return slices that cover the last axis: one slice if there is one row, else strips that stay in cache."""
    count = sums.shape[-1]
    step = _STRIP_ELEMENTS if len(weights.multipliers) > 1 else max(count, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _add_source(scratch: Scratch, totals: np.ndarray, wide: np.ndarray, weights: RowFactors, source: int) -> None:
    """Add one source's values [elements] to the sums of all rows [R, elements], as `rounding` defines."""
    product = scratch.rounded[: wide.nbytes].view(wide.dtype)
    for total, multipliers, first in zip(totals, weights.multipliers, weights.first, strict=True):
        multiplier = totals.dtype.type(multipliers[source])
        if source == first:
            # The sum starts with its first term, because 0.0 + -0.0 would lose the sign.
            np.multiply(wide, multiplier, out=total)
        elif multiplier == 1:
            np.add(total, wide, out=total)
        elif multiplier:
            np.multiply(wide, multiplier, out=product)
            np.add(total, product, out=total)


def finish_block(
    scratch: Scratch, dtype: str, out_dtype: str, elements: int, weights: RowFactors, row: int
) -> np.ndarray | None:
    """Divide a row's sum in place, and round it to the nearest values of `out_dtype`, ties to even.

    Returns:
        The rounded bytes, a uint8 view of `scratch.rounded`; None if a value is not finite in `out_dtype`.
    """
    sums = _typed_sums(scratch, dtype, elements)[row]
    if weights.divisors[row] != 1:
        np.divide(sums, sums.dtype.type(weights.divisors[row]), out=sums)
    out = scratch.rounded[: ITEM_BYTES[out_dtype] * elements]
    if sums.dtype == np.float32 and out_dtype in {"float32", "bfloat16"}:
        bits = np.bitwise_and(sums.view(np.uint32), _MAGNITUDE_BITS, out=scratch.wide[: sums.nbytes].view(np.uint32))
        if bits.max(initial=0) >= (_INFINITY if out_dtype == "float32" else _BF16_OVERFLOW):
            return None
        if out_dtype == "float32":
            out[:] = _in_order(sums, dtype).view(np.uint8)
        else:
            _round_to_bf16(sums.view(np.uint32), out, scratch, _is_paired(dtype, elements))
        return out
    narrow = out.view(numpy_dtype(out_dtype))
    # Overflow is detected in the result, below.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(narrow, _in_order(sums, dtype), casting="unsafe")
    return out if np.isfinite(narrow).all() else None


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


def squared_changes(scratch: Scratch, dtype: str, out_dtype: str, elements: int, row: int) -> tuple[float, float]:
    """Measure how much rounding and merging change the first 4,096 elements of a block.

    Args:
        scratch: The buffers, after the last `add_block` and `finish_block` of this row.
        dtype: Dtype of the sources.
        out_dtype: Dtype of the result.
        elements: Number of elements of the block.
        row: The recipe.

    Returns:
        float64 (sum of (rounded - merged)^2, sum of (newest source - merged)^2).
    """
    sample = min(elements, _SAMPLE_ELEMENTS)
    rounded = scratch.rounded[: ITEM_BYTES[out_dtype] * sample].view(numpy_dtype(out_dtype)).astype(np.float64)
    newest = scratch.raw[: ITEM_BYTES[dtype] * sample].view(numpy_dtype(dtype)).astype(np.float64)
    merged = _in_order(_typed_sums(scratch, dtype, elements)[row], dtype)[:sample].astype(np.float64)
    return float(np.sum((rounded - merged) ** 2)), float(np.sum((newest - merged) ** 2))
