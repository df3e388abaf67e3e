"""How well a forecast ranks settings: Kendall's tau and the regret, for each seed and each draw of documents.

Dimensions: N draws of documents, of which the first is all of them; C settings, S seeds, D documents.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.studies.statistics import MeanEstimate, draw_documents, estimate_from_draws

ANNEALED = "annealed, another seed"  # a ranking by the annealed losses of one seed, which have noise too
DRAWS = 4000  # of documents


class Ranking(NamedTuple):
    """How well a forecast ranks settings, with that by the annealed loss for the truth."""

    tau: np.ndarray  # [N, S], Kendall's tau
    regret: np.ndarray  # [N, S], the true loss of the setting that is put first less the lowest, in nats per token


def judge_ranking(
    size: Mapping[str, Any], name: str, share: float, settings: Sequence[str] = (), own_seed: bool = False
) -> Ranking:
    """Judge a forecast of the ranking of settings.

    Args:
        size: An entry of the results.
        name: The forecast.
        share: Of the run that it uses.
        settings: Those that are ranked; by default all.
        own_seed: Take the annealed loss of the same seed for the truth. By default it is the mean over the other seeds,
            so that one seed's noise is not taken for it.
    """
    chosen = [size["sweep"][setting] for setting in settings or size["sweep"]]
    annealed_NCS = losses([setting["annealed"] for setting in chosen], size, REPORT)
    forecast_NCS = annealed_NCS
    if name != ANNEALED:
        forecast_NCS = losses([setting[f"{share:g}"][name] for setting in chosen], size, SELECT)
    truth_NCS = annealed_NCS
    if not own_seed:
        seeds = annealed_NCS.shape[-1]
        truth_NCS = (annealed_NCS.sum(axis=-1, keepdims=True) - annealed_NCS) / (seeds - 1)
    forecast_NSC, truth_NSC = (np.swapaxes(of, 1, 2) for of in (forecast_NCS, truth_NCS))
    return Ranking(kendall_tau(forecast_NSC, truth_NSC), regret(forecast_NSC, truth_NSC))


def losses(nats_CSD: ArrayLike, size: Mapping[str, Any], part: str) -> np.ndarray:
    """Return losses in nats per token on all documents of a part, and on each draw of them [N, C, S]."""
    tokens_D = np.array(size["document_tokens"][part])
    counts_ND = document_counts(part, len(tokens_D))
    sums_NCS = np.tensordot(counts_ND, np.asarray(nats_CSD), axes=(1, 2))
    return sums_NCS / (counts_ND @ tokens_D)[:, None, None]


@functools.cache
def document_counts(part: str, documents: int) -> np.ndarray:
    """Return how often each document of a part counts in each draw; the parts are drawn independently [N, D]."""
    return draw_documents(documents, DRAWS, seed=(SELECT, REPORT).index(part))


def estimate(size: Mapping[str, Any], values_NS: np.ndarray) -> MeanEstimate:
    """Estimate the mean of a statistic of rankings, over seeds and documents."""
    return estimate_from_draws(values_NS, min(map(len, size["document_tokens"].values())))


def kendall_tau(forecast: ArrayLike, truth: ArrayLike) -> np.ndarray:
    """Compute Kendall's tau-b of rankings along the last axis: 1 if they are the same, 0 if unrelated, -1 if reversed.

    Raises:
        ValueError: A forecast or a truth is constant, has fewer than 2 values, or contains NaN.
    """
    first, second = (np.asarray(values, np.float64) for values in (forecast, truth))
    products, pairs = np.zeros(first.shape[:-1]), np.zeros((2, *first.shape[:-1]))
    for i, j in itertools.combinations(range(first.shape[-1]), 2):
        signs = [np.sign(values[..., i] - values[..., j]) for values in (first, second)]
        products += signs[0] * signs[1]
        pairs += np.abs(signs)
    if not (pairs > 0).all():
        raise ValueError(
            "Kendall's tau is undefined: forecast or truth has no ranking, because it is constant or contains NaN"
        )
    return products / np.sqrt(pairs[0] * pairs[1])


def regret(forecast: ArrayLike, truth: ArrayLike) -> np.ndarray:
    """Return the true loss of the candidate with the lowest forecast loss, less the lowest true loss: the last axis."""
    true, picked = np.asarray(truth, np.float64), np.argmin(np.asarray(forecast), axis=-1)
    return np.take_along_axis(true, picked[..., None], axis=-1)[..., 0] - true.min(axis=-1)
