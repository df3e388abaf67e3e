"""The arithmetic of a weighted sum, defined in one place so that all implementations of merging give the same bits.

The sum over checkpoints k of c_k theta_k is evaluated element by element in the accumulation dtype (float32; float64
for float64 leaves):

    total = m_f * theta_f                       f is the oldest checkpoint with a nonzero coefficient
    total = total + m_k * theta_k               k = f + 1, …; the product is rounded before it is added (no FMA)
    mean = total / divisor                      one division
    mean = theta_n  if mean is what n copies of theta_n would give; n is the newest checkpoint with a nonzero c_n
    merged = round_to_output(mean)              round to nearest, ties to even

with c_k = m_k / divisor in float64 from `factor_coefficients`; m_k and divisor are then rounded to the accumulation
dtype.

The third line makes it a law that a merge of equal inputs returns them exactly, in every dtype and with every recipe
whose coefficients sum to 1 (within the rounding of the accumulation dtype): without it, 3 · (1/3) x can differ from x
in the last bit. "What n copies would give" is the same sequence of operations with theta_n in place of every theta_k.
Where the inputs differ and both sums agree nevertheless, theta_n is as close to the exact sum as the rounding of
`mean` is. The line is left out where it cannot change the result (`ulps_of_copies` is 0).

`merging.averager` implements this with XLA on arrays, and `engine.sums` with NumPy on blocks of files. Their results
differ only where a value is subnormal (below 1.2e-38 in magnitude), because XLA flushes subnormal numbers to zero on
CPU and TPU; and where the sum of finite values overflows: the storage engine then adds in a wider dtype, while on
arrays the result is infinite. `merging.averager` leaves out the rounding of products that are exact
(`are_products_exact`), so that there a product that overflows may still give a finite sum.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError

# Of the dtypes that are exact in float32; 24 and 53 for float32 and float64.
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11} | {
    "float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e4m3b11fnuz": 4, "float8_e4m3": 4, "float8_e3m4": 5,
    "float8_e5m2": 3, "float8_e5m2fnuz": 3,
}  # fmt: skip
MAX_INTEGER_MULTIPLIER = 1024  # 11 bits: the product with a bfloat16 or float16 value is exact in float32


def validate_weights(weights_RxK: ArrayLike, count: int) -> np.ndarray:
    """Validate the weights (coefficients c_k) of R recipes for K = `count` checkpoints; return them as float64 [R, K].

    Raises:
        UserError: The weights are not a matrix with one finite weight per recipe and checkpoint.
    """
    rows = np.asarray(weights_RxK, np.float64)
    if rows.ndim != 2 or not len(rows):
        raise UserError(f"weights must be a matrix with one row per recipe, not of shape {rows.shape}")
    if not count or rows.shape[1] != count:
        raise UserError(f"{rows.shape[1]} weights for {count} checkpoints: give one weight per checkpoint")
    if not np.isfinite(rows).all():
        raise UserError("weights must be finite")
    return rows


def factor_coefficients(coefficients: ArrayLike) -> tuple[np.ndarray, float]:
    """Factor a row of coefficients into multipliers and one divisor: sum(c_k * x_k) = sum(m_k * x_k) / divisor.

    Coefficients in the ratio of small integers (the simple mean SMA 1 : 1 : …, the linearly weighted mean WMA
    1 : 2 : …) get these integers as multipliers. As long as the float32 sum is exact, a mean of bfloat16 inputs then
    rounds only in the division and in the cast to the output dtype; a multiplication of each input by float32(1/K)
    could round every term. Other coefficients are their own multipliers, with divisor 1.

    Args:
        coefficients: float64 [K]; zeros mark checkpoints that do not take part.

    Returns:
        The multipliers, float64 [K], and the divisor; coefficients = multipliers / divisor.
    """
    row = np.asarray(coefficients, np.float64)
    smallest = np.abs(row[row != 0]).min(initial=np.inf)
    if 1e-30 < smallest < 1e30:
        ratios = row / smallest
        integers = np.round(ratios)
        if np.abs(integers).max() <= MAX_INTEGER_MULTIPLIER and np.allclose(ratios, integers, rtol=1e-14, atol=0):
            divisor = 1.0 / smallest
            nearest = round(divisor)
            return integers, float(nearest) if nearest and abs(divisor - nearest) <= 1e-13 * divisor else divisor
    return row, 1.0


class RowFactors(NamedTuple):
    """Multipliers and divisors of R rows of coefficients, from `factor_coefficients`.

    Attributes:
        multipliers: float64 [R, K], one per row and checkpoint.
        divisors: float64 [R], one per row.
        first: int [R], index of the first (oldest) nonzero coefficient in each row, where the sum starts.
        last: int [R], index of the last (newest) nonzero coefficient in each row.
        has_negative: bool [R], whether a coefficient of the row is negative.
    """

    multipliers: np.ndarray
    divisors: np.ndarray
    first: np.ndarray
    last: np.ndarray
    has_negative: np.ndarray


def factor_rows(coefficients: ArrayLike) -> RowFactors:
    """Apply `factor_coefficients` to each row of float64 [R, K]."""
    rows, divisors = zip(*map(factor_coefficients, np.asarray(coefficients, np.float64)), strict=True)
    multipliers = np.stack(rows)
    first = np.argmax(multipliers != 0, axis=1)
    last = multipliers.shape[1] - 1 - np.argmax(multipliers[:, ::-1] != 0, axis=1)
    return RowFactors(multipliers, np.array(divisors), first, last, np.any(multipliers < 0, axis=1))


def is_average(coefficients: ArrayLike, dtype: str) -> bool:
    """Return whether coefficients [K] sum to 1, within the rounding of the dtype in which leaves of `dtype` are summed.

    A merge of equal inputs then returns them.
    """
    row = np.asarray(coefficients, np.float64)
    tolerance = 2.0 ** -_accumulation_bits(dtype) * (len(row) + 1) * math.fsum(np.abs(row))
    return abs(math.fsum(row) - 1) <= tolerance


def are_products_exact(coefficients: ArrayLike, dtype: str) -> bool:
    """Return whether float32 holds each product of a multiplier and a value of `dtype` exactly, unless it overflows."""
    multipliers, _ = factor_coefficients(coefficients)
    is_integer = bool((multipliers == np.round(multipliers)).all())
    bits = _SIGNIFICANT_BITS.get(dtype, _accumulation_bits(dtype))
    return is_integer and np.abs(multipliers).max(initial=0) * 2.0**bits <= 2.0**24


def ulps_of_copies(coefficients: ArrayLike, dtype: str, out_dtype: str) -> int:
    """Return by how many units in the last place the mean of copies of a value can differ from the value.

    It is 0 if the mean need not be compared with the mean of copies: no rounding can occur (integer multipliers, and
    few enough bits), or the rounding to the output dtype removes the error, or the coefficients do not sum to 1.

    Args:
        coefficients: float64 [K].
        dtype: Dtype of the inputs.
        out_dtype: Dtype of the result.
    """
    row = np.asarray(coefficients, np.float64)
    row = row[row != 0]
    multipliers, divisor = factor_coefficients(row)
    accumulation_bits = _accumulation_bits(dtype)
    bits = _SIGNIFICANT_BITS.get(dtype, accumulation_bits)
    is_integer = divisor == multipliers.sum() and bool((multipliers == np.round(multipliers)).all())
    # With a negative multiplier, copies of -0.0 sum to +0.0.
    is_positive = bool((row > 0).all())
    if is_positive and is_integer and np.abs(multipliers).sum() <= 2.0 ** (accumulation_bits - bits):
        return 0
    # Rounding the coefficients, K products, K - 1 sums and the quotient each cost at most half a unit of a partial sum.
    error = (len(row) + 4) * max(1.0, math.fsum(np.abs(row)))
    is_removed = is_positive and out_dtype == dtype and error < 2.0 ** (accumulation_bits - bits - 1)
    # Twice the error, because the value may be just above a power of two, below which a unit is half as large.
    return 0 if is_removed or not is_average(row, dtype) else math.ceil(2 * error)


def _accumulation_bits(dtype: str) -> int:
    return 53 if dtype == "float64" else 24
