"""Does a merged model answer more questions than the raw one, and as many as an annealed one?

Dimensions: S seeds, Q questions of a task.

Command:   python experiments/tasks/script.py --runs runs/science --jobs 2   (needs pip install -e '.[eval]')
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config import Config
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.held_out import prepare_tokens, read_sample
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.task_scores import GOLD_BITS, WRONG_BITS
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.evaluation.tasks.own import VERSION
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.runs.directory import Run
from pma_jax.studies import pages, run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun, get_by_seed
from pma_jax.studies.statistics import MeanEstimate, estimate_over_documents, find_clear, statistic_over_documents
from pma_jax.studies.study import DECIMALS, Study
from pma_jax.studies.targets import target_runs

ANNEALING = Path(__file__).resolve().parents[1] / "annealing" / "results.json"
RATIOS = "merged / raw, of the first task and where accuracy is above a guess"
DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
# Questions about the held-out source, about lines of Python, and in English, for which these models were not trained.
# Each with the accuracy of a guess.
TASKS = {
    "pma:last_line": 0.25,
    "pma:docstring": 0.25,
    "pma:brackets": 0.25,
    "olmo:basic_skills_coding_rc_5shot": 0.2,
    "olmo:arc_easy_rc_0shot": 0.25,
}
TINY_TASKS = ("pma:docstring",)
WINDOWS = (6, 8, 10, 12, 16)
ACCURACY, MARGIN = "acc", "margin"
METRICS = (GOLD_BITS, WRONG_BITS, ACCURACY)  # that are stored of each question; the margin is the second less the first
METRIC_NAMES = {
    GOLD_BITS: "bits per byte of the right answer",
    MARGIN: "bits per byte, wrong answers less the right one",
    ACCURACY: "accuracy",
}
RISING = (MARGIN, ACCURACY)  # metrics of which more is better
UNMERGED, MERGED, BRANCH, ANNEALED = "raw", "merged", "annealed, same run", "annealed, own setting"
TOKENS_PER_MODEL = 2_500_000  # that a model reads, for the estimate of the machine time: 20,000 answers


def plan(study: Study) -> Plan:
    """List the trunks, the branches over the last quarter and the best annealing of all tokens."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += [run for of in runs(study, size).values() for run in of]
        work += [OtherWork(f"{size}, questions", size, seed, 0, 4 * TOKENS_PER_MODEL) for seed in study.seeds]
    return work


