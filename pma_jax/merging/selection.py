"""Which checkpoints take part in a merge, by tokens: the last N, a range, every V; and what was odd about them.

Published suites have gaps, off-grid steps and several stages or parallel runs under one roof. Whatever is not an even
grid of one trajectory is told in the notes, and a boundary between stages is never crossed unless asked for.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

OFF_GRID_SHARE = 0.1  # of the interval: the default tolerance, and how uneven a grid may be without a note


@dataclasses.dataclass(frozen=True)
class Selection:
    """Indexes into the checkpoints that were offered, oldest first, and lines for the user."""

    indexes: tuple[int, ...]
    notes: tuple[str, ...] = ()


def select(
    tokens: ArrayLike,
    *,
    last: int | None = None,
    between: tuple[int | None, int | None] | None = None,
    every: int | None = None,
    tolerance: int | None = None,
    stages: Sequence[str | None] | None = None,
    across_stages: bool = False,
) -> Selection:
    """Chooses checkpoints by their positions.

    Args:
      tokens: integers [K], oldest first; increasing within a stage, while parallel runs may share positions.
      last: the newest N of those that the other conditions leave.
      between: (A, B) in tokens, both included; None leaves that end open.
      every: V in tokens: from the newest backwards, the checkpoint nearest to each multiple of V, unless it is further
        from it than the tolerance.
      tolerance: in tokens; by default a tenth of V.
      stages: [K], the stage or run that each checkpoint belongs to; None is a stage of its own.
      across_stages: allow the selection to hold checkpoints of several stages.

    Returns:
      Selection; notes tell the range, the tolerance, off-grid and missing checkpoints and crossed boundaries.

    Raises:
      ValueError: nothing is selected, fewer than `last` are there, positions are out of order, or the selection
        crosses a boundary (which is named) without `across_stages`.
    """
    t = np.asarray(tokens)
    labels = list(stages) if stages is not None else [None] * len(t)
    if len(labels) != len(t):
        raise ValueError(f"{len(labels)} stages for {len(t)} checkpoints: give one each")
    if last is not None and last < 1:
        raise ValueError(f"last = {last}: select at least 1 checkpoint")
    if every is not None and every <= 0:
        raise ValueError(f"every = {every}: the interval must be a positive number of tokens")
    if tolerance is not None and (every is None or tolerance < 0):
        raise ValueError("a tolerance is 0 or more tokens, and belongs to an interval: give `every` too")
    _check_order(t, labels)
    chosen = _in_range(t, between)
    notes: list[str] = []
    if every is not None:
        chosen = _on_grid(t, chosen, every, OFF_GRID_SHARE * every if tolerance is None else tolerance, last, notes)
    if last is not None:
        if len(chosen) < last:
            raise ValueError(
                f"{last} checkpoints are asked for and {len(chosen)} are there: take fewer, or widen the range"
            )
        chosen = chosen[-last:]
    notes += _stage_notes(t, chosen, labels, across_stages)
    if every is None and len({labels[i] for i in chosen}) == 1:
        notes += _gap_notes(t[chosen])
    return Selection(tuple(int(i) for i in chosen), tuple(notes))


def _in_range(t: np.ndarray, between: tuple[int | None, int | None] | None) -> np.ndarray:
    if not len(t):
        raise ValueError("there are no checkpoints to select from")
    low, high = between or (None, None)
    inside = np.ones(len(t), bool)
    if low is not None:
        inside &= t >= low
    if high is not None:
        inside &= t <= high
    chosen = np.flatnonzero(inside)
    if not len(chosen):
        low_text, high_text = ("" if end is None else f"{end:,}" for end in (low, high))
        raise ValueError(
            f"no checkpoint lies in {low_text}:{high_text} tokens: there are {len(t)}, from {t.min():,} to {t.max():,}"
        )
    return chosen


def _on_grid(
    t: np.ndarray, chosen: np.ndarray, every: int, tolerance: float, last: int | None, notes: list[str]
) -> np.ndarray:
    """The checkpoint nearest to each mark; marks are the newest one's position and every V before it."""
    newest = int(t[chosen[-1]])
    notes.append(f"every {every:,} tokens back from {newest:,}, nearest within {tolerance:,.0f}")
    nearest: dict[int, tuple[int, int]] = {}  # marks back from the newest -> (distance in tokens, index)
    for i in chosen[::-1].tolist():
        back = (newest - int(t[i]) + every // 2) // every
        off = abs(int(t[i]) - (newest - back * every))
        if off <= tolerance:
            nearest[back] = min(nearest.get(back, (off, i)), (off, i))
    found = sorted(nearest)[:last]
    for later, earlier in itertools.pairwise(found):
        if earlier - later > 1:
            marks = f"{newest - (earlier - 1) * every:,}"
            if earlier - later > 2:
                marks += f" to {newest - (later + 1) * every:,}"
            notes.append(f"missing: no checkpoint near {marks} tokens")
    for back in found:
        off, i = nearest[back]
        if off:
            notes.append(f"off grid: {t[i]:,} tokens stands for {newest - back * every:,}")
    return np.array([nearest[back][1] for back in found[::-1]])


def _check_order(t: np.ndarray, labels: list[str | None]) -> None:
    if t.ndim != 1 or (np.diff(t) < 0).any():
        raise ValueError("checkpoints must be in order of tokens, oldest first")
    newest: dict[str | None, int] = {}
    for label, position in zip(labels, t.tolist(), strict=True):
        if newest.get(label) == position:
            where = f" of {label}" if label is not None else ""
            raise ValueError(f"two checkpoints{where} are at {position:,} tokens: leave one out, or name their stages")
        newest[label] = position


def _stage_notes(t: np.ndarray, chosen: np.ndarray, labels: list[str | None], across_stages: bool) -> list[str]:
    """A line for each boundary inside the selection, or the error that names the first."""
    lines = []
    for a, b in itertools.pairwise(chosen):
        if labels[a] != labels[b]:
            first, second = (labels[i] or "(no stage)" for i in (a, b))
            line = f"{first} at {t[a]:,} and {second} at {t[b]:,} tokens"
            if line not in lines:
                lines.append(line)
    if lines and not across_stages:
        raise ValueError(
            f"the selection crosses a boundary between {lines[0]}: checkpoints of different stages or parallel runs "
            "are not one trajectory; select one of them, or allow it explicitly"
        )
    return [f"crosses a boundary between {line}" for line in lines]


def _gap_notes(t: np.ndarray) -> list[str]:
    """What is uneven about a selection that was not put on a grid: missing checkpoints and off-grid ones."""
    steps = np.diff(t)
    if len(steps) < 2:
        return []
    usual = float(np.median(steps))
    notes = []
    for before, after, step in zip(t[:-1], t[1:], steps, strict=True):
        missing = round(step / usual) - 1
        if missing >= 1:
            notes.append(
                f"missing: about {missing} between {before:,} and {after:,} tokens (usual interval {usual:,.0f})"
            )
        elif abs(step - usual) > OFF_GRID_SHARE * usual:
            notes.append(f"off grid: {after:,} tokens is {step:,} after {before:,} (usual interval {usual:,.0f})")
    return notes
