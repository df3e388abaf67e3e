"""The settings of the experiments on workers: what is trained, by name, and what of it is tuned.

Intervals are in steps, so that the same settings exist at any size. A unit, the tokens between two snapshots, is the
interval of most averages.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from pma_jax.studies.study import Study
from pma_jax.studies.tuning import Axis, Position

WORKERS = 4  # K, where it is not varied
COUNTS = (1, 2, 4, 8)  # K
SEEDS_OF_SWEEPS = 5
HALVING = 2**0.5  # the factor of a learning rate from one setting to the next
OUTER_FACTOR = 10 / 7  # of an outer rate: 0.34, 0.49, 0.7, 1
OUTER_RATES = (-2, -1, 0, 1)  # positions of DiLoCo's outer rates
MOMENTA = (0.0, 0.5)  # of the outer optimizer, beside its 0.9
SHARES = (0.0005, 0.005, 0.05)  # SPARTA's
DELAYS = (1, 5)  # Streaming DiLoCo's, in steps
ROUNDED = ("int8", "int4", "e3m0")
FEEDBACK = ("int4", "e3m0")  # types that are also sent with error feedback
# Experiment 3: optimizers of one worker that average while training, beside SNOO: changes of the configuration, and
# the key of their own that is tuned, with its scale; a length in tokens is a multiple of a unit.
AVERAGERS: dict[str, tuple[tuple[str, ...], Axis | None]] = {
    "EMA": ((), Axis("optimizer.ema_half_life_tokens", 1, 2)),
    "schedule-free": (("optimizer.name=schedule_free_adamw",), None),
    "GPA": (("optimizer.name=gpa_adamw",), Axis("optimizer.gpa_half_life_tokens", 4, 2)),
    "BEMA": (("optimizer.bema_interval_tokens=4096",), Axis("optimizer.bema_start_tokens", 1, 2)),
}
INTERPOLATIONS = (0.0, 0.9)  # GPA's mu_y beside its 0.7: from an average that is not trained on to nearly all of it
ONE = "one worker"  # the cell of experiment 1; PLAIN and PERIODIC are contenders among the methods
PLAIN, PERIODIC, SNOO, DILOCO, NOLOCO = "plain", "periodic averaging", "SNOO", "DiLoCo", "NoLoCo"
STREAMING, SPARTA, BOTH = "Streaming DiLoCo", "SPARTA", "SPARTA with DiLoCo"
OUTER_AXES = {
    DILOCO: Axis("replicas.diloco_rate", 0.7, OUTER_FACTOR),
    NOLOCO: Axis("replicas.noloco_rate", 0.7, OUTER_FACTOR),
    STREAMING: Axis("replicas.streaming_rate", 0.4, OUTER_FACTOR),
}
RATE_GRID = (-2, 0, 2)  # first positions of the rate, factors of 2; the search goes on in factors of sqrt 2


@dataclasses.dataclass(frozen=True)
class Ground:
    """What the settings are made from."""

    size: str
    sequences: int  # per step, over all workers
    batch_tokens: int
    unit_steps: int
    units: int  # per run
    layers: int
    rate: float  # of the size's configuration

    @property
    def unit_tokens(self) -> int:
        """The tokens between two snapshots."""
        return self.unit_steps * self.batch_tokens

    @property
    def windows(self) -> list[int]:
        """The numbers of snapshots that are merged."""
        return [n for n in (2, 4, 8, 16) if n <= self.units // 2]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained and reported."""

    changes: tuple[str, ...]  # of the configuration, without tuned keys
    search: str  # the tuned contender whose keys it has
    seeds: int = SEEDS_OF_SWEEPS
    workers: int = 0  # whose snapshots are read beside the point: all of them, or 0
    rate_factor: float = 1.0  # times the tuned rate


