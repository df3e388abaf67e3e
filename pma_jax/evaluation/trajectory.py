"""The loss of merges along a run: of what could have been merged when the run was so far, evaluated afterwards."""

import dataclasses
import json
from collections.abc import Iterable, Sequence

import numpy as np

from pma_jax.config import Config, EvaluationConfig
from pma_jax.data import shards
from pma_jax.evaluation.held_out import evaluation_digest
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import Cell
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.storage import atomic

FILE_NAME = "losses.json"
RAW = Cell("sma", 1)  # the newest point alone


def losses_along(
    run: Run,
    cells: Iterable[Cell],
    ends_tokens: Sequence[int],
    evaluation: EvaluationConfig | None = None,
) -> dict[tuple[Cell, int], float]:
    """The held-out loss of each merge at each end, in nats a token; what has too few snapshots there is left out.

    At an end a cell counts back from the snapshot there, whatever came later. Losses are kept in RUN/losses.json, by
    the digest of their text, and not computed again. Memory is that of `evaluate_merges`.

    Args:
      run: the run, with snapshots of every kind that the cells name.
      cells: the merges; `RAW` is the snapshot itself.
      ends_tokens: where the run has snapshots; the step that reached such a mark ends at most one batch past it.
      evaluation: the text; by default the run's own.

    Raises:
      ValueError: there is no snapshot at an end, or a recipe is wrong.
    """
    config = dataclasses.replace(run.config, evaluation=evaluation or run.config.evaluation)
    text = evaluation_digest(shards.prepare_tokens(config.data, progress=False), config)
    known = _kept(run).get(text, {})
    cells = list(dict.fromkeys(cells))
    wanted = {_name(cell, end): (cell, end) for end in ends_tokens for cell in cells}
    new = {name: pair for name, pair in wanted.items() if name not in known}
    if new:
        computed = _computed(run, config, new)
        everything = _kept(run)  # another process may have added to it meanwhile
        everything[text] = everything.get(text, {}) | computed
        if hosts.is_first():
            atomic.write_text(run.path / FILE_NAME, json.dumps(everything, indent=1) + "\n")
        known = known | computed
    return {pair: loss for name, pair in wanted.items() if (loss := known[name]) is not None}


def snapshot_at(snapshots: Sequence[Snapshot], tokens: int, batch_tokens: int) -> int:
    """Which of `snapshots` was taken at the mark `tokens`: its index. Raises ValueError when none was."""
    found = [i for i, s in enumerate(snapshots) if 0 <= s.tokens - tokens < batch_tokens]
    if not found:
        have = ", ".join(f"{s.tokens:,}" for s in snapshots) or "none"
        raise ValueError(f"there is no snapshot at {tokens:,} tokens (there are: {have})")
    return found[0]


def _computed(run: Run, config: Config, new: dict[str, tuple[Cell, int]]) -> dict[str, float | None]:
    of_kind = {kind: run.of_kind(kind) for kind in dict.fromkeys(cell.kind for cell, _ in new.values())}
    snapshots = [s for kind in of_kind for s in of_kind[kind]]
    begins = dict(zip(of_kind, np.cumsum([0, *(len(s) for s in of_kind.values())]), strict=False))
    rows: dict[str, np.ndarray] = {}
    for name, (cell, end) in new.items():
        newest = snapshot_at(of_kind[cell.kind], end, config.batch_tokens)
        tokens_K = np.array([s.tokens for s in of_kind[cell.kind][: newest + 1]])
        if len(tokens_K) < cell.needed:
            continue
        rows[name] = np.zeros(len(snapshots))
        rows[name][begins[cell.kind] : begins[cell.kind] + newest + 1] = cell.row(tokens_K)
    losses = evaluate_merges(config, snapshots, np.array(list(rows.values()))).losses if rows else []
    return dict.fromkeys(new) | dict(zip(rows, losses, strict=True))


def _name(cell: Cell, end_tokens: int) -> str:
    return f"{cell.text} at {end_tokens}"


def _kept(run: Run) -> dict[str, dict[str, float | None]]:
    # Told by one: who sees the file a moment later must not leave the others alone with a computation.
    path = run.path / FILE_NAME
    return json.loads(hosts.broadcast_from_first(lambda: path.read_text() if path.exists() else "{}"))
