"""Recipes: token positions of checkpoints -> coefficients. Every merge is a weighted sum.

PMA (arXiv 2505.12082), Eq. 1: M_avg = sum_i w_i M_i over the checkpoints of one trajectory, oldest first. A recipe
gives the w_i, float64 [K] on the host, which sum to 1. Decay shapes are in decay.py, power-function EMAs in power.py
and local fits in lagfree.py; all are exported here.

A recipe as text is `NAME[:PARAMETER=VALUE,…][:WINDOW]`: `sma`, `ema:alpha=0.2:10`, `decay:shape=cosine`,
`lagfree:lag=0.5,order=1`, `weights:0.2,0.3,0.5`. The window is the number of newest checkpoints that take part.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config import DECAY_SHAPES
from pma_jax.config.errors import UserError
from pma_jax.merging.decay import decay, decay_at, from_update_weights, increasing_positions
from pma_jax.merging.lagfree import lagfree, mean_age
from pma_jax.merging.power import gamma_from_sigma_rel, power

__all__ = [
    "Recipe",
    "coefficients",
    "decay",
    "decay_at",
    "ema",
    "ema_closed",
    "from_update_weights",
    "gamma_from_sigma_rel",
    "lagfree",
    "lawa",
    "mean_age",
    "parse",
    "power",
    "sma",
    "weights",
    "wma",
]

SUM_TOLERANCE = 1e-6  # of explicit weights, which are rounded decimals


def sma(n: int) -> np.ndarray:
    """Return the weights of the simple moving average, PMA Eq. 3: w_i = 1/N; float64 [n]."""
    _check_count("sma", n)
    return np.full(n, 1.0 / n)


def ema(n: int, alpha: float) -> np.ndarray:
    """Return the weights of the exponential moving average, PMA Eq. 4: M^(i) = α M_i + (1-α) M^(i-1), M^(1) = M_1.

    So w_i = α (1-α)^(N-i), and the oldest checkpoint, where the recursion starts, gets (1-α)^(N-1). Section 4.2 of the
    paper also prints a closed form without that start (`ema_closed`). The recursion must be what the paper used: it
    sums to 1, where the printed closed form does not (0.651 for α = 0.1, N = 10), and only its mean ages (in intervals,
    N = 10: WMA 3.00 < EMA 0.2 3.46 < SMA 4.50 < EMA 0.1 5.51) order the methods as Figure 4 does at 204B tokens.

    Args:
        n: Number of checkpoints.
        alpha: Weight of the NEW model, in (0, 1]; the `decay` of many libraries is 1 - alpha.

    Returns:
        float64 [n], sums to 1, oldest first.
    """
    _check_count("ema", n)
    _check_alpha(alpha)
    w = alpha * (1.0 - alpha) ** np.arange(n - 1, -1, -1, dtype=np.float64)
    w[0] = (1.0 - alpha) ** (n - 1)
    return w


def ema_closed(n: int, alpha: float) -> np.ndarray:
    """Return EMA's closed form, PMA Section 4.2, over its sum: w_i = α (1-α)^(N-i) / (1 - (1-α)^N); float64 [n]."""
    _check_count("ema_closed", n)
    _check_alpha(alpha)
    w = (1.0 - alpha) ** np.arange(n - 1, -1, -1, dtype=np.float64)
    return w / w.sum()


def wma(n: int) -> np.ndarray:
    """Return the weighted moving average's weights, PMA Eq. 5: w_i = i / (N(N+1)/2), i = 1 the oldest; float64 [n]."""
    _check_count("wma", n)
    return np.arange(1, n + 1) / (n * (n + 1) / 2)


def lawa(n: int) -> np.ndarray:
    """Return the weights of latest weight averaging (LAWA, arXiv 2209.14981): `sma`'s, float64 [n].

    LAWA is the mean of the k latest checkpoints. As text its k is the window: `lawa:5`.
    """
    return sma(n)


