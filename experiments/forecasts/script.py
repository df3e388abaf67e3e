"""Can merges of the first part of a run forecast the annealed loss, and which setting will be best?

Command:   python experiments/forecasts/script.py --runs runs/science --jobs 2

Two parts: a sweep of hyperparameters, whose ranking is forecast; and the annealed loss at the end of the trunks, which
a power law of tokens forecasts.
"""

import dataclasses
from typing import Any

import numpy as np
from forecast_page import MEAN_LOSS, MODELS, SHARES, draw, report, summarize

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch, Plan, PlannedEvaluation, PlannedRun, get_by_seed
from pma_jax.studies.study import DECIMALS, Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
# Settings of the sweep, which changes one key at a time: factors of the size's rate and batch size; weight decays.
RATES, BATCHES, DECAYS = (0.25, 0.5, 2.0, 4.0), (0.5, 2.0), (0.1, 0.5)
SWEEP_DIVISOR, SWEEP_UNITS = 4, 32  # a run of the sweep takes 1/4 of a trunk's tokens, in 32 units
ENDS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # where a trunk is evaluated, in 32nds of its length
NEWEST_DIVISOR = 4  # forecasts use the newest quarter of the snapshots so far


def cells(window: int) -> dict[str, Cell]:
    """Return the merges that forecasts use, by name: the newest snapshot alone, and means of the newest `window`."""
    return dict(zip(MODELS, (RAW, Cell("sma", window), Cell("sma", window, kind="block_mean")), strict=True))


def sweep_settings(study: Study, size: str) -> dict[str, tuple[str, ...]]:
    """Return the changes of each setting of the sweep, by name."""
    base = study.trunk_config(size, study.seeds[0])
    batch, rate = base.training.batch_size_sequences, base.schedule.peak_rate
    settings = {"as it is": ()}
    settings |= {f"rate x{x:g}": (f"schedule.peak_rate={rate * x}",) for x in RATES}
    settings |= {f"batch x{x:g}": (f"training.batch_size_sequences={int(batch * x)}",) for x in BATCHES}
    settings |= {f"weight decay {x:g}": (f"optimizer.weight_decay={x}",) for x in DECAYS}
    total = f"training.total_tokens={base.training.total_tokens // SWEEP_DIVISOR}"
    return {name: (total, *changes) for name, changes in settings.items()}


