"""Merging as a filter: the frequency response of a recipe.

A recipe with coefficients c is a finite impulse response filter over snapshots. Its response at frequency f (cycles
per unit of position, by default per snapshot) is H(f) = sum_k c_k exp(-2 pi i f a_k), where the age a_k is the position
of the newest snapshot minus that of snapshot k. H(0) = sum_k c_k = 1, so a constant passes unchanged. Noise that is
independent between snapshots is white: the merge keeps a fraction |H(f)|^2 of its power at frequency f. Drift is
concentrated near f = 0. The mean age (lag) is -Im H'(0) / (2 pi).
Shape suffixes: K snapshots, F frequencies.
"""

import numpy as np
from numpy.typing import ArrayLike


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
