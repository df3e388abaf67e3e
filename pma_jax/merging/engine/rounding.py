"""The arithmetic of a weighted sum, defined once so that every way to merge gives the same bits.

sum_k c_k theta_k is evaluated element by element in the accumulation dtype (float32; float64 for float64 leaves):

    total = m_1 * theta_1                       the oldest checkpoint with a nonzero coefficient
    total = total + m_k * theta_k               oldest first; the product is rounded before it is added (no FMA)
    merged = round_to_output(total / divisor)   one division; round to nearest, ties to even

with float64 c_k = m_k / divisor from `split_coefficients`, m_k and divisor rounded to the accumulation dtype.
`averager` implements this with XLA on arrays, `engine.sums` with NumPy on blocks of files. Their results differ only
where a value is subnormal (below 1.2e-38 in magnitude), because XLA flushes subnormal numbers to zero on CPU and TPU.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

LARGEST_INTEGER = 1024  # 11 bits: its product with a bfloat16 or float16 value is exact in float32


def check_rows(rows_RxK: ArrayLike, count: int) -> np.ndarray:
    """Return rows of weights for `count` checkpoints as float64 [R, K].

    Raises:
        ValueError: They are not a matrix with one finite weight per recipe and checkpoint.
    """
    rows = np.asarray(rows_RxK, np.float64)
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"weights must be a matrix with one row per recipe, not of shape {rows.shape}")
    if not count or rows.shape[1] != count:
        raise ValueError(f"{rows.shape[1]} weights for {count} checkpoints: give one weight per checkpoint")
    if not np.isfinite(rows).all():
        raise ValueError("weights must be finite")
    return rows


def split_coefficients(coefficients: ArrayLike) -> tuple[np.ndarray, float]:
    """Split a row of coefficients into multipliers for the sum and one divisor for the end.

    Coefficients in integer ratios (SMA 1 : 1 : …, WMA 1 : 2 : …) become those integers, so that the mean of bfloat16
    inputs is the correctly rounded one; multiplying each input by float32(1/K) is not. Other coefficients keep their
    values, with divisor 1.

    Args:
        coefficients: float64 [K]; zeros mark checkpoints that do not take part.

    Returns:
        Multipliers, float64 [K], and the divisor, with coefficients = multipliers / divisor.
    """
    row = np.asarray(coefficients, np.float64)
    smallest = np.abs(row[row != 0]).min(initial=np.inf)
    if 1e-30 < smallest < 1e30:
        ratios = row / smallest
        integers = np.round(ratios)
        if np.abs(integers).max() <= LARGEST_INTEGER and np.allclose(ratios, integers, rtol=1e-12, atol=0):
            divisor = 1.0 / smallest
            nearest = round(divisor)
            return integers, float(nearest) if nearest and abs(divisor - nearest) <= 1e-9 * divisor else divisor
    return row, 1.0


class SplitRows(NamedTuple):
    """Rows of coefficients as `split_coefficients` splits them.

    Attributes:
        multipliers: float64 [R, K], of each checkpoint.
        divisors: float64 [R], of each finished sum.
        first: int [R], the first checkpoint with a nonzero coefficient, which starts the sum.
    """

    multipliers: np.ndarray
    divisors: np.ndarray
    first: np.ndarray


def split_rows(coefficients: ArrayLike) -> SplitRows:
    """Apply `split_coefficients` to each row of float64 [R, K]."""
    rows, divisors = zip(*map(split_coefficients, np.asarray(coefficients, np.float64)), strict=True)
    multipliers = np.stack(rows)
    return SplitRows(multipliers, np.array(divisors), np.argmax(multipliers != 0, axis=1))
