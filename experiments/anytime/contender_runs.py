"""The runs of a contender's setting, and the losses that are read from them on the part `select`."""

from collections.abc import Sequence

from contenders import Rival, horizon_changes

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import Cell
from pma_jax.studies.planned import PlannedEvaluation, PlannedRun
from pma_jax.studies.study import Study
from pma_jax.studies.targets import HORIZONS, horizon_units


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


def read_select(study: Study, runs: Sequence[PlannedRun]) -> list[dict[str, float]]:
    """Return the loss of each model on the part `select` at each horizon, by the text of its merge."""
    found = []
    for run in runs:
        trained, reading = run.get(study), run.study(study)
        for judged in run.evaluations:
            losses = reading.losses(trained, judged.cells, judged.ends, judged.part)
            found.append({cell.text: loss for (cell, _), loss in losses.items()})
    return found


def best_losses(study: Study, runs: Sequence[PlannedRun]) -> list[float]:
    """Return the loss of the best model at each horizon."""
    return [min(losses.values()) for losses in read_select(study, runs)]
