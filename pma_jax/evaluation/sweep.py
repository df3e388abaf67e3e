"""Sweeps: merges of a run's newest snapshots over a grid of recipes, windows and intervals, each evaluated.

Results are cached in RUN/sweep.json. Dimensions: R merges, K snapshots.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pma_jax.config import SNAPSHOT_KINDS, Config
from pma_jax.evaluation.merges import EvaluatedMerges, evaluate_merges
from pma_jax.merging import recipes
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_untrusted_json


@dataclasses.dataclass(frozen=True)
class Cell:
    """One merge of the grid: the newest `window` of every `interval`-th snapshot, counted back from the newest."""

    recipe: str
    window: int
    interval: int = 1
    kind: str = "point"

    @property
    def text(self) -> str:
        """The cell's name: `sma:10`; `sma:10@2` of every second snapshot; `block/sma:10` of block means."""
        every = f"@{self.interval}" if self.interval > 1 else ""
        return f"{SNAPSHOT_KINDS[self.kind].prefix}{self.recipe}:{self.window}{every}"

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


RAW = Cell("sma", 1)  # the newest point alone


def sweep(
    run: Run,
    recipe_texts: Sequence[str],
    windows: Sequence[int],
    intervals: Sequence[int] = (1,),
    kind: str = "point",
) -> dict[str, Any]:
    """Evaluate every recipe over every window and interval at the newest snapshot, and cache the rows in sweep.json.

    Snapshots are read, and merges are held in memory, as `evaluate_merges` does. Rows that sweep.json holds for the
    same newest tokens are not computed again; rows for other tokens are dropped.

    Args:
        run: The run, with snapshots of `kind`.
        recipe_texts: As `recipes.parse` reads them, without a window.
        windows: Numbers of snapshots.
        intervals: i takes every i-th snapshot, counted back from the newest.
        kind: Of snapshots, "point" or "block_mean".

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
    tokens_K = np.array([s.tokens for s in snapshots])
    grid = dict.fromkeys(Cell(r, n, i, kind) for r, n, i in itertools.product(recipe_texts, windows, intervals))
    left_out: dict[str, str] = {}
    for cell in grid:
        try:
            cell.weights(tokens_K)
        except ValueError as error:
            left_out[cell.text] = str(error)
    if len(left_out) == len(grid):
        raise ValueError(
            f"no merge can be made of {run.path}: {'; '.join(f'{t}: {why}' for t, why in left_out.items())}"
        )
    stored = _read_stored(run, snapshots[-1].tokens)
    known = {row["text"] for row in stored["rows"]} | left_out.keys()
    new = [cell for cell in grid if cell.text not in known]
    result = stored | {"left_out": left_out}
    if new:
        result |= _evaluate_new(run, new, stored)
        result["seconds"]["all"] = time.perf_counter() - began
    if result != stored and hosts.is_first():
        atomic.write_text(run.path / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def evaluate_cells(
    config: Config, snapshots: Mapping[str, Sequence[Snapshot]], cells: Sequence[tuple[Cell, int]]
) -> EvaluatedMerges:
    """Evaluate each cell over the newest snapshots up to a token mark, as `evaluate_merges` does.

    Args:
        config: Of the run, with the held-out text.
        snapshots: Those of each kind that the cells name, oldest first.
        cells: The cells and their marks.

    Raises:
        ValueError: There is no snapshot at a mark, there are too few, or a recipe rejects them.
    """
    every = [s for of_kind in snapshots.values() for s in of_kind]
    rows_RxK = np.zeros((len(cells), len(every)))
    for row_K, (cell, tokens) in zip(rows_RxK, cells, strict=True):
        until = snapshots_until(snapshots[cell.kind], tokens, config.batch_tokens)
        start = every.index(until[0])
        row_K[start : start + len(until)] = cell.weights(np.array([s.tokens for s in until]))
    return evaluate_merges(config, every, rows_RxK)


def snapshots_until(snapshots: Sequence[Snapshot], tokens: int, batch_tokens: int) -> Sequence[Snapshot]:
    """Return the snapshots up to the one that was taken at the mark `tokens`.

    The step that reaches a mark ends less than one batch after it.

    Raises:
        ValueError: There is no snapshot at the mark.
    """
    for i, snapshot in enumerate(snapshots):
        if 0 <= snapshot.tokens - tokens < batch_tokens:
            return snapshots[: i + 1]
    have = ", ".join(f"{s.tokens:,}" for s in snapshots) or "none"
    raise ValueError(f"there is no snapshot at {tokens:,} tokens (there are: {have})")


def _evaluate_new(run: Run, new: list[Cell], stored: dict[str, Any]) -> dict[str, Any]:
    """Return the stored and new rows, the raw loss, the number of passes and the seconds taken."""
    tokens, raw_loss = stored["tokens"], stored["raw_loss"]
    snapshots = {kind: run.of_kind(kind) for kind in dict.fromkeys([new[0].kind, RAW.kind])}
    has_raw = any(s.tokens == tokens for s in snapshots[RAW.kind])
    # The raw model is one more merge, so that it is not read twice.
    cells = list(dict.fromkeys([*new, RAW] if has_raw and raw_loss is None else new))
    evaluated = evaluate_cells(run.config, snapshots, [(cell, tokens) for cell in cells])
    losses = dict(zip(cells, evaluated.losses, strict=True))
    rows = [{**dataclasses.asdict(cell), "text": cell.text, "loss": losses[cell]} for cell in new]
    return {
        "raw_loss": losses.get(RAW, raw_loss),
        "rows": [*stored["rows"], *rows],
        "passes": evaluated.passes,
        "seconds": evaluated.seconds,
    }


def _read_stored(run: Run, tokens: int) -> dict[str, Any]:
    """Read the content of sweep.json if it is about these tokens, else return an empty one."""
    empty = {"tokens": tokens, "raw_loss": None, "rows": [], "left_out": {}, "passes": 1, "seconds": {}}
    path = run.path / "sweep.json"
    stored = empty | parse_untrusted_json(path.read_bytes(), str(path)) if path.exists() else empty
    return stored if stored["tokens"] == tokens else empty
