"""The contenders: ways to have a model to serve at any time, without a horizon that is fixed in advance.

A contender is a way to train, with the configuration keys that are tuned for it, and the models that its snapshots give
without further training. Positions are in units, of which a run has `Study.units`.
"""

import dataclasses
import math
from collections.abc import Sequence

from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies.study import Study
from pma_jax.studies.targets import HORIZONS
from pma_jax.studies.tuning import Axis, Position

RATE, BATCH = "schedule.peak_rate", "training.batch_size_sequences"
CONSTANT, INVERSE_SQRT, BEMA, PARTIAL = "constant rate", "1/sqrt(t)", "BEMA", "partial decay"
# Keys of a contender's configuration that do not change, and the key of its own that is tuned. Values and scales in
# tokens are multiples of the tokens between two snapshots.
METHODS: dict[str, tuple[tuple[str, ...], Axis | None]] = {
    CONSTANT: ((), None),
    INVERSE_SQRT: (("schedule.decay=inverse_sqrt",), Axis("schedule.decay_start_tokens", 4, 2)),
    "schedule-free": (("optimizer.name=schedule_free_adamw",), None),
    "GPA": (("optimizer.name=gpa_adamw",), Axis("optimizer.gpa_half_life_tokens", 2, 2)),
    "SNOO": (
        ("replicas.method=diloco", "replicas.count=1", "replicas.interval_tokens={third}"),
        Axis("replicas.diloco_rate", 0.7, 10 / 7),
    ),
    BEMA: (("optimizer.bema_interval_tokens={twelfth}",), Axis("optimizer.bema_start_tokens", 2, 2)),
    PARTIAL: (("schedule.decay=linear",), Axis("schedule.final_rate", 0.3, 2)),
}
DECAY_SHARE = 0.5  # of the tokens over which the rate decays, of contenders that need the horizon
WITHOUT_ROUTER_BIAS = ("schedule-free", "GPA")  # their optimizers refuse a mixture that has one
WITH_BLOCK_MEANS = (CONSTANT, INVERSE_SQRT)
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # snapshots of a merge
SIGMAS = (0.05, 0.1, 0.15)  # of power-function averages over all snapshots
LAGS = (0.0, 0.25, 0.5, 0.75)  # of the fits with two parameters, width and lag; plain means have a lag of 1
FIRST_RATES = (-2, 0, 2)  # positions of the first settings, factors of 2; the search goes on in factors of sqrt 2
MODEL, POINTS, BLOCKS = "its model", "merge of points", "merge of block means"
ENSEMBLES = (1, 2, 4, 8, 16, 32)  # points of an ensemble: the largest number that half of a horizon has


@dataclasses.dataclass(frozen=True)
class Rival:
    """A contender of a size: the keys that do not change, and the axes of its search, the rate and the batch first."""

    name: str
    changes: tuple[str, ...]
    axes: tuple[Axis, ...]
    needs_horizon: bool  # so that each horizon is a run of its own

    @property
    def grid(self) -> tuple[Position, ...]:
        """The first settings: three rates."""
        return tuple((rate, *[0] * (len(self.axes) - 1)) for rate in FIRST_RATES)

    def is_allowed(self, position: Position) -> bool:
        """Return whether a setting is one of the contender: the rate of a partial decay ends below its peak."""
        values = [axis.value(i) for axis, i in zip(self.axes, position, strict=True)]
        return self.name != PARTIAL or values[2] < values[0]


def list_rivals(study: Study, size: str) -> list[Rival]:
    """Return the contenders of a size; their scales start from its configuration, which is tuned for merging."""
    config = study.trunk_config(size, study.seeds[0])
    rate, unit = config.schedule.peak_rate, config.checkpoint.interval_tokens
    # An interval has at least one step of the configured batch.
    lengths = {name: max(unit // n, config.batch_tokens) for name, n in (("third", 3), ("twelfth", 12))}
    common = (Axis(RATE, rate, 2**0.5), Axis(BATCH, config.training.batch_size_sequences, 2, minimum=1))
    rivals = []
    for name, (changes, own) in METHODS.items():
        if config.model.experts and config.model.router_bias and name in WITHOUT_ROUTER_BIAS:
            continue
        if own and own.key.endswith("_tokens"):
            # A decay starts after the warm-up; what starts after the first horizon has no effect there.
            minimum = config.schedule.warmup_tokens if own.key == "schedule.decay_start_tokens" else 0
            limit = config.training.total_tokens // max(HORIZONS.values()) if "start" in own.key else math.inf
            # Of few units, as in tests, the scales are shorter.
            own = dataclasses.replace(own, base=min(own.base, study.units // 8) * unit, minimum=minimum, limit=limit)
        if own and own.key == "schedule.final_rate":
            own = dataclasses.replace(own, base=own.base * rate)
        kinds = "point,block_mean" if name in WITH_BLOCK_MEANS else "point"
        given = (
            *(text.format(**lengths) for text in changes),
            f"checkpoint.kinds={kinds}",
            "checkpoint.keep_states_at_tokens=()",
        )
        rivals.append(Rival(name, given, (*common, own) if own else common, name == PARTIAL))
    return rivals


def with_decay(rival: Rival) -> Rival:
    """Return the contender with a linear decay to 0, whose horizons are runs of their own."""
    return dataclasses.replace(rival, changes=(*rival.changes, "schedule.decay=linear"), needs_horizon=True)


def tuning_cells(end: int) -> list[Cell]:
    """Return the models by which a setting is judged at a horizon: the contender's own, and merges of points."""
    return [RAW, *(Cell("sma", n) for n in (2, 4, 8, 16) if n <= end // 2), Cell("power:sigma_rel=0.1", end)]


def groups(name: str, end: int) -> dict[str, list[Cell]]:
    """Return the models of a contender at a horizon, in groups of which the best is reported."""
    found = {MODEL: [RAW], POINTS: merges("point", end)}
    return found | ({BLOCKS: merges("block_mean", end)} if name in WITH_BLOCK_MEANS else {})


def merges(kind: str, end: int) -> list[Cell]:
    """Return the merges of snapshots of a kind: plain and weighted means, power functions, and fits with a lag."""
    widths = [n for n in WIDTHS if n <= end]
    listed = [Cell("sma", n, kind=kind) for n in widths]
    listed += [Cell("wma", n, kind=kind) for n in widths if n > 2]
    listed += [Cell(f"power:sigma_rel={sigma:g}", end, kind=kind) for sigma in SIGMAS]
    return listed + [Cell(f"lagfree:lag={lag:g}", n, kind=kind) for lag in LAGS for n in widths if n > 2]


def horizon_changes(study: Study, size: str, rival: Rival, setting: Sequence[str], divisor: int) -> tuple[str, ...]:
    """Return the changes of a contender's run that ends at a horizon, given by the divisor of the size's tokens."""
    total = study.trunk_config(size, study.seeds[0]).training.total_tokens // divisor
    changes = (*rival.changes, *setting)
    if divisor > 1 or rival.needs_horizon:
        changes += (f"training.total_tokens={total}",)
    if rival.needs_horizon:
        changes += (f"schedule.decay_start_tokens={round(total * (1 - DECAY_SHARE))}",)
    return changes
