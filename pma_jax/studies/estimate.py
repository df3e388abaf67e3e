"""Estimate the machine time of an experiment's runs before they start, from the speeds of runs in the cache.

Speeds are those of the newest runs of the size's model in the cache of runs, with the same batch if there are such: the
time of a token depends on the batch, and that of a shared machine on the hour. If the cache has only the losses of runs
of the model, the recorded seconds per token are taken, which may be those of another machine. For a size without any,
short runs are trained and evaluated first, with the same model, batch and text.
"""

import dataclasses
import statistics
from collections.abc import Collection, Iterable
from typing import TypedDict

from pma_jax.config import Config
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.runs.directory import Run
from pma_jax.studies import run_cache
from pma_jax.studies.planned import Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.study import Study

PROBE_DIVISOR = 16  # a run that measures the speed trains 1/16 of the size's tokens
PROBE_UNITS = 4  # as many snapshots per token as 64 units of all tokens
PROBE_SEED = 1000
NEWEST_RUNS = 8  # whose speeds are taken: older ones may be of an hour in which a shared machine was slower


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the runs of a size cost, in machine seconds (see `run_cache`)."""

    start_seconds: float  # per run: compiling, and reading the text
    train_seconds: float  # per token, with the snapshots and evaluations of the run
    evaluate_seconds: float  # per token of held-out text and merge


@dataclasses.dataclass(frozen=True)
class KnownSpeed:
    """The speed of a run in the cache."""

    speed: Speed
    batch_sequences: int
    finished: float  # seconds since the epoch


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """The machine time of an experiment, and which of its runs are in the cache: seeds by the name of the runs."""

    hours: float  # of this machine, if the runs keep all its cores busy
    dependent_hours: float  # of `hours`, those of `dependent`, as if nothing of it were cached
    missing: dict[str, list[int]]
    dependent: dict[str, list[int]]  # work whose runs are known only when earlier runs have results
    cached: dict[str, list[int]]
    trained: set[str]  # keys of the runs that are to be trained


class Counted(TypedDict):
    """Contents of a file in which the estimates of several experiments count a run that they share once."""

    hours: float  # of all of them
    trained: list[str]  # keys of the runs


def estimate(study: Study, plan: Plan, counted: Collection[str] = ()) -> CostEstimate:
    """Estimate the machine time of the runs that a plan lists, as far as they are not cached.

    Args:
        study: The study.
        plan: The runs.
        counted: Keys of runs that another estimate includes; this one leaves their training out.
    """
    runs: dict[str, dict[str, list[int]]] = {"missing": {}, "dependent": {}, "cached": {}}
    seconds = dict.fromkeys(runs, 0.0)
    known: dict[str, list[KnownSpeed]] = {}
    trained: set[str] = set()
    for work in plan:
        train_tokens, evaluate_tokens = work.missing_tokens(study)
        is_cached = not (train_tokens or evaluate_tokens)
        state = "cached" if is_cached else "missing" if isinstance(work, PlannedRun) else "dependent"
        runs[state].setdefault(work.name, []).append(work.seed)
        if is_cached:
            continue
        if isinstance(work, PlannedRun) and train_tokens:
            key = work.training_key(study)
            if key in counted or key in trained:  # a run is trained once, however often plans list it
                train_tokens = 0
            trained.add(key)
        of_size = known.get(work.size) or known.setdefault(work.size, list_speeds(study, work.size))
        speed = choose_speed(of_size, work.batch_sequences(study))
        seconds[state] += speed.start_seconds if train_tokens else 0.0
        seconds[state] += train_tokens * speed.train_seconds + evaluate_tokens * speed.evaluate_seconds
    return CostEstimate(sum(seconds.values()) / 3600, seconds["dependent"] / 3600, **runs, trained=trained)


def list_speeds(study: Study, size: str) -> list[KnownSpeed]:
    """Return the speeds of the runs of a size's model; without any in the cache, train and evaluate short ones."""
    config = study.trunk_config(size, study.seeds[0])
    known = list(_speeds(study, config)) or list(_recorded_speeds(study, config))
    if not known:
        total = config.training.total_tokens // PROBE_DIVISOR
        evaluation = PlannedEvaluation((RAW, Cell("sma", 2)), (PROBE_UNITS,), REPORT)
        # As many at a time as later, because processes slow each other; and two in each, of which the second does not
        # compile, as most runs of an experiment do not.
        probes = [
            PlannedRun(size, PROBE_SEED + i, (f"training.total_tokens={total}",), None, (evaluation,), PROBE_UNITS)
            for i in range(2 * study.workers)
        ]
        complete_all(dataclasses.replace(study, runs_used={}), probes, study.workers)  # these are no results
        known = sorted(_speeds(study, config), key=lambda one: one.speed.start_seconds)[: study.workers]
    return known


