"""Fits of loss curves and scaling laws to n measurements."""

import dataclasses
import itertools

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """L(D) = floor + scale · D^-exponent, D in tokens, L in nats per token."""

    floor: float
    scale: float
    exponent: float

    def at(self, tokens: ArrayLike) -> np.ndarray:
        """Predict the loss at `tokens`, in nats per token."""
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
        """Predict the loss of a model with `parameters` parameters after `tokens` tokens, in nats per token."""
        n, d = np.asarray(parameters, np.float64), np.asarray(tokens, np.float64)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta


def fit_loss_curve(tokens_n: ArrayLike, loss_n: ArrayLike, huber: float = 1e-3) -> LossCurve:
    """Fit a `LossCurve` by the Huber loss of log L, and return the best fit over several starting points.

    Args:
        tokens_n: Tokens of each measurement.
        loss_n: Loss of each measurement, in nats per token.
        huber: Threshold of the Huber loss, in log L.

    Raises:
        ValueError: There are fewer than 4 measurements (3 parameters are fitted), or a value is not above 0.
    """
    tokens, loss = _checked(4, tokens=tokens_n, loss=loss_n)
    middle = np.exp(np.log(tokens).mean())  # centred, so that exponent and scale are nearly independent

    def model(x: np.ndarray) -> np.ndarray:
        return np.logaddexp(x[0], x[1] - np.exp(x[2]) * np.log(tokens / middle))

    starts = itertools.product(
        np.log(loss.min() * np.array([0.3, 0.7, 0.95])), np.log(loss.mean() * np.array([0.05, 0.5])), np.log([0.2, 0.6])
    )
    floor, scale, exponent = np.exp(_fit(model, np.log(loss), starts, huber))
    return LossCurve(float(floor), float(scale * middle**exponent), float(exponent))


def fit_scaling_law(parameters_n: ArrayLike, tokens_n: ArrayLike, loss_n: ArrayLike, huber: float = 1e-3) -> ScalingLaw:
    """Fit a `ScalingLaw` by the Huber loss of log L, from a grid of starting points (Hoffmann et al., Section 3.3).

    Args:
        parameters_n: Number of parameters of each measurement's model.
        tokens_n: Tokens of each measurement.
        loss_n: Loss of each measurement, in nats per token.
        huber: Threshold of the Huber loss, in log L.

    Raises:
        ValueError: There are fewer than 6 measurements (5 parameters are fitted), a value is not above 0, or all
            measurements have the same number of parameters or tokens, which leaves its exponent undetermined.
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
        raise ValueError(f"give one number per measurement: the shapes are {[v.shape for v in arrays.values()]}")
    for name, values in arrays.items():
        if len(values) < least:
            raise ValueError(f"{len(values)} measurements are too few for this fit: give {least} or more")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{name} must be finite and above 0")
    return list(arrays.values())
