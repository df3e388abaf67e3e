"""The held-out loss of merges along a run, evaluated afterwards at positions that the run has passed.

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
from pma_jax.evaluation.held_out import evaluation_digest
from pma_jax.evaluation.sweep import Cell, evaluate_cells, snapshots_through
from pma_jax.runs.directory import Run
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.storage.locks import locked
from pma_jax.storage.paths import is_bucket

FILE_NAME = "losses.json"
LOCK_NAME = ".losses.lock"

Losses = dict[str, dict[str, float | None]]  # the content of losses.json


def evaluate_along_run(
    run: Run,
    cells: Iterable[Cell],
    ends_tokens: Sequence[int],
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], float]:
    """Evaluate each merge at several points of the run, and cache the losses in RUN/losses.json.

    Each cell merges the newest snapshots up to each of `ends_tokens`. `evaluate_merges` states how much memory is used.
    Several processes may evaluate the same run.

    Args:
        run: The run, with snapshots of every kind that the cells name.
        cells: The merges; `sweep.RAW` is the snapshot itself.
        ends_tokens: Tokens at which snapshots of the run were scheduled.
        evaluation: The held-out text; by default the run's own.

    Returns:
        (cell, end) -> nats per token, without the cells that have too few snapshots at that end.

    Raises:
        ValueError: There is no snapshot at an end, a recipe is invalid, or losses.json is corrupt.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    text = evaluation_digest(shards.prepare_tokens(config.data, progress=False), config)
    path = run.path / FILE_NAME
    # One process reads the file for all: they must agree on what to evaluate.
    stored = hosts.broadcast_from_first(lambda: path.read_text() if path.exists() else "{}")
    cached = parse_untrusted_json(stored.encode(), str(path), allow_nan=True).get(text, {})
    cells = list(dict.fromkeys(cells))
    wanted = {_name(cell, end): (cell, end) for end in ends_tokens for cell in cells}
    new = {name: pair for name, pair in wanted.items() if name not in cached}
    if new:
        snapshots = {kind: run.of_kind(kind) for kind in dict.fromkeys(cell.kind for cell, _ in new.values())}
        possible = {
            name: (cell, end)
            for name, (cell, end) in new.items()
            if len(snapshots_through(snapshots[cell.kind], end, config.batch_tokens)) >= cell.span
        }
        losses = evaluate_cells(config, snapshots, list(possible.values())).losses if possible else []
        computed = dict.fromkeys(new) | dict(zip(possible, losses, strict=True))
        cached = cached | computed
        if hosts.is_first():
            _store(run, text, computed)
    return {pair: loss for name, pair in wanted.items() if (loss := cached[name]) is not None}


def _store(run: Run, text: str, losses: dict[str, float | None]) -> None:
    """Add losses to losses.json, which other processes may change at the same time. Buckets have no locks."""
    path = run.path / FILE_NAME
    with contextlib.nullcontext() if is_bucket(path) else locked(Path(run.path / LOCK_NAME)):
        everything: Losses = parse_untrusted_json(path.read_bytes(), str(path), True) if path.exists() else {}
        everything[text] = everything.get(text, {}) | losses
        atomic.write_text(path, json.dumps(everything, indent=1) + "\n")


def _name(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"
