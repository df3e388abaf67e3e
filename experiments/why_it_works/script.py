"""Why does merging work? The landscape, a quadratic, the spectrum of the weights, and noise against drift (PMA, 4.6).

Command:   python experiments/why_it_works/script.py --runs runs/science

Of one size, for each seed: the newest snapshots of a trunk, its annealed branch, and replicas that go on from one of
its states with other data orders.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from pma_jax.analysis import curvature, landscape, spectrum
from pma_jax.analysis.comparison import fit_noise, mean_interval, subset_rows
from pma_jax.analysis.workbench import Workbench, open_workbench
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.merging import recipes
from pma_jax.merging.averager import average
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import ContourPanel, Line, LinePanel, draw_contours, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.study import Study, run_experiment

TEXT_TOKENS = 8192  # held-out text of curvature and landscape
REPLICAS = 5  # in addition to the trunk
RANDOM_DIRECTIONS, TOP_DIRECTIONS = 32, 4
GRID = 17  # points along each axis of a contour plot
TWO_WEIGHTS_OF = "blocks/query_DxNxH"
RECIPES = ("sma", "wma", "ema:alpha=0.2", "decay:shape=cosine", "decay:shape=minus_sqrt", "lagfree:lag=0.5", "lagfree")
DIRECTIONS = {"random": f"{RANDOM_DIRECTIONS} random", "top": f"{TOP_DIRECTIONS} most curved"}
AROUND = {"merge": "the merged model", "annealed": "the annealed model"}


def measure(study: Study) -> dict[str, Any]:
    """Every measurement, for each seed of the first size."""
    found = {}
    for seed in study.seeds:
        run = study.trunk(study.sizes[0], seed)
        annealed = study.anneal(run, study.units * 3 // 4, study.units)
        found[str(seed)] = geometry(study, run, annealed, draws=seed == study.seeds[0])
        found[str(seed)]["noise"] = noise_and_drift(study, run, annealed)
    return {"size": study.sizes[0], "window": window(study), "units": study.units, "seeds": found}


def window(study: Study) -> int:
    """Units that merges here span: an eighth of the run."""
    return max(study.units // 8, 4)


def geometry(study: Study, run: Run, annealed: Run, draws: bool) -> dict[str, Any]:
    """What lies between the newest snapshots, their mean and the annealed model; the planes where they are drawn."""
    bench = open_workbench(run.config, min(TEXT_TOKENS, study.evaluation_tokens))
    with jax.set_mesh(bench.mesh):
        constant, decayed = (bench.models(r.of_kind("point")[-(study.units // 4) :]) for r in (run, annealed))
        newest = constant[-window(study) :]
        merged = average(newest, recipes.sma(len(newest)))
        return {
            "quadratic": {
                "merge": quadratic(bench, newest, merged),
                "annealed": quadratic(bench, newest, decayed[-1]),
            },
            "spectrum": spectra(bench, constant, decayed, merged),
            "planes": planes(bench, newest, merged, decayed[-1]) if draws else [],
        }


def quadratic(bench: Workbench, models: list[Any], around: Any) -> dict[str, Any]:
    """delta_i' H delta_j around one model, and what it says merging gains, against what it gains."""
    weights, objective = recipes.sma(len(models)), bench.loss
    loss = jax.jit(objective)
    each, of_mean = [float(loss(model)) for model in models], float(loss(average(models, weights)))
    deltas = [optax.tree.sub(model, around) for model in models]
    slopes = curvature.directional_slopes(objective, around, deltas)
    found: dict[str, Any] = {"measured": {"over_mean": np.mean(each) - of_mean, "over_last": each[-1] - of_mean}}
    products = {
        "hessian": curvature.hessian_product(objective, around),
        "gauss_newton": curvature.gauss_newton_product(bench.outputs, around),
    }
    for name, product in products.items():
        matrix = curvature.pairwise_curvature(product, deltas)
        found[name] = {
            "over_mean": curvature.merging_gain(matrix, weights),
            "over_last": curvature.merging_gain_over_last(matrix, weights, slopes),
            "off_diagonal_share": curvature.off_diagonal_share(matrix),
            "negative_pairs": float(np.mean(matrix[~np.eye(len(matrix), dtype=bool)] < 0)),
            "matrix": matrix.tolist(),
        }
    return found


def spectra(bench: Workbench, constant: list[Any], decayed: list[Any], merged: Any) -> dict[str, Any]:
    """Power of the weights' path along random and most curved directions, at a constant and at a decaying rate."""
    values, top = curvature.top_eigenpairs(curvature.hessian_product(bench.loss, merged), merged, TOP_DIRECTIONS)
    found: dict[str, Any] = {"eigenvalues": values.tolist()}
    for name, directions in (("random", spectrum.random_directions(merged, RANDOM_DIRECTIONS)), ("top", top)):
        found[name] = {}
        for rate, models in (("constant", constant), ("decaying", decayed)):
            frequencies, power = spectrum.power_spectrum(spectrum.projections(models, directions, merged))
            found[name][rate] = power.mean(axis=1).tolist()
        found["frequencies"] = frequencies.tolist()
    return found


