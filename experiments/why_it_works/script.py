"""Why does merging work? A quadratic, the loss landscape, the spectrum of the weights, noise and drift (PMA, 4.6).

Command:   python experiments/why_it_works/script.py --runs runs/science --jobs 2

One size; for each seed: the newest snapshots of a trunk, its annealed branch, and replicas that continue from one of
the trunk's states with other data orders.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from parameter_path import (
    plane_of_two_weights,
    power_spectral_density,
    projections,
    random_directions,
    top_eigenpairs,
)
from quadratic import measure_losses, measure_quadratic
from replica_noise import AT_THE_END, OVER_TIME, name_of_mean, subset_mean_weights
from why_page import RANDOM_DIRECTIONS, TOP_DIRECTIONS, draw, report, summarize

from pma_jax.analysis import curvature, landscape
from pma_jax.analysis.workbench import Workbench, open_workbench
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW
from pma_jax.merging import recipes
from pma_jax.merging.averager import weighted_sum
from pma_jax.runs.directory import Run
from pma_jax.runs.integrity import named_leaves
from pma_jax.studies import run_cache
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedRun
from pma_jax.studies.study import DECIMALS, Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
REPLICAS = 5  # in addition to the trunk
CURVATURE_TOKENS = 60_000_000  # tokens whose evaluation takes as long as curvature and planes of one seed, uncached
GRID = 17  # points along each axis of a contour plot
TWO_WEIGHTS_OF = "blocks/query_DxNxH"


def plan(study: Study) -> Plan:
    """List the trunks, the annealed branches and the replicas; curvature and planes are estimated."""
    size = study.sizes[0]
    work: list[PlannedRun | OtherWork] = []
    for seed in study.seeds:
        work += [PlannedRun(size, seed, needs_snapshots=True), annealed_run(study, seed), *replica_runs(study, seed)]
        work.append(OtherWork("curvature and planes", size, seed, 0, CURVATURE_TOKENS))
    return work


def annealed_run(study: Study, seed: int) -> PlannedRun:
    """Return the branch that anneals over the last quarter."""
    branch = Branch(study.units * 3 // 4, study.units)
    return PlannedRun(study.sizes[0], seed, (), branch, needs_snapshots=True)


def replica_runs(study: Study, seed: int) -> list[PlannedRun]:
    """List the replicas: branches at the trunk's rate, each with its own order of the data, as long as a merge."""
    orders = [f"training.seed={1000 * (r + 1) + seed}" for r in range(REPLICAS)]
    start = study.units - merge_window(study)
    branches = [Branch(start, study.units, "none", (order,)) for order in orders]
    return [PlannedRun(study.sizes[0], seed, (), branch, needs_snapshots=True) for branch in branches]


def measure(study: Study) -> dict[str, Any]:
    """Return all measurements for each seed of the first size."""
    seeds = {}
    for seed in study.seeds:
        run = study.trunk(study.sizes[0], seed)
        annealed = annealed_run(study, seed).get(study)
        seeds[str(seed)] = measure_geometry(study, run, annealed, with_planes=seed == study.seeds[0])
        seeds[str(seed)]["noise"] = measure_noise(study, run, annealed)
    return {"size": study.sizes[0], "window": merge_window(study), "units": study.units, "seeds": seeds}


