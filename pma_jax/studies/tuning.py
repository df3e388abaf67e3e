"""Tuning: search the best setting of each of several contenders, with the same number of settings for all.

A setting is a position on axes, each of which is a configuration key with a geometric scale of values. The search is
the same for every contender: first the settings of a grid, then, in rounds, two unmeasured neighbours of the best
setting so far, those along the first axes first. It ends when the best setting of every contender has a lower loss than
all its neighbours on these seeds, so that no best setting is at the edge of what was tried.

The settings of a round are measured together, those of all contenders, so that their runs can be trained at the same
time. A search on one seed is cheaper, and on less training more so: `search` then measures the best settings of each
contender on more seeds and in full (successive halving).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

from pma_jax.config.errors import UserError

Position = tuple[int, ...]  # one number per axis
# From the settings of each contender, by its name and each as overrides, to the losses of each, one per tuning seed, in
# nats per token; infinite if the run diverged.
Measure = Callable[[dict[str, list[list[str]]]], dict[str, list[list[float]]]]
TUNING_SEEDS = (100, 101, 102)  # results are never published on these
ROUND = 2  # settings per contender and round
LIMIT = 32  # settings per contender after which a search is given up


@dataclasses.dataclass(frozen=True)
class Axis:
    """A configuration key and the scale of values that are tried: base * factor**i for integers i."""

    key: str
    base: float
    factor: float
    minimum: float = 0.0  # values below are not tried: a batch has at least 1 sequence
    limit: float = math.inf  # values from here on are not tried: a decay starts before the end of the run
    zero_at: int | None = None  # the lowest position, which stands for 0: a weight decay can be 0

    def value(self, i: int) -> float:
        """Return the value at position `i`, with 4 significant digits, which do not take it below the minimum."""
        return 0.0 if i == self.zero_at else max(float(f"{self.base * self.factor**i:.4g}"), self.minimum)

    def is_valid(self, i: int) -> bool:
        """Return whether a setting may have position `i`."""
        if self.zero_at is not None and i <= self.zero_at:
            return i == self.zero_at
        return self.minimum <= self.base * self.factor**i < self.limit


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of the methods that are compared, and the first settings that are tried."""

    name: str
    axes: tuple[Axis, ...]
    grid: tuple[Position, ...]
    is_allowed: Callable[[Position], bool] = lambda position: True  # a condition on the values of several axes

    def is_valid(self, position: Position) -> bool:
        """Return whether a setting may be tried."""
        return all(axis.is_valid(i) for axis, i in zip(self.axes, position, strict=True)) and self.is_allowed(position)

    def overrides(self, position: Position) -> list[str]:
        """Return a setting as overrides of the configuration, `section.key=value`."""
        return overrides(self.axes, position)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The settings of a contender that were measured, and the losses of each, one per seed."""

    contender: Contender
    losses: dict[Position, list[float]]

    @property
    def best(self) -> Position:
        """The setting with the lowest mean loss over seeds."""
        return min(self.losses, key=self.mean)

    def lowest(self, count: int) -> list[Position]:
        """Return the `count` settings with the lowest mean losses, the best first."""
        return sorted(self.losses, key=self.mean)[:count]

    def mean(self, position: Position) -> float:
        """Return the mean loss of a setting over the seeds."""
        return sum(self.losses[position]) / len(self.losses[position])

    def open_neighbours(self, position: Position) -> list[Position]:
        """Return the settings one step from a setting, along one axis, that are not measured yet."""
        steps = [(axis, step) for axis in range(len(position)) for step in (1, -1)]
        around = [tuple(i + step * (k == axis) for k, i in enumerate(position)) for axis, step in steps]
        return [near for near in around if near not in self.losses and self.contender.is_valid(near)]

    def next_positions(self, count: int, shared: Iterable[Position] = ()) -> list[Position]:
        """Return `count` unmeasured settings.

        First come the neighbours of the best one, then those of `shared`, then the neighbours of the second best, and
        so on.
        """
        by_loss = sorted(self.losses, key=self.mean)
        around = [near for position in by_loss[1:] for near in self.open_neighbours(position)]
        known = [near for near in shared if near not in self.losses and self.contender.is_valid(near)]
        return list(dict.fromkeys([*self.open_neighbours(self.best), *known, *around]))[:count]


def overrides(axes: Sequence[Axis], position: Position) -> list[str]:
    """Return the values at a position as overrides of the configuration, `section.key=value`."""
    return [f"{axis.key}={axis.value(i):g}" for axis, i in zip(axes, position, strict=True)]


def tune(contenders: Sequence[Contender], measure: Measure, limit: int = LIMIT) -> dict[str, Tuned]:
    """Search the best setting of each contender; all get the same number of settings.

    Args:
        contenders: The methods that are compared.
        measure: Trains and judges settings.
        limit: Settings per contender after which the search is given up.

    Returns:
        The settings of each contender, by its name.

    Raises:
        UserError: The first settings of the contenders differ in number, or a contender's best setting is still at the
            edge of what was tried after `limit` settings.
    """
    check_equal_numbers({contender.name: len(contender.grid) for contender in contenders})
    tuned = {contender.name: Tuned(contender, {}) for contender in contenders}
    _add_losses(tuned, {contender.name: list(contender.grid) for contender in contenders}, measure)
    while count := min(max(len(one.open_neighbours(one.best)) for one in tuned.values()), ROUND):
        for one in tuned.values():
            if len(one.losses) + count > limit and one.open_neighbours(one.best):
                raise UserError(
                    f"{one.contender.name}: the best of {len(one.losses)} settings is at the edge of those tried "
                    f"({' '.join(one.contender.overrides(one.best))}): start from other values or raise the limit"
                )
        _add_losses(tuned, _next_round(list(tuned.values()), count), measure)
    return tuned


def measure_best(tuned: dict[str, Tuned], measure: Measure, count: int) -> dict[str, Tuned]:
    """Measure the `count` best settings of each contender on more seeds; return these settings only.

    Args:
        tuned: The settings of each contender, measured on the same seeds.
        measure: Trains and judges settings on other seeds.
        count: Settings per contender.

    Returns:
        The best settings of each contender, with their losses on the seeds of both measurements. The best one of them
        may have a neighbour that is measured on the first seeds only, or not at all: a page has to say so.
    """
    found = _keep_best(tuned, count)
    _add_losses(found, {name: list(one.losses) for name, one in found.items()}, measure)
    return found


def follow_best(tried: dict[str, Tuned], finalists: dict[str, Tuned], measure: Measure) -> None:
    """Measure the untried neighbours of the best finalist of each contender, until its best one has none.

    The search ends where the best setting on one seed is lower than its neighbours; that on all seeds can be another.

    Args:
        tried: The settings of the search.
        finalists: Those that are measured on all seeds; the neighbours are added.
        measure: Trains and judges settings on all seeds.
    """

    def untried(name: str) -> list[Position]:
        one = finalists[name]
        return [near for near in one.open_neighbours(one.best) if near not in tried[name].losses]

    while positions := {name: near for name in finalists if (near := untried(name))}:
        _add_losses(finalists, positions, measure)


def search(
    contenders: Sequence[Contender],
    measure_on: Callable[[Sequence[int], dict[str, list[list[str]]]], dict[str, list[list[float]]]],
    seeds: Sequence[int],
    finalists: int,
    follow_neighbours: bool = True,
    measure_first: Measure | None = None,
    limit: int = LIMIT,
) -> tuple[dict[str, Tuned], dict[str, Tuned]]:
    """Search the best setting of each contender on the first seed, and choose among the best ones on all seeds.

    Args:
        contenders: The methods that are compared.
        measure_on: As `Measure`, on the seeds of its first argument.
        seeds: Tuning seeds; the search is on the first of them.
        finalists: Settings of each contender that are measured on all seeds.
        follow_neighbours: Whether neighbours of the best setting are measured (`tune`); if not, only the first setting
            of each contender is.
        measure_first: How the settings of the search are judged, as on fewer tokens. The finalists are then measured
            with `measure_on` on all seeds, the first of them too. By default, that is `measure_on` on the first seed.
        limit: As for `tune`.

    Returns:
        The settings of each contender with their losses in the search; and the finalists with their losses on all
        seeds, the best of which is the choice.
    """
    measure = measure_first or functools.partial(measure_on, seeds[:1])
    if follow_neighbours:
        tuned = tune(contenders, measure, limit)
    else:
        tuned = {one.name: Tuned(one, {}) for one in contenders}
        _add_losses(tuned, {one.name: [one.grid[0]] for one in contenders}, measure)
    if not measure_first:
        if len(seeds) == 1:
            return tuned, _keep_best(tuned, finalists)
        return tuned, measure_best(tuned, functools.partial(measure_on, seeds[1:]), finalists)
    # The losses of the search are not comparable with those of `measure_on`.
    best = {name: Tuned(one.contender, {}) for name, one in tuned.items()}
    kept = {name: one.lowest(finalists) for name, one in tuned.items()}
    _add_losses(best, kept, functools.partial(measure_on, seeds))
    return tuned, best


def _keep_best(tuned: dict[str, Tuned], count: int) -> dict[str, Tuned]:
    """Return the `count` best settings of each contender, with their losses."""
    return {
        name: Tuned(one.contender, {position: one.losses[position] for position in one.lowest(count)})
        for name, one in tuned.items()
    }


def _next_round(tuned: Sequence[Tuned], count: int) -> dict[str, list[Position]]:
    """Return `count` settings per contender, those of contenders whose best one has open neighbours first.

    The others choose among the settings of contenders with the same axes, because contenders may share runs.
    """
    chosen: dict[str, list[Position]] = {}
    for one in sorted(tuned, key=lambda one: not one.open_neighbours(one.best)):
        rivals = [rival for rival in tuned if rival.contender.axes == one.contender.axes]
        shared = [near for rival in rivals for near in (*rival.losses, *chosen.get(rival.contender.name, ()))]
        chosen[one.contender.name] = one.next_positions(count, shared)
    return chosen


def _add_losses(tuned: dict[str, Tuned], positions: dict[str, list[Position]], measure: Measure) -> None:
    """Measure settings of contenders, and add their losses to those that are known."""
    settings = {name: [tuned[name].contender.overrides(at) for at in of_one] for name, of_one in positions.items()}
    for name, losses in measure(settings).items():
        of_one = tuned[name].losses
        of_one |= {at: [*of_one.get(at, ()), *new] for at, new in zip(positions[name], losses, strict=True)}


def check_equal_numbers(settings: dict[str, int]) -> None:
    """Raise UserError, naming the contender, unless all contenders of a table have the same number of settings."""
    most = max(settings, key=lambda name: settings[name])
    for name, number in settings.items():
        if number != settings[most]:
            raise UserError(
                f"{name} is tuned over {number} settings and {most} over {settings[most]}: give every contender the "
                "same number"
            )
