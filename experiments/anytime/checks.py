"""Two checks of the comparison.

Whether a contender is lower because it needs no annealing, or because its optimizer is better: two contenders are also
trained with a linear decay to 0, on the tuning seeds and the part `select`. And whether the order depends on the decay
rate of Adam's second moment, which is the same for all contenders and for the target: with another one, all are trained
to the first horizon on the tuning seeds, and some to all horizons on the seeds and the part of the results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from contender_runs import best_losses, list_runs
from contenders import Rival, tuning_cells, with_decay

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies.planned import PlannedEvaluation, PlannedRun, complete_all, get_by_seed
from pma_jax.studies.study import Study
from pma_jax.studies.targets import HORIZONS, horizon_units

DECAYED = ("schedule-free", "GPA")
B2 = "optimizer.b2=0.99"
FIRST = next(iter(HORIZONS))  # the horizon of the second check

Runs = list[list[PlannedRun]]  # of each tuning seed


def measure_checks(
    study: Study,
    size: str,
    rivals: Sequence[Rival],
    settings: dict[str, list[str]],
    target: dict[str, list[PlannedRun]],
) -> dict[str, Any]:
    """Train the runs of both checks, and return the loss of the best model of each.

    Returns:
        "decay": {"without" and "with": {contender: {horizon: losses}}, "target": {horizon: losses}}, and "b2":
        {"change": the override, "without" and "with": {contender or "target": losses at the first horizon}}; losses are
        one per tuning seed.
    """
    of_target = target_on_tuning_seeds(study, target)
    decay, b2 = decay_runs(study, size, rivals, settings), b2_runs(study, size, rivals, settings, of_target[FIRST])
    checked = [of for check in (decay, b2) for side in check.values() for of in side.values()]
    every = [run for of in (*checked, *of_target.values()) for one in of for run in one]
    complete_all(study, every, study.workers)
    at_horizons = {
        key: {name: dict(zip(HORIZONS, _losses(study, of), strict=True)) for name, of in side.items()}
        for key, side in decay.items()
    }
    targets = {horizon: _losses(study, of)[0] for horizon, of in of_target.items()}
    at_first = {key: {name: _losses(study, of)[0] for name, of in side.items()} for key, side in b2.items()}
    return {"decay": {**at_horizons, "target": targets}, "b2": {"change": B2, **at_first}}


def target_on_tuning_seeds(study: Study, target: dict[str, list[PlannedRun]]) -> dict[str, Runs]:
    """List the runs of the target of each horizon on the tuning seeds, which are judged as the contenders' are."""
    found = {}
    for horizon, (first, *_) in target.items():
        judged = PlannedEvaluation((RAW,), (first.units,), SELECT)
        run = dataclasses.replace(first, evaluations=(judged,), evaluation_tokens=study.evaluation_tokens // 2)
        found[horizon] = [[dataclasses.replace(run, seed=seed)] for seed in study.tuning_seeds]
    return found


def decay_runs(
    study: Study, size: str, rivals: Sequence[Rival], settings: dict[str, list[str]]
) -> dict[str, dict[str, Runs]]:
    """List the runs of `DECAYED` at their best settings, without a decay and with one."""
    plain = [rival for rival in rivals if rival.name in DECAYED]
    return {
        key: {rival.name: _runs(study, size, rival, settings[rival.name], tuple(HORIZONS)) for rival in of}
        for key, of in (("without", plain), ("with", [with_decay(rival) for rival in plain]))
    }


def b2_runs(
    study: Study,
    size: str,
    rivals: Sequence[Rival],
    settings: dict[str, list[str]],
    target: Runs,
) -> dict[str, dict[str, Runs]]:
    """List the runs of all contenders and of the target to the first horizon, without the change `B2` and with it."""
    found: dict[str, dict[str, Runs]] = {}
    for key, changes in (("without", ()), ("with", (B2,))):
        found[key] = {
            rival.name: _runs(study, size, rival, [*settings[rival.name], *changes], (FIRST,)) for rival in rivals
        }
        found[key]["target"] = [
            [dataclasses.replace(run, changes=(*run.changes, *changes)) for run in of] for of in target
        ]
    return found


def judge_with_b2(
    study: Study,
    size: str,
    models: dict[Rival, dict[str, Cell]],
    settings: dict[str, list[str]],
    target: dict[str, list[PlannedRun]],
) -> dict[str, Any]:
    """Train contenders and the target with the change `B2`, and judge them as the results are.

    Args:
        study: The study.
        size: The size.
        models: The model of each contender that is judged at each horizon.
        settings: The best setting of each contender.
        target: The runs of the target without the change, at each horizon.

    Returns:
        {contender or "target": {horizon: "model": the text of the merge, and "nats": the summed losses of each seed on
        each document of the part `report`}}.
    """
    runs = {}
    for rival, of in models.items():
        cells = {horizon: [cell] for horizon, cell in of.items()}
        setting = [*settings[rival.name], B2]
        runs[rival] = [list_runs(study, size, rival, setting, seed, cells, REPORT) for seed in study.seeds]
    changed = {
        horizon: [dataclasses.replace(run, changes=(*run.changes, B2)) for run in of] for horizon, of in target.items()
    }
    every = [run for of in runs.values() for one in of for run in one] + [run for of in changed.values() for run in of]
    complete_all(study, every, study.workers)
    judged: dict[str, Any] = {}
    for rival, of in models.items():
        judged[rival.name] = {}
        for i, (horizon, cell) in enumerate(of.items()):
            each = [one[i if rival.needs_horizon else 0] for one in runs[rival]]
            judged[rival.name][horizon] = _read_report(study, each, cell, horizon_units(study)[horizon])
    judged["target"] = {horizon: _read_report(study, of, RAW, of[0].units) for horizon, of in changed.items()}
    return judged


def _read_report(study: Study, runs: Sequence[PlannedRun], cell: Cell, end: int) -> dict[str, Any]:
    """Return the losses of a model at a unit of the runs, one per seed of the study."""
    losses = study.document_losses_over_seeds(get_by_seed(study, runs), [cell], [end], REPORT)
    return {"model": cell.text, "nats": losses["nats"][cell.text][str(end)]}


def _runs(study: Study, size: str, rival: Rival, setting: Sequence[str], horizons: Sequence[str]) -> Runs:
    cells = {horizon: tuning_cells(horizon_units(study)[horizon]) for horizon in horizons}
    return [list_runs(study, size, rival, setting, seed, cells, SELECT) for seed in study.tuning_seeds]


def _losses(study: Study, runs: Runs) -> list[list[float]]:
    """Return the losses at each horizon, one per seed."""
    return [list(of) for of in zip(*[best_losses(study, one) for one in runs], strict=True)]