def choose_speed(known: Iterable[KnownSpeed], batch_sequences: int) -> Speed:
    """Return the median speed of the newest runs, of those with the same batch if there are any."""
    same = [one for one in known if one.batch_sequences == batch_sequences] or list(known)
    newest = sorted(same, key=lambda one: one.finished)[-NEWEST_RUNS:]
    names = [field.name for field in dataclasses.fields(Speed)]
    return Speed(**{name: statistics.median(getattr(one.speed, name) for one in newest) for name in names})


def _speeds(study: Study, config: Config) -> Iterable[KnownSpeed]:
    """Yield the speed of each finished run in the cache that has the model of `config` and was evaluated."""
    for run, trained, evaluated in _costs(study, config):
        if run_cache.has_losses_only(run):
            continue
        records = [record for record in run.metrics if record["kind"] == "train"]
        if len(records) < 2:  # of a short branch
            continue
        # The records have wall seconds since the start of the process, the first after compiling.
        first, last = records[0], records[-1]
        share = (last["seconds"] - first["seconds"]) / last["seconds"] if last["seconds"] > first["seconds"] else 1.0
        per_token = share * trained["seconds"] / (last["tokens"] - first["tokens"])
        start = max(trained["seconds"] - per_token * trained["tokens"], 0.0)
        yield _known_speed(run, start, per_token, evaluated)


def _recorded_speeds(study: Study, config: Config) -> Iterable[KnownSpeed]:
    """Yield the speed of each recorded run of the model of `config`; the start is part of the seconds per token."""
    for run, trained, evaluated in _costs(study, config):
        if run_cache.has_losses_only(run):
            yield _known_speed(run, 0.0, trained["seconds"] / trained["tokens"], evaluated)


def _known_speed(run: Run, start_seconds: float, train_seconds: float, evaluated: dict[str, float]) -> KnownSpeed:
    speed = Speed(start_seconds, train_seconds, evaluated["seconds"] / evaluated["tokens"])
    return KnownSpeed(speed, run.config.training.batch_size_sequences, run_cache.finish_time(run))


def _costs(study: Study, config: Config) -> Iterable[tuple[Run, dict[str, float], dict[str, float]]]:
    """Yield the finished runs of a model whose costs are known, with those of their training and evaluation."""
    for run in run_cache.finished_runs(study.cache):
        if run.config.model != config.model:
            continue
        trained, evaluated = run_cache.training_cost(run), run_cache.evaluation_cost(run)
        if trained["seconds"] and evaluated["tokens"]:
            yield run, trained, evaluated


def describe_estimate(name: str, estimated: CostEstimate) -> str:
    """Format an estimate: the hours, then one line for each group of runs that differ in the seed only."""
    first = f"{name}: about {estimated.hours:.2f} machine hours"
    if estimated.dependent:
        first += f", {estimated.dependent_hours:.2f} of them for runs that depend on results, less if they are cached"
    lines, groups = [first], {"cached": estimated.cached, "to do": estimated.missing}
    for state, runs in (groups | {"depends on results": estimated.dependent}).items():
        lines += [f"  {state}: {run}, seeds {', '.join(map(str, dict.fromkeys(s)))}" for run, s in runs.items()]
    return "\n".join(lines)
