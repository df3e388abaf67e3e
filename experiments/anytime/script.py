"""Is there, at any time, a model to serve that is as good as the best annealing that ends there?

Command:   python experiments/anytime/script.py --runs runs/science --jobs 2 --sizes science_small
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from anytime_page import draw, report, summarize
from contenders import (
    CEILING,
    CONSTANT,
    ENSEMBLES,
    FIRST_RATES,
    SAME,
    Rival,
    groups,
    horizon_changes,
    list_rivals,
    tuning_cells,
)
from costs import costs
from ensembles import ensemble_name, ensemble_nats

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import Cell
from pma_jax.studies import tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all, get_by_seed
from pma_jax.studies.study import DECIMALS, Study
from pma_jax.studies.targets import HORIZONS, horizon_units, read_target, target_runs
from pma_jax.studies.tuning import Contender, Tuned

ANNEALING = Path(__file__).resolve().parents[1] / "annealing" / "results.json"
SEARCHED = ("a quarter",)  # the horizons of the search on the first tuning seed
FINALISTS = 3  # settings of each contender that are measured at all horizons, on all tuning seeds
LIMIT = 48  # settings of each contender on the first seed: with three axes, a search can take more than 32
EXPECTED_SETTINGS = 34  # of these, for the estimate of the machine time
DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}


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
        for seed in study.seeds:
            read = len(HORIZONS) * (len(rivals) * len(groups(CONSTANT, study.units)) + sum(ENSEMBLES)) * tokens
            work.append(OtherWork(f"{size}, the best settings", size, seed, (len(rivals) + 1) * total, read))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Search the settings of all contenders of every size, and compare them with the target on other seeds."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Search the contenders of a size, train the best setting of each and the target, and read their losses."""
    rivals = list_rivals(study, size)
    tried, best = search(study, size, rivals)
    settings = {rival.name: tuning.overrides(rival.axes, best[rival.name]) for rival in rivals}
    chosen = choose_all(study, size, rivals, settings)
    runs = report_runs(study, size, rivals, settings, chosen)
    complete_all(study, [run for of in runs.values() for one in of for run in one], study.workers)
    measured = {rival.name: measure_rival(study, rival, chosen[rival.name], runs[rival.name]) for rival in rivals}
    return study.describe_size(size) | {
        "ends": horizon_units(study),
        "tried": {name: describe(one, best[name]) for name, one in tried.items()},
        "settings": settings,
        "rivals": measured,
        "costs": costs(study, size, rivals, settings),
        "target": {horizon: read_target(study, runs) for horizon, runs in target_runs(study, ANNEALING, size).items()},
    }


# --- The search -------------------------------------------------------------------------------------------------------


def search(study: Study, size: str, rivals: Sequence[Rival]) -> tuple[dict[str, Tuned], dict[str, tuning.Position]]:
    """Search the setting of each contender with the lowest mean loss over the horizons, of its best model at each."""
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


def list_runs(
    study: Study, size: str, rival: Rival, setting: Sequence[str], seed: int, cells: dict[str, list[Cell]], part: str
) -> list[PlannedRun]:
    """List the runs of a setting: one per horizon, or one for all.

    Args:
        study: The study.
        size: The size.
        rival: The contender.
        setting: Its setting.
        seed: The seed.
        cells: The models that are judged at each horizon, the last horizon last.
        part: The part of the held-out text on which they are judged; of `select`, half of the study's tokens.
    """
    judged = {
        horizon: PlannedEvaluation(tuple(of), (horizon_units(study)[horizon],), part) for horizon, of in cells.items()
    }
    groups_of_horizons = [[horizon] for horizon in cells] if rival.needs_horizon else [list(cells)]
    runs, tokens = [], study.evaluation_tokens // 2 if part == SELECT else 0
    for together in groups_of_horizons:
        last = together[-1]
        changes = horizon_changes(study, size, rival, setting, HORIZONS[last])
        evaluations = tuple(judged[horizon] for horizon in together)
        runs.append(PlannedRun(size, seed, changes, None, evaluations, horizon_units(study)[last], tokens))
    return runs


