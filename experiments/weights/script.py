"""Which weights? Fixed recipes over points and block means, and weights that are learned (PMA, Figure 4).

Command:   python experiments/weights/script.py --runs runs/science --jobs 2

At a quarter, half and all of the tokens of each trunk: every recipe over every window. The best window of a recipe is
chosen on the part `select` of the held-out text, as the mean over seeds, and judged on `report`; weights are learned on
`fit`, for each seed.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from learned_weights import learn_weights
from weights_page import BASELINE, KINDS, POWER, RECIPES, draw, report, series, summarize

from pma_jax.analysis.workbench import text_loss
from pma_jax.data.sampling import FIT, REPORT, SELECT
from pma_jax.evaluation.held_out import make_evaluator, read_sample_of_run
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell, snapshots_through
from pma_jax.model.decoder import abstract_params
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.study import DECIMALS, Study
from pma_jax.studies.targets import horizon_units

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEARNED = (("point", 4), ("block_mean", 2))  # kind, and divisor: the newest units / divisor snapshots are merged
FIT_STEPS = 20  # of L-BFGS
FIT_BATCH_SEQUENCES = 256  # a gradient keeps the activations of all batches, so that large ones cost no memory


def cells(end: int) -> list[Cell]:
    """Return every merge of the table at an end, in units: windows up to all snapshots."""
    grid = [
        Cell(recipe, window, kind=kind)
        for kind in KINDS
        for recipe in RECIPES
        for window in WINDOWS
        if smallest_window(recipe) <= window <= end
    ]
    return [*grid, *(Cell(recipe, end, kind=kind) for kind in KINDS for recipe in POWER)]


def smallest_window(recipe: str) -> int:
    """Return the smallest window that is tried: 1 of the plain mean, 3 of a fit of a line or a parabola, else 2."""
    return 1 if recipe == BASELINE else 3 if recipe.startswith("lagfree") else 2


def plan(study: Study) -> Plan:
    """List the trunks, judged on the part `select`; the chosen merges and the learned weights are estimated."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += select_runs(study, size)
        # A step of L-BFGS computes about one gradient, which takes as long as training on the same tokens.
        trained = len(LEARNED) * FIT_STEPS * study.evaluation_tokens
        judged = len(horizon_units(study)) * len(KINDS) * (len(RECIPES) + 1) + len(LEARNED) + 1
        read = judged * study.evaluation_tokens
        work += [OtherWork(f"{size}, chosen and learned weights", size, s, trained, read) for s in study.seeds]
    return work


def select_runs(study: Study, size: str) -> list[PlannedRun]:
    """List the trunks, one per seed; their merges are judged on half of the tokens of the part `select`."""
    evaluations = tuple(PlannedEvaluation(tuple(cells(end)), (end,), SELECT) for end in horizon_units(study).values())
    return [PlannedRun(size, seed, (), None, evaluations, 0, study.evaluation_tokens // 2) for seed in study.seeds]


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of the chosen merges at each horizon, and of the learned weights at the end."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Choose the best window of each recipe and kind at each horizon, judge it, and learn weights."""
    means = select_means(study, size)
    chosen = {horizon: choose(means[horizon]) for horizon in means}
    evaluations = []
    for horizon, end in horizon_units(study).items():
        texts = set(chosen[horizon].values())
        if end == study.units:
            texts |= {plain_mean(study, kind, divisor).text for kind, divisor in LEARNED}
        judged = [RAW, *(cell for cell in cells(end) if cell.text in texts)]
        evaluations.append(PlannedEvaluation(tuple(judged), (end,), REPORT))
    runs = [PlannedRun(size, seed, (), None, tuple(evaluations)) for seed in study.seeds]
    complete_all(study, runs, study.workers)
    get_trunk = functools.partial(study.trunk, size)
    judged_at = {
        str(e.ends[0]): study.document_losses_over_seeds(get_trunk, e.cells, e.ends, REPORT) for e in evaluations
    }
    return study.describe_size(size) | {
        "ends": horizon_units(study),
        "select": means,
        "chosen": chosen,
        "merges": judged_at,
        "learned": [learn(study, size, kind, study.units // divisor) for kind, divisor in LEARNED],
    }


def select_means(study: Study, size: str) -> dict[str, dict[str, float]]:
    """Return the mean loss over seeds of each merge on the part `select`: {horizon: {text of the merge: loss}}."""
    runs, found = select_runs(study, size), {}
    for horizon, end in horizon_units(study).items():
        each = [run.study(study).losses(run.get(study), cells(end), [end], SELECT) for run in runs]
        found[horizon] = {cell.text: float(np.mean([losses[cell, at] for losses in each])) for cell, at in each[0]}
    return found


def plain_mean(study: Study, kind: str, divisor: int) -> Cell:
    """Return the plain mean of the snapshots of which weights are learned."""
    return Cell("sma", study.units // divisor, kind=kind)


def choose(means: dict[str, float]) -> dict[str, str]:
    """Return the merge with the lowest loss of each series, as a recipe over one kind of snapshot."""
    best: dict[str, str] = {}
    for text in means:
        of = series(text)
        if of not in best or means[text] < means[best[of]]:
            best[of] = text
    return best


# --- Learned weights --------------------------------------------------------------------------------------------------


def learn(study: Study, size: str, kind: str, window: int) -> dict[str, Any]:
    """Learn the weights of the newest `window` snapshots of each trunk on the part `fit`, and judge them on `report`.

    Returns:
        "weights": one row per seed. "fit_losses": the loss on `fit` of the plain mean, where the search starts, and of
        the learned weights, per seed. "nats": the summed loss of each document, per seed.
    """
    each = [learn_of_run(study, study.trunk(size, seed), kind, window) for seed in study.seeds]
    return {"kind": kind, "window": window, **{key: [one[key] for one in each] for key in each[0]}}


def learn_of_run(study: Study, run: Run, kind: str, window: int) -> dict[str, list[float]]:
    """Learn the weights of the newest snapshots of a trunk; the result is kept in the cache of runs."""
    evaluation = study.evaluation_config(run)
    digests = "/".join(read_sample_of_run(run, part, evaluation).digest for part in (FIT, REPORT))

    def measure_run(run: Run) -> dict[str, float]:
        config = dataclasses.replace(run.config, evaluation=evaluation)
        in_large = dataclasses.replace(evaluation, batch_size_sequences=FIT_BATCH_SEQUENCES)
        mesh = make_mesh(config.mesh)
        tokens = config.training.total_tokens
        snapshots = snapshots_through(run.of_kind(kind), tokens, config.batch_tokens)[-window:]
        abstract = abstract_params(config.model, mesh)
        with jax.set_mesh(mesh):
            text = make_evaluator(dataclasses.replace(config, evaluation=in_large), mesh, FIT)
            objective = text_loss(text.graph, text.batches)
            fit = learn_weights(objective, [restore_params(s, abstract) for s in snapshots], iterations=FIT_STEPS)
        (nats_D,) = evaluate_merges(config, snapshots, [fit.weights], REPORT).sums
        found = {"weights": fit.weights, "fit_losses": [fit.start_loss, fit.loss], "nats": np.round(nats_D, DECIMALS)}
        return {f"{key} {i}": float(x) for key, values in found.items() for i, x in enumerate(values)}

    name = f"weights of {window} of {kind} in {FIT_STEPS} steps, text {digests}"
    stored, found = run_cache.get_or_read(run, name, measure_run), {}
    for key in sorted(stored, key=lambda key: int(key.rpartition(" ")[2])):
        found.setdefault(key.rpartition(" ")[0], []).append(stored[key])
    return found


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
