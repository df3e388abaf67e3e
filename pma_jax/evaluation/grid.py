"""The grid of merges of any checkpoints: recipes x windows x intervals x end points, with their coefficients.

Does not import JAX. Dimensions: K checkpoints of the series.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.merging import recipes, selection
from pma_jax.merging.from_storage import recipe_coefficients
from pma_jax.merging.gather import CheckpointSeries, order_advice, snapshot_numbers
from pma_jax.storage.formats.source import CheckpointSource
from pma_jax.storage.matching import files_below

RAW = "raw"  # label of the newest checkpoint alone


class End(NamedTuple):
    """An end point: tokens (or steps, if tokens are not known), or a percentage of the newest checkpoint's."""

    value: float
    is_percentage: bool = False

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.is_percentage else f"{self.value:,}"


@dataclass(frozen=True, eq=False)
class GridCell:
    """One merge of a grid: `recipe` applied to `window` checkpoints, every `interval`-th, back from the end.

    Attributes:
        recipe: The recipe's text.
        window: Number of merged checkpoints.
        interval: Distance between them in checkpoints: with 2, every second one is merged.
        end: Position of the newest of them, in the unit of the series.
        coefficients: float64 [K], 0 for the checkpoints that are not merged.
        is_raw: Whether it is the newest checkpoint alone, to compare the merges with.
        notes: About irregular intervals, one line each.
    """

    recipe: str
    window: int
    interval: int
    end: int
    coefficients: np.ndarray
    is_raw: bool = False
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The cell's label without its end: `raw`, `sma:10` or `sma:10@2` (every second checkpoint)."""
        return RAW if self.is_raw else _label(self.recipe, self.window, self.interval)

    @property
    def recipe_text(self) -> str:
        """The merge as a recipe with its window and interval, for the provenance."""
        return _label(self.recipe, self.window, self.interval)

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the cell in a grid: its label and its end."""
        return self.text, self.end

    @property
    def directory_name(self) -> str:
        """A name for the directory of the merge."""
        name = f"{self.text}-at-{self.end}".replace(":", "-").replace("/", "-")
        return name if len(name) <= 120 else f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Grid:
    """Merges by end, oldest end first, each end's raw checkpoint first; and why others are left out."""

    series: CheckpointSeries
    cells: tuple[GridCell, ...]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def merges(self) -> tuple[GridCell, ...]:
        """The cells other than raw ones."""
        return tuple(cell for cell in self.cells if not cell.is_raw)


def make_grid(
    series: CheckpointSeries,
    recipe_texts: Sequence[str],
    windows: Sequence[int],
    intervals: Sequence[int] = (1,),
    ends: Sequence[End] = (),
    across_stages: bool = False,
) -> Grid:
    """Compute the merges of a grid. Those that cannot be made are left out, with the reason.

    Args:
        series: The checkpoints, whose order must be known.
        recipe_texts: Recipes in the syntax of `recipes.parse`, without a window.
        windows: Numbers of checkpoints to merge.
        intervals: Distances between them, in checkpoints.
        ends: End points, each at the nearest checkpoint; by default the newest checkpoint.
        across_stages: Allow merges of several stages.

    Raises:
        UserError: A recipe or an end is invalid, the order of the checkpoints is not known, or no merge is possible.
    """
    for text in recipe_texts:
        recipes.parse(text)
    check_order(series)
    end_indices, notes = find_ends(series, ends)
    cells: list[GridCell] = []
    left_out: dict[str, str] = {}
    # A single checkpoint has no interval.
    choices = dict.fromkeys(
        (r, n, i if n > 1 else 1) for r, n, i in itertools.product(recipe_texts, windows, intervals)
    )
    for end in end_indices:
        position = int(series.positions[end])
        made = []
        for recipe, window, interval in choices:
            try:
                made.append(_make_cell(series, recipe, window, interval, end, across_stages))
            except UserError as error:
                left_out[f"{_label(recipe, window, interval)} at {position:,}"] = str(error)
        if made:
            cells += [_raw_cell(series, end), *made]
    if not cells:
        reasons = "; ".join(f"{text}: {why}" for text, why in itertools.islice(left_out.items(), 5))
        raise UserError(f"no merge of the grid is possible: {reasons}")
    cells_of: dict[str, list[str]] = {}
    for cell in cells:
        for note in cell.notes:
            cells_of.setdefault(note, []).append(f"{cell.text} at {cell.end:,}")
    notes += [f"{note} (in {names[0]}; {len(names)} merges)" for note, names in cells_of.items()]
    return Grid(series, tuple(cells), left_out, tuple(notes))


def check_order(series: CheckpointSeries) -> None:
    """Raise UserError unless the order of all checkpoints is known."""
    if series.doubt is not None:
        raise UserError(f"a grid needs the order of the checkpoints: {order_advice(series.doubt)}")
    ties = np.flatnonzero(np.diff(series.positions) == 0)
    if len(ties):
        first, second = (series.sources[i].origin for i in (ties[0], ties[0] + 1))
        doubt = f"{first} and {second} have the same position"
        raise UserError(f"a grid needs the order of the checkpoints: {order_advice(doubt)}")