@dataclasses.dataclass(frozen=True)
class Search:
    """A contender of the tuning: changes of the configuration, and the keys that are searched, the rate first."""

    changes: tuple[str, ...]
    axes: tuple[Axis, ...]

    @property
    def grid(self) -> tuple[Position, ...]:
        """The first settings: three rates."""
        return tuple((rate, *[0] * (len(self.axes) - 1)) for rate in RATE_GRID)


def find_ground(study: Study) -> Ground:
    """Return the ground of a study: its first size, with 40 units per run where it has 64."""
    units = study.units * 5 // 8
    config = dataclasses.replace(study, units=units).trunk_config(study.sizes[0], 0)
    steps = config.checkpoint.interval_tokens // config.batch_tokens
    rate, sequences = config.schedule.peak_rate, config.training.batch_size_sequences
    return Ground(study.sizes[0], sequences, config.batch_tokens, steps, units, config.model.layers, rate)


# --- Changes of a configuration ---------------------------------------------------------------------------------------


def replicas(method: str, count: int, **keys: object) -> tuple[str, ...]:
    """Return the changes that make a run of `count` workers."""
    given = {"method": method, "count": count, **keys}
    return tuple(f"replicas.{key}={value}" for key, value in given.items())


def periodic(ground: Ground, count: int, steps: int) -> tuple[str, ...]:
    """Return the changes of periodic averaging every `steps` steps; 0: never.

    The average is taken one step after the snapshot, so that a snapshot shows workers that have trained apart for a
    complete interval: the interval is longer by less than a step in all. The mean of the workers is the same before
    and after.
    """
    total = ground.units * ground.unit_tokens
    interval = steps * ground.batch_tokens if steps else 2 * total
    later = ground.batch_tokens // (total // interval) if steps > 1 else 0
    return replicas("periodic", count, interval_tokens=interval + later)


def diloco(ground: Ground, count: int, **keys: object) -> tuple[str, ...]:
    """Return the changes of DiLoCo with an interval of one unit."""
    return replicas("diloco", count, interval_tokens=ground.unit_tokens, **keys)


def streaming(ground: Ground, **keys: object) -> tuple[str, ...]:
    """Return the changes of Streaming DiLoCo; unless `keys` say otherwise, two fragments without delay or mixing."""
    given = {"streaming_fragments": min(2, ground.layers), "streaming_mixing": 0.0} | keys
    return replicas("streaming", WORKERS, interval_tokens=ground.unit_tokens, **given)


def sparta(ground: Ground, share: float = 0.005, with_diloco: bool = False) -> tuple[str, ...]:
    """Return the changes of SPARTA, alone or with DiLoCo."""
    keys = {"interval_tokens": ground.unit_tokens, "sparta_diloco": True} if with_diloco else {}
    return replicas("sparta", WORKERS, sparta_share=share, **keys)


def noloco(ground: Ground, count: int, **keys: object) -> tuple[str, ...]:
    """Return the changes of NoLoCo with an interval of one unit."""
    return replicas("noloco", count, interval_tokens=ground.unit_tokens, **keys)


# --- Names ------------------------------------------------------------------------------------------------------------


def periodic_name(count: int, steps: int) -> str:
    """Name a setting of experiment 1."""
    return f"K={count}, H={steps or 'never'}"


