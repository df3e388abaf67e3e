"""Medians and quartiles of repeated timings, as the benchmarks print them."""

import numpy as np
from numpy.typing import ArrayLike


def describe(seconds: ArrayLike, digits: int = 1) -> str:
    """Format the median of times in milliseconds, and their quartiles: "47.1 ms, 46.0 to 48.1"."""
    low, middle, high = np.percentile(np.asarray(seconds), [25, 50, 75]) * 1e3
    return f"{middle:.{digits}f} ms, {low:.{digits}f} to {high:.{digits}f}"


def quartiles(values: ArrayLike, digits: int) -> list[float]:
    """Return the lower quartile, the median and the upper quartile, rounded."""
    return [round(float(value), digits) for value in np.percentile(np.asarray(values), [25, 50, 75])]