def runs(study: Study, size: str) -> dict[str, list[PlannedRun]]:
    """List the runs of a size, one per seed: the trunks, and the two annealings."""
    end = study.units
    merges = PlannedEvaluation(tuple(windows(study)), (end,), SELECT)
    trunks = [PlannedRun(size, seed, (), None, (merges,), 0, study.evaluation_tokens // 2) for seed in study.seeds]
    judged, branch = PlannedEvaluation((RAW,), (end,), REPORT), Branch(end - end // 4, end)
    branches = [PlannedRun(size, seed, (), branch, (judged,)) for seed in study.seeds]
    planned = {MERGED: trunks, BRANCH: branches, ANNEALED: target_runs(study, ANNEALING, size)["all"]}
    # Recorded losses are not enough: without the scores of its last snapshot, a run is trained again.
    readings = tuple(reading_name(study, size, task, RAW) for task in task_names(study))
    return {model: [dataclasses.replace(run, readings=readings) for run in of] for model, of in planned.items()}


def reading_name(study: Study, size: str, what: str, cell: Cell) -> str:
    """Return the name by which the cache of runs has scores of a merge on a task, or its number of cut sequences."""
    return f"scores of {cell.text} on {what}, questions {VERSION}, text {text_digest(study, size)}"


def text_digest(study: Study, size: str) -> str:
    """Return the digest of the held-out text of which the questions are made."""
    config = study.trunk_config(size, study.seeds[0])
    evaluation = dataclasses.replace(config.evaluation, tokens=study.evaluation_tokens)
    return _digest(dataclasses.replace(config, evaluation=evaluation))


@functools.cache
def _digest(config: Config) -> str:
    return read_sample(prepare_tokens(config), config, REPORT).digest


def windows(study: Study) -> list[Cell]:
    """Return the plain means among which the merge is chosen."""
    return [Cell("sma", window) for window in WINDOWS if window <= study.units // 2]


def measure(study: Study) -> dict[str, Any]:
    """Return the scores of the raw, the merged and the annealed models of every size."""
    return {"tasks": task_names(study), "sizes": {size: measure_size(study, size) for size in study.sizes}}


def task_names(study: Study) -> list[str]:
    """Return the tasks; few of a study with few units, as in tests."""
    return list(TASKS) if study.searches_settings else list(TINY_TASKS)


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the scores of each model of a size.

    Returns:
        "merge": the merge that was chosen; "cut": how many sequences a model could not read in full; and "scores":
        {model: {task: {metric: values of seeds x questions}}}.
    """
    of_size = runs(study, size)
    trunks = of_size[MERGED]
    losses = [run.study(study).losses(run.get(study), windows(study), [study.units], SELECT) for run in trunks]
    merge = min(windows(study), key=lambda cell: float(np.mean([one[cell, study.units] for one in losses])))
    models = {UNMERGED: (trunks, RAW), MERGED: (trunks, merge)}
    models |= {model: (of_size[model], RAW) for model in (BRANCH, ANNEALED)}
    scores, cut = {}, 0
    for model, (planned, cell) in models.items():
        get = get_by_seed(study, planned)
        of_seeds, cuts = zip(*(score(study, size, get(seed), cell) for seed in study.seeds), strict=True)
        cut = cuts[0]  # all models are asked the same
        scores[model] = {
            task: {
                metric: np.round([one[task][i] for one in of_seeds], DECIMALS).tolist()
                for i, metric in enumerate(METRICS)
            }
            for task in of_seeds[0]
        }
    return study.describe_size(size) | {"merge": merge.text, "cut": cut, "scores": scores}


def score(study: Study, size: str, run: Run, cell: Cell) -> tuple[dict[str, np.ndarray], int]:
    """Score a merge of a run's newest snapshots on each question; kept in the cache of runs.

    Returns:
        The metrics of each question of each task, [METRICS, Q], and the number of sequences that were cut.
    """
    names, unit = task_names(study), study.unit_tokens(run)

    @functools.cache
    def score_all() -> dict[str, Any]:
        end = run.config.training.total_tokens // unit
        snapshot = run.snapshots[-1] if cell == RAW else study.merge(run, cell, end)
        (row,) = score_targets([snapshot.path], names, (), is_recorded=False)
        return row

    def read(task: str) -> np.ndarray:
        (of_task,) = (one["by_document"] for one in score_all()["tasks"] if one["task"] == task)
        return np.array([of_task[metric] for metric in METRICS], np.float64).ravel()

    def get(what: str, read_run: Callable[[Run], Iterable[float]]) -> list[float]:
        return run_cache.get_or_read_list(run, reading_name(study, size, what, cell), read_run)

    values = {task: np.reshape(get(task, lambda _, task=task: read(task)), (len(METRICS), -1)) for task in names}
    (cut,) = get("the length of sequences", lambda _: [score_all()["truncated"]])
    return values, round(cut)


# --- The page ---------------------------------------------------------------------------------------------------------


def values_SQ(results: dict[str, Any], name: str, model: str, task: str, metric: str) -> np.ndarray:
    """Return a metric of each question for each seed, [S, Q]."""
    of_task = results["sizes"][name]["scores"][model][task]
    if metric == MARGIN:
        return np.subtract(of_task[WRONG_BITS], of_task[GOLD_BITS])
    return np.array(of_task[metric], np.float64)


def estimate(results: dict[str, Any], name: str, task: str, metric: str, model: str, less: str = "") -> MeanEstimate:
    """Estimate a metric of a model, or by how much it differs from that of another, over seeds and questions."""
    of_model_SQ = values_SQ(results, name, model, task, metric)
    if less:
        of_model_SQ = of_model_SQ - values_SQ(results, name, less, task, metric)
    return estimate_over_documents(of_model_SQ, np.ones(of_model_SQ.shape[1]))


def ratio(results: dict[str, Any], name: str, task: str, metric: str) -> MeanEstimate:
    """Estimate the metric of the merged model over that of the raw one, over seeds and questions."""
    pair = np.stack([values_SQ(results, name, model, task, metric) for model in (MERGED, UNMERGED)])
    return statistic_over_documents(lambda means: means[0] / means[1], pair, np.ones(pair.shape[-1]))


def compared(results: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """List the tasks of a size with each metric that is compared: bits of the answers, and accuracy above chance.

    Accuracy counts where that of some model is above that of a guess, over seeds and questions (95%).
    """
    listed = []
    for task in results["tasks"]:
        listed += [(task, GOLD_BITS), (task, MARGIN)]
        accuracies = [estimate(results, name, task, ACCURACY, model) for model in results["sizes"][name]["scores"]]
        if any(one.interval().low > TASKS[task] for one in accuracies):
            listed.append((task, ACCURACY))
    return listed


def report(results: dict[str, Any]) -> str:
    """Format the scores of each size, their differences, and the accuracies that are not above chance."""
    parts = []
    for name in results["sizes"]:
        ratios = f"{RATIOS.capitalize()}: {format_ratios(results, name)}."
        parts += [f"### {name}", format_scores(results, name), ratios]
        parts += [format_chance(results, name), format_cut(results, name)]
    return "\n\n".join(part for part in parts if part)


def format_scores(results: dict[str, Any], name: str) -> str:
    """Format each metric of the raw model, and the differences of the others from it and between them."""
    rows, size = [], results["sizes"][name]
    pairs = ((MERGED, UNMERGED), (BRANCH, UNMERGED), (ANNEALED, UNMERGED), (MERGED, BRANCH), (MERGED, ANNEALED))
    found = {
        (task, metric, pair): estimate(results, name, task, metric, *pair)
        for task, metric in compared(results, name)
        for pair in pairs
    }
    clear = dict(zip(found, find_clear(list(found.values())), strict=True))
    for task, metric in compared(results, name):
        raw = estimate(results, name, task, metric, UNMERGED)
        cells = []
        for pair in pairs:
            mark = "" if clear[task, metric, pair] else " (not shown)"
            cells.append(pages.format_interval(found[task, metric, pair].interval()) + mark)
        questions = str(values_SQ(results, name, UNMERGED, task, metric).shape[1])
        rows.append([task, questions, METRIC_NAMES[metric], format_level(raw), *cells])
    header = ["task", "questions", "metric", "raw", *(f"{a} − {b}" for a, b in pairs)]
    return pages.format_table(header, rows) + (
        f"\n\nMerged: {size['merge']}, chosen by held-out loss on the part `select`. Annealed: a branch of the same "
        "run, linear over the last quarter, and the best annealing of all tokens with its own rate and batch. "
        "Intervals are over seeds and questions, which all models answer. Fewer bits of the right answer are better, "
        "and more of the wrong ones less it, and a higher accuracy. Differences that are not marked are clear, all "
        "tested together at a false discovery rate of 5% (Benjamini and Hochberg)."
    )


def format_level(of_metric: MeanEstimate) -> str:
    """Format a metric with half the width of its interval: `0.8371 ± 0.0195`."""
    interval = of_metric.interval()
    return f"{interval.mean:.4f} ± {interval.high - interval.mean:.4f}"


def format_chance(results: dict[str, Any], name: str) -> str:
    """List the accuracies that no model has above that of a guess."""
    lines, listed = [], compared(results, name)
    for task in results["tasks"]:
        if (task, ACCURACY) not in listed:
            each = [
                f"{model} {format_level(estimate(results, name, task, ACCURACY, model))}"
                for model in results["sizes"][name]["scores"]
            ]
            lines.append(f"- {task} (a guess: {TASKS[task]:g}): {', '.join(each)}")
    return (
        "Accuracies that are not above a guess, of which no difference is made:\n\n" + "\n".join(lines) if lines else ""
    )


def format_cut(results: dict[str, Any], name: str) -> str:
    """Say how many prompts were longer than what the model reads."""
    size = results["sizes"][name]
    return (
        f"Prompts that were cut from the left, because the model reads {size['sequence_tokens']} bytes: {size['cut']}."
    )


def format_ratios(results: dict[str, Any], name: str) -> str:
    """Format the score of the merged model as a share of that of the raw one, of the metrics that `RATIOS` names."""
    listed = compared(results, name)
    shares = []
    for task, metric in [*listed[:1], *(one for one in listed if one[1] == ACCURACY)]:
        share = pages.format_percent_interval(ratio(results, name, task, metric).interval())
        shares.append(f"{task}, {METRIC_NAMES[metric]}: {share}")
    return "; ".join(shares)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the differences of the merged model from the raw one."""
    found, effects = [], []
    for name in results["sizes"]:
        listed = compared(results, name)
        estimates = [estimate(results, name, task, metric, MERGED, UNMERGED) for task, metric in listed]
        better = [
            is_clear and (one.mean > 0) == (metric in RISING)
            for is_clear, one, (_, metric) in zip(find_clear(estimates), estimates, listed, strict=True)
        ]
        counts = []
        for metric, words in (
            (GOLD_BITS, "tasks by the bits per byte of the right answer"),
            (MARGIN, "by those of the wrong answers less the right one's"),
            (ACCURACY, "by the accuracy, where it is above a guess"),
        ):
            of_metric = [is_better for is_better, (_, of) in zip(better, listed, strict=True) if of == metric]
            counts.append(f"{sum(of_metric)} of {len(of_metric)} {words}")
        found.append(f"{name}: merged is better than raw in {', '.join(counts[:-1])}, and {counts[-1]}")
        effects.append(f"{name}: {format_ratios(results, name)}")
    return IndexRow(
        14,
        "Does merging answer more questions?",
        "PMA, Figs. 1 and 9: several points more on benchmarks, such as 31.1 to 36.6 on HumanEval",
        "; ".join(found),
        f"{RATIOS}: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the bits per byte of each task's right answers of every model, less those of the raw model."""
    panels, listed = [], results["tasks"]
    for name in results["sizes"]:
        lines = []
        for model in (MERGED, BRANCH, ANNEALED):
            of_model = [estimate(results, name, task, GOLD_BITS, model, UNMERGED).interval() for task in listed]
            lines.append(interval_line(model, range(1, len(listed) + 1), of_model))
        numbered = ", ".join(f"{i} {task.partition(':')[2]}" for i, task in enumerate(listed, 1))
        panels.append(
            LinePanel(f"{name}: bits per byte of the right answer, less raw", numbered, lines, zero_line=True)
        )
    return {"figure.png": to_png(draw_lines(panels))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