def planes(bench: Workbench, models: list[Any], merged: Any, annealed: Any) -> list[dict[str, Any]]:
    """The plane that the snapshots lie nearest to, and that of the two weights of a layer that move most."""
    leaf = np.stack([np.asarray(leaf_of(model, TWO_WEIGHTS_OF)) for model in models]).std(axis=0)
    first, second = (tuple(map(int, np.unravel_index(i, leaf.shape))) for i in np.argsort(leaf, axis=None)[[-1, -2]])
    chosen = {
        "the plane of the snapshots": landscape.principal_plane(models),
        f"two weights of {TWO_WEIGHTS_OF}": landscape.plane_of_two_weights(merged, TWO_WEIGHTS_OF, first, second),
    }
    found = []
    for title, plane in chosen.items():
        places = np.array([plane.coordinates(model) for model in [*models, merged, annealed]])
        middle, reach = places[-2, :2], 1.6 * np.abs(places[:-1, :2] - places[-2, :2]).max()
        xs, ys = (np.linspace(m - reach, m + reach, GRID) for m in middle)
        losses = landscape.loss_over(bench.loss, plane, xs, ys)
        found.append(
            {
                "title": title,
                "x": xs.tolist(),
                "y": ys.tolist(),
                "losses": losses.round(5).tolist(),
                "snapshots": places[:-2].tolist(),
                "merged": places[-2].tolist(),
                "annealed": places[-1].tolist(),
            }
        )
    return found


def leaf_of(params: Any, name: str) -> Any:
    """Return the leaf of a parameter tree at the path `name`."""
    for part in name.split("/"):
        params = params[part]
    return params


def noise_and_drift(study: Study, run: Run, annealed: Run) -> dict[str, Any]:
    """Losses of means over replicas, over time, and over both."""
    span, seed = window(study), run.config.training.seed
    begin = study.units - span
    others = [f"training.seed={100 * r + 100 + seed}" for r in range(REPLICAS)]
    replicas = [run, *(study.fork(run, begin, study.units, [change]) for change in others)]
    snapshots = [s for replica in replicas for s in replica.of_kind("point")[-span:]]
    # A merge is a table of weights, replicas by time.
    last, even = np.eye(span)[-1], np.full(span, 1 / span)
    one, all_of_them = np.eye(len(replicas)), np.full(len(replicas), 1 / len(replicas))
    subsets = subset_rows(len(replicas))
    groups = {
        **{f"mean of {m}": [np.outer(row, last) for row in rows] for m, rows in subsets.items()},
        "time": [np.outer(row, even) for row in one],
        "both": [np.outer(all_of_them, even)],
        "path": [np.outer(all_of_them, at) for at in np.eye(span)],
    }
    config = dataclasses.replace(run.config, evaluation=study.evaluation_config(run))
    rows = [table.ravel() for tables in groups.values() for table in tables]
    losses = iter(evaluate_merges(config, snapshots, rows).losses)
    each = {name: [next(losses) for _ in tables] for name, tables in groups.items()}
    by_count = {m: float(np.mean(each[f"mean of {m}"])) for m in subsets}
    split = fit_noise(list(by_count), list(by_count.values()))
    return {
        "replicas": len(replicas),
        "by_count": {str(m): loss for m, loss in by_count.items()},
        "floor": split.floor,
        "noise": split.noise,
        "time": float(np.mean(each["time"])),
        "both": each["both"][0],
        "path": each["path"],
        "annealed": study.loss(annealed),
    }


# --- What the page shows ----------------------------------------------------------------------------------------------


def mean_and_interval(results: dict[str, Any], of: Any, digits: int = 4) -> str:
    """`of` each seed's results, its mean with the interval over seeds."""
    values = [of(seed) for seed in results["seeds"].values()]
    return pages.format_interval(mean_interval(values), digits)


def report(results: dict[str, Any]) -> str:
    """Three tables: the quadratic, noise and drift, the spectrum."""
    return "\n\n".join([quadratic_report(results), noise_report(results), spectrum_report(results)])


def quadratic_report(results: dict[str, Any]) -> str:
    """What a quadratic says of merging the last snapshots, against what is measured."""
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
    """What averaging over time adds, in nats (below 0: it is better), to a mean over all replicas."""
    return mean_and_interval(results, lambda s: s["noise"]["both"] - s["noise"]["path"][-1])


def noise_report(results: dict[str, Any]) -> str:
    """Losses of means over replicas and over time, each less that of one run's last snapshot."""
    count = next(iter(results["seeds"].values()))["noise"]["replicas"]

    def row(name: str, of: Any) -> list[str]:
        values = [of(seed["noise"]) for seed in results["seeds"].values()]
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
        f"The last {results['window']} of {results['units']} units of a trunk, {count} times with other data. "
        f"Averaging the replicas' common path over time, when their noise is mostly gone: {path_gain(results)}."
    )
    return f"**Noise and drift.** {text}\n\n{pages.format_table(header, rows)}"


