"""The held-out loss of merges at past token counts of a run, evaluated after those were reached.

RUN/losses.json contains {digest of the held-out windows: {"CELL at TOKENS": nats per token, or null if there are too
few snapshots}}.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pma_jax.config import EvaluationConfig
from pma_jax.data import shards
from pma_jax.evaluation.held_out import held_out_digest
from pma_jax.evaluation.sweep import Cell, evaluate_cells, snapshots_through
from pma_jax.runs.directory import Run
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.storage.locks import locked
from pma_jax.storage.paths import is_bucket

FILE_NAME = "losses.json"
LOCK_NAME = ".losses.lock"


def evaluate_along_run(
    run: Run,
    cells: Iterable[Cell],
    end_tokens: Sequence[int],
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], float]:
    """Evaluate each merge at several points of the run, and cache the losses in RUN/losses.json.

    Each cell merges the newest snapshots up to each of `end_tokens`. `evaluation.merges.evaluate_merges` states
    how much memory is used. Several processes may evaluate the same run; in a bucket, which has no locks, one of them
    may overwrite another's new losses.

    Args:
        run: The run, with snapshots of every kind that the cells name.
        cells: Cells of a sweep, each a merge of the newest snapshots; `sweep.RAW` is the newest snapshot itself.
        end_tokens: Token counts at which the merges end; the run must have a snapshot at each.
        evaluation: The held-out text; by default the run's own.

    Returns:
        (cell, end) -> nats per token, without the cells that have too few snapshots at that end.

    Raises:
        ValueError: There is no snapshot at an end, a recipe is invalid, or losses.json is corrupt.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    digest = held_out_digest(shards.prepare_tokens(config.data, progress=False), config)
    path = run.path / FILE_NAME
    # Read on the first process and broadcast, so that all processes evaluate the same cells.
    stored = hosts.broadcast_from_first(lambda: path.read_text() if path.exists() else "{}")
    cached = parse_untrusted_json(stored.encode(), str(path), allow_nan=True).get(digest, {})
    cells = list(dict.fromkeys(cells))
    requested = {_cache_key(cell, end): (cell, end) for end in end_tokens for cell in cells}
    missing = {name: key for name, key in requested.items() if name not in cached}
    if missing:
        kinds = dict.fromkeys(cell.kind for cell, _ in missing.values())
        snapshots = {kind: run.of_kind(kind) for kind in kinds}
        evaluable = {
            name: (cell, end)
            for name, (cell, end) in missing.items()
            if len(snapshots_through(snapshots[cell.kind], end, config.batch_tokens)) >= cell.span
        }
        losses = evaluate_cells(config, snapshots, list(evaluable.values())).losses if evaluable else []
        # None marks cells with too few snapshots.
        computed = dict.fromkeys(missing) | dict(zip(evaluable, losses, strict=True))
        cached = cached | computed
        if hosts.is_first():
            _store_losses(run, digest, computed)
    return {key: loss for name, key in requested.items() if (loss := cached[name]) is not None}


def _store_losses(run: Run, digest: str, losses: dict[str, float | None]) -> None:
    """Add losses to losses.json, which other processes may change at the same time. Buckets have no locks."""
    path = run.path / FILE_NAME
    with contextlib.nullcontext() if is_bucket(path) else locked(Path(run.path / LOCK_NAME)):
        losses_by_digest = parse_untrusted_json(path.read_bytes(), str(path), True) if path.exists() else {}
        losses_by_digest[digest] = losses_by_digest.get(digest, {}) | losses
        atomic.write_text(path, json.dumps(losses_by_digest, indent=1) + "\n")


def _cache_key(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"
