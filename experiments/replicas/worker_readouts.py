"""What is read from the runs: losses of workers and of their mean, merged over time or not, and how far they are apart.

Of each setting, four models are compared at the end: `mean`, the parameters that stand for all workers; `merged mean`,
the mean of its last N snapshots; `worker` and `merged worker`, the same of one worker, as the mean of the losses of two
of them. Without workers of its own, a setting has the first two only.

Dimensions: S seeds, D documents, K workers.
"""

import itertools
from typing import Any

import jax
import numpy as np
from worker_search import CELLS, METHODS, SPREAD, planned_run
from worker_settings import Ground, Setting

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import Cell
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import run_cache
from pma_jax.studies.planned import PlannedEvaluation, PlannedRun
from pma_jax.studies.study import DECIMALS, Study

MEAN, WORKER = "mean", "worker"
READ_WORKERS = 2  # of which the losses are averaged; all workers are alike
MOVEMENT_UNITS = 8  # over which the movements of workers are correlated

Windows = dict[str, int]  # N of the merged mean and of the merged worker


def rates(setting: Setting, searched: dict[str, Any]) -> list[str]:
    """Return the tuned keys of a setting, as overrides."""
    found = searched[METHODS].get(setting.search) or searched[CELLS][setting.search]
    rate, *others = found["best"]
    key, _, value = rate.partition("=")
    return [f"{key}={float(value) * setting.rate_factor:g}", *others]


def merge_cells(kind: str, windows: list[int]) -> tuple[Cell, ...]:
    """Return the newest snapshot of a kind, and the means of the last ones."""
    return tuple(Cell("sma", n, kind=kind) for n in (1, *windows))


def runs_to_choose(study: Study, ground: Ground, setting: Setting, searched: dict[str, Any]) -> list[PlannedRun]:
    """List the runs of a setting, one per seed, with the merges from which the windows are chosen."""
    kinds = ["point", *(["worker_0"] if setting.workers else [])]
    cells = tuple(cell for kind in kinds for cell in merge_cells(kind, ground.windows))
    evaluation = PlannedEvaluation(cells, (ground.units,), SELECT)
    return [_run(ground, seed, setting, searched, (evaluation,)) for seed in study.seeds[: setting.seeds]]


def runs_to_report(
    study: Study, ground: Ground, setting: Setting, searched: dict[str, Any], windows: Windows
) -> list[PlannedRun]:
    """List the runs of a setting, with the models that are reported."""
    cells = merge_cells("point", [windows[MEAN]])
    for worker in range(min(setting.workers, READ_WORKERS)):
        cells += merge_cells(f"worker_{worker}", [windows[WORKER]])
    evaluation = PlannedEvaluation(cells, (ground.units,), REPORT)
    return [_run(ground, seed, setting, searched, (evaluation,)) for seed in study.seeds[: setting.seeds]]


def _run(
    ground: Ground, seed: int, setting: Setting, searched: dict[str, Any], evaluations: tuple[PlannedEvaluation, ...]
) -> PlannedRun:
    return planned_run(ground, seed, (*setting.changes, *rates(setting, searched)), evaluations, setting.workers)


def diverged_seeds(study: Study, runs: list[PlannedRun]) -> list[int]:
    """Return the seeds of the runs that diverged."""
    return [run.seed for run in runs if run.has_diverged(study)]


def choose_windows(study: Study, ground: Ground, runs: list[PlannedRun]) -> tuple[Windows, dict[str, Any]]:
    """Choose the windows with the lowest mean loss over seeds on the part `select`; return the losses there too."""
    reading = runs[0].study(study)
    windows: Windows = {}
    losses: dict[str, Any] = {}
    each = [reading.losses(run.get(study), runs[0].evaluations[0].cells, [ground.units], SELECT) for run in runs]
    for name, kind in ((MEAN, "point"), (WORKER, "worker_0")):
        if Cell("sma", 1, kind=kind) not in runs[0].evaluations[0].cells:
            continue
        found = {n: [one[Cell("sma", n, kind=kind), ground.units] for one in each] for n in (1, *ground.windows)}
        losses[name] = {str(n): values for n, values in found.items()}
        windows[name] = min(ground.windows, key=lambda n, found=found: sum(found[n]))
    return windows, losses


def read_losses(study: Study, ground: Ground, runs: list[PlannedRun], windows: Windows) -> dict[str, Any]:
    """Return the summed nats of each model, for each seed and document of the part `report`."""
    reading, cells = runs[0].study(study), runs[0].evaluations[0].cells
    each = [reading.document_losses(run.get(study), cells, [ground.units], REPORT) for run in runs]
    end = ground.units * reading.unit_tokens(runs[0].get(study))
    nats: dict[str, list[list[float]]] = {}
    for name, window in windows.items():
        for model, n in ((name, 1), (f"merged {name}", window)):
            of_model = [cell for cell in cells if cell.window == n and (cell.kind == "point") == (name == MEAN)]
            nats_SxD = [np.mean([x.nats[cell, end] for cell in of_model], axis=0) for x in each]
            nats[model] = [np.round(x_D, DECIMALS).tolist() for x_D in nats_SxD]
    return {"document_tokens": each[0].counts.tolist(), "nats": nats}


def read_spread(run: Run, workers: int) -> dict[str, float]:
    """Return how far the workers of a run are apart at its end, and whether they move together.

    `distance`: the root of the mean squared distance of the workers from their mean, as a share of its norm.
    `correlation`: the mean cosine between the movements of two workers over the last units.
    """
    return run_cache.get_or_read(run, SPREAD, lambda run: _measure_spread(run, workers))


def _measure_spread(run: Run, workers: int) -> dict[str, float]:
    abstract = abstract_params(run.config.model, make_mesh(run.config.mesh))
    ends = []
    for worker in range(workers):
        snapshots = run.of_kind(f"worker_{worker}")
        pair = snapshots[-1], snapshots[max(len(snapshots) - 1 - MOVEMENT_UNITS, 0)]
        ends.append([_flat(restore_params(snapshot, abstract)) for snapshot in pair])
    last_K, before_K = np.moveaxis(np.array(ends), 1, 0)
    return {"distance": distance(last_K), "correlation": correlation(last_K - before_K)}


def distance(params_K: np.ndarray) -> float:
    """Return the root of the mean squared distance of rows from their mean, as a share of its norm."""
    mean = params_K.mean(axis=0)
    return float(np.sqrt(((params_K - mean) ** 2).sum(axis=1).mean()) / np.linalg.norm(mean))


def correlation(movements_K: np.ndarray) -> float:
    """Return the mean cosine between two rows."""
    unit_K = movements_K / np.linalg.norm(movements_K, axis=1, keepdims=True)
    return float(np.mean([a @ b for a, b in itertools.combinations(unit_K, 2)]))


def _flat(params: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])
