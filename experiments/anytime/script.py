"""Is there, at any time, a model to serve that is as good as the best annealing that ends there?

Command:   python experiments/anytime/script.py --runs runs/science --jobs 2 --sizes science_small
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from anytime_page import by_select, draw, report, summarize
from checks import DECAYED, judge_with_b2, measure_checks
from contender_runs import best_losses, list_runs, read_select
from contenders import CONSTANT, ENSEMBLES, FIRST_RATES, Rival, groups, list_rivals, tuning_cells
from costs import costs
from ensembles import ensemble_name, ensemble_nats

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import Cell
from pma_jax.studies import tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import OtherWork, Plan, PlannedRun, complete_all, get_by_seed
from pma_jax.studies.study import DECIMALS, Study
from pma_jax.studies.targets import HORIZONS, horizon_units, read_target, target_runs
from pma_jax.studies.tuning import Contender, Tuned

ANNEALING = Path(__file__).resolve().parents[1] / "annealing" / "results.json"
SEARCHED = ("a quarter",)  # the horizons of the search on the first tuning seed
FINALISTS = 3  # settings of each contender that are measured at all horizons, on all tuning seeds
LIMIT = 48  # settings of each contender on the first seed: with three axes, a search can take more than 32
UNCHECKED = ("science_long",)  # sizes without the two checks: secondary readouts, left out to save time
EXPECTED_SETTINGS = 34  # of these, for the estimate of the machine time
DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}


class Choice(NamedTuple):
    """The model of a group that was chosen, and its mean loss over the tuning seeds on the part `select`."""

    cell: Cell
    loss: float


def plan(study: Study) -> Plan:
    """List the target and the first settings of the search; what follows depends on their losses, and is estimated."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += [run for of in target_runs(study, ANNEALING, size).values() for run in of]
        rivals, seeds, tokens = list_rivals(study, size), study.tuning_seeds, study.evaluation_tokens
        for rival in rivals:
            for position in rival.grid if study.searches_settings else rival.grid[:1]:
                setting = tuning.overrides(rival.axes, position)
                work += tuning_runs(study, size, rival, setting, seeds[0], SEARCHED)
        total = study.trunk_config(size, study.seeds[0]).training.total_tokens
        more = len(rivals) * (EXPECTED_SETTINGS - len(FIRST_RATES))
        cells = sum(len(tuning_cells(horizon_units(study)[horizon])) for horizon in SEARCHED)
        work.append(
            OtherWork(
                f"{size}, the rest of the search",
                size,
                seeds[0],
                more * total // HORIZONS[SEARCHED[-1]],
                more * cells * tokens // 2,
            )
        )
        cells = sum(len(tuning_cells(end)) for end in horizon_units(study).values())
        for seed in seeds:
            runs = FINALISTS * len(rivals)
            choices = sum(len(of) for rival in rivals for of in choices_of(study, rival).values())
            read = (runs * cells + choices) * tokens // 2
            work.append(OtherWork(f"{size}, finalists", size, seed, runs * total, read))
            if size in UNCHECKED:
                continue
            # The two checks: contenders with a decay, and all of them and the target at the first horizon.
            decayed = len(DECAYED) * sum(total // divisor for divisor in HORIZONS.values())
            at_first = 2 * (len(rivals) + 1) * total // max(HORIZONS.values())
            work.append(
                OtherWork(f"{size}, checks", size, seed, decayed + at_first, len(DECAYED) * cells * tokens // 2)
            )
        for seed in study.seeds:
            read = len(HORIZONS) * (len(rivals) * len(groups(CONSTANT, study.units)) + sum(ENSEMBLES)) * tokens
            work.append(OtherWork(f"{size}, the best settings", size, seed, (len(rivals) + 1) * total, read))
            if size in UNCHECKED:
                continue
            # Two contenders and the target, with another decay rate of Adam.
            trained = 2 * total + sum(total // divisor for divisor in HORIZONS.values())
            work.append(OtherWork(f"{size}, another b2", size, seed, trained, 3 * len(HORIZONS) * tokens))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Search the settings of all contenders of every size, and compare them with the target on other seeds."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Search the contenders of a size, train the best setting of each and the target, and read their losses."""
    rivals, target = list_rivals(study, size), target_runs(study, ANNEALING, size)
    tried, finalists = search(study, size, rivals)
    settings = {name: one.contender.overrides(one.best) for name, one in finalists.items()}
    chosen = choose_all(study, size, rivals, settings)
    runs = report_runs(study, size, rivals, settings, chosen)
    complete_all(study, [run for of in runs.values() for one in of for run in one], study.workers)
    measured = {rival.name: measure_rival(study, rival, chosen[rival.name], runs[rival.name]) for rival in rivals}
    found = study.describe_size(size) | {
        "ends": horizon_units(study),
        "tried": {name: describe_search(one) for name, one in tried.items()},
        "finalists": {
            rival.name: describe_finalists(study, size, rival, finalists[rival.name], tried[rival.name])
            for rival in rivals
        },
        "settings": settings,
        "rivals": measured,
        "costs": costs(study, size, rivals, settings),
        "target": {horizon: read_target(study, runs) for horizon, runs in target.items()},
    }
    if size in UNCHECKED:
        return found
    compared = (by_select(found)[0], CONSTANT)
    models = {rival: best_models(chosen[rival.name]) for rival in rivals if rival.name in compared}
    return found | {
        "checks": measure_checks(study, size, rivals, settings, target),
        "with_b2": judge_with_b2(study, size, models, settings, target),
    }


# --- The search -------------------------------------------------------------------------------------------------------


def search(study: Study, size: str, rivals: Sequence[Rival]) -> tuple[dict[str, Tuned], dict[str, Tuned]]:
    """Search the setting of each contender with the lowest mean loss over the horizons, of its best model at each.

    Returns:
        The settings of the search and the finalists, as `tuning.search`.
    """
    by_name = {rival.name: rival for rival in rivals}

    def measure_on(
        seeds: Sequence[int], settings: dict[str, list[list[str]]], horizons: Sequence[str] = tuple(HORIZONS)
    ) -> dict[str, list[list[float]]]:
        runs = {
            name: [[tuning_runs(study, size, by_name[name], one, seed, horizons) for seed in seeds] for one in of_one]
            for name, of_one in settings.items()
        }
        complete_all(study, [run for of in runs.values() for one in of for seed in one for run in seed], study.workers)
        return {
            name: [[judge(study, by_seed) for by_seed in of_setting] for of_setting in of_one]
            for name, of_one in runs.items()
        }

    contenders = [Contender(rival.name, rival.axes, rival.grid, rival.is_allowed) for rival in rivals]
    seeds = study.tuning_seeds
    measure_first = functools.partial(measure_on, seeds[:1], horizons=SEARCHED)
    return tuning.search(contenders, measure_on, seeds, FINALISTS, study.searches_settings, measure_first, LIMIT)


def tuning_runs(
    study: Study, size: str, rival: Rival, setting: Sequence[str], seed: int, horizons: Sequence[str]
) -> list[PlannedRun]:
    """List the runs of a setting on a tuning seed; of those of the search, only the losses are kept."""
    cells = {horizon: tuning_cells(horizon_units(study)[horizon]) for horizon in horizons}
    runs = list_runs(study, size, rival, setting, seed, cells, SELECT)
    keeps_snapshots = tuple(horizons) != SEARCHED
    return [dataclasses.replace(run, keeps_snapshots=keeps_snapshots) for run in runs]


def judge(study: Study, runs: Sequence[PlannedRun]) -> float:
    """Return the mean over the horizons of the loss of the best model at each; infinite if a run diverged."""
    if any(run.has_diverged(study) for run in runs):
        return math.inf
    return float(np.mean(best_losses(study, runs)))


def describe_search(tuned: Tuned) -> list[dict[str, Any]]:
    """Return the settings of a contender and their losses in the search, the best first; null if the run diverged."""
    described = []
    for position in sorted(tuned.losses, key=tuned.mean):
        loss = tuned.mean(position)
        described.append(
            {"setting": tuned.contender.overrides(position), "loss": loss if math.isfinite(loss) else None}
        )
    return described


def describe_finalists(study: Study, size: str, rival: Rival, tuned: Tuned, searched: Tuned) -> list[dict[str, Any]]:
    """Return the finalists of a contender, the best first, with the loss of the best model of each at each horizon.

    Returns:
        Of each: its "setting", the "losses" {horizon: one per tuning seed}, or null if a run diverged, and whether the
        search has not tried a neighbour ("is_at_edge").
    """
    described = []
    for position in sorted(tuned.losses, key=tuned.mean):
        setting, losses = tuned.contender.overrides(position), None
        if math.isfinite(tuned.mean(position)):
            each = [tuning_runs(study, size, rival, setting, seed, tuple(HORIZONS)) for seed in study.tuning_seeds]
            losses = dict(zip(HORIZONS, zip(*[best_losses(study, runs) for runs in each], strict=True), strict=True))
        is_at_edge = bool(searched.open_neighbours(position))
        described.append({"setting": setting, "losses": losses, "is_at_edge": is_at_edge})
    return described


# --- The results ------------------------------------------------------------------------------------------------------


def choices_of(study: Study, rival: Rival) -> dict[str, list[Cell]]:
    """Return all models of a contender at each horizon."""
    return {
        horizon: [cell for group in groups(rival.name, end).values() for cell in group]
        for horizon, end in horizon_units(study).items()
    }


def choose_all(
    study: Study, size: str, rivals: Sequence[Rival], settings: dict[str, list[str]]
) -> dict[str, dict[str, dict[str, Choice]]]:
    """Choose the best models of every contender, on the tuning seeds and the part `select`.

    Returns:
        {contender: {horizon: {group: choice}}}.
    """
    runs = {
        rival.name: [
            list_runs(study, size, rival, settings[rival.name], seed, choices_of(study, rival), SELECT)
            for seed in study.tuning_seeds
        ]
        for rival in rivals
    }
    complete_all(study, [run for of in runs.values() for one in of for run in one], study.workers)
    return {rival.name: choose(study, rival, runs[rival.name]) for rival in rivals}


def choose(study: Study, rival: Rival, runs: Sequence[Sequence[PlannedRun]]) -> dict[str, dict[str, Choice]]:
    """Choose the model of each group at each horizon with the lowest mean loss over the seeds of the runs."""
    losses, chosen = [read_select(study, of) for of in runs], {}
    for i, (horizon, end) in enumerate(horizon_units(study).items()):
        chosen[horizon] = {}
        for group, listed in groups(rival.name, end).items():
            # A fit needs more snapshots than others.
            read = [cell for cell in listed if cell.text in losses[0][i]]
            means = [Choice(cell, float(np.mean([of[i][cell.text] for of in losses]))) for cell in read]
            chosen[horizon][group] = min(means, key=lambda choice: choice.loss)
    return chosen


def best_models(chosen: dict[str, dict[str, Choice]]) -> dict[str, Cell]:
    """Return the model of a contender at each horizon that is the lowest of all its groups."""
    return {horizon: min(of.values(), key=lambda choice: choice.loss).cell for horizon, of in chosen.items()}


def report_runs(
    study: Study,
    size: str,
    rivals: Sequence[Rival],
    settings: dict[str, list[str]],
    chosen: dict[str, dict[str, dict[str, Choice]]],
) -> dict[str, list[list[PlannedRun]]]:
    """List, for each contender and seed, the runs on which its chosen models are judged."""
    runs = {}
    for rival in rivals:
        ends = horizon_units(study)
        cells = {horizon: judged_cells(rival, of, ends[horizon]) for horizon, of in chosen[rival.name].items()}
        each = [list_runs(study, size, rival, settings[rival.name], seed, cells, REPORT) for seed in study.seeds]
        if rival.name == CONSTANT:
            config = study.trunk_config(size, study.seeds[0], each[0][0].changes)
            names = [ensemble_name(study, config, end, ensemble_mean(end).window, REPORT) for end in ends.values()]
            each = [[dataclasses.replace(run, readings=tuple(names)) for run in of] for of in each]
        runs[rival.name] = each
    return runs


def judged_cells(rival: Rival, chosen: dict[str, Choice], end: int) -> list[Cell]:
    """List the models that are judged at a unit: the chosen ones and, at a constant rate, the ensemble's mean."""
    more = [ensemble_mean(end)] if rival.name == CONSTANT else []
    return list(dict.fromkeys([*(choice.cell for choice in chosen.values()), *more]))


def ensemble_mean(end: int) -> Cell:
    """Return the mean of the points that the ensemble at a unit has."""
    return Cell("sma", max(n for n in ENSEMBLES if n <= end // 2))


def measure_rival(
    study: Study, rival: Rival, chosen: dict[str, dict[str, Choice]], runs: Sequence[Sequence[PlannedRun]]
) -> dict[str, Any]:
    """Return the losses of the chosen models of a contender at each horizon.

    Returns:
        {horizon: "chosen": {group: text of the merge}, "select": {group: the loss by which it was chosen}, and the
        losses on the part `report` as `Study.document_losses_over_seeds` returns them}. At a constant rate also
        "ensemble": {"points", the text of their "mean", and "nats": the summed losses of their ensemble by document}.
    """
    measured = {}
    for i, (horizon, end) in enumerate(horizon_units(study).items()):
        which = i if rival.needs_horizon else 0
        get = get_by_seed(study, [of[which] for of in runs])
        of = {
            "chosen": {group: choice.cell.text for group, choice in chosen[horizon].items()},
            "select": {group: choice.loss for group, choice in chosen[horizon].items()},
            **study.document_losses_over_seeds(get, judged_cells(rival, chosen[horizon], end), [end], REPORT),
        }
        if rival.name == CONSTANT:
            mean = ensemble_mean(end)
            each = [ensemble_nats(study, get(seed), end, mean.window, REPORT) for seed in study.seeds]
            nats = np.round(each, DECIMALS).tolist()
            of["ensemble"] = {"points": mean.window, "mean": mean.text, "nats": nats}
        measured[horizon] = of
    return measured


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
