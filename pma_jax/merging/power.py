"""Power-function averages of snapshots (Karras et al., EDM2, arXiv 2312.02696, Section 3.1).

The average at token T weights the parameters at token t by p(t) ∝ t^γ on [0, T]. Its width is a fixed fraction of the
training so far; the width of an exponential average is a fixed number of tokens.
"""

import numpy as np
from numpy.typing import ArrayLike


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Return the exponent γ of the profile t^γ whose standard deviation is `sigma_rel` · T.

    The relative width is sqrt((γ+1) / ((γ+2)² (γ+3))), so γ is the largest root of
    γ³ + 7γ² + (16 - σ⁻²)γ + 12 - σ⁻² = 0.

    Args:
        sigma_rel: Relative width in (0, 1/sqrt(12)] = (0, 0.2887], where the upper end is γ = 0, the plain mean.

    Raises:
        ValueError: sigma_rel is out of range.
    """
    if not 0 < sigma_rel <= 12**-0.5:
        raise ValueError(f"sigma_rel = {sigma_rel}: it must be above 0 and at most 0.2886 (the plain mean)")
    inverse = float(sigma_rel) ** -2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots.real.max()))


def power(tokens: ArrayLike | int, sigma_rel: float, start_tokens: float = 0.0) -> np.ndarray:
    """Return the coefficients of a power-function EMA over snapshots at any positions.

    Snapshot k represents the parameters in (t_{k-1}, t_k], with t_0 = `start_tokens`, so its coefficient is the
    integral of the profile there:
        c_k = (t_k^(γ+1) - t_{k-1}^(γ+1)) / (t_K^(γ+1) - t_0^(γ+1)).
    With t_0 = 0 these are the coefficients that the running update theta_hat ← β_k theta_hat + (1 - β_k) theta_k,
    β_k = (1 - Δt_k / t_k)^(γ+1), has at t_K. The oldest snapshot then represents all of training before it: if older
    snapshots were left out, set `start_tokens` to the position of the last of them.

    Args:
        tokens: [K], positions in tokens, positive, increasing; or n, for even positions 1 … n from the run's start.
        sigma_rel: Width of the profile as a fraction of t_K.
        start_tokens: Where the profile begins, before the oldest position.

    Returns:
        float64 [K], sums to 1, oldest first.

    Raises:
        ValueError: sigma_rel or start_tokens is out of range, or a position is not positive.
    """
    gamma = gamma_from_sigma_rel(sigma_rel)
    t = np.arange(1.0, tokens + 1) if isinstance(tokens, int) else np.asarray(tokens, np.float64)
    if len(t) == 0 or t[0] <= 0:
        raise ValueError("power needs at least one checkpoint, all after token 0: leave the initial one out")
    if not 0 <= start_tokens < t[0]:
        raise ValueError(f"start_tokens = {start_tokens:g}: it must be at least 0 and before the oldest ({t[0]:g})")
    mass = (np.concatenate(([start_tokens], t)) / t[-1]) ** (gamma + 1)
    return np.diff(mass) / (1.0 - mass[0])
