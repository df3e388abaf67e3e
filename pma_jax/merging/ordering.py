"""Order checkpoints by their position in training, and tell where the order is not known.

Positions are tokens if all are known, else steps, else epochs. A stage with a higher number comes after one with a
lower number, and annealing after the stage that it continues. Checkpoints with equal positions have no known order.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pma_jax.storage.formats import hub
from pma_jax.storage.formats.names import parse_path, stage_rank
from pma_jax.storage.formats.source import CheckpointSource


@dataclass(frozen=True)
class Ordering:
    """The order of K checkpoints.

    Attributes:
        indices: Indices of the checkpoints, oldest first.
        positions: int64 [K], of the checkpoints in this order, not decreasing. The order of checkpoints with equal
            positions is not known.
        unit: What the positions count: "tokens", "steps", "epochs", or "order" (1, 2, 3 …, or 0 if not known).
        doubt: Why the order is not known; None if it is.
        notes: Messages for the user, one line each.
    """

    indices: tuple[int, ...]
    positions: np.ndarray
    unit: str
    doubt: str | None = None
    notes: tuple[str, ...] = ()


def order_checkpoints(sources: Sequence[CheckpointSource], stages: Sequence[str | None]) -> Ordering:
    """Order checkpoints by stage, then by tokens, steps or epochs."""
    count = len(sources)
    unit, values, notes = _choose_unit(sources, stages)
    if count == 1:
        return Ordering((0,), np.array(values or [0]), unit)
    ranks = [stage_rank((stage or "").rpartition("/")[2]) for stage in stages]
    indices: list[int] = []
    if not values:
        doubt = _describe_unknown(sources)
    elif len({number is None for number, _ in ranks}) > 1:
        doubt = "some names state a stage and others do not"
    else:
        keys = [((number or 0, anneals), value) for (number, anneals), value in zip(ranks, values, strict=True)]
        indices = sorted(range(count), key=lambda i: keys[i])
        doubt = _find_contradiction(sources, stages, indices)
    if doubt is not None:
        return Ordering(tuple(range(count)), np.zeros(count, np.int64), "order", doubt, tuple(notes))
    positions = np.array([values[i] for i in indices])
    if (np.diff(positions) < 0).any():  # only between stages
        notes.append(f"{unit} restart between the stages: the checkpoints are in the order of their stages")
        ordered_ranks_and_positions = [(ranks[i], values[i]) for i in indices]
        positions = np.cumsum([1, *(a != b for a, b in itertools.pairwise(ordered_ranks_and_positions))])
        unit = "order"
    return Ordering(tuple(indices), positions, unit, None, tuple(notes))


def keep_given_order(sources: Sequence[CheckpointSource], stages: Sequence[str | None]) -> Ordering:
    """Keep the order of the checkpoints, and note if their tokens, steps or epochs have another one."""
    count = len(sources)
    unit, values, notes = _choose_unit(sources, stages)
    if values and all(a < b for a, b in itertools.pairwise(values)):
        return Ordering(tuple(range(count)), np.array(values), unit, None, tuple(notes))
    if values:
        shown = ", ".join(f"{value:,}" for value in values[:6])
        notes.append(f"the order of the command is kept, although the {unit} are {shown}")
    return Ordering(tuple(range(count)), np.arange(1, count + 1), "order", None, tuple(notes))


def _choose_unit(sources: Sequence[CheckpointSource], stages: Sequence[str | None]) -> tuple[str, list[int], list[str]]:
    """Return the first unit in which all positions are known, with the positions and notes; else ("order", [], [])."""
    notes: list[str] = []
    for unit, values in _positions(sources).items():
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue
        if unit == "tokens" and _repeats_at_other_steps(sources, stages):
            notes.append("several steps have the same tokens, which are rounded or no tokens: ordered by steps")
            continue
        return unit, known, notes
    return "order", [], notes


def _positions(sources: Sequence[CheckpointSource]) -> dict[str, list[int | None]]:
    return {
        "tokens": [source.tokens for source in sources],
        "steps": [source.step for source in sources],
        "epochs": [source.epoch for source in sources],
    }


def _repeats_at_other_steps(sources: Sequence[CheckpointSource], stages: Sequence[str | None]) -> bool:
    """Return whether one stage has the same tokens at several steps, as in `step1000-7B` and `step2000-7B`."""
    step_of: dict[tuple[str | None, int | None], int | None] = {}
    return any(
        step_of.setdefault((stage, source.tokens), source.step) != source.step
        for source, stage in zip(sources, stages, strict=True)
        if source.step is not None
    )


def _describe_unknown(sources: Sequence[CheckpointSource]) -> str:
    """Return why no unit is known for all checkpoints; the message names some of those that lack it."""
    by_unit = _positions(sources)
    unit = max(by_unit, key=lambda unit: sum(value is not None for value in by_unit[unit]))
    missing = [source.origin for source, value in zip(sources, by_unit[unit], strict=True) if value is None]
    if len(missing) == len(sources):
        return "neither tokens nor steps are known for the checkpoints"
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    return f"the {unit} of {', '.join(missing[:2])}{more} are not known"


def _find_contradiction(
    sources: Sequence[CheckpointSource], stages: Sequence[str | None], indices: Sequence[int]
) -> str | None:
    """Return how tokens, steps, epochs or the steps in names contradict the order within a stage, if they do."""
    columns = _positions(sources) | {"steps in the names": [_step_in_name(source) for source in sources]}
    for stage in dict.fromkeys(stage for stage in stages if stage is not None):
        for unit, values in columns.items():
            known = [(value, i) for i in indices if stages[i] == stage and (value := values[i]) is not None]
            for (a, i), (b, j) in itertools.pairwise(known):
                if a > b:
                    return (
                        f"the {unit} of {sources[i].origin} ({a:,}) and {sources[j].origin} ({b:,}) contradict their "
                        "other positions"
                    )
    return None


def _step_in_name(source: CheckpointSource) -> int | None:
    is_hub = source.origin.startswith(hub.PREFIX)
    return hub.parse_progress(source.origin).step if is_hub else parse_path(source.path).step
