"""Evaluate merges at several token counts of a run, and cache the held-out losses in RUN/losses.json.

The file contains {digest of the held-out text: {"CELL at TOKENS": [nats per token, its standard error], or null if
snapshots are missing}}.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax.config import EvaluationConfig
from pma_jax.data.sampling import HeldOutLoss
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import Cell, evaluate_cells, snapshots_through
from pma_jax.runs.directory import Run
from pma_jax.runtime import hosts
from pma_jax.storage.json_files import read_json, update_json
from pma_jax.storage.json_schema import Loss
from pma_jax.storage.paths import as_path, exists

LOSSES_FILE_NAME = "losses.json"
# Schema of losses.json. Early versions stored numbers, without standard errors, under digests of other text.
LossesByDigest = dict[str, dict[str, list[Loss | None] | Loss | None]]


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
    """Evaluate merges at token counts of the run, and cache the losses in RUN/losses.json.

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
        The loss for each pair. Pairs with too few snapshots, or with a gap among them, are omitted.

    Raises:
        UserError: The run has no snapshot at an end, the recipe of a cell is invalid, losses.json is corrupt, or the
            corpus has changed.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    digest = read_sample_of_run(run, part, config.evaluation).digest
    # Read on the first process and broadcast, so that all processes evaluate the same cells.
    stored = hosts.broadcast_from_first(lambda: json.dumps(_read_losses(run.path / LOSSES_FILE_NAME)))
    cached = json.loads(stored).get(digest, {})
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
        losses = evaluate_cells(config, snapshots, list(evaluable.values()), part).losses if evaluable else []
        # None (null in the file) for the pairs that lack snapshots.
        values = [[evaluated.loss, evaluated.standard_error] for evaluated in losses]
        computed = dict.fromkeys(missing) | dict(zip(evaluable, values, strict=True))
        cached = cached | computed
        if hosts.is_first_process():
            _store_losses(run, digest, computed)
    return {pair: HeldOutLoss(*value) for cache_key, pair in by_key.items() if (value := cached[cache_key]) is not None}


def _store_losses(run: Run, digest: str, losses: Mapping[str, Sequence[float | None] | None]) -> None:
    """Add losses to losses.json, which other jobs may change at the same time."""

    def add(losses_by_digest: dict[str, Any] | None) -> dict[str, Any]:
        losses_by_digest = losses_by_digest or {}
        return losses_by_digest | {digest: losses_by_digest.get(digest, {}) | losses}

    update_json(run.path / LOSSES_FILE_NAME, LossesByDigest, add)


def _read_losses(path: epath.Path) -> dict[str, dict[str, Any]]:
    return read_json(as_path(path), LossesByDigest, allow_nan=True) if exists(path) else {}


def _cache_key(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"
