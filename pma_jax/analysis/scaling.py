"""Loss curves and scaling laws: fits that say how far they can be trusted.

Legend: n measurements.
"""

import dataclasses
import itertools

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """L(D) = floor + scale · D^-exponent, D in tokens, L in nats a token."""

    floor: float
    scale: float
    exponent: float

    def at(self, tokens: ArrayLike) -> np.ndarray:
        """The loss at so many tokens."""
        return self.floor + self.scale * np.asarray(tokens, np.float64) ** -self.exponent


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, Eq. 2); N parameters, D tokens."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def at(self, parameters: ArrayLike, tokens: ArrayLike) -> np.ndarray:
        """The loss of a model of so many parameters at so many tokens."""
        n, d = np.asarray(parameters, np.float64), np.asarray(tokens, np.float64)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta


def fit_loss_curve(tokens_n: ArrayLike, loss_n: ArrayLike, huber: float = 1e-3) -> LossCurve:
    """The curve of least Huber loss in log L (threshold `huber`), the best of several starts.

    Raises ValueError for fewer than 4 points (3 numbers are fitted), or where tokens or losses are not above 0.
    """
    tokens, loss = _checked(4, tokens=tokens_n, loss=loss_n)
    middle = np.exp(np.log(tokens).mean())  # fitted around it: exponent and scale are then nearly independent

    def model(x: np.ndarray) -> np.ndarray:
        return np.logaddexp(x[0], x[1] - np.exp(x[2]) * np.log(tokens / middle))

    starts = itertools.product(
        np.log(loss.min() * np.array([0.3, 0.7, 0.95])), np.log(loss.mean() * np.array([0.05, 0.5])), np.log([0.2, 0.6])
    )
    floor, scale, exponent = np.exp(_fit(model, np.log(loss), starts, huber))
    return LossCurve(float(floor), float(scale * middle**exponent), float(exponent))


def fit_scaling_law(parameters_n: ArrayLike, tokens_n: ArrayLike, loss_n: ArrayLike, huber: float = 1e-3) -> ScalingLaw:
    """The law of least Huber loss in log L over all starts of a grid (Hoffmann et al., Section 3.3).

    Raises ValueError for fewer than 6 points (5 numbers are fitted), for values that are not above 0, and where
    parameters or tokens are all the same: one exponent could then be anything.
    """
    parameters, tokens, loss = _checked(6, parameters=parameters_n, tokens=tokens_n, loss=loss_n)
    for name, values in (("parameters", parameters), ("tokens", tokens)):
        if np.ptp(values) == 0:
            raise ValueError(f"all measurements have the same {name} ({values[0]:g}): vary them to fit its exponent")
    n0, d0 = (np.exp(np.log(values).mean()) for values in (parameters, tokens))

    def model(x: np.ndarray) -> np.ndarray:
        by_size = x[1] - np.exp(x[3]) * np.log(parameters / n0)
        by_tokens = x[2] - np.exp(x[4]) * np.log(tokens / d0)
        return np.logaddexp(np.logaddexp(x[0], by_size), by_tokens)

    shares = np.log(loss.mean() * np.array([0.05, 0.4]))
    starts = itertools.product(np.log(loss.min() * np.array([0.3, 0.8])), shares, shares, *[np.log([0.2, 0.6])] * 2)
    e, a, b, alpha, beta = np.exp(_fit(model, np.log(loss), starts, huber))
    return ScalingLaw(*map(float, (e, a * n0**alpha, b * d0**beta, alpha, beta)))


def _fit(model, target: np.ndarray, starts, huber: float) -> np.ndarray:
    def residuals(x: np.ndarray) -> np.ndarray:
        return model(x) - target

    fits = [scipy.optimize.least_squares(residuals, start, loss="huber", f_scale=huber) for start in starts]
    return min(fits, key=lambda fit: fit.cost).x


def _checked(least: int, **named: ArrayLike) -> list[np.ndarray]:
    arrays = {name: np.asarray(values, np.float64) for name, values in named.items()}
    sizes = {values.shape for values in arrays.values()}
    if len(sizes) > 1 or len(next(iter(sizes))) != 1:
        raise ValueError(f"give one number a measurement: the shapes are {[v.shape for v in arrays.values()]}")
    for name, values in arrays.items():
        if len(values) < least:
            raise ValueError(f"{len(values)} measurements are too few for this fit: give {least} or more")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{name} must be finite and above 0")
    return list(arrays.values())
