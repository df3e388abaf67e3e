"""Power-function averages and their reconstruction after training (Karras et al., EDM2, arXiv 2312.02696).

The average at token T weighs the parameters at token t by p(t) ∝ t^gamma on [0, T]: its width is a fixed share of the
training so far, where an exponential average's is a fixed number of tokens.
"""

import numpy as np
from numpy.typing import ArrayLike


def sigma_rel_from_gamma(gamma: float) -> float:
    """Relative width of the profile t^gamma: its standard deviation over T, sqrt((γ+1) / ((γ+2)² (γ+3)))."""
    if not gamma >= 0:
        raise ValueError(f"gamma = {gamma}: it must be 0 (the plain mean) or more")
    return float(np.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))))


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Exponent for a relative width: the largest root of γ³ + 7γ² + (16 - σ⁻²)γ + 12 - σ⁻² = 0.

    Args:
      sigma_rel: width as a share of the training so far; below 1/sqrt(12) = 0.2887, which is γ = 0, the plain mean.

    Raises:
      ValueError: sigma_rel is outside (0, 1/sqrt(12)].
    """
    if not 0 < sigma_rel <= 12**-0.5:
        raise ValueError(f"sigma_rel = {sigma_rel}: it must be above 0 and at most 0.2886 (the plain mean)")
    inverse = float(sigma_rel) ** -2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots.real.max()))


def power(tokens: ArrayLike | int, sigma_rel: float, start_tokens: float = 0.0) -> np.ndarray:
    """Power-function EMA over snapshots at any positions.

    Snapshot k stands for the parameters in (t_{k-1}, t_k], t_0 = `start_tokens`, so its coefficient is the profile's
    integral there: c_k = (t_k^(γ+1) - t_{k-1}^(γ+1)) / (t_K^(γ+1) - t_0^(γ+1)). From t_0 = 0 that is exactly what the
    running update theta_hat ← β_k theta_hat + (1 - β_k) theta_k with β_k = (1 - Δt_k / t_k)^(γ+1) has at t_K. The
    oldest snapshot then stands for all of training before it: when older ones were left out, set `start_tokens` to
    the last that was, and the profile is cut there and rescaled.

    Args:
      tokens: [K], positions in tokens, positive, increasing; or n, for even positions 1 … n from the run's start.
      sigma_rel: width of the profile as a share of t_K.
      start_tokens: where the profile begins; at most the oldest position.

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


def inner_product(tokens_a: ArrayLike, gamma_a: ArrayLike, tokens_b: ArrayLike, gamma_b: ArrayLike) -> np.ndarray:
    """Inner product of two power profiles, each t^γ on [0, its tokens] with unit mass (EDM2, appendix C).

    Broadcasts; float64. The unit is 1 / tokens.
    """
    t_a, g_a, t_b, g_b = (np.asarray(x, np.float64) for x in (tokens_a, gamma_a, tokens_b, gamma_b))
    earlier_share = np.minimum(t_a, t_b) / np.maximum(t_a, t_b)
    rho = earlier_share ** np.where(t_a < t_b, g_b, g_a)
    return (g_a + 1) * (g_b + 1) * rho / ((g_a + g_b + 1) * np.maximum(t_a, t_b))


def post_hoc(tokens: ArrayLike, gammas: ArrayLike, target_tokens: float, target_gamma: float) -> np.ndarray:
    """Coefficients over stored power EMAs that come closest to one that was never tracked (EDM2, section 3.2).

    Least squares between profiles: A x = B in float64, A_ij = <p_i, p_j> and B_i = <p_i, p_target>, then x over its
    sum. A is scaled to a unit diagonal first, because neighbouring profiles are nearly parallel.

    Args:
      tokens: [S], position of each stored average, any order; an average tracked with two exponents is two entries.
      gammas: [S], exponent of each.
      target_tokens: position of the wanted average; one of `tokens`. Averages stored later get 0.
      target_gamma: its exponent.

    Returns:
      float64 [S], sums to 1.

    Raises:
      ValueError: no average is stored at the target, or an entry is there twice.
    """
    t_S, gamma_S = np.asarray(tokens, np.float64), np.asarray(gammas, np.float64)
    if t_S.shape != gamma_S.shape or (t_S <= 0).any():
        raise ValueError("post_hoc needs one exponent for each stored average, all after token 0")
    if not (t_S == target_tokens).any():
        raise ValueError(
            f"no average is stored at {target_tokens:g} tokens: the nearest is at "
            f"{t_S[np.argmin(abs(t_S - target_tokens))]:g}"
        )
    if len(set(zip(t_S, gamma_S, strict=True))) < len(t_S):
        raise ValueError("an average with the same position and exponent is listed twice: keep one")
    used = np.flatnonzero(t_S <= target_tokens)
    t, gamma = t_S[used] / target_tokens, gamma_S[used]
    A = inner_product(t[:, None], gamma[:, None], t[None], gamma[None])
    B = inner_product(t, gamma, 1.0, target_gamma)
    scale = np.diag(A) ** -0.5
    x = scale * np.linalg.solve(A * scale[:, None] * scale, B * scale)
    out = np.zeros(len(t_S))
    out[used] = x / x.sum()
    return out
