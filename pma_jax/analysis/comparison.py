"""Numbers that compare runs: recovered shares of annealing, tokens to a loss, roughness."""

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError


def recovered_share(raw_loss: float, annealed_loss: float | None, loss: float) -> float | None:
    """Return the share of annealing's loss reduction that `loss` recovers: 0 at `raw_loss`, 1 at `annealed_loss`.

    Return None if `annealed_loss` is None, or if annealing did not reduce the loss.
    """
    if annealed_loss is None or annealed_loss >= raw_loss:
        return None
    return (raw_loss - loss) / (raw_loss - annealed_loss)


def tokens_to_reach(tokens: ArrayLike, losses: ArrayLike, loss: float) -> float | None:
    """Return the tokens at which a loss curve first reaches `loss`, by linear interpolation; None if it never does."""
    x, y = np.asarray(tokens, np.float64), np.asarray(losses, np.float64)
    below = np.flatnonzero(y <= loss)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(x[0])
    fraction = (y[i - 1] - loss) / (y[i - 1] - y[i])
    return float(x[i - 1] + fraction * (x[i] - x[i - 1]))


def roughness(values: ArrayLike) -> float:
    """Return the root mean square of the differences between the logarithms of consecutive values.

    A roughness of 0.1 means that consecutive values typically differ by about 10%; a slow trend contributes little.
    `pma_init` uses it for gradient norms.

    Raises:
        UserError: There are fewer than 2 values, or one is not above 0.
    """
    series = np.asarray(values, np.float64)
    if len(series) < 2 or not (series > 0).all():
        raise UserError("roughness needs 2 or more values above 0")
    return float(np.sqrt(np.mean(np.diff(np.log(series)) ** 2)))
