"""Power-function averages of snapshots (Karras et al., EDM2, arXiv 2312.02696, Section 3.1).

The average at token T weights the parameters at token t by the profile p(t) ∝ t^γ on [0, T]. Its width is a fixed
fraction of the training so far; the width of an exponential average is a fixed number of tokens.
"""

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError
from pma_jax.merging.decay import increasing_positions


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Return the exponent γ of the profile t^γ whose standard deviation is `sigma_rel` · T.

    The relative width is sqrt((γ+1) / ((γ+2)² (γ+3))), so γ is the largest root of
    γ³ + 7γ² + (16 - σ⁻²)γ + 12 - σ⁻² = 0.

    Args:
        sigma_rel: Relative width, in (0, 0.2887]. From 1/sqrt(12) = 0.28867… on, γ is 0: the plain mean.

    Raises:
        UserError: sigma_rel is out of range.
    """
    if not 0 < sigma_rel <= 0.2887:  # 1/sqrt(12), rounded up
        raise UserError(f"sigma_rel = {sigma_rel}: it must be above 0 and at most 0.2887 (the plain mean)")
    inverse = float(sigma_rel) ** -2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots.real.max()))


def power(tokens: ArrayLike | int, sigma_rel: float, start_tokens: float = 0.0) -> np.ndarray:
    """Return the coefficients of a power-function EMA over snapshots at any positions.

    Snapshot k represents the parameters in (t_{k-1}, t_k], with t_0 = `start_tokens`, so its coefficient is the
    integral of the profile there:
        c_k = (t_k^(γ+1) - t_{k-1}^(γ+1)) / (t_K^(γ+1) - t_0^(γ+1)).
    With t_0 = 0 they equal the coefficients, at t_K, of the running update
        theta_hat ← β_k theta_hat + (1 - β_k) theta_k,  β_k = (1 - Δt_k / t_k)^(γ+1).
    In that case the oldest snapshot also represents all training before it. If older snapshots are left out, set
    `start_tokens` to the position of the newest of these.

    Args:
        tokens: [K], positions in tokens, positive and strictly increasing. Or the number of snapshots n, for evenly
            spaced positions 1 … n.
        sigma_rel: Width of the profile as a fraction of t_K.
        start_tokens: Position at which the profile begins, at or after 0 and before the oldest snapshot.

    Returns:
        float64 [K], sums to 1, oldest first.

    Raises:
        UserError: sigma_rel or start_tokens is out of range, or positions are not positive or do not increase.
    """
    gamma = gamma_from_sigma_rel(sigma_rel)
    t = increasing_positions(np.arange(1.0, tokens + 1) if isinstance(tokens, int) else tokens)
    if t[0] <= 0:
        raise UserError("power needs positions after token 0: leave out the snapshot at token 0")
    if not 0 <= start_tokens < t[0]:
        raise UserError(f"start_tokens = {start_tokens:g}: it must be at least 0 and before the oldest ({t[0]:g})")
    cumulative = (np.concatenate(([start_tokens], t)) / t[-1]) ** (gamma + 1)
    return np.diff(cumulative) / (1.0 - cumulative[0])
