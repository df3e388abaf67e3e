"""Tuning: search the best setting of each of several contenders, with the same number of settings for all.

A setting is a position on axes, each of which is a configuration key with a geometric scale of values. The search is
the same for every contender: first the settings of a grid, then, in rounds, two unmeasured neighbours of the best
setting so far, those along the first axes first. It ends when the best setting of every contender has a lower loss than
all its neighbours, so that no best setting is at the edge of what was tried.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from pma_jax.config.errors import UserError

Position = tuple[int, ...]  # one number per axis
TUNING_SEEDS = (100, 101, 102)  # results are never published on these
ROUND = 2  # settings per contender and round


@dataclasses.dataclass(frozen=True)
class Axis:
    """A configuration key and the scale of values that are tried: base * factor**i for integers i."""

    key: str
    base: float
    factor: float
    minimum: float = 0.0  # values below are not tried: a batch has at least 1 sequence
    zero_at: int | None = None  # the lowest position, which stands for 0: a weight decay can be 0

    def value(self, i: int) -> float:
        """Return the value at position `i`, with 4 significant digits."""
        return 0.0 if i == self.zero_at else float(f"{self.base * self.factor**i:.4g}")

    def is_valid(self, i: int) -> bool:
        """Return whether a setting may have position `i`."""
        return self.value(i) >= self.minimum and (self.zero_at is None or i >= self.zero_at)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of the methods that are compared, how it is measured, and the first settings that are tried."""

    name: str
    axes: tuple[Axis, ...]
    grid: tuple[Position, ...]
    # From settings, each as overrides, to the losses of each, one per tuning seed, in nats per token; infinite if the
    # run diverged.
    measure: Callable[[list[list[str]]], list[list[float]]]
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

    def mean(self, position: Position) -> float:
        """Return the mean loss of a setting over the seeds."""
        return sum(self.losses[position]) / len(self.losses[position])

    def open_neighbours(self, position: Position) -> list[Position]:
        """Return the settings one step from a setting, along one axis, that are not measured yet."""
        steps = [(axis, step) for axis in range(len(position)) for step in (1, -1)]
        around = [tuple(i + step * (k == axis) for k, i in enumerate(position)) for axis, step in steps]
        return [near for near in around if near not in self.losses and self.contender.is_valid(near)]

    def next_positions(self, count: int, rivals: Iterable["Tuned"] = ()) -> list[Position]:
        """Return `count` unmeasured settings.

        First come the neighbours of the best one, then settings that rivals on the same axes have measured, because
        contenders may share runs, then the neighbours of the second best, and so on.
        """
        theirs = [near for one in rivals if one.contender.axes == self.contender.axes for near in one.losses]
        by_loss = sorted(self.losses, key=self.mean)
        around = [near for position in by_loss[1:] for near in self.open_neighbours(position)]
        shared = [near for near in theirs if near not in self.losses and self.contender.is_valid(near)]
        return list(dict.fromkeys([*self.open_neighbours(self.best), *shared, *around]))[:count]

    def measure(self, positions: Sequence[Position]) -> None:
        """Measure settings, and add their losses."""
        settings = [self.contender.overrides(position) for position in positions]
        self.losses.update(zip(positions, self.contender.measure(settings), strict=True))


def overrides(axes: Sequence[Axis], position: Position) -> list[str]:
    """Return the values at a position as overrides of the configuration, `section.key=value`."""
    return [f"{axis.key}={axis.value(i):g}" for axis, i in zip(axes, position, strict=True)]


def tune(contenders: Sequence[Contender], limit: int = 32) -> dict[str, Tuned]:
    """Search the best setting of each contender; all get the same number of settings.

    Args:
        contenders: The methods that are compared.
        limit: Settings per contender after which the search is given up.

    Returns:
        The settings of each contender, by its name.

    Raises:
        UserError: The first settings of the contenders differ in number, or a contender's best setting is still at the
            edge of what was tried after `limit` settings.
    """
    check_equal_numbers({contender.name: len(contender.grid) for contender in contenders})
    tuned = {contender.name: Tuned(contender, {}) for contender in contenders}
    for one in tuned.values():
        one.measure(one.contender.grid)
    while count := min(max(len(one.open_neighbours(one.best)) for one in tuned.values()), ROUND):
        for one in tuned.values():
            if len(one.losses) + count > limit and one.open_neighbours(one.best):
                raise UserError(
                    f"{one.contender.name}: the best of {len(one.losses)} settings is at the edge of those tried "
                    f"({' '.join(one.contender.overrides(one.best))}): start from other values or raise the limit"
                )
        for one in sorted(tuned.values(), key=lambda one: not one.open_neighbours(one.best)):
            one.measure(one.next_positions(count, tuned.values()))
    return tuned


def check_equal_numbers(settings: dict[str, int]) -> None:
    """Raise UserError, naming the contender, unless all contenders of a table have the same number of settings."""
    most = max(settings, key=lambda name: settings[name])
    for name, number in settings.items():
        if number != settings[most]:
            raise UserError(
                f"{name} is tuned over {number} settings and {most} over {settings[most]}: give every contender the "
                "same number"
            )
