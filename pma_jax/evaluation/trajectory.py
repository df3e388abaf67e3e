"""Evaluate merges at several token counts of a run, and cache the held-out losses in RUN/document_losses.json.

The file contains {digest of the held-out text: {"CELL at TOKENS": [summed nats of each document], or null if snapshots
are missing}}. Dimension: D documents of the sample.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pma_jax.config import EvaluationConfig
from pma_jax.data.sampling import HeldOutLoss, estimate
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import Cell, evaluate_cells, snapshots_through
from pma_jax.runs.directory import Run
from pma_jax.runtime import hosts
from pma_jax.storage.json_files import read_json, update_json
from pma_jax.storage.json_schema import Loss
from pma_jax.storage.paths import as_path, exists

LOSSES_FILE_NAME = "document_losses.json"
LossesByDigest = dict[str, dict[str, list[Loss] | None]]  # schema of the file


@dataclasses.dataclass(frozen=True)
class DocumentLosses:
    """The losses of merges on each document of a sample of held-out text."""

    nats: dict[tuple[Cell, int], np.ndarray]  # by merge and its end in tokens: float64 [D], summed loss per document
    counts: np.ndarray  # float64 [D], number of targets of each document
    digest: str  # of the sample


def evaluate_along_run(
    run: Run,
    cells: Iterable[Cell],
    end_tokens: Sequence[int],
    part: str,
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], HeldOutLoss]:
    """Evaluate each of `cells` at each of `end_tokens`. See `evaluate_pairs`."""
    return evaluate_pairs(run, [(cell, end) for end, cell in itertools.product(end_tokens, cells)], part, evaluation)


def evaluate_pairs(
    run: Run,
    pairs: Iterable[tuple[Cell, int]],
    part: str,
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], HeldOutLoss]:
    """Evaluate merges at token counts of the run. See `evaluate_documents`.

    Returns:
        The loss for each pair. Pairs with too few snapshots, or with a gap among them, are omitted.
    """
    losses = evaluate_documents(run, pairs, part, evaluation)
    return {pair: estimate(nats_D, losses.counts) for pair, nats_D in losses.nats.items()}


def evaluate_documents(
    run: Run,
    pairs: Iterable[tuple[Cell, int]],
    part: str,
    evaluation: EvaluationConfig | None = None,
) -> DocumentLosses:
    """Evaluate merges at token counts of the run, and cache the losses in RUN/document_losses.json.

    Each pair is a cell and the tokens at which its newest snapshot is scheduled. For memory use, see
    `evaluation.merges.evaluate_merges`. Several jobs may evaluate the same run at once. In a bucket, which has no file
    locks, one job can overwrite losses that another has stored.

    Args:
        run: The run. It must have saved snapshots of each cell's kind (`Cell.kind`).
        pairs: The merges to evaluate, as cells of a sweep, and their ends; `sweep.RAW` is the newest snapshot without
            merging. The run must have a snapshot at each end.
        part: The part of the held-out text (`data.sampling.PARTS`).
        evaluation: Evaluation settings, including the number of tokens. Defaults to those of the run.

    Returns:
        The losses of each pair. Pairs with too few snapshots, or with a gap among them, are omitted.

    Raises:
        UserError: The run has no snapshot at an end, the recipe of a cell is invalid, the file of losses is corrupt, or
            the corpus has changed.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    sample = read_sample_of_run(run, part, config.evaluation)
    # Read on the first process and broadcast, so that all processes evaluate the same cells.
    stored = hosts.broadcast_from_first(lambda: json.dumps(_read_losses(run.path / LOSSES_FILE_NAME)))
    cached = json.loads(stored).get(sample.digest, {})
    by_key = {_cache_key(cell, end): (cell, end) for cell, end in pairs}
    missing = {cache_key: pair for cache_key, pair in by_key.items() if cache_key not in cached}
    if missing:
        kinds = dict.fromkeys(cell.kind for cell, _ in missing.values())
        snapshots = {kind: run.of_kind(kind) for kind in kinds}
        evaluable = {}
        for cache_key, (cell, end) in missing.items():
            used = snapshots_through(snapshots[cell.kind], end, config.batch_tokens)
            if not cell.describe_missing(config, [s.tokens for s in used]):
                evaluable[cache_key] = cell, end
        sums = evaluate_cells(config, snapshots, list(evaluable.values()), part).sums.tolist() if evaluable else []
        # None (null in the file) for the pairs that lack snapshots.
        computed = dict.fromkeys(missing) | dict(zip(evaluable, sums, strict=True))
        cached = cached | computed
        if hosts.is_first_process():
            _store_losses(run, sample.digest, computed)
    known = {pair: np.array(nats_D) for cache_key, pair in by_key.items() if (nats_D := cached[cache_key]) is not None}
    return DocumentLosses(known, sample.counts_D, sample.digest)


def count_missing(run: Run, pairs: Iterable[tuple[Cell, int]], part: str, evaluation: EvaluationConfig) -> int:
    """Count the pairs whose losses are not cached; see `evaluate_documents`."""
    digest = read_sample_of_run(run, part, evaluation).digest
    cached = _read_losses(run.path / LOSSES_FILE_NAME).get(digest, {})
    return sum(_cache_key(cell, end) not in cached for cell, end in pairs)


def _store_losses(run: Run, digest: str, losses: Mapping[str, Sequence[float] | None]) -> None:
    """Add losses to the file, which other jobs may change at the same time."""

    def add(losses_by_digest: dict[str, Any] | None) -> dict[str, Any]:
        losses_by_digest = losses_by_digest or {}
        return losses_by_digest | {digest: losses_by_digest.get(digest, {}) | losses}

    update_json(run.path / LOSSES_FILE_NAME, LossesByDigest, add)


def _read_losses(path: epath.Path) -> dict[str, dict[str, Any]]:
    return read_json(as_path(path), LossesByDigest, allow_nan=True) if exists(path) else {}


def _cache_key(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"