def fast_share(seed: dict[str, Any], directions: str, rate: str) -> float:
    """Share of the power at the faster half of the frequencies."""
    power, frequencies = np.array(seed["spectrum"][directions][rate]), np.array(seed["spectrum"]["frequencies"])
    return float(power[frequencies > 0.25].sum() / power.sum())


def response(results: dict[str, Any], recipe: str, frequencies: Any) -> np.ndarray:
    """|H(f)| of a recipe over the window: by how much it scales a wave of that frequency."""
    weights = recipes.coefficients(recipe, range(1, results["window"] + 1))
    return np.abs(spectrum.frequency_response(weights, frequencies))


def passed(results: dict[str, Any], seed: dict[str, Any], directions: str, recipe: str) -> float:
    """Share of the path's power at a constant rate that a recipe passes."""
    found = seed["spectrum"]
    power, frequencies = np.array(found[directions]["constant"]), np.array(found["frequencies"])
    return float((response(results, recipe, frequencies) ** 2 * power).sum() / power.sum())


def spectrum_report(results: dict[str, Any]) -> str:
    """How fast the weights move, and how much of it a decaying rate, or a recipe, takes away."""
    speeds, left = [], []
    for directions, name in DIRECTIONS.items():
        shares = [
            mean_and_interval(results, lambda s, d=directions, r=rate: fast_share(s, d, r), 2)
            for rate in ("constant", "decaying")
        ]
        speeds.append([name, *shares])
    for recipe in RECIPES:
        shares = [mean_and_interval(results, lambda s, d=d, r=recipe: passed(results, s, d, r), 2) for d in DIRECTIONS]
        left.append([display_name(recipe), *shares])
    decays = [
        mean_and_interval(
            results, lambda s, d=d: sum(s["spectrum"][d]["decaying"]) / sum(s["spectrum"][d]["constant"]), 2
        )
        for d in DIRECTIONS
    ]
    left.append(["annealing over the last quarter", *decays])
    text = "Power of the path over the last quarter, linear trends removed; fast: above 0.25 cycles per unit."
    header = ["directions", "fast share, constant rate", "fast share, decaying rate"]
    then = f"Share of that power that a recipe over {results['window']} snapshots passes, and that annealing leaves:"
    names = [f"along {name}" for name in DIRECTIONS.values()]
    tables = pages.format_table(header, speeds), pages.format_table(["", *names], left)
    return f"**The filter view.** {text}\n\n{tables[0]}\n\n{then}\n\n{tables[1]}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """The question's row on the page of all."""
    seeds = results["seeds"].values()
    raw = [s["noise"]["by_count"]["1"] for s in seeds]
    gain = [r - s["noise"]["time"] for r, s in zip(raw, seeds, strict=True)]
    share = np.mean([s["noise"]["noise"] for s in seeds]) / np.mean(gain)
    explained = np.mean([s["quadratic"]["merge"]["hessian"]["over_mean"] for s in seeds])
    measured = np.mean([s["quadratic"]["merge"]["measured"]["over_mean"] for s in seeds])
    found = (
        f"A quadratic at the merged model predicts {explained / measured:.0%} of the gain over the mean of the losses. "
        f"Averaging away, over replicas, the noise of the last {results['window']} units alone would gain {share:.0%} "
        "of what averaging over them in time gains. Once it is mostly gone, averaging the path over time changes the "
        f"loss by {path_gain(results)} nats."
    )
    return IndexRow(
        5,
        "Why does it work?",
        "Deviations from the optimum cancel (Section 4.6, Fig. 8)",
        found,
        f"gain over the last snapshot {pages.format_interval(mean_interval(gain))} nats",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """planes.png of the first seed; figure.png over all."""
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
    drawn = [LinePanel("held-out loss, nats per token", "replicas averaged, m", lines)]
    frequencies = seeds[0]["spectrum"]["frequencies"][1:]
    for directions, name in (("random", "random directions"), ("top", "most curved directions")):
        power = {
            rate: np.log10(np.mean([s["spectrum"][directions][rate] for s in seeds], axis=0))[1:].tolist()
            for rate in ("constant", "decaying")
        }
        spectral = [Line(f"{rate} rate", frequencies, values) for rate, values in power.items()]
        drawn.append(LinePanel(f"log10 of power, {name}", "cycles per unit", spectral))
    at = np.linspace(0, 0.5, 21)
    answers = [Line(display_name(recipe), at.tolist(), response(results, recipe, at).tolist()) for recipe in RECIPES]
    drawn.append(LinePanel(f"response |H| of recipes over {results['window']}", "cycles per unit", answers, zero=True))
    return {"planes.png": to_png(draw_contours(panels)), "figure.png": to_png(draw_lines(drawn, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