def merge_window(study: Study) -> int:
    """Return the number of snapshots that are merged: an eighth of the run, at least 4."""
    return max(study.units // 8, 4)


def measure_geometry(study: Study, run: Run, annealed: Run, with_planes: bool) -> dict[str, Any]:
    """Return the quadratic, the spectrum and, if `with_planes`, the loss over planes, at the end of one trunk."""
    bench = open_workbench(run.config, study.evaluation_tokens)
    with jax.set_mesh(bench.mesh):
        constant, decayed = (bench.models(r.of_kind("point")[-(study.units // 4) :]) for r in (run, annealed))
        newest = constant[-merge_window(study) :]
        merged = weighted_sum(newest, recipes.sma(len(newest)))
        return {
            "quadratic": {
                "losses": measure_losses(bench, newest),
                "merge": measure_quadratic(run, bench, newest, merged, "the merged model"),
                "annealed": measure_quadratic(run, bench, newest, decayed[-1], "the annealed model"),
            },
            "spectrum": measure_spectra(run, bench, constant, decayed, merged),
            "planes": measure_planes(bench, newest, merged, decayed[-1]) if with_planes else [],
        }


def measure_spectra(run: Run, bench: Workbench, constant: list[Any], decayed: list[Any], merged: Any) -> dict[str, Any]:
    """Return the power of the weights' path along random and most curved directions, at constant and decaying rate."""
    path = [*constant, *decayed]

    def read(_: Run) -> np.ndarray:
        product = curvature.sum_products(bench.hessian, merged, bench.batches)
        values, directions = top_eigenpairs(product, merged, TOP_DIRECTIONS)
        return np.concatenate([values, projections(path, directions, merged).ravel()])

    reading = f"path along the {TOP_DIRECTIONS} most curved directions, text {bench.text.sample.digest}"
    values, top = np.split(np.array(run_cache.get_or_read_list(run, reading, read)), [TOP_DIRECTIONS])
    random = projections(path, random_directions(merged, RANDOM_DIRECTIONS), merged)
    spectra: dict[str, Any] = {"eigenvalues": values.tolist()}
    for name, along in (("random", random), ("top", top.reshape(len(path), TOP_DIRECTIONS))):
        spectra[name] = {}
        for rate, series in (("constant", along[: len(constant)]), ("decaying", along[len(constant) :])):
            frequencies, power = power_spectral_density(series)
            spectra[name][rate] = power.mean(axis=1).tolist()
        spectra["frequencies"] = frequencies.tolist()
    return spectra


def measure_planes(bench: Workbench, models: list[Any], merged: Any, annealed: Any) -> list[dict[str, Any]]:
    """Return the loss over the principal plane of the snapshots, and over the two weights of a layer that vary most."""
    leaf = np.stack([np.asarray(named_leaves(model, "/")[TWO_WEIGHTS_OF]) for model in models]).std(axis=0)
    first, second = (tuple(map(int, np.unravel_index(i, leaf.shape))) for i in np.argsort(leaf, axis=None)[[-1, -2]])
    chosen = {
        "the plane of the snapshots": landscape.principal_plane(models),
        f"two weights of {TWO_WEIGHTS_OF}": plane_of_two_weights(merged, TWO_WEIGHTS_OF, first, second),
    }
    panels = []
    for title, plane in chosen.items():
        coordinates = np.array([plane.coordinates(model) for model in [*models, merged, annealed]])
        centre = coordinates[-2, :2]
        radius = 1.6 * np.abs(coordinates[:-1, :2] - centre).max()
        xs, ys = (np.linspace(c - radius, c + radius, GRID) for c in centre)
        losses = landscape.loss_on_grid(bench.loss, plane, xs, ys)
        panels.append(
            {
                "title": title,
                "x": xs.tolist(),
                "y": ys.tolist(),
                "losses": losses.round(5).tolist(),
                "snapshots": coordinates[:-2].tolist(),
                "merged": coordinates[-2].tolist(),
                "annealed": coordinates[-1].tolist(),
            }
        )
    return panels


def measure_noise(study: Study, run: Run, annealed: Run) -> dict[str, Any]:
    """Return the losses of means over replicas at the end of the run, and over replicas and time.

    Returns:
        "replicas": how many. "nats": {model: summed loss of each document, the mean over the merges of that kind}.
    """
    span = merge_window(study)
    replicas = [run, *(planned.get(study) for planned in replica_runs(study, run.config.training.seed))]
    snapshots = [s for replica in replicas for s in replica.of_kind("point")[-span:]]
    # Each merge is a matrix of weights [replicas, span]: the outer product of weights over replicas and over time.
    over_time = {AT_THE_END: np.eye(span)[-1], OVER_TIME: np.full(span, 1 / span)}
    groups = {
        name_of_mean(m, time): [np.outer(row, weights) for row in rows]
        for time, weights in over_time.items()
        for m, rows in subset_mean_weights(len(replicas)).items()
    }
    config = dataclasses.replace(run.config, evaluation=study.evaluation_config(run))
    rows = [merge.ravel() for merges in groups.values() for merge in merges]
    sums = iter(evaluate_merges(config, snapshots, rows, REPORT).sums)
    nats = {name: np.mean([next(sums) for _ in merges], axis=0) for name, merges in groups.items()}
    of_annealed = study.document_losses(annealed, [RAW], [study.units], REPORT)
    nats["annealed"] = next(iter(of_annealed.nats.values()))
    return {
        "replicas": len(replicas),
        "document_tokens": of_annealed.counts.tolist(),
        "nats": {name: np.round(nats_D, DECIMALS).tolist() for name, nats_D in nats.items()},
    }


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS)
