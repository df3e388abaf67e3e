"""Does a merged model answer more questions than the raw one, and as many as an annealed one?

Command:   python experiments/tasks/script.py --runs runs/science --jobs 2   (needs pip install -e '.[eval]')
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.task_scores import GOLD_BITS
from pma_jax.evaluation.task_targets import score_targets
from pma_jax.evaluation.tasks.own import VERSION
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.runs.directory import Run
from pma_jax.studies import pages, run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun, get_by_seed
from pma_jax.studies.statistics import find_clear, mean_interval, paired_estimate, ratio_of_means
from pma_jax.studies.study import Study
from pma_jax.studies.targets import target_runs

ANNEALING = Path(__file__).resolve().parents[1] / "annealing" / "results.json"
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
TINY_TASKS = ("pma:last_line",)
WINDOWS = (6, 8, 10, 12, 16)
ACCURACY = "acc"
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
    return {MERGED: trunks, BRANCH: branches, ANNEALED: target_runs(study, ANNEALING, size)["all"]}


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
    """Return the scores of each model of a size: {model: {task: {metric: one value per seed}}}."""
    of_size = runs(study, size)
    trunks = of_size[MERGED]
    losses = [run.study(study).losses(run.get(study), windows(study), [study.units], SELECT) for run in trunks]
    merge = min(windows(study), key=lambda cell: float(np.mean([one[cell, study.units] for one in losses])))
    get_trunk = get_by_seed(study, trunks)
    scores = {UNMERGED: [score(study, get_trunk(seed), RAW) for seed in study.seeds]}
    scores[MERGED] = [score(study, get_trunk(seed), merge) for seed in study.seeds]
    for model in (BRANCH, ANNEALED):
        get = get_by_seed(study, of_size[model])
        scores[model] = [score(study, get(seed), RAW) for seed in study.seeds]
    by_task = {model: regroup(of_model) for model, of_model in scores.items()}
    return study.describe_size(size) | {"merge": merge.text, "scores": by_task}


def score(study: Study, run: Run, cell: Cell) -> dict[str, float]:
    """Return the metrics of a merge of a run's newest snapshots, by "task metric"; kept in the cache of runs."""
    names, unit = task_names(study), study.unit_tokens(run)
    digest = read_sample_of_run(run, REPORT, study.evaluation_config(run)).digest

    def read(run: Run) -> dict[str, float]:
        end = run.config.training.total_tokens // unit
        snapshot = run.snapshots[-1] if cell == RAW else study.merge(run, cell, end)
        (row,) = score_targets([snapshot.path], names, (), is_recorded=False)
        found = {"truncated": float(row["truncated"])}
        for task in row["tasks"]:
            found[f"{task['task']} questions"] = float(task["documents"])
            found |= {f"{task['task']} {name}": metric["value"] for name, metric in task["metrics"].items()}
        return found

    name = f"scores of {cell.text} on {', '.join(names)}, questions {VERSION}, text {digest}"
    return run_cache.get_or_read(run, name, read)


