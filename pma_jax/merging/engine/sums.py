"""Numpy kernels of the engine: weighted sums in float32, on blocks small enough to stay in cache.

bfloat16 is the upper half of float32, so a shift by 16 bits converts it exactly, and rounding back is integer
arithmetic: several times the rate of numpy's conversions of ml_dtypes.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pma_jax.merging.engine.rounding import RowFactors
from pma_jax.storage.formats.source import ITEM_BYTES, numpy_dtype

_BF16_SHIFT = np.uint32(16)
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
# The smallest float32 that rounds to infinity in bfloat16.
_BF16_OVERFLOW = 0x7F7F8000
# With several rows, a strip of every source and of one row's sum stays in the second-level cache.
_STRIP_ELEMENTS = 2**13


@dataclass(frozen=True)
class Scratch:
    """The buffers of one thread, reused for every block: page faults cost more than the arithmetic.

    Attributes:
        raw: uint8 [block_bytes + padding]; one source's block as stored.
        rounded: uint8 [2 * block_bytes]; one finished block in the output dtype.
        sums: uint8 [R, 2 * block_bytes]; the sums, viewed as float32 or float64.
        wide: uint8 [2 * block_bytes]; temporaries.
        stack: uint8 [K, 2 * block_bytes]; all sources' blocks in the accumulation dtype, for `combine_staged`; empty
            for one row.
    """

    raw: np.ndarray
    rounded: np.ndarray
    sums: np.ndarray
    wide: np.ndarray
    stack: np.ndarray


def new_scratch(rows: int, sources: int, block_elements: int) -> Scratch:
    """Allocate buffers for blocks of up to `block_elements` elements, `rows` recipes and `sources` checkpoints."""
    widest = 8 * block_elements + 64

    def aligned(*shape: int) -> np.ndarray:
        flat = np.zeros(int(np.prod(shape)) + 4096, np.uint8)
        skip = -flat.ctypes.data % 4096
        return flat[skip : skip + int(np.prod(shape))].reshape(shape)

    # Zeroed pages that are never touched take no memory, so unused buffers cost nothing.
    stack = aligned(sources if rows > 1 else 0, widest)
    return Scratch(aligned(widest), aligned(widest), aligned(rows, widest), aligned(widest), stack)


def scratch_bytes(rows: int, sources: int, block_elements: int, dtypes: set[str]) -> int:
    """Return an upper bound in bytes of the memory that one thread's buffers use for leaves of `dtypes`."""
    widest = 8 if "float64" in dtypes else 4
    return (rows + (sources if rows > 1 else 0) + 4) * (widest * block_elements + 4160)


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype in which leaves of `dtype` are summed: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def _typed_sums(scratch: Scratch, dtype: str, elements: int) -> np.ndarray:
    width = ITEM_BYTES[accumulation_dtype(dtype)]
    return scratch.sums[:, : width * elements].view(accumulation_dtype(dtype))


def _widen(scratch: Scratch, dtype: str, elements: int, into: np.ndarray) -> np.ndarray:
    """Return the raw block in the accumulation dtype, converted into `into` if needed."""
    raw = scratch.raw[: ITEM_BYTES[dtype] * elements].view("uint16" if dtype == "bfloat16" else numpy_dtype(dtype))
    if dtype == accumulation_dtype(dtype):
        return raw
    if dtype == "bfloat16":
        bits = into[: 4 * elements].view(np.uint32)
        np.copyto(bits, raw)
        return np.left_shift(bits, _BF16_SHIFT, out=bits).view(np.float32)
    wide = into[: 4 * elements].view(np.float32)
    np.copyto(wide, raw, casting="unsafe")
    return wide


# `finish_block` reports values that are not finite, with the names of the leaf and the source.
@np.errstate(over="ignore", invalid="ignore")
def add_block(scratch: Scratch, dtype: str, elements: int, weights: RowFactors, source: int) -> None:
    """Add the block in `scratch.raw`, of source number `source`, to every row's sum with its weight."""
    wide = _widen(scratch, dtype, elements, scratch.wide)
    sums = _typed_sums(scratch, dtype, elements)
    for strip in _strips(sums, weights):
        _add_source(scratch, sums[:, strip], wide[strip], weights, source)


@np.errstate(over="ignore", invalid="ignore")
def stage_block(scratch: Scratch, dtype: str, elements: int, source: int) -> None:
    """Convert the block in `scratch.raw` and keep it as source number `source` for `combine_staged`."""
    into = scratch.stack[source]
    wide = _widen(scratch, dtype, elements, into)
    if dtype == accumulation_dtype(dtype):
        into[: wide.nbytes] = scratch.raw[: wide.nbytes]


