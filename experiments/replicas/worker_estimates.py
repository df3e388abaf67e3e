"""What the page states of results.json: the losses of settings, and their differences."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pma_jax.studies.statistics import MeanEstimate, estimate_over_documents

Model = tuple[str, str]  # a setting, and which of its models: mean, merged mean, worker, merged worker
MODELS = ("worker", "mean", "merged worker", "merged mean")


def is_known(results: dict[str, Any], name: str) -> bool:
    """Return whether a setting was measured, and did not diverge."""
    return "nats" in results["settings"].get(name, {})


def losses_SD(results: dict[str, Any], model: Model) -> np.ndarray:
    """Return the losses of a model, nats per token, of each seed and document.

    A setting without workers of its own has one worker, or equal ones: they are the mean.
    """
    name, readout = model
    measured = results["settings"][name]
    nats = measured["nats"].get(readout) or measured["nats"][readout.replace("worker", "mean")]
    return np.array(nats) / np.array(measured["document_tokens"])


def combine(results: dict[str, Any], plus: Sequence[Model], minus: Sequence[Model]) -> MeanEstimate:
    """Estimate the sum of the losses of some models less that of others, over the seeds that all of them have."""
    count = min(len(losses_SD(results, model)) for model in (*plus, *minus))
    total_SD = sum(losses_SD(results, model)[:count] for model in plus)
    total_SD = total_SD - sum(losses_SD(results, model)[:count] for model in minus)
    return estimate_over_documents(total_SD, results["settings"][plus[0][0]]["document_tokens"])


def seed_losses(results: dict[str, Any], model: Model) -> list[float]:
    """Return the loss of a model, one per seed."""
    tokens_D = np.array(results["settings"][model[0]]["document_tokens"])
    return (losses_SD(results, model) @ tokens_D / tokens_D.sum()).tolist()


def gain_in_time(results: dict[str, Any], name: str, of: str = "mean") -> MeanEstimate:
    """Estimate what merging in time gains: the loss of the newest snapshot less that of the merge."""
    return combine(results, [(name, of)], [(name, f"merged {of}")])


def interaction(results: dict[str, Any], name: str) -> MeanEstimate:
    """Estimate how much less averaging over workers gains once their snapshots are merged in time."""
    return combine(results, [(name, "worker"), (name, "merged mean")], [(name, "mean"), (name, "merged worker")])


def gain_across(results: dict[str, Any], name: str, merged: bool = False) -> MeanEstimate:
    """Estimate what averaging over workers gains, as they are or once their snapshots are merged in time."""
    prefix = "merged " if merged else ""
    return combine(results, [(name, f"{prefix}worker")], [(name, f"{prefix}mean")])


def less_than_half_is_left(results: dict[str, Any], name: str) -> bool | None:
    """Return whether merging in time leaves less than half of what averaging over workers gains; None: undecided."""
    plus, minus = ["merged worker", "merged worker", "mean"], ["merged mean", "merged mean", "worker"]
    of_half = combine(results, [(name, model) for model in plus], [(name, model) for model in minus]).interval()
    return None if of_half.low <= 0 <= of_half.high else of_half.high < 0
