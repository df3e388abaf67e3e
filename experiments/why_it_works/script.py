"""Why does merging work? A quadratic, the loss landscape, the spectrum of the weights, noise and drift (PMA, 4.6).

Command:   python experiments/why_it_works/script.py --runs runs/science

One size; for each seed: the newest snapshots of a trunk, its annealed branch, and replicas that continue from one of
the trunk's states with other data orders.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from contours import ContourPanel, draw_contours
from numpy.typing import ArrayLike
from parameter_path import (
    plane_of_two_weights,
    power_spectral_density,
    projections,
    random_directions,
    top_eigenpairs,
)
from replica_noise import fit_replica_noise, subset_mean_weights

from pma_jax.analysis import curvature, landscape, spectrum
from pma_jax.analysis.workbench import Workbench, open_workbench
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.merging import recipes
from pma_jax.merging.averager import weighted_sum
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runs.integrity import named_leaves
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedRun
from pma_jax.studies.statistics import mean_interval
from pma_jax.studies.study import Study

TEXT_TOKENS = 8192  # held-out tokens for curvature and landscape
REPLICAS = 5  # in addition to the trunk
RANDOM_DIRECTIONS, TOP_DIRECTIONS = 32, 4
CURVATURE_TOKENS = 8_000_000  # tokens whose evaluation takes as long as curvature and planes of one seed
GRID = 17  # points along each axis of a contour plot
TWO_WEIGHTS_OF = "blocks/query_DxNxH"
RECIPES = ("sma", "wma", "ema:alpha=0.2", "decay:shape=cosine", "decay:shape=minus_sqrt", "lagfree:lag=0.5", "lagfree")
DIRECTIONS = {"random": f"{RANDOM_DIRECTIONS} random", "top": f"{TOP_DIRECTIONS} most curved"}
AROUND = {"merge": "the merged model", "annealed": "the annealed model"}


def plan(study: Study) -> Plan:
    """List the trunks and the annealed branches; replicas and curvature are estimated."""
    size, end = study.sizes[0], study.units
    branch = Branch(end * 3 // 4, end)
    work: list[PlannedRun | OtherWork] = []
    for seed in study.seeds:
        work += [PlannedRun(size, seed), PlannedRun(size, seed, (), branch)]
        trained = REPLICAS * merge_window(study) * study.describe_size(size)["unit_tokens"]
        work.append(OtherWork("replicas, curvature and planes", size, seed, trained, CURVATURE_TOKENS))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Return all measurements for each seed of the first size."""
    seeds = {}
    for seed in study.seeds:
        run = study.trunk(study.sizes[0], seed)
        annealed = study.anneal(run, study.units * 3 // 4, study.units)
        seeds[str(seed)] = measure_geometry(study, run, annealed, with_planes=seed == study.seeds[0])
        seeds[str(seed)]["noise"] = measure_noise(study, run, annealed)
    return {"size": study.sizes[0], "window": merge_window(study), "units": study.units, "seeds": seeds}


def merge_window(study: Study) -> int:
    """Return the number of snapshots that are merged: an eighth of the run, at least 4."""
    return max(study.units // 8, 4)


def measure_geometry(study: Study, run: Run, annealed: Run, with_planes: bool) -> dict[str, Any]:
    """Return the quadratic, the spectrum and, if `with_planes`, the loss over planes, at the end of one trunk."""
    bench = open_workbench(run.config, min(TEXT_TOKENS, study.evaluation_tokens))
    with jax.set_mesh(bench.mesh):
        constant, decayed = (bench.models(r.of_kind("point")[-(study.units // 4) :]) for r in (run, annealed))
        newest = constant[-merge_window(study) :]
        merged = weighted_sum(newest, recipes.sma(len(newest)))
        return {
            "quadratic": {
                "merge": measure_quadratic(bench, newest, merged),
                "annealed": measure_quadratic(bench, newest, decayed[-1]),
            },
            "spectrum": measure_spectra(bench, constant, decayed, merged),
            "planes": measure_planes(bench, newest, merged, decayed[-1]) if with_planes else [],
        }


def measure_quadratic(bench: Workbench, models: list[Any], around: Any) -> dict[str, Any]:
    """Return the measured gain of the mean of `models`, and the gain that a quadratic around `around` predicts.

    With the deviations delta_i = models[i] - around, the quadratic's `matrix` is delta_i' H delta_j, for H the Hessian
    and the Gauss-Newton matrix.
    """
    weights, objective = recipes.sma(len(models)), bench.loss
    loss = jax.jit(objective)
    losses, mean_model_loss = [float(loss(model)) for model in models], float(loss(weighted_sum(models, weights)))
    deltas = [optax.tree.sub(model, around) for model in models]
    slopes = curvature.directional_derivatives(objective, around, deltas)
    measured = {"over_mean": np.mean(losses) - mean_model_loss, "over_last": losses[-1] - mean_model_loss}
    gains: dict[str, Any] = {"measured": measured}
    products = {
        "hessian": curvature.make_hessian_vector_product(objective, around),
        "gauss_newton": curvature.make_gauss_newton_vector_product(bench.logits_and_mask, around),
    }
    for name, product in products.items():
        matrix = curvature.pairwise_curvature(product, deltas)
        gains[name] = {
            "over_mean": curvature.merging_gain(matrix, weights),
            "over_last": curvature.merging_gain_over_last(matrix, weights, slopes),
            "off_diagonal_share": off_diagonal_share(matrix),
            "negative_pairs": float(np.mean(matrix[~np.eye(len(matrix), dtype=bool)] < 0)),
            "matrix": matrix.tolist(),
        }
    return gains


def off_diagonal_share(matrix_KxK: ArrayLike) -> float:
    """Return the sum of the off-diagonal entries divided by the trace.

    -1: the deltas cancel, and a mean removes all of the loss they add. 0: they are independent, and a mean keeps 1/K
    of it. K - 1: they are equal, and a mean gains nothing.
    """
    matrix = np.asarray(matrix_KxK, np.float64)
    return float((matrix.sum() - np.trace(matrix)) / np.trace(matrix))


def measure_spectra(bench: Workbench, constant: list[Any], decayed: list[Any], merged: Any) -> dict[str, Any]:
    """Return the power of the weights' path along random and most curved directions, at constant and decaying rate."""
    values, top = top_eigenpairs(curvature.make_hessian_vector_product(bench.loss, merged), merged, TOP_DIRECTIONS)
    spectra: dict[str, Any] = {"eigenvalues": values.tolist()}
    for name, directions in (("random", random_directions(merged, RANDOM_DIRECTIONS)), ("top", top)):
        spectra[name] = {}
        for rate, models in (("constant", constant), ("decaying", decayed)):
            frequencies, power = power_spectral_density(projections(models, directions, merged))
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
    """Return the losses of means over replicas, over time, and over both."""
    span, seed = merge_window(study), run.config.training.seed
    start = study.units - span
    seed_changes = [f"training.seed={1000 * (r + 1) + seed}" for r in range(REPLICAS)]
    replicas = [run, *(study.fork(run, start, study.units, [change]) for change in seed_changes)]
    snapshots = [s for replica in replicas for s in replica.of_kind("point")[-span:]]
    # Each merge is a matrix of weights [replicas, span]: the outer product of weights over replicas and over time.
    last_unit, all_units = np.eye(span)[-1], np.full(span, 1 / span)
    one_replica, all_replicas = np.eye(len(replicas)), np.full(len(replicas), 1 / len(replicas))
    subsets = subset_mean_weights(len(replicas))
    groups = {
        **{f"mean of {m}": [np.outer(row, last_unit) for row in rows] for m, rows in subsets.items()},
        "time": [np.outer(row, all_units) for row in one_replica],
        "both": [np.outer(all_replicas, all_units)],
        "path": [np.outer(all_replicas, unit) for unit in np.eye(span)],
    }
    config = dataclasses.replace(run.config, evaluation=study.evaluation_config(run))
    rows = [merge.ravel() for merges in groups.values() for merge in merges]
    losses = iter([evaluated.loss for evaluated in evaluate_merges(config, snapshots, rows, REPORT).losses])
    group_losses = {name: [next(losses) for _ in merges] for name, merges in groups.items()}
    by_count = {m: float(np.mean(group_losses[f"mean of {m}"])) for m in subsets}
    fit = fit_replica_noise(list(by_count), list(by_count.values()))
    return {
        "replicas": len(replicas),
        "by_count": {str(m): loss for m, loss in by_count.items()},
        "floor": fit.floor,
        "noise": fit.noise_per_replica,
        "time": float(np.mean(group_losses["time"])),
        "both": group_losses["both"][0],
        "path": group_losses["path"],
        "annealed": study.loss(annealed),
    }


# --- The page ---------------------------------------------------------------------------------------------------------


def mean_and_interval(results: dict[str, Any], statistic: Callable[[dict[str, Any]], float], digits: int = 4) -> str:
    """Format the mean over seeds of `statistic` of each seed's results, with its interval."""
    values = [statistic(seed) for seed in results["seeds"].values()]
    return pages.format_interval(mean_interval(values), digits)


def report(results: dict[str, Any]) -> str:
    """Format three parts: the quadratic, noise and drift, the spectrum."""
    return "\n\n".join([quadratic_report(results), noise_report(results), spectrum_report(results)])


def quadratic_report(results: dict[str, Any]) -> str:
    """Format the gain of merging the last snapshots as measured and as a quadratic predicts it."""
    rows = []
    for around, name in AROUND.items():
        for kind in ("measured", "hessian", "gauss_newton"):
            gains = [
                mean_and_interval(results, lambda s, k=kind, g=gain, a=around: s["quadratic"][a][k][g])
                for gain in ("over_mean", "over_last")
            ]
            shares = ["", ""]
            if kind != "measured":
                shares = [
                    mean_and_interval(results, lambda s, k=kind, q=share, a=around: s["quadratic"][a][k][q], 2)
                    for share in ("off_diagonal_share", "negative_pairs")
                ]
            if kind != "measured" or around == "merge":
                rows.append(["" if kind == "measured" else name, kind.replace("_", "-"), *gains, *shares])
    header = ["expanded around", "", "over the mean of the losses", "over the last", "off-diagonal", "negative pairs"]
    text = f"Gain of the mean of the last {results['window']} snapshots, nats per token"
    return f"**A quadratic.** {text}:\n\n{pages.format_table(header, rows)}"


def path_gain(results: dict[str, Any]) -> str:
    """Format the loss of the mean over all replicas and time minus that of the last mean over replicas, in nats."""
    return mean_and_interval(results, lambda s: s["noise"]["both"] - s["noise"]["path"][-1])


def noise_report(results: dict[str, Any]) -> str:
    """Format the losses of means over replicas and over time, and their differences from one run's last snapshot."""
    count = next(iter(results["seeds"].values()))["noise"]["replicas"]

    def row(name: str, statistic: Callable[[dict[str, Any]], float]) -> list[str]:
        values = [statistic(seed["noise"]) for seed in results["seeds"].values()]
        raw = [seed["noise"]["by_count"]["1"] for seed in results["seeds"].values()]
        return [name, f"{np.mean(values):.4f}", pages.format_difference(values, raw)]

    rows = [
        row("the last snapshot", lambda n: n["by_count"]["1"]),
        row("mean of the last snapshots of 2 replicas", lambda n: n["by_count"]["2"]),
        row(f"of {count} replicas", lambda n: n["by_count"][str(count)]),
        row("of infinitely many (extrapolated)", lambda n: n["floor"]),
        row(f"mean over time: the last {results['window']} snapshots of one", lambda n: n["time"]),
        row(f"over both: {count} replicas, {results['window']} snapshots each", lambda n: n["both"]),
        row("annealed over the last quarter", lambda n: n["annealed"]),
    ]
    header = ["model", "held-out loss", "less the last snapshot"]
    text = (
        f"The last {results['window']} of {results['units']} units of a trunk, in {count} replicas with different data "
        f"orders. Change of the loss by averaging the mean of all replicas over time: {path_gain(results)} nats."
    )
    return f"**Noise and drift.** {text}\n\n{pages.format_table(header, rows)}"


def fast_share(seed: dict[str, Any], directions: str, rate: str) -> float:
    """Return the share of the power in the upper half of the frequencies."""
    power, frequencies = np.array(seed["spectrum"][directions][rate]), np.array(seed["spectrum"]["frequencies"])
    return float(power[frequencies > 0.25].sum() / power.sum())


def response(results: dict[str, Any], recipe: str, frequencies: Any) -> np.ndarray:
    """Return |H(f)| of a recipe over the window: the factor by which it scales a wave of each frequency."""
    weights = recipes.coefficients(recipe, range(1, results["window"] + 1))
    return np.abs(spectrum.frequency_response(weights, frequencies))


def passed_share(results: dict[str, Any], seed: dict[str, Any], directions: str, recipe: str) -> float:
    """Return the share of the path's power at a constant rate that a recipe passes."""
    spectra = seed["spectrum"]
    power, frequencies = np.array(spectra[directions]["constant"]), np.array(spectra["frequencies"])
    return float((response(results, recipe, frequencies) ** 2 * power).sum() / power.sum())


def spectrum_report(results: dict[str, Any]) -> str:
    """Format the share of fast movement of the weights, and the share of power that recipes and annealing leave."""
    fast_rows, remaining_rows = [], []
    for directions, name in DIRECTIONS.items():
        shares = [
            mean_and_interval(results, lambda s, d=directions, r=rate: fast_share(s, d, r), 2)
            for rate in ("constant", "decaying")
        ]
        fast_rows.append([name, *shares])
    for recipe in RECIPES:
        shares = [
            mean_and_interval(results, lambda s, d=d, r=recipe: passed_share(results, s, d, r), 2) for d in DIRECTIONS
        ]
        remaining_rows.append([display_name(recipe), *shares])
    decays = [
        mean_and_interval(
            results, lambda s, d=d: sum(s["spectrum"][d]["decaying"]) / sum(s["spectrum"][d]["constant"]), 2
        )
        for d in DIRECTIONS
    ]
    remaining_rows.append(["annealing over the last quarter", *decays])
    text = "Power of the path over the last quarter, linear trends removed; fast: above 0.25 cycles per unit."
    header = ["directions", "fast share, constant rate", "fast share, decaying rate"]
    remaining = (
        f"Share of that power that a recipe over {results['window']} snapshots passes, and that annealing leaves:"
    )
    names = [f"along {name}" for name in DIRECTIONS.values()]
    tables = pages.format_table(header, fast_rows), pages.format_table(["", *names], remaining_rows)
    return f"**The filter view.** {text}\n\n{tables[0]}\n\n{remaining}\n\n{tables[1]}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the share of the gain that a quadratic, and noise, explain."""
    seeds = results["seeds"].values()
    raw = [s["noise"]["by_count"]["1"] for s in seeds]
    gain = [r - s["noise"]["time"] for r, s in zip(raw, seeds, strict=True)]
    share = np.mean([s["noise"]["noise"] for s in seeds]) / np.mean(gain)
    explained = np.mean([s["quadratic"]["merge"]["hessian"]["over_mean"] for s in seeds])
    measured = np.mean([s["quadratic"]["merge"]["measured"]["over_mean"] for s in seeds])
    verdict = (
        f"A quadratic at the merged model predicts {explained / measured:.0%} of the gain over the mean of the losses. "
        f"Averaging away, over replicas, the noise of the last {results['window']} units alone would gain {share:.0%} "
        "of what averaging over them in time gains. Once it is mostly gone, averaging the path over time changes the "
        f"loss by {path_gain(results)} nats."
    )
    return IndexRow(
        5,
        "Why does it work?",
        "Deviations from the optimum cancel (Section 4.6, Fig. 8)",
        verdict,
        f"gain over the last snapshot {pages.format_interval(mean_interval(gain))} nats",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw planes.png of the first seed, and figure.png over all seeds."""
    seeds = list(results["seeds"].values())
    panels = []
    for plane in seeds[0]["planes"]:
        snapshots = np.array(plane["snapshots"])
        marks = [
            Line("snapshots", snapshots[:, 0].tolist(), snapshots[:, 1].tolist()),
            Line("their mean", plane["merged"][:1], plane["merged"][1:2]),
        ]
        panels.append(ContourPanel(plane["title"], plane["x"], plane["y"], plane["losses"], marks))
    counts = [int(m) for m in seeds[0]["noise"]["by_count"]]
    losses = np.array([[s["noise"]["by_count"][str(m)] for m in counts] for s in seeds])
    flat = lambda name: [float(np.mean([s["noise"][name] for s in seeds]))] * len(counts)  # noqa: E731
    lines = [Line("mean of m replicas", counts, losses.mean(axis=0).tolist())]
    lines += [
        Line(label, counts, flat(name), dashed=True)
        for label, name in (("mean over time", "time"), ("over both", "both"), ("annealed", "annealed"))
    ]
    line_panels = [LinePanel("held-out loss, nats per token", "replicas averaged, m", lines)]
    frequencies = seeds[0]["spectrum"]["frequencies"][1:]
    for directions, name in (("random", "random directions"), ("top", "most curved directions")):
        power = {
            rate: np.log10(np.mean([s["spectrum"][directions][rate] for s in seeds], axis=0))[1:].tolist()
            for rate in ("constant", "decaying")
        }
        spectral = [Line(f"{rate} rate", frequencies, values) for rate, values in power.items()]
        line_panels.append(LinePanel(f"log10 of power, {name}", "cycles per unit", spectral))
    at = np.linspace(0, 0.5, 21)
    responses = [Line(display_name(recipe), at.tolist(), response(results, recipe, at).tolist()) for recipe in RECIPES]
    line_panels.append(
        LinePanel(f"response |H| of recipes over {results['window']}", "cycles per unit", responses, zero_line=True)
    )
    return {"planes.png": to_png(draw_contours(panels)), "figure.png": to_png(draw_lines(line_panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