def intervals(ground: Ground) -> list[int]:
    """Return H in steps: every step, a quarter of a unit, a unit, four units, and 0 for never."""
    unit = ground.unit_steps
    return list(dict.fromkeys([1, max(unit // 4, 1), unit, 4 * unit, 0]))


def small_batch_name(ground: Ground) -> str:
    """Name data-parallel training with the batch of one of the workers."""
    return f"data-parallel, batch {ground.sequences // WORKERS}"


def outer_name(rate: float, momentum: float) -> str:
    """Name a setting of experiment 2."""
    return f"DiLoCo, eta={rate:g}, beta={momentum:g}"


# --- What is trained --------------------------------------------------------------------------------------------------


def first_experiment(ground: Ground) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return the settings of experiment 1: changes, and the workers whose snapshots are read."""
    unit = ground.unit_steps
    cells: dict[str, tuple[tuple[str, ...], int]] = {ONE: ((), 0)}
    for count in [k for k in COUNTS if k > 1 and ground.sequences % k == 0]:
        cells[periodic_name(count, unit)] = periodic(ground, count, unit), count
    for steps in intervals(ground):
        # After an average at each step, all workers are equal.
        cells[periodic_name(WORKERS, steps)] = periodic(ground, WORKERS, steps), 0 if steps == 1 else WORKERS
    cells[small_batch_name(ground)] = (f"training.batch_size_sequences={ground.sequences // WORKERS}",), 0
    return cells


def second_experiment(ground: Ground) -> dict[str, tuple[str, ...]]:
    """Return the settings of experiment 2, each with an outer rate and a momentum of its own."""
    axis = OUTER_AXES[DILOCO]
    pairs = [(axis.value(i), 0.9) for i in OUTER_RATES] + [(axis.base, momentum) for momentum in MOMENTA]
    keys = [{"diloco_rate": rate, "diloco_momentum": momentum} for rate, momentum in pairs]
    return {outer_name(*pair): diloco(ground, WORKERS, **key) for pair, key in zip(pairs, keys, strict=True)}


def method_searches(ground: Ground) -> dict[str, Search]:
    """Return the methods that are compared with each other: the rate of each is tuned, and a key of its own."""
    rate = rate_axis(ground)
    unit = ground.unit_steps
    searches = {
        PLAIN: Search((), (rate,)),
        PERIODIC: Search(periodic(ground, WORKERS, unit), (rate,)),
        DILOCO: Search(diloco(ground, WORKERS), (rate, OUTER_AXES[DILOCO])),
        STREAMING: Search(streaming(ground), (rate, OUTER_AXES[STREAMING])),
        SPARTA: Search(sparta(ground), (rate,)),
        BOTH: Search(sparta(ground, with_diloco=True), (rate, OUTER_AXES[DILOCO])),
        NOLOCO: Search(noloco(ground, WORKERS), (rate, OUTER_AXES[NOLOCO])),
        SNOO: Search(diloco(ground, 1), (rate, OUTER_AXES[DILOCO])),
    }
    for name, (changes, axis) in AVERAGERS.items():
        if axis and axis.key.endswith("_tokens"):
            axis = dataclasses.replace(axis, base=axis.base * ground.unit_tokens)
        searches[name] = Search(changes, (rate, axis) if axis else (rate,))
    return searches


def cell_searches(ground: Ground, outer: Mapping[str, Sequence[str]]) -> dict[str, Search]:
    """Return the cells of experiments 1, 2 and 5, of which only the rate is tuned.

    Args:
        ground: What the settings are made from.
        outer: The outer rate that is the best of each method, as overrides.
    """
    axes = (rate_axis(ground),)
    cells = {name: changes for name, (changes, _) in first_experiment(ground).items()}
    cells |= second_experiment(ground)
    cells |= twice_the_workers(ground, outer)
    return {name: Search(changes, axes) for name, changes in cells.items()}


def twice_the_workers(ground: Ground, outer: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the settings of experiment 5 with twice the workers; none if the batch does not suffice."""
    count = 2 * WORKERS
    if ground.sequences % count:
        return {}
    methods = {DILOCO: diloco(ground, count), NOLOCO: noloco(ground, count)}
    return {f"{name}, K={count}": (*changes, *outer.get(name, ())) for name, changes in methods.items()}


def rate_axis(ground: Ground) -> Axis:
    """Return the scale of the learning rate."""
    return Axis("schedule.peak_rate", ground.rate, HALVING)


def list_settings(ground: Ground, all_seeds: int, outer: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Setting]]:
    """Return what is trained and reported: the settings of each experiment, 1 to 6, by name.

    A setting that several experiments read has the same name in each.

    Args:
        ground: What the settings are made from.
        all_seeds: Seeds of experiment 1.
        outer: The outer rate that is the best of each method, as overrides.
    """
    k = WORKERS
    first = {
        name: Setting(changes, name, all_seeds, workers)
        for name, (changes, workers) in first_experiment(ground).items()
    }
    averaged = periodic_name(k, ground.unit_steps)
    second = {name: Setting(changes, name) for name, changes in second_experiment(ground).items()}
    averagers = {PLAIN: Setting((), PLAIN), SNOO: Setting(diloco(ground, 1), SNOO)}
    averagers |= {name: Setting(changes, name) for name, (changes, _) in AVERAGERS.items()}
    for mu_y in INTERPOLATIONS:
        changes = (*AVERAGERS["GPA"][0], f"optimizer.gpa_interpolation={mu_y}")
        averagers[f"GPA, mu_y={mu_y:g}"] = Setting(changes, "GPA")
    shares = {f"{SPARTA}, p={p:g}": Setting(sparta(ground, p), SPARTA, workers=k) for p in SHARES}
    shares[f"{SPARTA}, p=0.005, rate x2"] = Setting(sparta(ground), SPARTA, workers=k, rate_factor=2)
    shares[f"{BOTH}, p=0.005"] = Setting(sparta(ground, with_diloco=True), BOTH)
    shares[f"{BOTH}, p=0.005, rate x2"] = Setting(sparta(ground, with_diloco=True), BOTH, rate_factor=2)
    # With workers only to be the same run as the cell of experiment 1, if it has the same rate.
    pairs = {PERIODIC: Setting(periodic(ground, k, ground.unit_steps), PERIODIC, workers=k)}
    pairs[f"{DILOCO}, K={k}"] = Setting(diloco(ground, k), DILOCO)
    pairs[f"{NOLOCO}, K={k}"] = Setting(noloco(ground, k), NOLOCO, workers=k)
    pairs[f"{NOLOCO}, K={k}, gamma=0"] = Setting((*noloco(ground, k), "replicas.noloco_pull=0"), NOLOCO, workers=k)
    for name, changes in twice_the_workers(ground, outer).items():
        pairs[name] = Setting(changes, name, workers=2 * k * name.startswith(NOLOCO))
        if name.startswith(NOLOCO):
            pairs[f"{name}, gamma=0"] = Setting((*changes, "replicas.noloco_pull=0"), name, workers=2 * k)
    fragments = streaming_settings(ground) | {f"{DILOCO}, K={k}": pairs[f"{DILOCO}, K={k}"]}
    second |= {averaged: first[averaged]}
    return {"1": first, "2": second, "3": averagers, "4": shares, "5": pairs, "6": fragments}


def streaming_settings(ground: Ground) -> dict[str, Setting]:
    """Return the settings of experiment 6: each differs from the first in one key, with feedback in two."""
    changed: dict[str, dict[str, object]] = {STREAMING: {}}
    if ground.layers > 1:
        changed[f"{STREAMING}, P=1"] = {"streaming_fragments": 1}
    for steps in dict.fromkeys(min(delay, ground.unit_steps - 1) for delay in DELAYS):
        changed[f"{STREAMING}, V={steps}"] = {"streaming_delay_tokens": steps * ground.batch_tokens}
    changed[f"{STREAMING}, alpha=0.5"] = {"streaming_mixing": 0.5}
    for dtype in ROUNDED:
        changed[f"{STREAMING}, {dtype}"] = {"streaming_dtype": dtype}
    for dtype in FEEDBACK:
        changed[f"{STREAMING}, {dtype}, feedback"] = {"streaming_dtype": dtype, "streaming_error_feedback": True}
    return {name: Setting(streaming(ground, **keys), STREAMING) for name, keys in changed.items()}
