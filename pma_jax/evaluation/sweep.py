"""Sweeps: merges of a run's newest snapshots over a grid of recipes, windows and intervals, each evaluated.

Results are cached in RUN/sweep.json. Dimensions: R merges, K snapshots.
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
from pma_jax.storage.json_files import parse_json


@dataclasses.dataclass(frozen=True)
class Cell:
    """One merge of the grid: the newest `window` of every `interval`-th snapshot, counted back from the newest."""

    recipe: str
    window: int
    interval: int = 1
    kind: str = "point"

    @property
    def text(self) -> str:
        """The cell's name in tables, figures and sweep.json."""
        return cell_text(self.recipe, self.window, self.interval, self.kind)

    @property
    def snapshots_needed(self) -> int:
        """The number of snapshots that the cell spans, including those that its interval skips."""
        return (self.window - 1) * self.interval + 1

    def weights(self, tokens_K: np.ndarray) -> np.ndarray:
        """Return the weights over snapshots at these token positions.

        Args:
            tokens_K: [K], oldest first.

        Returns:
            float64 [K], sums to 1; 0 for the snapshots that do not take part.

        Raises:
            ValueError: There are too few snapshots, or the recipe rejects them.
        """
        weights_K = np.zeros(len(tokens_K))
        if len(tokens_K) < self.snapshots_needed:
            raise ValueError(f"there are {len(tokens_K)} snapshots, and it needs {self.snapshots_needed}")
        used = slice(len(tokens_K) - self.snapshots_needed, None, self.interval)
        weights_K[used] = recipes.coefficients(self.recipe, tokens_K[used])
        return weights_K


def cell_text(recipe: str, window: int, interval: int = 1, kind: str = "point") -> str:
    """Format a merge: `sma:10`; `sma:10@2` of every second snapshot; `block/sma:10` of block means."""
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
    """Evaluate every recipe over every window and interval at the newest snapshot, and cache the rows in sweep.json.

    Each snapshot is read once; the next one loads while one is added to all merges. Memory holds the merges and two
    snapshots. If not all merges fit into `memory_bytes`, they are made in several passes, and each pass reads the
    snapshots again. Rows that sweep.json holds for the same newest tokens are not computed again; rows for other tokens
    are dropped.

    Args:
        run: The run, with snapshots of `kind`.
        recipe_texts: As `recipes.parse` reads them, without a window.
        windows: Numbers of snapshots.
        intervals: i takes every i-th snapshot, counted back from the newest.
        kind: Of snapshots, "point" or "block_mean".
        memory_bytes: Per device; by default half of the free memory.

    Returns:
        The content of sweep.json: `tokens`; `raw_loss` of the newest point, None where there is none; `rows`, each with
        recipe, window, interval, kind, text and loss in nats per token; `left_out`, the text of each merge that this
        call could not make and why; `passes` over the snapshots and `seconds` of reading (with adding), evaluating and
        in all, of the last call that computed anything.

    Raises:
        ValueError: A recipe is invalid, no merge of the grid can be made, or sweep.json is corrupt.
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
    weights, left_out = _weights_of_cells(grid, snapshots)
    if not weights:
        raise ValueError(
            f"no merge can be made of {run.path}: {'; '.join(f'{t}: {why}' for t, why in left_out.items())}"
        )
    stored = _read_stored(run, snapshots[-1].tokens)
    known = {row["text"] for row in stored["rows"]}
    new = [cell for cell in weights if cell.text not in known]
    result = stored | {"left_out": left_out}
    if new:
        result |= _evaluate_cells(run, snapshots, {cell: weights[cell] for cell in new}, stored, began, memory_bytes)
    if result != stored and hosts.is_first():
        atomic.write_text(run.path / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def _weights_of_cells(
    grid: Sequence[Cell], snapshots: Sequence[Snapshot]
) -> tuple[dict[Cell, np.ndarray], dict[str, str]]:
    """Return float64 [K] for each merge that can be made, and the reason for each other."""
    tokens = np.array([s.tokens for s in snapshots])
    weights, left_out = {}, {}
    for cell in grid:
        try:
            weights[cell] = cell.weights(tokens)
        except ValueError as error:
            left_out[cell.text] = str(error)
    return weights, left_out


def _evaluate_cells(
    run: Run,
    snapshots: Sequence[Snapshot],
    weights: dict[Cell, np.ndarray],
    stored: dict[str, Any],
    began: float,
    memory_bytes: float | None,
) -> dict[str, Any]:
    """Return the stored and new rows, the raw loss, the number of passes and the seconds taken."""
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


def _read_stored(run: Run, tokens: int) -> dict[str, Any]:
    """Read the content of sweep.json if it is about these tokens, else return an empty one."""
    empty = {"tokens": tokens, "raw_loss": None, "rows": [], "left_out": {}, "passes": 1, "seconds": {}}
    path = run.path / "sweep.json"
    stored = empty | parse_json(path.read_bytes(), str(path)) if path.exists() else empty
    return stored if stored["tokens"] == tokens else empty
