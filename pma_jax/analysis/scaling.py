"""Fits of loss curves and scaling laws to measured losses."""

import dataclasses
import itertools

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """L(D) = floor + scale · D^-exponent, D in tokens, L in nats per token."""

    floor: float
    scale: float
    exponent: float

    def predict(self, tokens: ArrayLike) -> np.ndarray:
        """Predict the loss at `tokens`, in nats per token."""
        return self.floor + self.scale * np.asarray(tokens, np.float64) ** -self.exponent


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, Eq. 2); N parameters, D tokens.

    The fields `e`, `a` and `b` are E, A and B themselves, not their logarithms.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def predict(self, parameters: ArrayLike, tokens: ArrayLike) -> np.ndarray:
        """Predict the loss of a model with `parameters` parameters after `tokens` tokens, in nats per token."""
        n, d = np.asarray(parameters, np.float64), np.asarray(tokens, np.float64)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta


def fit_loss_curve(tokens: ArrayLike, losses: ArrayLike, huber_delta: float = 1e-3) -> LossCurve:
    """Fit a `LossCurve` by minimizing the Huber loss of the residuals of log L, from several starting points.

    Args:
        tokens: Tokens of each measurement, 1-D.
        losses: Loss of each measurement, in nats per token.
        huber_delta: Residual of log L above which the Huber loss is linear.

    Raises:
        UserError: There are fewer than 4 measurements (3 parameters are fitted), or a value is not above 0.
    """
    d, loss = _to_arrays(4, tokens=tokens, losses=losses)
    d0 = np.exp(np.log(d).mean())  # relative to this geometric mean, scale and exponent are nearly independent

    def model(x: np.ndarray) -> np.ndarray:
        return np.logaddexp(x[0], x[1] - np.exp(x[2]) * np.log(d / d0))

    starts = itertools.product(
        np.log(loss.min() * np.array([0.3, 0.7, 0.95])), np.log(loss.mean() * np.array([0.05, 0.5])), np.log([0.2, 0.6])
    )
    floor, scale, exponent = np.exp(_fit(model, np.log(loss), starts, huber_delta))
    return LossCurve(float(floor), float(scale * d0**exponent), float(exponent))


def fit_scaling_law(
    parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, huber_delta: float = 1e-3
) -> ScalingLaw:
    """Fit a `ScalingLaw` by minimizing the Huber loss of the residuals of log L (Hoffmann et al., Section 3.3).

    The result is the best fit from a grid of starting points.

    Args:
        parameters: Number of parameters of each measurement's model, 1-D.
        tokens: Tokens of each measurement.
        losses: Loss of each measurement, in nats per token.
        huber_delta: Residual of log L above which the Huber loss is linear.

    Raises:
        UserError: There are fewer than 6 measurements (5 parameters are fitted), a value is not above 0, or all
            measurements have the same number of parameters or tokens, so that the exponent cannot be determined.
    """
    n, d, loss = _to_arrays(6, parameters=parameters, tokens=tokens, losses=losses)
    for name, values in (("parameters", n), ("tokens", d)):
        if np.ptp(values) == 0:
            raise UserError(f"all measurements have the same number of {name} ({values[0]:g}): vary this number")
    n0, d0 = (np.exp(np.log(values).mean()) for values in (n, d))

    def model(x: np.ndarray) -> np.ndarray:
        parameter_term = x[1] - np.exp(x[3]) * np.log(n / n0)
        token_term = x[2] - np.exp(x[4]) * np.log(d / d0)
        return np.logaddexp(np.logaddexp(x[0], parameter_term), token_term)

    terms = np.log(loss.mean() * np.array([0.05, 0.4]))
    starts = itertools.product(np.log(loss.min() * np.array([0.3, 0.8])), terms, terms, *[np.log([0.2, 0.6])] * 2)
    e, a, b, alpha, beta = np.exp(_fit(model, np.log(loss), starts, huber_delta))
    return ScalingLaw(*map(float, (e, a * n0**alpha, b * d0**beta, alpha, beta)))


def _fit(model, target: np.ndarray, starts, huber_delta: float) -> np.ndarray:
    def residuals(x: np.ndarray) -> np.ndarray:
        return model(x) - target

    fits = [scipy.optimize.least_squares(residuals, start, loss="huber", f_scale=huber_delta) for start in starts]
    return min(fits, key=lambda fit: fit.cost).x


def _to_arrays(minimum: int, **measurements: ArrayLike) -> list[np.ndarray]:
    """Convert measurements to float64, and check their number, shapes and signs."""
    arrays = {name: np.asarray(values, np.float64) for name, values in measurements.items()}
    sizes = {values.shape for values in arrays.values()}
    if len(sizes) > 1 or len(next(iter(sizes))) != 1:
        raise UserError(f"expected 1-D arrays of equal length, not the shapes {[v.shape for v in arrays.values()]}")
    for name, values in arrays.items():
        if len(values) < minimum:
            raise UserError(f"the fit needs at least {minimum} measurements, not {len(values)}")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise UserError(f"{name} must be finite and above 0")
    return list(arrays.values())
