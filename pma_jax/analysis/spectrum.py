"""Merging as a filter: the spectrum of the parameters along training, and the frequency response of a recipe.

A recipe with coefficients c is a finite impulse response filter over snapshots. Its response at frequency f (cycles
per unit of position, by default per snapshot) is H(f) = sum_k c_k exp(-2 pi i f a_k), where the age a_k is the position
of the newest snapshot minus that of snapshot k. H(0) = sum_k c_k = 1, so a constant passes unchanged. Noise that is
independent between snapshots is white: the merge keeps a fraction |H(f)|^2 of its power at frequency f. Drift is
concentrated near f = 0. The mean age (lag) is -Im H'(0) / (2 pi).
Shape suffixes, joined by x: K snapshots, D directions, F frequencies.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import scipy.signal
from numpy.typing import ArrayLike

from pma_jax.analysis.curvature import inner_product


def frequency_response(
    coefficients_K: ArrayLike, frequencies_F: ArrayLike, positions_K: ArrayLike | None = None
) -> np.ndarray:
    """Compute the frequency response H(f) (see the module) of a recipe: complex128 [F].

    Args:
        coefficients_K: Coefficients of the recipe, oldest first.
        frequencies_F: Frequencies in cycles per unit of `positions_K`; with unit spacing, the Nyquist frequency is 0.5.
        positions_K: Positions of the snapshots in training, oldest first, such as tokens; by default 0, 1, 2, ...
    """
    coefficients = np.asarray(coefficients_K, np.float64)
    positions = np.arange(len(coefficients)) if positions_K is None else np.asarray(positions_K, np.float64)
    ages_K = positions[-1] - positions
    return np.exp(-2j * np.pi * np.outer(np.asarray(frequencies_F, np.float64), ages_K)) @ coefficients


def random_directions(like: Any, count: int, seed: int = 0) -> list[Any]:
    """Draw `count` random pytrees of unit L2 norm with the structure and shapes of `like`.

    If `like` has many elements, the pytrees are nearly orthogonal.
    """
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        optax.tree.scale(1 / optax.tree.norm(tree), tree)
        for tree in (optax.tree.random_like(key, like) for key in keys)
    ]


def projections(params_K: Iterable[Any], directions_D: Sequence[Any], origin: Any) -> np.ndarray:
    """Compute the inner product of params_k - origin with each direction: float64 [K, D].

    These are coordinates of the parameters if the directions have unit norm, as those of `random_directions` have.
    """
    rows = []
    for params in params_K:
        offset = optax.tree.sub(params, origin)
        rows.append([float(inner_product(offset, direction)) for direction in directions_D])
    return np.array(rows, np.float64)


def power_spectral_density(series_KxD: ArrayLike, interval: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the power spectral density of each of D series by a periodogram.

    Each series is detrended linearly and multiplied by a Hann window, so that drift does not leak into all frequencies.

    Args:
        series_KxD: D series of K evenly spaced values.
        interval: Spacing of the values, such as the snapshot interval in tokens.

    Returns:
        Frequencies [F] in cycles per unit in which `interval` is given (cycles per token for tokens), and densities
                [F, D], with F = K // 2 + 1.

    Raises:
        ValueError: There are fewer than 4 values.
    """
    series = np.asarray(series_KxD, np.float64)
    if len(series) < 4:
        raise ValueError(f"a series must have at least 4 values, not {len(series)}")
    return scipy.signal.periodogram(series, fs=1 / interval, window="hann", detrend="linear", axis=0)
