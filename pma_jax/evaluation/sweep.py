"""A grid of merges of a run's newest snapshots, each evaluated: recipes x windows x intervals, of one kind of snapshot.

Legend: R merges, K snapshots.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.merging import recipes
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.storage import atomic


@dataclasses.dataclass(frozen=True)
class Cell:
    """One merge of the grid: the newest `window` of every `interval`-th snapshot, counted back from the newest."""

    recipe: str
    window: int
    interval: int = 1
    kind: str = "point"

    @property
    def text(self) -> str:
        """How tables, figures and sweep.json call it."""
        return row_text(self.recipe, self.window, self.interval, self.kind)

    @property
    def needed(self) -> int:
        """How many snapshots must be there, those that it passes over included."""
        return (self.window - 1) * self.interval + 1

    def chosen(self, count: int) -> list[int]:
        """Positions of its snapshots among `count`, oldest first. Raises ValueError when there are too few."""
        if count < self.needed:
            raise ValueError(f"there are {count} snapshots, and it needs {self.needed}")
        return list(range(count - self.needed, count, self.interval))

    def row(self, tokens_K: np.ndarray) -> np.ndarray:
        """Its weights over snapshots at these positions, oldest first: float64 [K]. Raises ValueError as `chosen`."""
        row_K, chosen = np.zeros(len(tokens_K)), self.chosen(len(tokens_K))
        row_K[chosen] = recipes.coefficients(self.recipe, tokens_K[chosen])
        return row_K


def row_text(recipe: str, window: int, interval: int = 1, kind: str = "point") -> str:
    """`sma:10`; `sma:10@2` of every second snapshot; `block/sma:10` of block means."""
    every = f"@{interval}" if interval > 1 else ""
    return f"{SNAPSHOT_KINDS[kind].prefix}{recipe}:{window}{every}"


def sweep(
    run: Run,
    recipe_texts: Sequence[str],
    windows: Sequence[int],
    intervals: Sequence[int] = (1,),
    kind: str = "point",
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """Evaluate every recipe over every window and interval, at the newest snapshot; adds the rows to RUN/sweep.json.

    Each snapshot is read once, and the next one while one is added to all merges. Memory holds the merges and two
    snapshots; where not all merges fit into `memory_bytes`, they are made in several passes, and each pass reads the
    snapshots again. A row that sweep.json has of the same tokens is not computed again; rows of other tokens are
    dropped.

    Args:
      run: the run; it needs snapshots of `kind`.
      recipe_texts: as `recipes.parse` reads them, without a window.
      windows: numbers of snapshots.
      intervals: i takes every i-th snapshot, counted back from the newest.
      kind: of snapshots, "point" or "block_mean".
      memory_bytes: of one device; by default half of what is free.

    Returns:
      What sweep.json holds: `tokens`; `raw_loss`, of the newest point, None where there is none; `rows`, each of
      recipe, window, interval, kind, text and loss in nats a token; `left_out`, of this call the text of each merge
      that could not be made and why; of the last call that computed anything `passes` over the snapshots, and `seconds`
      of reading (a merge is added while the next snapshot is read), of evaluating and of all.

    Raises:
      ValueError: a recipe is wrong, or no merge of the grid can be made.
    """
    began = time.perf_counter()
    for text in recipe_texts:
        recipes.parse(text)
    snapshots = run.of_kind(kind)
    if not snapshots:
        raise ValueError(
            f"{run.path} has no snapshots of kind {kind}: it saves {', '.join(run.config.checkpoint.kinds)}"
        )
    grid = [Cell(r, n, i, kind) for r, n, i in itertools.product(recipe_texts, windows, intervals)]
    weights, left_out = _weights(grid, snapshots)
    if not weights:
        raise ValueError(
            f"no merge can be made of {run.path}: {'; '.join(f'{t}: {why}' for t, why in left_out.items())}"
        )
    stored = _stored(run, snapshots[-1].tokens)
    known = {row["text"] for row in stored["rows"]}
    new = [cell for cell in weights if cell.text not in known]
    result = stored | {"left_out": left_out}
    if new:
        result |= _computed(run, snapshots, {cell: weights[cell] for cell in new}, stored, began, memory_bytes)
    if result != stored and hosts.is_first():
        atomic.write_text(run.path / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def _weights(grid: Sequence[Cell], snapshots: Sequence[Snapshot]) -> tuple[dict[Cell, np.ndarray], dict[str, str]]:
    """float64 [K] of each merge that can be made, and why the others cannot."""
    tokens = np.array([s.tokens for s in snapshots])
    weights, left_out = {}, {}
    for cell in grid:
        try:
            weights[cell] = cell.row(tokens)
        except ValueError as error:
            left_out[cell.text] = str(error)
    return weights, left_out


def _computed(
    run: Run,
    snapshots: Sequence[Snapshot],
    weights: dict[Cell, np.ndarray],
    stored: dict[str, Any],
    began: float,
    memory_bytes: float | None,
) -> dict[str, Any]:
    """The stored rows and the new ones, the raw loss, and what it took."""
    rows_RxK = np.array(list(weights.values()))
    raw = snapshots[-1] if snapshots[-1].kind == "point" else _newest_point(run, stored["tokens"])
    if raw and stored["raw_loss"] is None:
        # The raw model is one more merge, of the newest point alone, so that it is not read twice.
        if raw is not snapshots[-1]:
            snapshots, rows_RxK = [*snapshots, raw], np.pad(rows_RxK, ((0, 0), (0, 1)))
        rows_RxK = np.vstack([np.eye(len(snapshots))[-1:], rows_RxK])
    evaluated = evaluate_merges(run.config, snapshots, rows_RxK, memory_bytes)
    losses = evaluated.losses
    raw_loss = stored["raw_loss"]
    if len(losses) > len(weights):
        raw_loss, *losses = losses
    rows = [
        {**dataclasses.asdict(cell), "text": cell.text, "loss": loss}
        for cell, loss in zip(weights, losses, strict=True)
    ]
    seconds = evaluated.seconds | {"all": time.perf_counter() - began}
    return {"raw_loss": raw_loss, "rows": [*stored["rows"], *rows], "passes": evaluated.passes, "seconds": seconds}


def _newest_point(run: Run, tokens: int) -> Snapshot | None:
    return next((s for s in reversed(run.of_kind("point")) if s.tokens == tokens), None)


def _stored(run: Run, tokens: int) -> dict[str, Any]:
    """What sweep.json holds of these tokens, or nothing yet."""
    empty = {"tokens": tokens, "raw_loss": None, "rows": [], "left_out": {}, "passes": 1, "seconds": {}}
    path = run.path / "sweep.json"
    found = empty | json.loads(path.read_text()) if path.exists() else empty
    return found if found["tokens"] == tokens else empty
