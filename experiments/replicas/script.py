"""Averaging between workers: is it noise that cancels, or exploration? And what does merging in time add to it?

Command:   python experiments/replicas/script.py --runs runs/science --jobs 2

Six experiments on one size: periodic averaging by the number of workers and the interval (1), DiLoCo's outer optimizer
(2), optimizers of one worker that average while training (3), SPARTA (4), NoLoCo (5) and Streaming DiLoCo (6).
"""

import dataclasses
from collections import Counter
from typing import Any

from sent_bytes import sent_bytes
from worker_figure import draw
from worker_page import report, summarize
from worker_readouts import (
    choose_windows,
    diverged_seeds,
    rates,
    read_losses,
    read_spread,
    runs_to_choose,
    runs_to_report,
)
from worker_search import FINALISTS, first_runs, outer_rates, search_all
from worker_settings import (
    COUNTS,
    RATE_GRID,
    Ground,
    Setting,
    cell_searches,
    find_ground,
    list_settings,
    method_searches,
    periodic_name,
)

from pma_jax.model.decoder import abstract_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import OtherWork, Plan, PlannedRun, complete_all
from pma_jax.studies.study import Study

DEFAULTS = {"sizes": ("science_replicas",), "seeds": tuple(range(8))}
EXPECTED_METHOD_SETTINGS, EXPECTED_CELL_SETTINGS = 9, 6  # of a contender, for the estimate of the machine time
READ_OF_WORKERS, READ_OF_MEAN = 15, 7  # merges that are evaluated per run, for the same
SETTINGS_AT_A_TIME = 4  # trained and read together; several, so that all cores have work


def plan(study: Study) -> Plan:
    """List the first runs of the search; what follows depends on their losses, and is estimated."""
    ground = find_ground(study)
    total = ground.units * ground.unit_tokens
    work: list[PlannedRun | OtherWork] = [*first_runs(study, ground)]
    done = Counter(
        run.config.training.seed
        for run in run_cache.finished_runs(study.cache)
        if run.config.training.total_tokens == total and run.config.training.seed in study.tuning_seeds
    )
    methods, cells = method_searches(ground), cell_searches(ground, {})
    tried = len(methods) * EXPECTED_METHOD_SETTINGS + len(cells) * EXPECTED_CELL_SETTINGS
    contenders = len(methods) + len(cells)
    for index, seed in enumerate(study.tuning_seeds if study.searches_settings else ()):
        # The grid is listed above, on the first seed; the others have the best settings only.
        listed, expected = (0, contenders * FINALISTS) if index else (contenders * len(RATE_GRID), tried)
        more = max(expected - max(done[seed], listed), 0)
        read = (len(ground.windows) + 4) * study.evaluation_tokens // 2
        work.append(OtherWork("the rest of the search", ground.size, seed, more * total, more * read))
    settings = all_settings(ground, study, {})
    for index, seed in enumerate(study.seeds):
        chosen = [setting for setting in settings.values() if index < setting.seeds]
        read = sum(READ_OF_WORKERS if setting.workers else READ_OF_MEAN for setting in chosen)
        work.append(
            OtherWork(f"{len(chosen)} settings", ground.size, seed, len(chosen) * total, read * study.evaluation_tokens)
        )
    return work


def all_settings(ground: Ground, study: Study, outer: dict[str, list[str]]) -> dict[str, Setting]:
    """Return the settings of all experiments, by name."""
    experiments = list_settings(ground, len(study.seeds), outer)
    return {name: setting for settings in experiments.values() for name, setting in settings.items()}


def measure(study: Study) -> dict[str, Any]:
    """Search the rates, train all settings, choose the windows on `select`, and return the losses on `report`."""
    ground = find_ground(study)
    searched = search_all(study, ground)
    outer = outer_rates(searched["methods"])
    settings = [*all_settings(ground, study, outer).items()]
    measured: dict[str, dict[str, Any]] = {}
    # Each group is read before the next one is trained: the losses of a part of the experiment can be recorded.
    for first in range(0, len(settings), SETTINGS_AT_A_TIME):
        measured |= measure_group(study, ground, searched, dict(settings[first : first + SETTINGS_AT_A_TIME]))
    experiments = list_settings(ground, len(study.seeds), outer)
    names = {number: list(of_one) for number, of_one in experiments.items()}
    unit = ground.unit_steps
    varied = [
        {"workers": count, "name": periodic_name(count, unit) if count > 1 else "one worker"}
        for count in COUNTS
        if ground.sequences % count == 0
    ]
    return {
        "size": ground.size,
        "facts": dataclasses.replace(study, units=ground.units).describe_size(ground.size),
        "ground": dataclasses.asdict(ground),
        "searched": searched,
        "search": {"seeds": len(study.tuning_seeds), "finalists": FINALISTS},
        "experiments": names,
        "counts": varied,
        "settings": measured,
    }


def measure_group(
    study: Study, ground: Ground, searched: dict[str, Any], settings: dict[str, Setting]
) -> dict[str, dict[str, Any]]:
    """Train settings, choose their windows, and return what is reported of each."""
    runs = {name: runs_to_choose(study, ground, setting, searched) for name, setting in settings.items()}
    complete_all(study, [run for listed in runs.values() for run in listed], study.workers)
    diverged = {name: diverged_seeds(study, listed) for name, listed in runs.items()}
    chosen = {name: choose_windows(study, ground, runs[name]) for name in settings if not diverged[name]}
    judged = {
        name: runs_to_report(study, ground, settings[name], searched, windows) for name, (windows, _) in chosen.items()
    }
    complete_all(study, [run for listed in judged.values() for run in listed], study.workers)
    measured: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        measured[name] = {"setting": list(setting.changes), "tuned": rates(setting, searched)}
        if diverged[name]:
            measured[name]["diverged"] = diverged[name]
            continue
        windows, select = chosen[name]
        measured[name] |= {"windows": windows, "select": select, **read_losses(study, ground, judged[name], windows)}
        measured[name] |= describe_runs(study, judged[name], setting)
    return measured


def describe_runs(study: Study, runs: list[PlannedRun], setting: Setting) -> dict[str, Any]:
    """Return the bytes that a worker of a setting sends, and how far its workers are apart, one entry per seed."""
    trained = [run.get(study) for run in runs]
    config = trained[0].config
    described: dict[str, Any] = {
        "sent_bytes": sent_bytes(config, abstract_params(config.model, make_mesh(config.mesh)))
    }
    if setting.workers:
        spreads = [read_spread(run, setting.workers) for run in trained]
        described["spread"] = {key: [spread[key] for spread in spreads] for key in spreads[0]}
    return described


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS)