def regroup(scores: list[dict[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Return scores by task and metric, one value per seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for key in scores[0]:
        task, _, metric = key.rpartition(" ")
        found.setdefault(task, {})[metric] = [one[key] for one in scores]
    return found


# --- The page ---------------------------------------------------------------------------------------------------------


def compared(results: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """List the tasks of a size with each metric that is compared: the bits of the answers, and accuracy above chance.

    Accuracy counts where that of some model is above that of a guess.
    """
    scores, listed = results["sizes"][name]["scores"], []
    for task in results["tasks"]:
        metrics = scores[UNMERGED][task]
        listed += [(task, GOLD_BITS)] if GOLD_BITS in metrics else []
        if ACCURACY in metrics and any(is_above_chance(of[task], TASKS[task]) for of in scores.values()):
            listed.append((task, ACCURACY))
    return listed


def is_above_chance(metrics: dict[str, list[float]], guess: float) -> bool:
    """Return whether the accuracy of a model is above that of a guess, over seeds and over questions (95%).

    The errors of both are added as if the seeds erred on the same questions, which is the cautious case.
    """
    interval, questions = mean_interval(metrics[ACCURACY]), metrics["questions"][0]
    of_questions = 1.96 * math.sqrt(interval.mean * (1 - interval.mean) / questions)
    return interval.mean - math.hypot(interval.mean - interval.low, of_questions) > guess


def report(results: dict[str, Any]) -> str:
    """Format the scores of each size, their differences, and the accuracies that are not above chance."""
    parts = []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_scores(results, name), format_chance(results, name), format_cut(size)]
    return "\n\n".join(part for part in parts if part)


def format_scores(results: dict[str, Any], name: str) -> str:
    """Format each metric of the raw model, and the differences of the others from it and between them."""
    size = results["sizes"][name]
    scores, rows = size["scores"], []
    pairs = ((MERGED, UNMERGED), (BRANCH, UNMERGED), (ANNEALED, UNMERGED), (MERGED, BRANCH), (MERGED, ANNEALED))
    found = {
        (task, metric, pair): paired_estimate(*(scores[model][task][metric] for model in pair))
        for task, metric in compared(results, name)
        for pair in pairs
    }
    clear = dict(zip(found, find_clear(list(found.values())), strict=True))
    for task, metric in compared(results, name):
        raw, merged = (scores[model][task][metric] for model in (UNMERGED, MERGED))
        ratio = ratio_of_means(merged, raw)
        cells = []
        for pair in pairs:
            mark = "" if clear[task, metric, pair] else " (not shown)"
            cells.append(pages.format_interval(found[task, metric, pair].interval()) + mark)
        questions = f"{scores[UNMERGED][task]['questions'][0]:.0f}"
        change = "" if ratio is None else pages.format_percent_interval(ratio)
        what = "accuracy" if metric == ACCURACY else "bits per byte of the answer"
        rows.append([task, questions, what, pages.format_mean(raw), change, *cells])
    header = ["task", "questions", "metric", "raw", "merged over raw", *(f"{a} − {b}" for a, b in pairs)]
    return pages.format_table(header, rows) + (
        f"\n\nMerged: {size['merge']}, chosen by held-out loss on the part `select`. Annealed: a branch of the same "
        "run, linear over the last quarter, and the best annealing of all tokens with its own rate and batch. "
        "Intervals are over seeds, of these questions, which all models answer. Fewer bits are better, and a higher "
        "accuracy. "
        "Differences that are not marked are clear, all tested together at a false discovery rate of 5% (Benjamini and "
        "Hochberg)."
    )


def format_chance(results: dict[str, Any], name: str) -> str:
    """List the accuracies that no model has above that of a guess."""
    scores, lines = results["sizes"][name]["scores"], []
    for task in results["tasks"]:
        if ACCURACY in scores[UNMERGED][task] and (task, ACCURACY) not in compared(results, name):
            each = [f"{model} {pages.format_mean(of[task][ACCURACY])}" for model, of in scores.items()]
            lines.append(f"- {task} (a guess: {TASKS[task]:g}): {', '.join(each)}")
    return (
        "Accuracies that are not above a guess, of which no difference is made:\n\n" + "\n".join(lines) if lines else ""
    )


def format_cut(size: dict[str, Any]) -> str:
    """Say how many prompts were longer than what the model reads."""
    cut = size["scores"][UNMERGED][""]["truncated"][0]
    return f"Prompts that were cut from the left, because the model reads {size['sequence_tokens']} bytes: {cut:.0f}."


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the differences of the merged model from the raw one."""
    found, effects = [], []
    for name, size in results["sizes"].items():
        scores, listed = size["scores"], compared(results, name)
        estimates = [paired_estimate(scores[MERGED][t][m], scores[UNMERGED][t][m]) for t, m in listed]
        better = [
            is_clear and (estimate.mean < 0) == (metric == GOLD_BITS)
            for is_clear, estimate, (_, metric) in zip(find_clear(estimates), estimates, listed, strict=True)
        ]
        counts = []
        for metric, words in (
            (GOLD_BITS, "tasks by the bits per byte of the right answer"),
            (ACCURACY, "by the accuracy, where it is above a guess"),
        ):
            of_metric = [is_better for is_better, (_, of) in zip(better, listed, strict=True) if of == metric]
            counts.append(f"{sum(of_metric)} of {len(of_metric)} {words}")
        found.append(f"{name}: merged is better than raw in {' and in '.join(counts)}")
        for task, metric in [*listed[:1], *(one for one in listed if one[1] == ACCURACY)]:
            ratio = ratio_of_means(scores[MERGED][task][metric], scores[UNMERGED][task][metric])
            if ratio:
                what = "accuracy" if metric == ACCURACY else "bits per byte of the answer"
                effects.append(f"{name}, {task}, {what}: {pages.format_percent_interval(ratio)}")
    return IndexRow(
        14,
        "Does merging answer more questions?",
        "PMA, Figs. 1 and 9: several points more on benchmarks, such as 31.1 to 36.6 on HumanEval",
        "; ".join(found),
        f"merged / raw, of the first task and where accuracy is above a guess: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the bits per byte of each task's answers of every model, less those of the raw model."""
    panels = []
    for name, size in results["sizes"].items():
        scores = size["scores"]
        listed = [task for task, metric in compared(results, name) if metric == GOLD_BITS]
        lines = []
        for model in (MERGED, BRANCH, ANNEALED):
            of_model = [paired_estimate(scores[model][t][GOLD_BITS], scores[UNMERGED][t][GOLD_BITS]) for t in listed]
            lines.append(interval_line(model, range(1, len(listed) + 1), [one.interval() for one in of_model]))
        numbered = ", ".join(f"{i} {task.partition(':')[2]}" for i, task in enumerate(listed, 1))
        panels.append(LinePanel(f"{name}: bits per byte of the answer, less raw", numbered, lines, zero_line=True))
    return {"figure.png": to_png(draw_lines(panels))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