def judge(study: Study, runs: Sequence[PlannedRun]) -> float:
    """Return the mean over the horizons of the loss of the best model at each; infinite if a run diverged."""
    if any(run.has_diverged(study) for run in runs):
        return math.inf
    return float(np.mean([min(losses.values()) for losses in read_select(study, runs)]))


def read_select(study: Study, runs: Sequence[PlannedRun]) -> list[dict[str, float]]:
    """Return the loss of each model on the part `select` at each horizon, by the text of its merge."""
    found = []
    for run in runs:
        trained, reading = run.get(study), run.study(study)
        for judged in run.evaluations:
            losses = reading.losses(trained, judged.cells, judged.ends, judged.part)
            found.append({cell.text: loss for (cell, _), loss in losses.items()})
    return found


def describe(tuned: Tuned, best: tuning.Position) -> list[dict[str, Any]]:
    """Return the settings of a contender in the layout of results.json; a diverged one has no losses."""
    described = []
    for position in sorted(tuned.losses, key=lambda at: (-len(tuned.losses[at]), tuned.mean(at))):
        values = tuned.losses[position]
        described.append(
            {
                "setting": tuned.contender.overrides(position),
                "losses": values if math.isfinite(sum(values)) else None,
                "is_at_edge": position == best and bool(tuned.open_neighbours(position)),
            }
        )
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
) -> dict[str, dict[str, dict[str, Cell]]]:
    """Choose the best models of every contender, on the tuning seeds and the part `select`.

    Returns:
        {contender: {horizon: {group: model}}}.
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


def choose(study: Study, rival: Rival, runs: Sequence[Sequence[PlannedRun]]) -> dict[str, dict[str, Cell]]:
    """Choose the model of each group at each horizon with the lowest mean loss over the seeds of the runs."""
    losses, chosen = [read_select(study, of) for of in runs], {}
    for i, (horizon, end) in enumerate(horizon_units(study).items()):
        chosen[horizon] = {}
        for group, listed in groups(rival.name, end).items():
            # A fit needs more snapshots than others.
            means = {cell: np.mean([of[i][cell.text] for of in losses]) for cell in listed if cell.text in losses[0][i]}
            chosen[horizon][group] = min(means, key=means.__getitem__)
    return chosen


def report_runs(
    study: Study,
    size: str,
    rivals: Sequence[Rival],
    settings: dict[str, list[str]],
    chosen: dict[str, dict[str, dict[str, Cell]]],
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


def judged_cells(rival: Rival, chosen: dict[str, Cell], end: int) -> list[Cell]:
    """List the models that are judged at a unit: the chosen ones and, at a constant rate, the ensemble's mean."""
    more = [ensemble_mean(end)] if rival.name == CONSTANT else []
    return list(dict.fromkeys([*chosen.values(), *more]))


def ensemble_mean(end: int) -> Cell:
    """Return the mean of the points that the ensemble at a unit has."""
    return Cell("sma", max(n for n in ENSEMBLES if n <= end // 2))


def measure_rival(
    study: Study, rival: Rival, chosen: dict[str, dict[str, Cell]], runs: Sequence[Sequence[PlannedRun]]
) -> dict[str, Any]:
    """Return the losses of the chosen models of a contender at each horizon.

    Returns:
        {horizon: "chosen": {group: text of the merge}, and the losses on the part `report` as
        `Study.document_losses_over_seeds` returns them}.
    """
    measured = {}
    for i, (horizon, end) in enumerate(horizon_units(study).items()):
        which = i if rival.needs_horizon else 0
        get = get_by_seed(study, [of[which] for of in runs])
        texts = {group: cell.text for group, cell in chosen[horizon].items()}
        losses = study.document_losses_over_seeds(get, judged_cells(rival, chosen[horizon], end), [end], REPORT)
        if rival.name == CONSTANT:
            mean = ensemble_mean(end)
            texts |= {SAME: mean.text, CEILING: f"ensemble of {mean.window}"}
            each = [ensemble_nats(study, get(seed), end, mean.window, REPORT) for seed in study.seeds]
            losses["nats"][texts[CEILING]] = {str(end): np.round(each, DECIMALS).tolist()}
        measured[horizon] = {"chosen": texts, **losses}
    return measured


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
