"""Score a model on tasks with lm-eval (the extra `eval`), and the scores as JSON values.

lm-eval chooses the questions, asks the model for log-likelihoods or text, and computes the metrics. The bits per byte
of the gold answers are added to them, because they move before accuracy does.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from pma_jax.config import Config
from pma_jax.evaluation.snapshot_tokenizer import TextTokenizer
from pma_jax.evaluation.tasks import load
from pma_jax.evaluation.token_scores import MeshModel, run_on_mesh
from pma_jax.runtime import hosts

GOLD_BITS = "bits_per_byte_of_answer"
WRONG_BITS = "bits_per_byte_of_wrong_answers"
RAW_LABEL = "raw"  # what records call a model that is not merged
_BOOTSTRAP_SAMPLES = 1000  # for the standard error of metrics that are no mean, such as perplexity


class Estimate(TypedDict):
    """A metric on a task."""

    value: float
    standard_error: float | None
    documents: int  # that it is computed from
    is_higher_better: bool


class TaskScore(TypedDict):
    """The scores of a model on one task or group of tasks."""

    task: str
    documents: int  # that the model was asked about
    questions: str  # digest of the documents, prompts and right answers: scores with equal digests are comparable
    metrics: dict[str, Estimate]
    # Of a task, not of a group: each metric that is a mean, and the bits of the wrong answers, for each document in the
    # order in which all models are asked; None for documents that are left out of the mean.
    by_document: NotRequired[dict[str, list[float | None]]]


class TaskScores(TypedDict):
    """The scores of a model on several tasks."""

    tasks: list[TaskScore]
    truncated: int  # sequences that the model could not read in full


def load_on_first(
    names: Sequence[str], config: Config | None, *, shots: int | None = None, part: str
) -> dict[str, Any]:
    """Load tasks in the first process, which alone runs lm-eval; return nothing in the others.

    Raises:
        UserError: As `load_tasks`, in all processes.
    """
    tasks: dict[str, Any] = {}
    with without_logs():
        hosts.run_on_first(lambda: tasks.update(load.load_tasks(names, config, shots=shots, part=part)))
    return tasks


def score_on_mesh(
    model: MeshModel,
    tokenizer: TextTokenizer,
    tasks: Mapping[str, Any],
    limit: int | None = None,
    by_document: bool = False,
) -> TaskScores:
    """Score a model on the mesh. Call in all processes; the first one runs lm-eval, and all return its scores.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tasks: The tasks (`load_on_first`).
        limit: Number of documents of each task, from its first; None: all.
        by_document: Whether to return the values of each document too.
    """

    def work() -> TaskScores:
        from pma_jax.evaluation.harness_model import HarnessModel

        harness = HarnessModel(model, tokenizer)
        return {"tasks": score(harness, tasks, limit, by_document), "truncated": harness.truncated}

    return run_on_mesh(model, work)


def score(harness: Any, tasks: Mapping[str, Any], limit: int | None, by_document: bool = False) -> list[TaskScore]:
    """Score a model of lm-eval (`lm_eval.api.model.LM`) on tasks and their groups; arguments as `score_on_mesh`."""
    from lm_eval import evaluator

    from pma_jax.evaluation.tasks.bits_per_byte import measure_gold_bits
    from pma_jax.evaluation.tasks.load import seed_examples

    seed_examples(tasks)
    with quiet():
        results = evaluator.evaluate(harness, dict(tasks), limit=limit, bootstrap_iters=_BOOTSTRAP_SAMPLES)
    members = {name: list(dict.fromkeys(_members(name, results))) for name in results["results"]}
    groups = {name: tasks_of for name, tasks_of in members.items() if name not in results["samples"]}
    bits = measure_gold_bits(results["samples"], tasks["tasks"], groups)
    scores = []
    for name, values in results["results"].items():
        samples = [sample for member in members[name] for sample in results["samples"][member]]
        documents = sum(int(results["results"][member]["sample_len"]) for member in members[name])
        metrics = _metrics(values, results["higher_is_better"].get(name, {}), documents)
        gold = bits.get(name)
        if gold is not None and gold.bits_per_byte is not None:
            metrics[GOLD_BITS] = Estimate(
                value=gold.bits_per_byte,
                standard_error=gold.standard_error,
                documents=gold.documents,
                is_higher_better=False,
            )
        if metrics:  # a group may aggregate nothing
            scored = TaskScore(task=name, documents=documents, questions=_digest(samples), metrics=metrics)
            if by_document and name in results["samples"]:
                scored["by_document"] = _by_document(results["samples"][name], tasks["tasks"][name], metrics)
            scores.append(scored)
    return scores


def _by_document(
    samples: Sequence[Mapping[str, Any]], task: Any, metrics: Mapping[str, Estimate]
) -> dict[str, list[float | None]]:
    """Return the values of each document of a task, as `TaskScore.by_document`."""
    from pma_jax.evaluation.tasks import bits_per_byte

    values: dict[str, list[float | None]] = {}
    for metric, estimate in metrics.items():
        name, _, filter_name = metric.partition("/")
        logged = [sample.get(name) for sample in samples if sample["filter"] == (filter_name or "none")]
        numbers = [float(value) for value in logged if isinstance(value, int | float | np.generic)]
        # lm-eval also logs the terms of metrics that are no mean, such as a perplexity.
        if (
            logged
            and len(numbers) == len(logged)
            and math.isclose(math.fsum(numbers) / len(numbers), estimate["value"])
        ):
            values[metric] = [*numbers]
    if task.OUTPUT_TYPE in bits_per_byte.SCORED_TYPES:
        bits = bits_per_byte.measure_document_bits(samples, task)
        values |= {GOLD_BITS: [one.gold for one in bits], WRONG_BITS: [one.wrong for one in bits]}
    return values


def _members(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the tasks of a group, and of the groups in it, or the task itself."""
    if name in results["samples"]:
        return [name]
    return [task for member in results["group_subtasks"].get(name, ()) for task in _members(member, results)]