def weights(values: ArrayLike, normalize: bool = False) -> np.ndarray:
    """Validate explicit weights, of which some may be negative.

    Args:
        values: [n], finite, oldest first.
        normalize: Divide by the sum. Otherwise the sum must be 1 within 1e-6, and is then made exactly 1.

    Returns:
        float64 [n], sums to 1.

    Raises:
        UserError: A weight is not finite, or the sum is not 1 (with `normalize`: is 0).
    """
    w = np.asarray(values, np.float64)
    if w.ndim != 1 or len(w) == 0 or not np.isfinite(w).all():
        raise UserError("weights must be a list of finite numbers, one per checkpoint")
    total = math.fsum(w)
    if normalize and abs(total) < SUM_TOLERANCE * np.abs(w).sum():
        raise UserError("weights that sum to 0 cannot be normalised")
    if not normalize and abs(total - 1.0) > SUM_TOLERANCE:
        raise UserError(f"weights sum to {total:.7g}, not 1: correct them or ask to normalise (normalize=true)")
    return w / total


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A parsed recipe."""

    text: str
    name: str
    params: tuple[tuple[str, Any], ...]  # (name, value), in canonical order
    window: int | None  # newest checkpoints that take part; None: all


def parse(text: str) -> Recipe:
    """Parse a recipe's text; the module's docstring has the grammar.

    Raises:
        UserError: The name, a parameter or a value is invalid; the message suggests the nearest valid one.
    """
    name, *parts = [part.strip() for part in text.strip().split(":")]
    method = _method(name)
    if "" in parts:
        raise UserError(f"{text!r} has nothing after a colon: write {method.example}, then a window such as :10")
    # In `weights:1` the 1 is a weight, so the window of `weights` can only come third.
    lists_values = name == "weights"
    window = None
    if parts and _is_integer(parts[-1]) and not (lists_values and len(parts) == 1):
        window = int(parts.pop())
        if window < 1:
            raise UserError(f"the window in {text!r} must be at least 1 checkpoint")
    if len(parts) > 1:
        raise UserError(f"{text!r} has too many parts: write {method.example}, then a window such as :10")
    recipe = Recipe(text, name, _parse_params(name, parts[0] if parts else ""), window)
    # Evaluate it once, so that values out of range are reported now and not after checkpoints were read.
    trial = dict(recipe.params)
    size = window or len(trial["values"]) if lists_values else min(window or 3, 3)
    method.row(np.arange(1, size + 1) * 10**15, **trial)
    return recipe


def coefficients(text: str, tokens: ArrayLike) -> np.ndarray:
    """Return the coefficients of a recipe over these checkpoints.

    Args:
        text: The recipe.
        tokens: Integers [K], token positions of the checkpoints, oldest first, increasing.

    Returns:
        float64 [K], sums to 1; 0 for checkpoints older than the window.

    Raises:
        UserError: The recipe is invalid, positions do not increase, or there are fewer checkpoints than the window.
    """
    recipe = parse(text)
    t = increasing_positions(tokens)
    window = len(t) if recipe.window is None else recipe.window
    if window > len(t):
        raise UserError(f"{text} asks for {window} checkpoints and there are {len(t)}: choose a smaller window")
    row = np.zeros(len(t))
    row[len(t) - window :] = _method(recipe.name).row(t[len(t) - window :], **dict(recipe.params))
    return row


@dataclasses.dataclass(frozen=True)
class _Method:
    """A recipe's coefficients as a function of positions, and the parameters of its text form."""

    row: Callable[..., np.ndarray]  # (tokens [K], **params) -> float64 [K]
    params: dict[str, type]
    required: tuple[str, ...]
    example: str


def _explicit(tokens: np.ndarray, values: tuple[float, ...], normalize: bool = False) -> np.ndarray:
    if len(values) != len(tokens):
        raise UserError(f"{len(values)} weights for {len(tokens)} checkpoints: give one each, oldest first")
    return weights(values, normalize)


def _lagfree(tokens: np.ndarray, lag: float = 0.0, order: int = 1) -> np.ndarray:
    return lagfree(tokens, lag, order)


_METHODS = {
    "sma": _Method(lambda t: sma(len(t)), {}, (), "sma"),
    "ema": _Method(lambda t, alpha: ema(len(t), alpha), {"alpha": float}, ("alpha",), "ema:alpha=0.2"),
    "ema_closed": _Method(
        lambda t, alpha: ema_closed(len(t), alpha), {"alpha": float}, ("alpha",), "ema_closed:alpha=0.2"
    ),
    "wma": _Method(lambda t: wma(len(t)), {}, (), "wma"),
    "lawa": _Method(lambda t: lawa(len(t)), {}, (), "lawa:5"),
    "decay": _Method(decay_at, {"shape": str}, ("shape",), "decay:shape=cosine"),
    "power": _Method(power, {"sigma_rel": float, "start_tokens": float}, ("sigma_rel",), "power:sigma_rel=0.1"),
    "lagfree": _Method(_lagfree, {"lag": float, "order": int}, (), "lagfree:lag=0.5,order=1"),
    "weights": _Method(_explicit, {"normalize": bool}, (), "weights:0.2,0.3,0.5"),
}


def _method(name: str) -> _Method:
    if name not in _METHODS:
        raise UserError(f"no recipe is called {name!r}: {_nearest(name, _METHODS)}")
    return _METHODS[name]


def _parse_params(name: str, text: str) -> tuple:
    """Parse `key=value,…` (for `weights`, bare numbers first) into the recipe's parameters, in canonical order."""
    method = _METHODS[name]
    given: dict[str, object] = {}
    values: list[float] = []
    for item in (part.strip() for part in text.split(",")) if text else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if name == "weights" and not equals:
            values.append(_convert(name, "weight", float, item))
            continue
        if key not in method.params or not equals:
            takes = ", ".join(method.params)
            hint = _nearest(key, method.params) if method.params else f"{name} takes no parameters"
            raise UserError(
                f"{name} has no parameter {key!r}: {hint}"
                if equals or not takes
                else f"cannot read {item!r} in {name}: write {method.example}"
            )
        if key in given:
            raise UserError(f"{name} is given {key} twice: keep one")
        given[key] = _convert(name, key, method.params[key], value)
    missing = [key for key in method.required if key not in given]
    if missing or (name == "weights" and not values):
        raise UserError(f"{name} needs {' and '.join(missing) or 'its weights'}: for example {method.example}")
    listed = (("values", tuple(values)),) if name == "weights" else ()
    return listed + tuple((key, given[key]) for key in method.params if key in given)


def _convert(name: str, key: str, kind: type, text: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except (ValueError, KeyError):
        wanted = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}[kind]
        raise UserError(f"{key} of {name} must be {wanted}, not {text!r}") from None
    if key == "shape" and value not in DECAY_SHAPES:
        raise UserError(f"unknown decay shape {text!r}: {_nearest(text, DECAY_SHAPES)}")
    return value


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _nearest(word: str, choices) -> str:
    near = difflib.get_close_matches(word.lower(), list(choices), 1, 0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"(there are {', '.join(choices)})"


def _check_count(name: str, n: int) -> None:
    if n < 1:
        raise UserError(f"{name} needs at least one checkpoint, not {n}")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise UserError(f"alpha = {alpha}: it must be above 0 and at most 1 (the weight of the new model)")