def sweep_runs(study: Study, size: str, changes: tuple[str, ...], seed: int) -> tuple[PlannedRun, PlannedRun]:
    """Return the run of a setting and its annealed branch; forecasts are not judged on the text of the truth."""
    marks = [int(SWEEP_UNITS * share) for share in (*SHARES, 1.0)]
    evaluations = [PlannedEvaluation(tuple(cells(newest_count(unit)).values()), (unit,), SELECT) for unit in marks]
    evaluations += [PlannedEvaluation((RAW,), newest_units(unit), SELECT) for unit in marks]
    branch, last = Branch(SWEEP_UNITS * 3 // 4, SWEEP_UNITS), PlannedEvaluation((RAW,), (SWEEP_UNITS,), REPORT)
    return (
        PlannedRun(size, seed, changes, None, tuple(evaluations), SWEEP_UNITS),
        PlannedRun(size, seed, changes, branch, (last,), SWEEP_UNITS),
    )


def newest_count(unit: int) -> int:
    """Return how many of the newest snapshots forecasts use at `unit`."""
    return max(unit // NEWEST_DIVISOR, 1)


def newest_units(unit: int) -> tuple[int, ...]:
    """Return the units of the newest snapshots at `unit`, of which forecasts use the mean."""
    return tuple(range(unit - newest_count(unit) + 1, unit + 1))


def curve_runs(study: Study, size: str, seed: int) -> tuple[PlannedRun, PlannedRun]:
    """Return the trunk of a seed with its positions, and the branch that is annealed over its last quarter."""
    evaluations = tuple(
        PlannedEvaluation(tuple(cells(newest_count(at)).values()), (at,), REPORT) for at in curve_ends(study)
    )
    branch, last = Branch(study.units * 3 // 4, study.units), PlannedEvaluation((RAW,), (study.units,), REPORT)
    return PlannedRun(size, seed, (), None, evaluations), PlannedRun(size, seed, (), branch, (last,))


def curve_ends(study: Study) -> list[int]:
    """Return the positions along a trunk, in units."""
    return sorted({study.units * k // 32 for k in ENDS})


def plan(study: Study) -> Plan:
    """List the runs of the sweep and of the curves, and their annealed branches."""
    work: list[PlannedRun] = []
    for size in study.sizes:
        for seed in study.seeds:
            for changes in sweep_settings(study, size).values():
                work += sweep_runs(study, size, changes, seed)
            work += curve_runs(study, size, seed)
    return work


def measure(study: Study) -> dict[str, Any]:
    """Return the losses that both parts need."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the losses of a size.

    Returns:
        "document_tokens": the tokens of each document of the parts `select` and `report`. "sweep" and "curves": losses
        of each seed on each document, summed, in nats.
    """
    sweep, tokens = measure_sweep(study, size)
    return study.describe_size(size) | {
        "document_tokens": tokens,
        "sweep": sweep,
        "curves": measure_curves(study, size),
    }


def measure_sweep(study: Study, size: str) -> tuple[dict[str, dict[str, Any]], dict[str, list[float]]]:
    """Return, for each setting, "annealed" and, by the share seen, each model, and the tokens of the documents.

    Returns:
        {setting: {"annealed": [seeds, documents of `report`], share: {model: [seeds, documents of `select`]}}}, and
        {part: tokens of its documents}.
    """
    small, tokens = dataclasses.replace(study, units=SWEEP_UNITS), {}
    measured: dict[str, dict[str, Any]] = {}
    for name, changes in sweep_settings(study, size).items():
        runs = [sweep_runs(study, size, changes, seed) for seed in study.seeds]
        trunk, branch = (get_by_seed(study, [run[i] for run in runs]) for i in range(2))
        annealed = small.document_losses_over_seeds(branch, [RAW], [SWEEP_UNITS], REPORT)
        entry: dict[str, Any] = {"annealed": annealed["nats"][RAW.text][str(SWEEP_UNITS)]}
        for share in (*SHARES, 1.0):
            unit = int(SWEEP_UNITS * share)
            merges = cells(newest_count(unit))
            each = small.document_losses_over_seeds(trunk, merges.values(), [unit], SELECT)
            entry[f"{share:g}"] = {key: each["nats"][cell.text][str(unit)] for key, cell in merges.items()}
            raw = small.document_losses_over_seeds(trunk, [RAW], newest_units(unit), SELECT)["nats"][RAW.text]
            entry[f"{share:g}"][MEAN_LOSS] = np.mean(list(raw.values()), axis=0).round(DECIMALS).tolist()
            tokens = {SELECT: each["document_tokens"], REPORT: annealed["document_tokens"]}
        measured[name] = entry
    return measured, tokens


def measure_curves(study: Study, size: str) -> dict[str, Any]:
    """Return losses along the trunks, of means of the newest quarter of the snapshots, and of annealed branches.

    Returns:
        "tokens": positions; each model and "annealed": losses, [positions, seeds] and [seeds].
    """
    runs = [curve_runs(study, size, seed) for seed in study.seeds]
    curves: dict[str, Any] = {name: [] for name in MODELS}
    for end in curve_ends(study):
        chosen = cells(newest_count(end))
        each = [study.losses(run.get(study), chosen.values(), [end]) for run, _ in runs]
        for name, cell in chosen.items():
            curves[name].append([x[cell, end] for x in each])
    unit = study.trunk_config(size, study.seeds[0]).checkpoint.interval_tokens
    curves["tokens"] = [end * unit for end in curve_ends(study)]
    return curves | {"annealed": [study.loss(branch.get(study)) for _, branch in runs]}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
