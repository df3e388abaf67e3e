"""Runs that an experiment needs, as a list: to train them several at a time, and to estimate their machine time.

A worker is a process that trains and evaluates the runs of a list, and leaves out those that another worker has begun.
All of them, and the script that reads the results, share one cache of runs.

Command of a worker:   python -m pma_jax.studies.planned LIST.json
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config.errors import DivergenceError, UserError, error_line
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import count_missing
from pma_jax.launch.job import Job, Step
from pma_jax.launch.local import run_jobs
from pma_jax.runs import lock
from pma_jax.runs.directory import Run
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.signals import Stopped
from pma_jax.studies import run_cache
from pma_jax.studies.study import Study

# Of the workers: on some CPUs, XLA logs several errors for each program that it reads from its cache, and uses it all
# the same (openxla/xla issue 44565).
WORKER_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3")}


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a trunk, in units. By default it is annealed: its rate decays to `schedule.final_rate` at the end."""

    at: int
    end: int
    shape: str = "linear"  # of the decay, which begins at `at`; "none": the trunk's rate
    changes: tuple[str, ...] = ()  # others, as `section.key=value`
    start: Cell | None = None  # the merge of the trunk's newest snapshots whose weights the branch starts from

    @property
    def name(self) -> str:
        """What differs from other branches of the trunk."""
        decay = f"{self.shape} decay" if self.shape != "none" else "branch"
        start = [f"from {self.start.text}"] if self.start else []
        return ", ".join([f"{decay} from unit {self.at} to {self.end}", *map(_value_text, self.changes), *start])

    def overrides(self, unit_tokens: int) -> list[str]:
        """Return the changes of the trunk's configuration, without those that every fork has."""
        is_annealed = self.shape != "none"
        decay = [f"schedule.decay={self.shape}", f"schedule.decay_start_tokens={self.at * unit_tokens}"]
        return [*(decay if is_annealed else ()), *self.changes]