@np.errstate(over="ignore", invalid="ignore")
def combine_staged(scratch: Scratch, dtype: str, elements: int, weights: RowFactors) -> None:
    """Sum the staged blocks for all rows, one strip in cache at a time."""
    sums = _typed_sums(scratch, dtype, elements)
    staged = scratch.stack[:, : sums[0].nbytes].view(sums.dtype)
    multipliers = weights.multipliers.astype(sums.dtype)
    is_exact = _einsum_rounds_products()
    for strip in _strips(sums, weights):
        totals = sums[:, strip]
        # A loop in C: a third of the time of one call per row and source.
        np.einsum("rk,kn->rn", multipliers, staged[:, strip], out=totals)
        # It starts from zero, which loses the sign of a negative zero.
        if not is_exact or not totals.all():
            for source, wide in enumerate(staged[:, strip]):
                _add_source(scratch, totals, wide, weights, source)


@functools.cache
def _einsum_rounds_products() -> bool:
    """Return whether `np.einsum` rounds products before adding, as `rounding` defines; not with FMA."""
    x = np.float32(1 + 2**-12)
    terms = np.full((2, 67), [[-(x * x)], [x]], np.float32)  # 67: full vectors and a remainder
    return not np.einsum("rk,kn->rn", np.array([[1, x]], np.float32), terms).any()


def _strips(sums: np.ndarray, weights: RowFactors) -> Iterator[slice]:
    """Yield slices of the last axis: all of it for one row, strips that stay in cache for several."""
    count = sums.shape[-1]
    step = _STRIP_ELEMENTS if len(weights.multipliers) > 1 else max(count, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _add_source(scratch: Scratch, totals: np.ndarray, wide: np.ndarray, weights: RowFactors, source: int) -> None:
    """Add one source's values, [elements], to every row's sums, [R, elements], as `rounding` defines it."""
    product = scratch.rounded[: wide.nbytes].view(wide.dtype)
    for total, multipliers, first in zip(totals, weights.multipliers, weights.first, strict=True):
        multiplier = totals.dtype.type(multipliers[source])
        if source == first:
            # Starting from the first term instead of from zero keeps the sign of a negative zero.
            np.multiply(wide, multiplier, out=total)
        elif multiplier == 1:
            np.add(total, wide, out=total)
        elif multiplier:
            np.multiply(wide, multiplier, out=product)
            np.add(total, product, out=total)


def finish_block(
    scratch: Scratch, dtype: str, out_dtype: str, elements: int, weights: RowFactors, row: int
) -> np.ndarray | None:
    """Divide a row's sum in place, round to nearest even, and return its bytes (uint8, in `scratch.rounded`).

    Returns None if the result is not finite in `out_dtype`.
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
            out[:] = sums.view(np.uint8)
        else:
            _round_to_bf16(sums.view(np.uint32), out.view(np.uint16), scratch)
        return out
    narrow = out.view(numpy_dtype(out_dtype))
    # The check of the result reports an overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(narrow, sums, casting="unsafe")
    return out if np.isfinite(narrow).all() else None


def _round_to_bf16(bits: np.ndarray, into: np.ndarray, scratch: Scratch) -> None:
    """Round to nearest, ties to even, in integers: add 0x7fff plus the last kept bit, keep the upper half."""
    rounded = np.right_shift(bits, _BF16_SHIFT, out=scratch.wide[: bits.nbytes].view(np.uint32))
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _BF16_SHIFT, out=rounded)
    np.copyto(into, rounded, casting="unsafe")


def squared_changes(scratch: Scratch, dtype: str, out_dtype: str, elements: int, row: int) -> tuple[float, float]:
    """Measure on one block how much rounding and merging change the parameters.

    Args:
        scratch: The buffers, after the last `add_block` and `finish_block` of this row.
        dtype: Dtype of the sources.
        out_dtype: Dtype of the result.
        elements: Number of elements to measure.
        row: The recipe.

    Returns:
        float64 (sum of (rounded - merged)^2, sum of (newest source - merged)^2).
    """
    rounded = scratch.rounded[: ITEM_BYTES[out_dtype] * elements].view(numpy_dtype(out_dtype)).astype(np.float64)
    newest = scratch.raw[: ITEM_BYTES[dtype] * elements].view(numpy_dtype(dtype)).astype(np.float64)
    merged = _typed_sums(scratch, dtype, elements)[row].astype(np.float64)
    return float(np.sum((rounded - merged) ** 2)), float(np.sum((newest - merged) ** 2))
