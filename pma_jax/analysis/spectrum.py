"""Merging as a filter: the spectrum of the parameters along training, and the frequency response of a recipe.

A recipe is a finite impulse response filter over snapshots. Its response at frequency f (cycles per snapshot) is
H(f) = sum_k c_k exp(-2 pi i f a_k), with the age a_k of snapshot k. H(0) = 1: a constant passes unchanged. Independent
noise of the snapshots is white, and a fraction |H|^2 of its power passes. Drift is near f = 0, and -Im H'(0) / 2 pi is
the mean age, the lag.
Shape suffixes: K snapshots, D directions, F frequencies.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import scipy.signal
from numpy.typing import ArrayLike

from pma_jax.analysis.curvature import inner_product


def frequency_response(
    weights_K: ArrayLike, frequencies_F: ArrayLike, positions_K: ArrayLike | None = None
) -> np.ndarray:
    """Compute the frequency response H(f) of a recipe, complex128 [F].

    Args:
        weights_K: Coefficients, oldest first.
        frequencies_F: Frequencies in cycles per unit of `positions_K`; 0.5 is the Nyquist frequency of unit spacing.
        positions_K: Positions of the snapshots, such as tokens; by default 0, 1, 2, ...
    """
    weights = np.asarray(weights_K, np.float64)
    positions = np.arange(len(weights)) if positions_K is None else np.asarray(positions_K, np.float64)
    ages_K = positions[-1] - positions
    return np.exp(-2j * np.pi * np.outer(np.asarray(frequencies_F, np.float64), ages_K)) @ weights


def random_directions(like: Any, count: int, seed: int = 0) -> list[Any]:
    """Draw `count` random unit trees with the shapes of `like`; with many parameters they are nearly orthogonal."""
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        optax.tree.scale(1 / optax.tree.norm(tree), tree)
        for tree in (optax.tree.random_like(key, like) for key in keys)
    ]


def projections(params_K: Sequence[Any], directions_D: Sequence[Any], origin: Any) -> np.ndarray:
    """Compute (theta_k - origin) · direction_d, float64 [K, D]; `params_K` may be a generator of trees."""
    rows = []
    for params in params_K:
        offset = optax.tree.sub(params, origin)
        rows.append([float(inner_product(offset, direction)) for direction in directions_D])
    return np.array(rows, np.float64)


def power_spectrum(series_KxD: ArrayLike, interval: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the power spectral density of each of D series by a periodogram.

    Each series is detrended linearly and multiplied by a Hann window, so that drift does not leak into all frequencies.

    Args:
        series_KxD: D series of K evenly spaced values.
        interval: Spacing of the values.

    Returns:
        Frequencies [F], in cycles per unit of `interval`, and densities [F, D], with F = K // 2 + 1.

    Raises:
        ValueError: There are fewer than 4 values.
    """
    series = np.asarray(series_KxD, np.float64)
    if len(series) < 4:
        raise ValueError(f"a spectrum needs 4 or more snapshots, not {len(series)}")
    return scipy.signal.periodogram(series, fs=1 / interval, window="hann", detrend="linear", axis=0)
