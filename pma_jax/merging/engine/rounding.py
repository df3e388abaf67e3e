"""The arithmetic of a weighted sum, defined in one place so that all implementations of merging give the same bits.

The sum over checkpoints k of c_k theta_k is evaluated element by element in the accumulation dtype (float32; float64
for float64 leaves):

    total = m_f * theta_f                       f is the oldest checkpoint with a nonzero coefficient
    total = total + m_k * theta_k               k = f + 1, …; the product is rounded before it is added (no FMA)
    merged = round_to_output(total / divisor)   one division; round to nearest, ties to even

with c_k = m_k / divisor in float64 from `factor_coefficients`; m_k and divisor are then rounded to the accumulation
dtype. `merging.averager` implements this with XLA on arrays, and `engine.sums` with NumPy on blocks of files. Their
results differ only where a value is subnormal (below 1.2e-38 in magnitude), because XLA flushes subnormal numbers to
zero on CPU and TPU.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError

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
        if np.abs(integers).max() <= MAX_INTEGER_MULTIPLIER and np.allclose(ratios, integers, rtol=1e-12, atol=0):
            divisor = 1.0 / smallest
            nearest = round(divisor)
            return integers, float(nearest) if nearest and abs(divisor - nearest) <= 1e-9 * divisor else divisor
    return row, 1.0


class RowFactors(NamedTuple):
    """Multipliers and divisors of R rows of coefficients, from `factor_coefficients`.

    Attributes:
        multipliers: float64 [R, K], one per row and checkpoint.
        divisors: float64 [R], one per row.
        first: int [R], index of the first (oldest) nonzero coefficient in each row, where the sum starts.
    """

    multipliers: np.ndarray
    divisors: np.ndarray
    first: np.ndarray


def factor_rows(coefficients: ArrayLike) -> RowFactors:
    """Apply `factor_coefficients` to each row of float64 [R, K]."""
    rows, divisors = zip(*map(factor_coefficients, np.asarray(coefficients, np.float64)), strict=True)
    multipliers = np.stack(rows)
    return RowFactors(multipliers, np.array(divisors), np.argmax(multipliers != 0, axis=1))