def _digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return a SHA-256 (first 16 hex digits) of what a model is asked."""
    asked = sorted([sample[f"{part}_hash"] for part in ("doc", "prompt", "target")] for sample in samples)
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def task_records(place: Mapping[str, Any], scores: TaskScores, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the metric records of scores, one per task and metric.

    Args:
        place: `tokens`, `step` and `model`: `raw`, or a merge as `sma:10`.
        scores: The scores.
        settings: `limit` and `shots`.
    """
    return [
        {"kind": "task", **place, "task": score["task"], "metric": metric}
        | {**estimate, "questions": score["questions"], **settings}
        for score in scores["tasks"]
        for metric, estimate in score["metrics"].items()
    ]


def main_metric(score: TaskScore) -> str:
    """Return the metric by which models are compared: the bits per byte of the answers, or the task's first."""
    return GOLD_BITS if GOLD_BITS in score["metrics"] else next(iter(score["metrics"]))


def _metrics(values: Mapping[str, Any], higher_is_better: Mapping[str, Any], documents: int) -> dict[str, Estimate]:
    """Return the metrics of a task by name: `acc`, or `exact_match/strict-match` if its answers are filtered."""
    metrics: dict[str, Estimate] = {}
    for key, value in values.items():
        name, _, filter_name = key.partition(",")
        if not filter_name or name.endswith("_stderr"):
            continue
        error = values.get(f"{name}_stderr,{filter_name}")
        full_name = name if filter_name == "none" else f"{name}/{filter_name}"
        metrics[full_name] = Estimate(
            value=float(value),
            standard_error=_finite(error),
            documents=documents,
            is_higher_better=higher_is_better.get(name) is not False,
        )
    return metrics


def _finite(error: Any) -> float | None:
    return float(error) if isinstance(error, int | float) and math.isfinite(error) else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the logs, warnings and progress bars of lm-eval out of the terminal; errors are raised."""
    with without_logs(), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Keep the logs and warnings of libraries out of the terminal; errors are raised."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
