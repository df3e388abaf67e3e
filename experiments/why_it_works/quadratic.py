"""How much of the gain of a merge a quadratic predicts, from the curvature between the deviations of the snapshots.

All sums are over the held-out targets of each document, in nats. Shape suffixes: D documents, K snapshots, S seeds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

from pma_jax.analysis import curvature
from pma_jax.analysis.workbench import Workbench
from pma_jax.merging import recipes
from pma_jax.merging.averager import weighted_sum
from pma_jax.runs.directory import Run
from pma_jax.studies import run_cache
from pma_jax.studies.statistics import MeanEstimate, estimate_over_documents, statistic_over_documents

KINDS = ("hessian", "gauss_newton")
BATCH_WINDOWS = 8  # of one document: few, so that little of the last batch of a document is padding


def measure_losses(bench: Workbench, models: list[Any]) -> dict[str, list[float]]:
    """Return, for each document, the mean loss of the models, the loss of the last, and that of their mean."""
    nats_KxD = np.array([bench.text.sum_by_document(model) for model in models])
    merged_D = bench.text.sum_by_document(weighted_sum(models, recipes.sma(len(models))))
    losses = {"mean of the losses": nats_KxD.mean(axis=0), "last": nats_KxD[-1], "loss of the mean": merged_D}
    return {name: nats_D.round(4).tolist() for name, nats_D in losses.items()}


def measure_quadratic(run: Run, bench: Workbench, models: list[Any], around: Any, name: str) -> dict[str, Any]:
    """Measure the quadratic around the model `around`, which is called `name`, between its deviations from `models`.

    With the deviations delta_i = models[i] - around, a matrix has the entries delta_i' M delta_j, for M the Hessian or
    the Gauss-Newton matrix. What takes minutes is kept in the cache of runs.

    Returns:
        "slope": the derivative along the last deviation less that along their mean, of each document. For each of
            `KINDS`: "trace", "total" and "last" of the matrix, of each document, and "matrix", over all of them.
    """
    documents = bench.document_batches(BATCH_WINDOWS)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    batches, tokens = [batch for of in documents for batch in of], bench.text.sample.counts_D.sum()
    deltas = [optax.tree.sub(model, around) for model in models]

    def sum_by_document(parts_N: np.ndarray) -> np.ndarray:
        return np.add.reduceat(parts_N, starts, axis=0) * tokens

    slopes_DxK = sum_by_document(curvature.directional_derivatives(bench.loss_of_batch, around, batches, deltas))
    found: dict[str, Any] = {"slope": (slopes_DxK[:, -1] - slopes_DxK.mean(axis=1)).round(4).tolist()}
    for kind, matrix in zip(KINDS, (bench.hessian, bench.gauss_newton), strict=True):

        def read(_: Run, matrix: curvature.MatrixOfBatch = matrix) -> np.ndarray:
            matrix_DxKxK = sum_by_document(curvature.pairwise_curvature(matrix, around, batches, deltas))
            sums = np.trace(matrix_DxKxK, axis1=1, axis2=2), matrix_DxKxK.sum(axis=(1, 2)), matrix_DxKxK[:, -1, -1]
            return np.concatenate([*sums, matrix_DxKxK.sum(axis=0).ravel()])

        reading = f"{kind} of the last {len(models)} snapshots around {name}, text {bench.text.sample.digest}"
        numbers = np.round(run_cache.get_or_read_list(run, reading, read), 4)
        *sums, matrix_KK = np.split(numbers, np.arange(1, 4) * len(documents))
        found[kind] = dict(zip(("trace", "total", "last"), (one.tolist() for one in sums), strict=True))
        found[kind]["matrix"] = matrix_KK.reshape(len(models), -1).tolist()
    return found


def measured_gain(results: dict[str, Any], over: str) -> MeanEstimate:
    """Estimate the loss `over` ("mean of the losses", "last") less the loss of the mean, over seeds and documents."""
    return _estimate_gain(_measured(results, over), _tokens(results))


def predicted_gain(results: dict[str, Any], around: str, kind: str, over: str) -> MeanEstimate:
    """Estimate what the quadratic predicts of `measured_gain`, over seeds and documents."""
    return _estimate_gain(_predicted(results, around, kind, over), _tokens(results))


def explained_share(results: dict[str, Any], around: str, kind: str, over: str) -> MeanEstimate:
    """Estimate the predicted gain as a share of the measured one, over seeds and documents."""
    both = np.array([_predicted(results, around, kind, over), _measured(results, over)])
    return statistic_over_documents(lambda gains: gains[0] / gains[1], both, _tokens(results))


def kept_share(results: dict[str, Any], around: str, kind: str) -> MeanEstimate:
    """Estimate the quadratic loss of the mean of the K deviations as a share of the mean of theirs.

    0: the deviations cancel. 1/K: their products add up to 0, as those of orthogonal ones. 1: they are equal, and a
    mean gains nothing.
    """
    sums = [[seed["quadratic"][around][kind][key] for seed in _seeds(results)] for key in ("total", "trace")]
    return statistic_over_documents(lambda of: of[0] / of[1] / results["window"], sums, _tokens(results))


def curvature_ratio(results: dict[str, Any], kind: str, over: str) -> MeanEstimate:
    """Estimate the gain predicted around the annealed model, divided by that around the merged one."""
    both = np.array([_predicted(results, around, kind, over) for around in ("annealed", "merge")])
    return statistic_over_documents(lambda gains: gains[0] / gains[1], both, _tokens(results))


def negative_pairs(seed: dict[str, Any], around: str, kind: str) -> int:
    """Count the pairs of different deviations whose product is negative, over all text, of one seed."""
    matrix_KK = np.array(seed["quadratic"][around][kind]["matrix"])
    return int(np.sum(matrix_KK[np.triu_indices(len(matrix_KK), 1)] < 0))


def mean_cosine(seed: dict[str, Any], around: str, kind: str, apart: Sequence[int]) -> float:
    """Return the mean cosine of deviations that are any of `apart` snapshots apart, of one seed.

    The cosine of two deviations is in the metric of the matrix M, delta_i' M delta_j / sqrt(delta_i' M delta_i
    delta_j' M delta_j).
    """
    matrix_KK = np.array(seed["quadratic"][around][kind]["matrix"])
    scales_K = np.sqrt(np.diag(matrix_KK))
    first, second = np.triu_indices(len(matrix_KK), 1)
    cosines = matrix_KK[first, second] / (scales_K[first] * scales_K[second])
    return float(cosines[np.isin(second - first, apart)].mean())


def _seeds(results: dict[str, Any]) -> list[dict[str, Any]]:
    return list(results["seeds"].values())


def _tokens(results: dict[str, Any]) -> list[float]:
    return _seeds(results)[0]["noise"]["document_tokens"]


def _estimate_gain(gain_SxD: np.ndarray, tokens_D: list[float]) -> MeanEstimate:
    return estimate_over_documents(gain_SxD / np.array(tokens_D), tokens_D)


def _measured(results: dict[str, Any], over: str) -> np.ndarray:
    """Compute the measured gain like `_predicted`: float64 [S, D]."""
    losses = [seed["quadratic"]["losses"] for seed in _seeds(results)]
    return np.array([np.subtract(of[over], of["loss of the mean"]) for of in losses])


def _predicted(results: dict[str, Any], around: str, kind: str, over: str) -> np.ndarray:
    """Compute the predicted gain of each seed on each document, summed over its targets, in nats: float64 [S, D].

    The formulas are those of `curvature.merging_gain` and `merging_gain_over_last`, for equal coefficients 1/K.
    """
    gains, count = [], results["window"]
    for seed in _seeds(results):
        of = seed["quadratic"][around]
        trace_D, total_D, last_D = (np.array(of[kind][key]) for key in ("trace", "total", "last"))
        if over == "last":
            gains.append(np.array(of["slope"]) + (last_D - total_D / count**2) / 2)
        else:
            gains.append((trace_D / count - total_D / count**2) / 2)
    return np.array(gains)
