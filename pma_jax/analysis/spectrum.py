"""Merging as a filter: what moves in the weights at which rate, and what a recipe lets through.

A recipe is a finite impulse response over snapshots; its response at frequency f (cycles a snapshot) is
H(f) = sum_k c_k exp(-2 pi i f a_k), a_k the age of snapshot k. H(0) = 1: what does not move stays. Noise between
snapshots is white, |H|^2 passes of it; drift is near f = 0, and -Im H'(0) / 2 pi is the mean age, the lag.
Legend: K snapshots, D directions, F frequencies.
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
    """H(f) of a recipe, complex128 [F].

    Args:
        weights_K: coefficients, oldest first.
        frequencies_F: in cycles a unit of `positions_K`; 0.5 is the fastest that evenly spaced snapshots show.
        positions_K: of the snapshots, such as tokens; by default 0, 1, 2, ...
    """
    weights = np.asarray(weights_K, np.float64)
    positions = np.arange(len(weights)) if positions_K is None else np.asarray(positions_K, np.float64)
    ages_K = positions[-1] - positions
    return np.exp(-2j * np.pi * np.outer(np.asarray(frequencies_F, np.float64), ages_K)) @ weights


def random_directions(like: Any, count: int, seed: int = 0) -> list[Any]:
    """`count` trees of the shapes of `like`, normal and of length 1: nearly orthogonal where parameters are many."""
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        optax.tree.scale(1 / optax.tree.norm(tree), tree)
        for tree in (optax.tree.random_like(key, like) for key in keys)
    ]


def projections(params_K: Sequence[Any], directions_D: Sequence[Any], origin: Any) -> np.ndarray:
    """(theta_k - origin) · direction_d: float64 [K, D]. Drawn one tree at a time: `params_K` may be a generator."""
    rows = []
    for params in params_K:
        offset = optax.tree.sub(params, origin)
        rows.append([float(inner_product(offset, direction)) for direction in directions_D])
    return np.array(rows, np.float64)


def power_spectrum(series_KxD: ArrayLike, interval: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Power a frequency of each series: frequencies [F] in cycles a unit of `interval`, density [F, D].

    The straight line of each is taken out first and a Hann window laid on: drift would else leak into all frequencies.
    F = K // 2 + 1. Raises ValueError for fewer than 4 points.
    """
    series = np.asarray(series_KxD, np.float64)
    if len(series) < 4:
        raise ValueError(f"{len(series)} snapshots have no spectrum to speak of: give 4 or more")
    return scipy.signal.periodogram(series, fs=1 / interval, window="hann", detrend="linear", axis=0)
