"""Sweeps: merges of a run's newest snapshots over a grid of recipes, windows and intervals, each evaluated.

Results are cached in RUN/sweep.json. Dimensions: R merges, K snapshots.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np

from pma_jax.config import Config, snapshot_kind
from pma_jax.config.bounds import Range
from pma_jax.config.errors import UserError
from pma_jax.data.sampling import SELECT, HeldOutLoss, SampleDescription, estimate
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.merges import EvaluatedMerges, evaluate_merges
from pma_jax.merging import recipes
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime import hosts
from pma_jax.runtime.progress import Progress
from pma_jax.storage.json_files import read_json, update_json
from pma_jax.storage.json_schema import Count, Loss
from pma_jax.storage.paths import as_path, exists

SWEEP_FILE_NAME = "sweep.json"
_EMPTY = {
    "raw_loss": None,
    "raw_standard_error": None,
    "rows": [],
    "left_out": {},
    "passes": 1,
    "seconds": {},
}


class SweepRow(TypedDict):
    """One merge in sweep.json; rows of early versions lack the interval, the kind and the standard error."""

    text: str
    recipe: str
    window: Annotated[int, Range(1)]
    interval: NotRequired[Annotated[int, Range(1)]]
    kind: NotRequired[str]  # see config.snapshot_kind
    loss: Loss
    standard_error: NotRequired[Loss | None]
    difference: NotRequired[Loss | None]
    difference_standard_error: NotRequired[Loss | None]


_ROW_DEFAULTS = {
    "interval": 1,
    "kind": "point",
    "standard_error": None,
    "difference": None,
    "difference_standard_error": None,
}


class SweepResult(TypedDict):
    """Contents of sweep.json; those of early versions lack the description of the held-out text."""

    tokens: Count
    held_out: NotRequired[SampleDescription]
    raw_loss: Loss | None
    raw_standard_error: NotRequired[Loss | None]
    rows: list[SweepRow]
    left_out: NotRequired[dict[str, str]]
    passes: NotRequired[Count]
    seconds: NotRequired[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One merge of a sweep: `recipe` applied to `window` snapshots, `interval` apart, that end at the newest."""

    recipe: str
    window: int
    interval: int = 1  # in snapshots, not tokens: with 2, every second snapshot is merged
    kind: str = "point"

    @property
    def text(self) -> str:
        """The cell's label: `sma:10`, `sma:10@2` (every second snapshot) or `block/sma:10` (block means)."""
        suffix = f"@{self.interval}" if self.interval > 1 else ""
        return f"{snapshot_kind(self.kind).label_prefix}{self.recipe}:{self.window}{suffix}"

    def describe_missing(self, config: Config, tokens_K: Sequence[int]) -> str:
        """Return which snapshot the merge needs and does not find, as one line; empty if it finds all.

        Args:
            config: The run's configuration.
            tokens_K: [K], token count of each snapshot, oldest first.
        """
        numbers = [config.snapshot_number(tokens) for tokens in tokens_K]
        missing = self._snapshot_numbers(numbers[-1]) - set(numbers) if numbers else {0}
        if not missing:
            return ""
        before = [tokens for tokens, number in zip(tokens_K, numbers, strict=True) if number < max(missing)]
        if not before:
            return f"there are {len(tokens_K)} snapshots, and the merge needs {(self.window - 1) * self.interval + 1}"
        return f"the merge needs a snapshot that is missing after {before[-1]:,} tokens"

    def coefficients(self, config: Config, tokens_K: Sequence[int]) -> np.ndarray:
        """Return the coefficient of each snapshot in the merge.

        Args:
            config: The run's configuration, which determines when snapshots are saved.
            tokens_K: [K], token count of each snapshot, oldest first.

        Returns:
            float64 [K], sums to 1; 0 for snapshots that are not merged.

        Raises:
            UserError: A snapshot that the merge needs is missing, or the recipe rejects the snapshots.
        """
        if problem := self.describe_missing(config, tokens_K):
            raise UserError(problem)
        numbers = [config.snapshot_number(tokens) for tokens in tokens_K]
        is_used_K = np.isin(numbers, list(self._snapshot_numbers(numbers[-1])))
        coefficients_K = np.zeros(len(tokens_K))
        coefficients_K[is_used_K] = recipes.coefficients(self.recipe, np.asarray(tokens_K)[is_used_K])
        return coefficients_K

    def _snapshot_numbers(self, newest: int) -> set[int]:
        """Return the numbers (`Config.snapshot_number`) of the merged snapshots, of which `newest` is the last."""
        return {newest - i * self.interval for i in range(self.window)}


RAW = Cell("sma", 1)  # the newest point snapshot (the parameters after one step) without merging: the baseline


