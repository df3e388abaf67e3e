"""Is a merge a better start for continued training and fine-tuning? (PMA, Figures 6 and 7, Table 1)

Command:   python experiments/pma_init/script.py --runs runs/science --jobs 2

Runs start from the last snapshot of a trunk, and from a merge of its newest snapshots. They continue training on the
sources of another package, with the optimizer of the trunk or a fresh one, or fine-tune on Python functions (signature
and docstring -> body, loss on bodies only).
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from start_page import draw, report, summarize

from pma_jax.analysis.comparison import roughness
from pma_jax.config import Config
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.held_out import prepare_tokens, read_sample
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.studies import run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.study import DECIMALS, Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
STARTS = {"last": RAW, "merged": Cell("sma", 8)}
EARLY = 100  # steps whose gradient norms are compared
NORMS = f"the first {EARLY} gradient norms"
UNITS = 8  # snapshots of each run
JUDGED = "the part `report` of the held-out text of each task, as said above, the same for both starts"


class Task(NamedTuple):
    """What is trained from a snapshot."""

    token_divisor: int  # of the trunk's tokens
    rates: tuple[float, ...]  # that are tried, times the trunk's
    changes: tuple[str, ...]
    restores_optimizer: bool
    text_factor: float = 1.0  # held-out tokens that are read, times the study's: not all of them are judged


CONTINUED = ("data.package=scipy",)
# Byte 0 ends each pair, so that packed pairs do not attend to each other. The standard library has too few functions to
# judge on. With longer pairs, more batches of short sequences would have no byte of a body, and a gradient of 0.
FUNCTIONS = (
    "data.package=libraries-without-tests",
    "data.held_out_percent=55",
    "data.task=functions",
    "data.pair_bytes=512",
    "model.separator_token=0",
)
TASKS = {
    "continued training, fresh optimizer": Task(4, (0.5, 1.0, 2.0, 4.0), CONTINUED, False),
    "continued training, optimizer restored": Task(4, (0.5, 1.0, 2.0, 4.0), CONTINUED, True),
    "fine-tuning": Task(8, (0.25, 0.5, 1.0, 2.0), FUNCTIONS, False, text_factor=3.5),
}


def plan(study: Study) -> Plan:
    """List the trunks; the runs that start from their snapshots are estimated."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        tokens = study.trunk_config(size, study.seeds[0]).training.total_tokens
        trained = len(STARTS) * sum(len(task.rates) * tokens // task.token_divisor for task in TASKS.values())
        # At the first snapshot, at the end and on the part `select`; before the first step once for all rates.
        counts = [len(STARTS) * (3 * len(task.rates) + 1) * task.text_factor for task in TASKS.values()]
        read = round(sum(counts) * study.evaluation_tokens)
        work += trunks(study, size)
        work += [OtherWork("runs from its snapshots", size, seed, trained, read) for seed in study.seeds]
    return work


def trunks(study: Study, size: str) -> list[PlannedRun]:
    """List the trunks from whose snapshots the runs start."""
    return [PlannedRun(size, seed, needs_snapshots=True) for seed in study.seeds]


def measure(study: Study) -> dict[str, Any]:
    """Return losses and gradient norms of each task, rate and start, for each seed of every size."""
    return {"judged": JUDGED, "sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return what is measured of a size, and the text of each task.

    Returns:
        "tasks": {task: "document_tokens", "text": a description of the sample, and "rates": {rate: {start: [what
        `measure_seed` returns, for each seed]}}}.
    """
    complete_all(study, trunks(study, size), study.workers)
    planned = {
        (name, rate, start): [planned_run(study, size, seed, cell, task, rate) for seed in study.seeds]
        for name, task in TASKS.items()
        for rate in task.rates
        for start, cell in STARTS.items()
    }
    complete_all(study, [run for of in planned.values() for run in of], study.workers)
    tasks = {name: describe_text(study, size, task) | {"rates": {}} for name, task in TASKS.items()}
    for name, task in TASKS.items():
        begin = {start: begins(study, size, cell, task) for start, cell in STARTS.items()}
        for rate in task.rates:
            tasks[name]["rates"][f"{rate:g}"] = {
                start: [
                    {"begin": begin[start][i]} | measure_seed(study, run, shows_norms=i == 0)
                    for i, run in enumerate(planned[name, rate, start])
                ]
                for start in STARTS
            }
    return study.describe_size(size) | {"tasks": tasks}


def merged(study: Study, size: str, seed: int, cell: Cell) -> Snapshot:
    """Return a merge of the newest snapshots of a trunk."""
    return study.merge(study.trunk(size, seed), cell, study.units)


def task_config(study: Study, size: str, task: Task) -> Config:
    """Return the configuration of a trunk with the data of a task, and the held-out text on which it is judged."""
    config = study.trunk_config(size, study.seeds[0], task.changes)
    evaluation = dataclasses.replace(config.evaluation, tokens=judged_tokens(study, task))
    return dataclasses.replace(config, evaluation=evaluation)


def judged_tokens(study: Study, task: Task) -> int:
    """Return the held-out tokens that are read of a task."""
    return round(task.text_factor * study.evaluation_tokens)


def describe_text(study: Study, size: str, task: Task) -> dict[str, Any]:
    """Describe the held-out text of a task: the study's tokens of it, or all that there are."""
    config = task_config(study, size, task)
    sample = read_sample(prepare_tokens(config), config, REPORT)
    return {"document_tokens": sample.counts_D.tolist(), "text": sample.describe()}


def planned_run(study: Study, size: str, seed: int, cell: Cell, task: Task, rate: float) -> PlannedRun:
    """Return a run that starts from a merge, and what is read of it.

    It has the optimizer of the trunk's last state or a fresh one. Its rate is `rate` times that of the trunk, and
    decays to 0 (cosine). With a fresh optimizer it is warmed up before.
    """
    config = study.trunk_config(size, seed)
    total = config.training.total_tokens // task.token_divisor
    changes = (
        *task.changes,
        f"training.log_interval_tokens={config.batch_tokens}",
        f"schedule.peak_rate={config.schedule.peak_rate * rate}",
        "checkpoint.kinds=point",
    )
    if task.restores_optimizer:
        changes += (f"checkpoint.interval_tokens={total // UNITS}",)
        branch = Branch(study.units, study.units + study.units // task.token_divisor, "cosine", changes, cell)
        run = PlannedRun(size, seed, (), branch)
    else:
        changes += (
            f"training.total_tokens={total}",
            f"training.start_from={merged(study, size, seed, cell).path}",
            f"schedule.warmup_tokens={total // 32}",
            "schedule.decay=cosine",
            f"schedule.decay_start_tokens={total // 32}",
            "checkpoint.keep_states_at_tokens=()",
        )
        run = PlannedRun(size, seed, changes, units=UNITS)
    early, end = ends(task)
    judged = (PlannedEvaluation((RAW,), (early, end), REPORT), PlannedEvaluation((RAW,), (end,), SELECT))
    tokens = judged_tokens(study, task)
    return dataclasses.replace(run, evaluations=judged, evaluation_tokens=tokens, readings=(NORMS,))


def ends(task: Task) -> tuple[int, int]:
    """Return the positions of the first and the last snapshot of a run, in units of its interval."""
    begin = UNITS * task.token_divisor if task.restores_optimizer else 0  # a branch counts the tokens of its trunk
    return begin + 1, begin + UNITS


def begins(study: Study, size: str, cell: Cell, task: Task) -> list[list[float]]:
    """Return the summed loss of each document of a task before the first step, for each seed."""
    config = task_config(study, size, task)
    digest = read_sample(prepare_tokens(config), config, REPORT).digest

    def read(run: Run) -> np.ndarray:
        (nats_D,) = evaluate_merges(config, [study.merge(run, cell, study.units)], [[1]], REPORT).sums
        return np.round(nats_D, DECIMALS)

    name = f"nats by document of {cell.text} at the end, text {digest}"
    return [run_cache.get_or_read_list(study.trunk(size, seed), name, read) for seed in study.seeds]


def measure_seed(study: Study, planned: PlannedRun, shows_norms: bool) -> dict[str, Any]:
    """Return the losses of documents of a run at the first snapshot and the end, and the roughness of gradient norms.

    Args:
        study: The study.
        planned: The run.
        shows_norms: Return the first gradient norms themselves, for a figure, and not only their roughness.
    """
    run, reading = planned.get(study), planned.study(study)
    report, select = (reading.document_losses(run, one.cells, one.ends, one.part) for one in planned.evaluations)
    early, end = (
        np.round(report.nats[RAW, at * reading.unit_tokens(run)], DECIMALS).tolist()
        for at in planned.evaluations[0].ends
    )
    (select_end,) = (float(nats_D.sum() / select.counts.sum()) for nats_D in select.nats.values())
    norms = read_norms(run)
    shown = {"gradient_norms": norms} if shows_norms else {}
    # A batch without a byte of a body has a gradient of 0, whatever the model: both starts leave the same steps out.
    early_roughness = roughness([norm for norm in norms if norm > 0])
    return shown | {"early": early, "end": end, "select_end": select_end, "early_roughness": early_roughness}


def read_norms(run: Run) -> list[float]:
    """Return the first gradient norms of a run; kept in the cache of runs."""

    def read(run: Run) -> list[float]:
        records = [r for r in run.metrics if r["kind"] == "train" and r["tokens"] > run.start_tokens]
        return [round(record["gradient_norm"], 4) for record in records[:EARLY]]

    return run_cache.get_or_read_list(run, NORMS, read)


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
