"""Evaluate merges at several token counts of a run, and cache the held-out losses in RUN/losses.json.

The file contains {digest of the held-out windows: {"CELL at TOKENS": nats per token, or null if there are too
few snapshots}}.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from etils import epath

from pma_jax.config import EvaluationConfig
from pma_jax.data import shards
from pma_jax.evaluation.held_out import held_out_digest
from pma_jax.evaluation.sweep import Cell, evaluate_cells, snapshots_through
from pma_jax.runs.directory import Run
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.json_files import read_json
from pma_jax.storage.json_schema import Loss
from pma_jax.storage.locks import locked
from pma_jax.storage.paths import as_path, exists, is_bucket

LOSSES_FILE_NAME = "losses.json"
LOSSES_LOCK_NAME = ".losses.lock"
LossesByDigest = dict[str, dict[str, Loss | None]]  # schema of losses.json


def evaluate_along_run(
    run: Run,
    cells: Iterable[Cell],
    end_tokens: Sequence[int],
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], float]:
    """Evaluate each merge at several token counts of the run, and cache the losses in RUN/losses.json.

    For each of `end_tokens`, a cell merges the last snapshots up to the one scheduled there. For memory use, see
    `evaluation.merges.evaluate_merges`. Several jobs may evaluate the same run at once. In a bucket, which has no file
    locks, one job can overwrite losses that another has stored.

    Args:
        run: The run. It must have saved snapshots of each cell's kind (`Cell.kind`).
        cells: The merges to evaluate, as cells of a sweep; `sweep.RAW` is the newest snapshot without merging.
        end_tokens: Token counts at which merges end. The run must have a snapshot at each.
        evaluation: Evaluation settings, including the held-out text. Defaults to those of the run.

    Returns:
        The loss in nats per token for each (cell, end_tokens). Pairs with too few snapshots are omitted.

    Raises:
        UserError: The run has no snapshot at one of `end_tokens`, the recipe of a cell is invalid, or losses.json is
            corrupt.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    digest = held_out_digest(shards.prepare_tokens(config.data, progress=False), config)
    path = run.path / LOSSES_FILE_NAME
    # Read on the first process and broadcast, so that all processes evaluate the same cells.
    stored = hosts.broadcast_from_first(lambda: json.dumps(_read_losses(path)))
    cached = json.loads(stored).get(digest, {})
    pairs = {_cache_key(cell, end): (cell, end) for end, cell in itertools.product(end_tokens, cells)}
    missing = {cache_key: pair for cache_key, pair in pairs.items() if cache_key not in cached}
    if missing:
        kinds = dict.fromkeys(cell.kind for cell, _ in missing.values())
        snapshots = {kind: run.of_kind(kind) for kind in kinds}
        evaluable = {}
        for cache_key, (cell, end) in missing.items():
            used = snapshots_through(snapshots[cell.kind], end, config.batch_tokens)
            if not cell.describe_missing(config, [s.tokens for s in used]):
                evaluable[cache_key] = cell, end
        losses = evaluate_cells(config, snapshots, list(evaluable.values())).losses if evaluable else []
        # None (null in the file) for the pairs that lack snapshots.
        computed = dict.fromkeys(missing) | dict(zip(evaluable, losses, strict=True))
        cached = cached | computed
        if hosts.is_first_process():
            _store_losses(run, digest, computed)
    return {pair: loss for cache_key, pair in pairs.items() if (loss := cached[cache_key]) is not None}


def _store_losses(run: Run, digest: str, losses: dict[str, float | None]) -> None:
    """Add losses to losses.json, which other jobs may change at the same time.

    In a bucket, which has no file locks, one job can overwrite what another has stored.
    """
    path = run.path / LOSSES_FILE_NAME
    with contextlib.nullcontext() if is_bucket(path) else locked(Path(run.path / LOSSES_LOCK_NAME)):
        losses_by_digest = _read_losses(path)
        losses_by_digest[digest] = losses_by_digest.get(digest, {}) | losses
        atomic.write_text(path, json.dumps(losses_by_digest, indent=1) + "\n")


def _read_losses(path: epath.Path) -> dict[str, dict[str, float | None]]:
    return read_json(as_path(path), LossesByDigest, allow_nan=True) if exists(path) else {}


def _cache_key(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"
