"""The search of learning rates and outer rates, and the runs that it needs.

Contenders are judged by the mean of the raw loss (over the last marks) and the best merge of their snapshots, on other
seeds and other documents than those of the results. Two searches: the methods, with a key of each one's own beside the
rate, then the cells of the sweeps, of which only the rate is tuned. In each, all contenders get as many settings: many
on one seed, and the best of them on all.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from worker_settings import (
    DILOCO,
    NOLOCO,
    Ground,
    Search,
    cell_searches,
    method_searches,
    twice_the_workers,
)

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies import tuning
from pma_jax.studies.planned import PlannedEvaluation, PlannedRun, complete_all, measure_raw_and_merged
from pma_jax.studies.study import Study
from pma_jax.studies.tuning import Contender

RAW_MARKS = 4  # the raw loss is the mean over that many of the last units: one snapshot is noise
# No state but the last: nothing is forked.
COMMON = ("checkpoint.keep_states_at_tokens=()",)
FINALISTS = 3  # settings of each contender that are measured on all tuning seeds
METHODS, CELLS = "methods", "cells"
SPREAD = "spread of the workers"  # read of the snapshots of runs that save their workers


def planned_run(
    ground: Ground, seed: int, changes: Sequence[str], evaluations: Sequence[PlannedEvaluation], workers: int = 0
) -> PlannedRun:
    """Return a run that saves its points, and those of its workers if there are any."""
    kinds = "checkpoint.kinds=point,replica" if workers else "checkpoint.kinds=point"
    readings = (SPREAD,) if workers else ()
    changes = (*changes, *COMMON, kinds)
    return PlannedRun(ground.size, seed, changes, None, tuple(evaluations), ground.units, readings=readings)


def evaluations(ground: Ground) -> tuple[PlannedEvaluation, PlannedEvaluation]:
    """Return what is read of a run of the search: the raw loss at the last marks, and merges at the end."""
    marks = tuple(range(ground.units - RAW_MARKS + 1, ground.units + 1))
    merges = tuple(Cell("sma", n) for n in ground.windows)
    return PlannedEvaluation((RAW,), marks, SELECT), PlannedEvaluation(merges, (ground.units,), SELECT)


def search_runs(
    study: Study, ground: Ground, search: Search, settings: list[list[str]], seeds: Sequence[int]
) -> list[PlannedRun]:
    """List the runs of settings of a contender, all seeds of one setting after the other."""
    planned = [
        planned_run(ground, seed, (*search.changes, *setting), evaluations(ground))
        for setting in settings
        for seed in seeds
    ]
    return [dataclasses.replace(run, evaluation_tokens=study.evaluation_tokens // 2) for run in planned]


def first_runs(study: Study, ground: Ground) -> list[PlannedRun]:
    """List the runs of the first settings of all contenders; none if rates are not searched."""
    if not study.searches_settings:
        return []
    later = twice_the_workers(ground, {})  # their outer rates are not known yet
    cells = [search for name, search in cell_searches(ground, {}).items() if name not in later]
    searches, seeds = [*method_searches(ground).values(), *cells], study.tuning_seeds[:1]
    return [
        run
        for search in searches
        for run in search_runs(
            study, ground, search, [tuning.overrides(search.axes, position) for position in search.grid], seeds
        )
    ]


def search_all(study: Study, ground: Ground) -> dict[str, Any]:
    """Search the methods, then the cells; return what was tried, and the best setting of each, for results.json."""
    methods = search_group(study, ground, method_searches(ground))
    cells = search_group(study, ground, cell_searches(ground, outer_rates(methods)))
    return {METHODS: methods, CELLS: cells}


def outer_rates(methods: dict[str, Any]) -> dict[str, list[str]]:
    """Return the best outer rate of the methods that cells read, as overrides."""
    return {name: methods[name]["best"][1:] for name in (DILOCO, NOLOCO)}


def search_group(study: Study, ground: Ground, searches: dict[str, Search]) -> dict[str, Any]:
    """Search the best setting of each contender."""
    if not study.searches_settings:
        first = {name: (0,) * len(search.axes) for name, search in searches.items()}
        return {
            name: {"best": tuning.overrides(search.axes, first[name]), "tried": []} for name, search in searches.items()
        }
    seeds = study.tuning_seeds
    measured: dict[str, dict[tuple[str, ...], dict[str, list[float]]]] = {name: {} for name in searches}

    def measure_on(seeds: Sequence[int], settings: dict[str, list[list[str]]]) -> dict[str, list[list[float]]]:
        found = measure_settings(study, ground, searches, settings, seeds)
        for name, losses in found.items():
            for setting, new in zip(map(tuple, settings[name]), losses, strict=True):
                known = measured[name].get(setting, {})
                measured[name][setting] = {model: [*known.get(model, ()), *values] for model, values in new.items()}
        return {
            name: [np.mean([one["raw"], one["merged"]], axis=0).tolist() for one in losses]
            for name, losses in found.items()
        }

    contenders = [Contender(name, search.axes, search.grid) for name, search in searches.items()]
    _, finalists = tuning.search(contenders, measure_on, seeds, FINALISTS)
    return {name: describe(one.contender.overrides(one.best), measured[name]) for name, one in finalists.items()}


def measure_settings(
    study: Study,
    ground: Ground,
    searches: dict[str, Search],
    settings: dict[str, list[list[str]]],
    seeds: Sequence[int],
) -> dict[str, list[dict[str, list[float]]]]:
    """Train and evaluate settings of contenders; return the raw and the best merged loss of each, one per seed."""
    runs = {name: search_runs(study, ground, searches[name], of_one, seeds) for name, of_one in settings.items()}
    # Train the runs of all contenders together first, so that all workers are busy.
    complete_all(study, [run for listed in runs.values() for run in listed], study.workers)
    return {name: measure_raw_and_merged(study, listed, len(seeds)) if listed else [] for name, listed in runs.items()}


def describe(best: list[str], measured: dict[tuple[str, ...], dict[str, list[float]]]) -> dict[str, Any]:
    """Return the settings of a contender, and the best, in the layout of results.json."""
    tried = []
    for setting, losses in measured.items():
        is_finite = math.isfinite(sum(losses["raw"]))
        # None: the run of a seed diverged.
        tried.append({"setting": list(setting), **(losses if is_finite else dict.fromkeys(losses))})
    return {"best": best, "tried": tried}


def edge_keys(searched: dict[str, Any]) -> list[str]:
    """Return the overrides of a contender's best setting beside which no lower or no higher value was tried."""
    best = searched["best"]
    keys = []
    for k, override in enumerate(best):
        along = [
            one["setting"]
            for one in searched["tried"]
            if one["setting"][:k] + one["setting"][k + 1 :] == best[:k] + best[k + 1 :]
        ]
        values = [float(setting[k].partition("=")[2]) for setting in along]
        value = float(override.partition("=")[2])
        if values and value in (min(values), max(values)):
            keys.append(override)
    return keys