def find_ends(series: CheckpointSeries, ends: Sequence[End]) -> tuple[list[int], list[str]]:
    """Return the index of the checkpoint nearest to each end, in ascending order, and notes about inexact ones.

    Raises:
        UserError: An end is farther outside of the checkpoints than half an interval, or it is a number and the
            positions of the checkpoints are not known.
    """
    positions, notes = series.positions, []
    newest = int(positions[-1])
    margin = float(np.median(np.diff(positions))) / 2 if len(positions) > 1 else 0.0
    found: dict[int, None] = {}
    for end in ends or (End(100, True),):
        if not end.is_percentage and series.unit == "order":
            raise UserError(
                f"--ends {end}: the tokens and steps of the checkpoints do not give their order: give percentages (60%)"
            )
        target = newest * end.value / 100 if end.is_percentage else end.value
        if not positions[0] - margin <= target <= newest + margin:
            raise UserError(
                f"--ends {end}: the checkpoints are from {int(positions[0]):,} to {newest:,} {series.unit}: give ends "
                "within"
            )
        index = int(np.argmin(np.abs(positions - target)))
        if positions[index] != target:
            notes.append(f"the end {end} is the nearest checkpoint, at {int(positions[index]):,} {series.unit}")
        if index in found:
            notes.append(f"the end {end} is the same checkpoint as another end")
        found[index] = None
    return sorted(found), notes


def stamp(source: CheckpointSource) -> list[Any]:
    """Return what changes if the files of a checkpoint change: its address, and each file's size and time."""
    if source.format == "deferred":
        return [source.origin]
    paths = {part.path for ranges in source.byte_ranges.values() for part in ranges}
    paths |= set(files_below(source.path)) if source.path.is_dir() else {source.path}
    stats = [(str(path), path.stat()) for path in sorted(paths)]
    return [source.origin, *([path, stat.st_size, stat.st_mtime_ns] for path, stat in stats)]


def cell_digests(
    series: CheckpointSeries, cells: Sequence[GridCell], options: Mapping[str, Any]
) -> dict[tuple[str, int], str]:
    """Return a digest of each cell's checkpoints, coefficients and options, by the cell's key."""
    used = {k for cell in cells for k in np.flatnonzero(cell.coefficients).tolist()}
    stamps = {k: stamp(series.sources[k]) for k in used}

    def digest(cell: GridCell) -> str:
        row = [(stamps[k], float(cell.coefficients[k])) for k in np.flatnonzero(cell.coefficients).tolist()]
        identity = json.dumps([cell.recipe, row, dict(options)], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    return {cell.key: digest(cell) for cell in cells}


def find_cells(series: CheckpointSeries, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], GridCell]:
    """Return the cells of rows of sweep.json by their keys, without those that these checkpoints cannot make."""
    index_of = {int(position): i for i, position in enumerate(series.positions)}
    cells = {}
    for row in rows:
        key, end = (row["text"], row["end"]), index_of.get(row["end"])
        if end is None:
            continue
        if row["text"] == RAW:
            cells[key] = _raw_cell(series, end)
            continue
        with contextlib.suppress(UserError):
            cells[key] = _make_cell(series, row["recipe"], row["window"], row["interval"], end, across_stages=True)
    return cells


def _raw_cell(series: CheckpointSeries, end: int) -> GridCell:
    return GridCell("sma", 1, 1, int(series.positions[end]), np.eye(len(series.sources))[end], is_raw=True)


def _make_cell(
    series: CheckpointSeries, recipe: str, window: int, interval: int, end: int, across_stages: bool
) -> GridCell:
    """Return one merge, that ends at the checkpoint with index `end`; raise UserError if it cannot be made."""
    indices = list(range(end - (window - 1) * interval, end + 1, interval))
    if indices[0] < 0:
        raise UserError(
            f"there are {end + 1} checkpoints up to there, and the merge needs {(window - 1) * interval + 1}"
        )
    chosen = series.take(indices)
    selected = selection.select(
        chosen.positions,
        stages=chosen.stages,
        across_stages=across_stages,
        unit=series.unit,
        is_series=series.is_expanded,
    )
    numbers = snapshot_numbers(chosen)
    if numbers is not None and (np.diff(numbers) != interval).any():
        raise UserError("a snapshot that the merge needs is missing (removed by retention?)")
    coefficients = np.zeros(len(series.sources))
    coefficients[indices] = recipe_coefficients(recipe, chosen)
    position = int(series.positions[end])
    return GridCell(recipe, window, interval, position, coefficients, notes=selected.notes)


def _label(recipe: str, window: int, interval: int) -> str:
    return f"{recipe}:{window}" + (f"@{interval}" if interval > 1 else "")
