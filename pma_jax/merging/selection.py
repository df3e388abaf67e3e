"""Select the checkpoints of a merge by token count (the last N, a range, every V tokens), and note irregularities.

Published collections of checkpoints have gaps, uneven intervals, and several training stages or parallel runs. Notes
report missing checkpoints and irregular intervals. A selection from several stages is an error unless it is allowed.

A checkpoint is any saved set of parameters; a snapshot is a checkpoint that pma_jax wrote.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from pma_jax.config.errors import UserError

# Default tolerance, as a fraction of the interval. Also the largest deviation from the usual interval without a note.
GRID_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Selection:
    """Indices of the selected checkpoints, oldest first, and notes for the user, one line each."""

    indices: tuple[int, ...]
    notes: tuple[str, ...] = ()


def select(
    tokens: ArrayLike,
    *,
    last: int | None = None,
    between_tokens: tuple[int | None, int | None] | None = None,
    every_tokens: int | None = None,
    tolerance_tokens: int | None = None,
    stages: Sequence[str | None] | None = None,
    across_stages: bool = False,
    unit: str = "tokens",
    is_series: bool = True,
) -> Selection:
    """Select checkpoints by token count, or by another position.

    Args:
        tokens: Token counts [K] in ascending order. The order of checkpoints with equal counts is not known.
        last: Number of checkpoints to select: the newest of those that satisfy the other conditions.
        between_tokens: (A, B), both inclusive; None leaves that end open.
        every_tokens: Interval V: select the newest checkpoint, and the one nearest to each of V, 2 V, ... tokens before
            it, if one is within the tolerance.
        tolerance_tokens: Largest distance from these token counts; by default a tenth of V.
        stages: [K], the stage or run of each checkpoint; None for one that fits any. By default all are of one.
        across_stages: Allow checkpoints of several stages in the selection.
        unit: What `tokens` are, for messages: "tokens", "steps", "epochs", or "order" (numbers without a meaning).
        is_series: Whether the checkpoints were saved as one series per stage: notes then report missing and off-grid
            ones, and equal counts in one stage are an error. Otherwise the user chose them one by one.

    Returns:
        The selection. Its notes report the interval, off-grid and missing checkpoints, and boundaries between stages.

    Raises:
        UserError: No checkpoint satisfies the conditions, fewer than `last` do, token counts are out of order or do not
            tell which are the last, or the selection crosses a boundary between stages without `across_stages`; the
            message names that boundary.
    """
    t = np.asarray(tokens)
    labels = list(stages) if stages is not None else [""] * len(t)
    _check_options(len(t), len(labels), last, every_tokens, tolerance_tokens)
    _check_order(t, labels if is_series and unit != "order" else [None] * len(t), unit)
    chosen = select_range(t, between_tokens)
    notes: list[str] = []
    if every_tokens is not None:
        tolerance = GRID_TOLERANCE * every_tokens if tolerance_tokens is None else tolerance_tokens
        chosen = _on_grid(t, chosen, every_tokens, tolerance, last, notes)
    if last is not None:
        if len(chosen) < last:
            raise UserError(
                f"{last} checkpoints are requested and there are {len(chosen)}: request fewer, or widen the range"
            )
        if len(chosen) > last and t[chosen[-last]] == t[chosen[-last - 1]]:
            raise UserError(
                f"cannot select the last {last}: the order of the checkpoints {_at(t[chosen[-last]], unit)} is not "
                "known; name those that you mean"
            )
        chosen = chosen[-last:]
    notes += _stage_notes(t, chosen, labels, across_stages, unit)
    if every_tokens is None and is_series and unit != "order" and len({labels[i] for i in chosen}) == 1:
        notes += _gap_notes(t[chosen], unit)
    return Selection(tuple(int(i) for i in chosen), tuple(notes))


def check_one_snapshot_kind(path_to_kind: Mapping[str, str]) -> None:
    """Check that all snapshots have the same kind, "point" or "block_mean".

    Raises:
        UserError: They have different kinds; the message names one snapshot of each kind.
    """
    kind_to_path = {kind: path for path, kind in path_to_kind.items()}
    if len(kind_to_path) > 1:
        (kind_a, path_a), (kind_b, path_b) = kind_to_path.items()
        raise UserError(f"cannot merge {path_a} ({kind_a}) with {path_b} ({kind_b}): select snapshots of one kind")


def select_range(tokens: ArrayLike, between: tuple[int | None, int | None] | None) -> np.ndarray:
    """Return the indices of the token counts in a range, both ends inclusive; raise UserError if there are none."""
    t = np.asarray(tokens)
    if not len(t):
        raise UserError("there are no checkpoints to select from")
    low, high = between or (None, None)
    inside = np.ones(len(t), bool)
    if low is not None:
        inside &= t >= low
    if high is not None:
        inside &= t <= high
    chosen = np.flatnonzero(inside)
    if not len(chosen):
        low_text, high_text = ("" if end is None else f"{end:,}" for end in (low, high))
        raise UserError(
            f"no checkpoint is in {low_text}:{high_text} tokens: there are {len(t)}, from {t.min():,} to {t.max():,}"
        )
    return chosen


def _on_grid(
    t: np.ndarray, chosen: np.ndarray, every: int, tolerance: float, last: int | None, notes: list[str]
) -> np.ndarray:
    """Return the indices of the checkpoints nearest to the grid points, and append to `notes` what is irregular.

    The grid points are the newest token count and every multiple of `every` tokens before it.
    """
    newest = int(t[chosen[-1]])
    notes.append(f"every {every:,} tokens back from {newest:,}, nearest within {tolerance:,.0f}")
    nearest: dict[int, tuple[int, int]] = {}  # number of intervals before the newest -> (distance in tokens, index)
    for i in chosen[::-1].tolist():
        intervals_back = (newest - int(t[i]) + every // 2) // every
        distance = abs(int(t[i]) - (newest - intervals_back * every))
        if distance <= tolerance:
            nearest[intervals_back] = min(nearest.get(intervals_back, (distance, i)), (distance, i))
    points = sorted(nearest)[:last]
    for later, earlier in itertools.pairwise(points):
        if earlier - later > 1:
            span = f"{newest - (earlier - 1) * every:,}"
            if earlier - later > 2:
                span += f" to {newest - (later + 1) * every:,}"
            notes.append(f"missing: no checkpoint near {span} tokens")
    for intervals_back in points:
        distance, i = nearest[intervals_back]
        if distance:
            notes.append(f"off grid: {t[i]:,} tokens is used for {newest - intervals_back * every:,}")
    return np.array([nearest[intervals_back][1] for intervals_back in points[::-1]])


def _check_options(
    checkpoints: int, stages: int, last: int | None, every_tokens: int | None, tolerance_tokens: int | None
) -> None:
    if stages != checkpoints:
        raise UserError(f"{stages} stages for {checkpoints} checkpoints: give one per checkpoint")
    if last is not None and last < 1:
        raise UserError(f"last = {last}: select at least 1 checkpoint")
    if every_tokens is not None and every_tokens <= 0:
        raise UserError(f"every_tokens = {every_tokens}: the interval must be positive")
    if tolerance_tokens is not None and (every_tokens is None or tolerance_tokens < 0):
        raise UserError("tolerance_tokens must be 0 or more, and requires every_tokens")


def _check_order(t: np.ndarray, labels: list[str | None], unit: str) -> None:
    if t.ndim != 1 or (np.diff(t) < 0).any():
        raise UserError(f"checkpoints must be in order of {unit}, oldest first")
    newest: dict[str | None, int] = {}
    for label, position in zip(labels, t.tolist(), strict=True):
        if label is not None and newest.get(label) == position:
            where = f" of {label}" if label else ""
            raise UserError(f"two checkpoints{where} are {_at(position, unit)}: remove one, or set their stages")
        newest[label] = position


def _stage_notes(
    t: np.ndarray, chosen: np.ndarray, labels: list[str | None], across_stages: bool, unit: str
) -> list[str]:
    """Return a note for each stage boundary in the selection; raise UserError for the first unless `across_stages`."""
    lines = []
    for a, b in itertools.pairwise(i for i in chosen if labels[i] is not None):
        if labels[a] != labels[b]:
            at = ("", "") if unit == "order" else (f" at {t[a]:,}", f" at {t[b]:,} {unit}")
            line = f"{labels[a]}{at[0]} and {labels[b]}{at[1]}"
            if line not in lines:
                lines.append(line)
    if lines and not across_stages:
        raise UserError(
            f"the selection crosses a boundary between {lines[0]}: select checkpoints of one stage, or set "
            "across_stages (--across-stages)"
        )
    return [f"crosses a boundary between {line}" for line in lines]


def _gap_notes(t: np.ndarray, unit: str) -> list[str]:
    """Return notes about missing and off-grid checkpoints, for a selection without a requested grid."""
    intervals = np.diff(t)
    if len(intervals) < 2:
        return []
    usual = float(np.median(intervals))
    notes = []
    for before, after, interval in zip(t[:-1], t[1:], intervals, strict=True):
        missing = round(interval / usual) - 1 if usual else 0
        if missing >= 1:
            notes.append(
                f"missing: about {missing} between {before:,} and {after:,} {unit} (usual interval {usual:,.0f})"
            )
        elif abs(interval - usual) > GRID_TOLERANCE * usual:
            notes.append(f"off grid: {after:,} {unit} is {interval:,} after {before:,} (usual interval {usual:,.0f})")
    return notes


def _at(position: int, unit: str) -> str:
    return "of equal position" if unit == "order" else f"at {position:,} {unit}"