@dataclasses.dataclass(frozen=True)
class PlannedEvaluation:
    """Merges that are evaluated on a part of the held-out text."""

    cells: tuple[Cell, ...]
    ends: tuple[int, ...]  # in units
    part: str


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A trunk, or a branch of it, and what is read from it."""

    size: str
    seed: int
    changes: tuple[str, ...] = ()  # `section.key=value`
    branch: Branch | None = None
    evaluations: tuple[PlannedEvaluation, ...] = ()
    units: int = 0  # per trunk; 0: those of the study
    evaluation_tokens: int = 0  # held-out tokens of the evaluations; 0: those of the study
    readings: tuple[str, ...] = ()  # names of what the experiment reads of the snapshots; see `run_cache.get_or_read`
    keeps_snapshots: bool = True  # if not, `complete_all` keeps only its losses
    needs_snapshots: bool = False  # what is read of them is not cached, so that recorded losses are not enough

    @property
    def name(self) -> str:
        """The size and what differs from its trunk; runs that differ in the seed have the same name."""
        branch = [self.branch.name] if self.branch else []
        return ", ".join([self.size, *map(_value_text, self.changes), *branch])

    def training_key(self, study: Study) -> str:
        """Return the key of the training, equal for all entries of plans that need the same trained run."""
        trunk = configuration.digest(self.study(study).trunk_config(self.size, self.seed, self.changes))
        return f"{trunk} {self.branch}" if self.branch else trunk

    def batch_sequences(self, study: Study) -> int:
        """Return the sequences per step of the trunk."""
        return study.trunk_config(self.size, self.seed, self.changes).training.batch_size_sequences

    def study(self, study: Study) -> Study:
        """Return the study with the units and the held-out text of this run."""
        units, tokens = self.units or study.units, self.evaluation_tokens or study.evaluation_tokens
        return dataclasses.replace(study, units=units, evaluation_tokens=tokens)

    def get(self, study: Study) -> Run:
        """Train the run, or return the cached one."""
        study = self.study(study)
        run, branch = study.trunk(self.size, self.seed, self.changes), self.branch
        if branch is None:
            return run
        weights = study.merge(run, branch.start, branch.at) if branch.start else None
        return study.fork(run, branch.at, branch.end, branch.overrides(study.unit_tokens(run)), weights)

    def find(self, study: Study) -> Run | None:
        """Return the cached run, without training; None if it is not finished."""
        study = self.study(study)
        run = run_cache.find(study.cache, study.trunk_config(self.size, self.seed, self.changes))
        if run is None or self.branch is None:
            return run
        branch, unit = self.branch, study.unit_tokens(run)
        if branch.start and run_cache.has_losses_only(run):  # the key of the fork depends on the merge
            return None
        weights = study.merge(run, branch.start, branch.at) if branch.start else None
        changes = study.fork_changes(run, branch.end, branch.overrides(unit))
        return run_cache.find_fork(study.cache, run, branch.at * unit, changes, weights)

    def has_diverged(self, study: Study) -> bool:
        """Return whether the training of the trunk diverged."""
        study = self.study(study)
        return run_cache.has_diverged(study.cache, study.trunk_config(self.size, self.seed, self.changes))

    def complete(self, study: Study) -> None:
        """Train the run and evaluate its merges, as far as they are not cached.

        Raises:
            DivergenceError: The run diverged.
        """
        if any(self.missing_tokens(study)):
            self._remove_recorded(study)
        run = self.get(study)
        for planned in self.evaluations:
            self.study(study).document_losses(run, planned.cells, planned.ends, planned.part)

    def _remove_recorded(self, study: Study) -> None:
        """Remove the run, and the trunk from which it will be forked, where the cache has only their losses."""
        if run := self.find(study):
            run_cache.remove_recorded(run)
        if self.find(study) is None and (trunk := dataclasses.replace(self, branch=None).find(study)):
            run_cache.remove_recorded(trunk)

    def _lacks_readings(self, run: Run) -> bool:
        return self.needs_snapshots or bool(set(self.readings) - run_cache.readings(run).keys())

    def missing_tokens(self, study: Study) -> tuple[int, int]:
        """Count the tokens that are still to be trained, and the tokens of text on which merges are to be evaluated."""
        if self.has_diverged(study):
            return 0, 0
        run, study = self.find(study), self.study(study)
        missing = 0
        if run is not None:
            unit, config = study.unit_tokens(run), study.evaluation_config(run)
            for planned in self.evaluations:
                pairs = [(cell, end * unit) for cell in planned.cells for end in planned.ends]
                missing += count_missing(run, pairs, planned.part, config)
        if run is not None and not (run_cache.has_losses_only(run) and (missing or self._lacks_readings(run))):
            return 0, missing * study.evaluation_tokens
        config = study.trunk_config(self.size, self.seed, self.changes)
        trained = config.training.total_tokens
        if self.branch:
            trained = (self.branch.end - self.branch.at) * config.checkpoint.interval_tokens
        return trained, sum(len(p.cells) * len(p.ends) for p in self.evaluations) * study.evaluation_tokens


@dataclasses.dataclass(frozen=True)
class OtherWork:
    """Work that depends on earlier results, so that its runs are not known before: only its amount is estimated."""

    name: str
    size: str
    seed: int
    train_tokens: int
    evaluate_tokens: int = 0  # over all merges

    def batch_sequences(self, study: Study) -> int:
        """Return the sequences per step of the size; the work may have others."""
        return study.trunk_config(self.size, self.seed).training.batch_size_sequences

    def missing_tokens(self, study: Study) -> tuple[int, int]:
        """Return the tokens to train and those to evaluate on."""
        del study
        return self.train_tokens, self.evaluate_tokens


Plan = Sequence[PlannedRun | OtherWork]


def get_by_seed(study: Study, runs: Iterable[PlannedRun]) -> Callable[[int], Run]:
    """Return a function from a seed to the trained run, as `Study.losses_over_seeds` takes it, for one run per seed."""
    by_seed = {run.seed: run for run in runs}
    return lambda seed: by_seed[seed].get(study)


def measure_raw_and_merged(study: Study, runs: Sequence["PlannedRun"], count: int) -> list[dict[str, list[float]]]:
    """Train the runs of settings; return the `raw` and the `merged` losses of each setting, one per seed.

    Args:
        study: The study, whose seeds and cache are used.
        runs: The runs of each setting, one after the other. All have the same two evaluations. The mean of the first is
            the raw loss; of the merges of the second, the one with the lowest mean over seeds counts.
        count: Runs per setting, one per seed.

    Returns:
        The losses in nats per token; all are infinite if a run of the setting diverged.
    """
    complete_all(study, runs, study.workers)
    reading, measured = runs[0].study(study), []
    for first in range(0, len(runs), count):
        of_setting = runs[first : first + count]
        if any(run.has_diverged(study) for run in of_setting):
            measured.append({name: [math.inf] * count for name in ("raw", "merged")})
            continue
        raw, merged = (
            [reading.losses(run.get(study), evaluation.cells, evaluation.ends, evaluation.part) for run in of_setting]
            for evaluation in runs[0].evaluations
        )
        by_merge = [[one[merge] for one in merged] for merge in merged[0]]
        measured.append({"raw": [sum(one.values()) / len(one) for one in raw], "merged": min(by_merge, key=sum)})
    return measured


def complete_all(study: Study, plan: Plan, workers: int) -> None:
    """Train and evaluate the runs of a plan with the local engine of grids, `workers` processes at a time.

    Each process has its share of the cores. Entries of the plan that share a training are completed one after the
    other, so that its snapshots are removed, if no entry keeps them, when none needs them any more. The cache records
    which runs diverged; they are not trained again.

    Raises:
        UserError: There are fewer cores than workers, or a worker failed.
    """
    by_training: dict[str, list[PlannedRun]] = {}
    for run in dict.fromkeys(plan):
        if isinstance(run, PlannedRun):
            by_training.setdefault(run.training_key(study), []).append(run)
    groups = [runs for runs in by_training.values() if any(any(run.missing_tokens(study)) for run in runs)]
    groups.sort(key=lambda runs: runs[0].branch is not None)  # so that no worker waits for the trunk of its branch
    workers = min(workers, len(groups))
    if workers < 2:
        for runs in groups:
            _complete(runs, study)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.json")
        listed = [[dataclasses.asdict(run) for run in runs] for runs in groups]
        path.write_text(json.dumps({"study": study.settings(), "groups": listed}))
        command = ("-m", "pma_jax.studies.planned", str(path))
        run_workers({f"worker {i + 1}": command for i in range(workers)}, workers)


def run_workers(commands: Mapping[str, Sequence[str]], workers: int) -> None:
    """Run Python processes with the local engine of grids, `workers` at a time, each with its share of the cores.

    Args:
        commands: The arguments of Python, by the name of the process.
        workers: Processes at a time.

    Raises:
        UserError: There are fewer cores than workers, or a process failed.
    """
    jobs = [
        Job(name, (Step("train", (sys.executable, *arguments), environment=WORKER_ENVIRONMENT),))
        for name, arguments in commands.items()
    ]
    failed = run_jobs(jobs, workers, lambda line: print(line, file=sys.stderr, flush=True))
    if failed:
        name, failure = next(iter(failed.items()))
        raise UserError(f"{name} failed ({failure['line']}): see its error above")


def _work(path: Path) -> None:
    """Complete the runs of a list, except those that another worker has begun."""
    listed = json.loads(path.read_text())
    study = Study.from_settings(listed["study"])
    for number, raw in enumerate(listed["groups"]):
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock.hold(epath.Path(path.parent), file_name=f"group {number}.lock"))
            except lock.InUseError:
                continue
            _complete([_parse(run) for run in raw], study)


def _complete(runs: Sequence[PlannedRun], study: Study) -> None:
    """Complete runs that share a training, or print that it diverged; remove its snapshots if no run keeps them."""
    try:
        for run in runs:
            run.complete(study)
    except DivergenceError as error:
        print(f"{runs[0].name}, seed {runs[0].seed}, diverged: {error_line(error)}", file=sys.stderr, flush=True)
        return
    if any(run.keeps_snapshots for run in runs):
        return
    trained = runs[0].get(study)
    if not run_cache.has_losses_only(trained):
        run_cache.keep_losses_only(trained)


def _parse(raw: dict[str, Any]) -> PlannedRun:
    branch = _parse_branch(raw["branch"]) if raw["branch"] else None
    evaluations = tuple(
        PlannedEvaluation(
            tuple(Cell(**cell) for cell in evaluation["cells"]), tuple(evaluation["ends"]), evaluation["part"]
        )
        for evaluation in raw["evaluations"]
    )
    parsed: dict[str, Any] = {name: tuple(raw[name]) for name in ("changes", "readings")}
    parsed |= {"branch": branch, "evaluations": evaluations}
    return PlannedRun(**raw | parsed)


def _parse_branch(raw: dict[str, Any]) -> Branch:
    start = Cell(**raw["start"]) if raw["start"] else None
    return Branch(**raw | {"changes": tuple(raw["changes"]), "start": start})


def _value_text(change: str) -> str:
    """Return a change without its section."""
    return change.partition(".")[2]


if __name__ == "__main__":
    keep_freed_memory()
    try:
        _work(Path(sys.argv[1]))
    except Stopped as stopped:
        raise SystemExit(stopped.status) from stopped
    except UserError as error:
        raise SystemExit(f"error: {error_line(error)}") from error
