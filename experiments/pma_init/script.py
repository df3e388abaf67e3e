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
from pma_jax.config import Config, EvaluationConfig
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.held_out import prepare_tokens, read_sample
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedRun, complete_all
from pma_jax.studies.study import DECIMALS, Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
STARTS = {"last": RAW, "merged": Cell("sma", 8)}
EARLY = 100  # steps whose gradient norms are compared
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
# judge on. With longer pairs, some batches of short sequences would have no byte of a body, and a gradient of 0.
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
        texts = sum(len(task.rates) * task.text_factor for task in TASKS.values())
        read = round(3.5 * len(STARTS) * texts * study.evaluation_tokens)
        work += [PlannedRun(size, seed, needs_snapshots=True) for seed in study.seeds]
        work += [OtherWork("runs from its snapshots", size, seed, trained, read) for seed in study.seeds]
    return work


def measure(study: Study) -> dict[str, Any]:
    """Return losses and gradient norms of each task, rate and start, for each seed of every size."""
    return {"judged": JUDGED, "sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return what is measured of a size, and the text of each task.

    Returns:
        "tasks": {task: "document_tokens", "text": a description of the sample, and "rates": {rate: {start: [what
        `measure_run` returns, for each seed]}}}.
    """
    planned = {
        (name, rate, start, seed): planned_run(study, size, seed, cell, task, rate)
        for name, task in TASKS.items()
        for rate in task.rates
        for start, cell in STARTS.items()
        for seed in study.seeds
    }
    complete_all(study, list(planned.values()), study.workers)
    tasks = {name: describe_text(study, size, task) | {"rates": {}} for name, task in TASKS.items()}
    for (name, rate, start, seed), run in planned.items():
        of_rate = tasks[name]["rates"].setdefault(f"{rate:g}", {start: [] for start in STARTS})
        begin = merged(study, size, seed, STARTS[start])
        shows_norms = seed == study.seeds[0]
        of_rate[start].append(measure_run(study, run.get(study), TASKS[name], begin, shows_norms))
    return study.describe_size(size) | {"tasks": tasks}


def merged(study: Study, size: str, seed: int, cell: Cell) -> Snapshot:
    """Return a merge of the newest snapshots of a trunk."""
    return study.merge(study.trunk(size, seed), cell, study.units)


def describe_text(study: Study, size: str, task: Task) -> dict[str, Any]:
    """Describe the held-out text of a task: the study's tokens of it, or all that there are."""
    config = study.trunk_config(size, study.seeds[0], task.changes)
    config = dataclasses.replace(config, evaluation=judging(study, config, task))
    sample = read_sample(prepare_tokens(config), config, REPORT)
    return {"document_tokens": sample.counts_D.tolist(), "text": sample.describe()}


def planned_run(study: Study, size: str, seed: int, cell: Cell, task: Task, rate: float) -> PlannedRun:
    """Return a run that starts from a merge, with the optimizer of the trunk's last state or a fresh one.

    Its rate is `rate` times that of the trunk, and decays to 0 (cosine). With a fresh optimizer it is warmed up before.
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
        return PlannedRun(size, seed, (), branch)
    changes += (
        f"training.total_tokens={total}",
        f"training.start_from={merged(study, size, seed, cell).path}",
        f"schedule.warmup_tokens={total // 32}",
        "schedule.decay=cosine",
        f"schedule.decay_start_tokens={total // 32}",
        "checkpoint.keep_states_at_tokens=()",
    )
    return PlannedRun(size, seed, changes, None, (), UNITS)


def judging(study: Study, config: Config, task: Task) -> EvaluationConfig:
    """Return the evaluation of a task."""
    return dataclasses.replace(config.evaluation, tokens=round(task.text_factor * study.evaluation_tokens))


def measure_run(study: Study, run: Run, task: Task, start: Snapshot, shows_norms: bool) -> dict[str, Any]:
    """Return the losses of documents before the first step, at the first snapshot and the end, and gradient norms.

    Args:
        study: The study.
        run: The run.
        task: What it is trained on.
        start: The weights that it started from.
        shows_norms: Return the first gradient norms themselves, for a figure, and not only their roughness.
    """
    config = dataclasses.replace(run.config, evaluation=judging(study, run.config, task))
    each = [start, run.snapshots[0], run.snapshots[-1]]
    sums = np.round(evaluate_merges(config, each, np.eye(len(each)), REPORT).sums, DECIMALS)
    half = dataclasses.replace(config.evaluation, tokens=config.evaluation.tokens // 2)
    (last,) = evaluate_merges(dataclasses.replace(config, evaluation=half), each[-1:], [[1]], SELECT).losses
    records = [r for r in run.metrics if r["kind"] == "train"]
    norms = [r["gradient_norm"] for r in records if r["tokens"] > run.start_tokens]
    shown = {"gradient_norms": [round(norm, 4) for norm in norms[:EARLY]]} if shows_norms else {}
    return shown | {
        "begin": sums[0].tolist(),
        "early": sums[1].tolist(),
        "end": sums[2].tolist(),
        "select_end": last.loss,
        "early_roughness": roughness(norms[:EARLY]),
    }


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