def sweep(
    run: Run,
    recipe_texts: Sequence[str],
    windows: Sequence[int],
    intervals: Sequence[int] = (1,),
    kind: str = "point",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate every recipe with every window and interval at the newest snapshot, and cache the rows in sweep.json.

    The held-out text is the part `select`, because the losses serve to choose a merge. See `evaluate_merges` for how
    snapshots are read and how much memory is used. Rows of sweep.json for the same newest snapshot and text are reused;
    other rows are discarded.

    Args:
        run: The run, with snapshots of `kind`.
        recipe_texts: Recipes in the syntax of `recipes.parse`, without a window.
        windows: Numbers of snapshots to merge.
        intervals: Distances between merged snapshots, in snapshots: 2 is every second, counted back from the newest.
        kind: The kind of snapshots, such as "point", "block_mean" or "worker_0".
        progress: Called with what is done, of how many reads and evaluations.

    Returns:
        The content of sweep.json:
        `tokens`: token count of the newest snapshot. `held_out`: how the text was sampled (`Sample.describe`).
        `raw_loss`, `raw_standard_error`: of the point snapshot there, or None.
        `rows`: one dict (`SweepRow`) for each merge; losses in nats per token, standard errors over documents, and the
        difference from the raw loss (None without a point snapshot there) with its own standard error.
        `left_out`: maps the text of each merge that cannot be made to the reason.
        `passes`: how many times snapshots were read in the last call that evaluated anything.
        `seconds`: the time of that call: read (reading and adding snapshots), evaluate, and all.

    Raises:
        UserError: A recipe is invalid, no merge of the grid can be made, or sweep.json is corrupt.
    """
    began = time.perf_counter()
    snapshots, grid, left_out = plan_grid(run, recipe_texts, windows, intervals, kind)
    text = read_sample_of_run(run, SELECT, run.config.evaluation).describe()
    empty = _EMPTY | {"tokens": snapshots[-1].tokens, "held_out": text}
    # Read on the first process and broadcast, so that all processes evaluate the same merges.
    stored = _matching(json.loads(hosts.broadcast_from_first(lambda: json.dumps(read_sweep(run)))), empty)
    excluded = {row["text"] for row in stored["rows"]} | left_out.keys()
    new = [cell for cell in grid if cell.text not in excluded]
    result = stored | {"left_out": left_out}
    if new:
        result |= _evaluate_new(run, new, stored, progress)
        result["seconds"]["all"] = time.perf_counter() - began
    if result != stored and hosts.is_first_process():

        def add(content: dict[str, Any] | None) -> dict[str, Any]:
            # Another process may have added rows meanwhile.
            rows = {row["text"]: row for row in [*_matching(_with_all_keys(content), empty)["rows"], *result["rows"]]}
            return result | {"rows": list(rows.values())}

        return update_json(run.path / SWEEP_FILE_NAME, SweepResult, add)
    return result


def plan_grid(
    run: Run, recipe_texts: Sequence[str], windows: Sequence[int], intervals: Sequence[int], kind: str
) -> tuple[list[Snapshot], list[Cell], dict[str, str]]:
    """Return the snapshots of a kind, the cells of a grid, and why some of them, by their texts, cannot be made.

    Raises:
        UserError: A recipe is invalid, the run has no snapshots of the kind, or no merge of the grid can be made.
    """
    for text in recipe_texts:
        recipes.parse(text)
    if not (snapshots := run.of_kind(kind)):
        kinds = ", ".join(run.config.checkpoint.kinds)
        raise UserError(f"{run.path} has no snapshots of kind {kind}: it saves {kinds}")
    grid = list(dict.fromkeys(Cell(r, n, i, kind) for r, n, i in itertools.product(recipe_texts, windows, intervals)))
    return snapshots, grid, _impossible_merges(run, grid, snapshots)


def _impossible_merges(run: Run, grid: Collection[Cell], snapshots: Sequence[Snapshot]) -> dict[str, str]:
    """Return the text of each merge that cannot be made, with the reason. Raises UserError if that is all of them."""
    tokens_K = [s.tokens for s in snapshots]
    left_out: dict[str, str] = {}
    for cell in grid:
        try:
            cell.coefficients(run.config, tokens_K)
        except UserError as error:
            left_out[cell.text] = str(error)
    if len(left_out) == len(grid):
        raise UserError(
            f"no merge of the grid is possible in {run.path}: {'; '.join(f'{t}: {why}' for t, why in left_out.items())}"
        )
    return left_out


def evaluate_cells(
    config: Config,
    snapshots: Mapping[str, Sequence[Snapshot]],
    cells_and_tokens: Sequence[tuple[Cell, int]],
    part: str,
    progress: Progress | None = None,
) -> EvaluatedMerges:
    """Evaluate each cell at a token count of its own. See `evaluate_merges` for cost, memory and the result.

    Args:
        config: Configuration of the run, including what determines the held-out tokens.
        snapshots: Maps each kind of the cells to its snapshots, oldest first.
        cells_and_tokens: Pairs of a cell and the token count at which its newest snapshot was scheduled (see
            `snapshots_through`). The token count of that snapshot is also accepted.
        part: The part of the held-out text (`data.sampling.PARTS`).
        progress: As in `score_merges`.

    Raises:
        UserError: No snapshot was scheduled at a token count, too few precede it, or a recipe rejects them.
    """
    return evaluate_merges(config, *weigh_snapshots(config, snapshots, cells_and_tokens), part, progress)


def weigh_snapshots(
    config: Config, snapshots: Mapping[str, Sequence[Snapshot]], cells_and_tokens: Sequence[tuple[Cell, int]]
) -> tuple[list[Snapshot], np.ndarray]:
    """Return the snapshots of all kinds, and float64 [R, K], their weights in each cell. See `evaluate_cells`."""
    all_snapshots = [s for kind_snapshots in snapshots.values() for s in kind_snapshots]
    coefficients_RxK = np.zeros((len(cells_and_tokens), len(all_snapshots)))
    for row_K, (cell, scheduled_tokens) in zip(coefficients_RxK, cells_and_tokens, strict=True):
        used = snapshots_through(snapshots[cell.kind], scheduled_tokens, config.batch_tokens)
        start = all_snapshots.index(used[0])
        row_K[start : start + len(used)] = cell.coefficients(config, [s.tokens for s in used])
    return all_snapshots, coefficients_RxK


def snapshots_through(snapshots: Sequence[Snapshot], scheduled_tokens: int, batch_tokens: int) -> Sequence[Snapshot]:
    """Return the snapshots up to and including the one that was scheduled at `scheduled_tokens`.

    A snapshot is taken after the first step that ends at or after its scheduled tokens. Its token count exceeds the
    scheduled one by less than one batch.

    Raises:
        UserError: No snapshot was scheduled at these tokens.
    """
    for i, snapshot in enumerate(snapshots):
        if 0 <= snapshot.tokens - scheduled_tokens < batch_tokens:
            return snapshots[: i + 1]
    have = ", ".join(f"{s.tokens:,}" for s in snapshots) or "none"
    raise UserError(f"there is no snapshot at {scheduled_tokens:,} tokens (there are: {have})")


def read_sweep(run: Run) -> dict[str, Any] | None:
    """Return the content of RUN/sweep.json; None if the run has none.

    Raises:
        UserError: The file is corrupt.
    """
    path = as_path(run.path / SWEEP_FILE_NAME)
    return _with_all_keys(read_json(path, SweepResult, allow_nan=True)) if exists(path) else None


def _with_all_keys(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the content of a sweep.json with the keys that rows of early versions lack."""
    return content and content | {"rows": [row | (_ROW_DEFAULTS | row) for row in content["rows"]]}


def _evaluate_new(run: Run, new: list[Cell], stored: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    """Evaluate `new` and return the keys of sweep.json that change."""
    tokens, raw = stored["tokens"], HeldOutLoss(stored["raw_loss"], stored["raw_standard_error"])
    snapshots = {kind: run.of_kind(kind) for kind in dict.fromkeys([new[0].kind, RAW.kind])}
    has_raw = any(s.tokens == tokens for s in snapshots[RAW.kind])
    # The raw loss is evaluated as one more merge, so that the newest point is not read twice. The standard errors of
    # differences need the raw loss of each document, which is not stored.
    cells = list(dict.fromkeys([*new, RAW] if has_raw else new))
    evaluated = evaluate_cells(run.config, snapshots, [(cell, tokens) for cell in cells], SELECT, progress)
    losses = dict(zip(cells, evaluated.losses, strict=True))
    raw_nats_D = evaluated.sums[cells.index(RAW)] if has_raw else None
    rows = [
        {
            **dataclasses.asdict(cell),
            "text": cell.text,
            **dataclasses.asdict(losses[cell]),
            **_compare_with_raw(nats_D, raw_nats_D, evaluated.counts),
        }
        for cell, nats_D in zip(new, evaluated.sums, strict=False)
    ]
    raw = losses.get(RAW, raw)
    return {
        "raw_loss": raw.loss,
        "raw_standard_error": raw.standard_error,
        "rows": [*stored["rows"], *rows],
        "passes": evaluated.passes,
        "seconds": evaluated.seconds,
    }


def _compare_with_raw(nats_D: np.ndarray, raw_nats_D: np.ndarray | None, counts_D: np.ndarray) -> dict[str, Any]:
    """Return the difference of a merge's loss from the raw loss, and its standard error over documents."""
    difference = None if raw_nats_D is None else estimate(nats_D - raw_nats_D, counts_D)
    return {
        "difference": difference and difference.loss,
        "difference_standard_error": difference and difference.standard_error,
    }


def _matching(content: dict[str, Any] | None, empty: dict[str, Any]) -> dict[str, Any]:
    """Return the content of sweep.json if it is for the newest snapshot and held-out text of `empty`, else `empty`."""
    is_same = content and all(content.get(key) == empty[key] for key in ("tokens", "held_out"))
    return empty | content if content and is_same else empty
