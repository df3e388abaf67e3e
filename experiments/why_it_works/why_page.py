"""The page of the experiment: tables, the row of the index, and the figures."""

from collections.abc import Callable
from typing import Any

import numpy as np
from contours import ContourPanel, draw_contours
from quadratic import (
    KINDS,
    explained_share,
    measured_gain,
    negative_pairs,
    off_diagonal_share,
    predicted_gain,
)
from replica_noise import extrapolate_to_many

from pma_jax.analysis import spectrum
from pma_jax.merging import recipes
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, mean_interval

RANDOM_DIRECTIONS, TOP_DIRECTIONS = 32, 4
RECIPES = ("sma", "wma", "ema:alpha=0.2", "decay:shape=cosine", "decay:shape=minus_sqrt", "lagfree:lag=0.5", "lagfree")
DIRECTIONS = {"random": f"{RANDOM_DIRECTIONS} random", "top": f"{TOP_DIRECTIONS} most curved"}
AROUND = {"merge": "the merged model", "annealed": "the annealed model"}
LAST = "mean of 1"
FLOOR, FLOOR_OF_ENDS, TIME_FLOOR = "infinitely many", "infinitely many, from two", "time, infinitely many"


def mean_and_interval(results: dict[str, Any], statistic: Callable[[dict[str, Any]], float], digits: int = 4) -> str:
    """Format the mean over seeds of `statistic` of each seed's results, with its interval."""
    values = [statistic(seed) for seed in results["seeds"].values()]
    return pages.format_interval(mean_interval(values), digits)


def report(results: dict[str, Any]) -> str:
    """Format three parts: the quadratic, noise and drift, the spectrum."""
    return "\n\n".join([quadratic_report(results), noise_report(results), spectrum_report(results)])


def quadratic_report(results: dict[str, Any]) -> str:
    """Format the gain of merging the last snapshots as measured and as a quadratic predicts it."""
    over = ("mean of the losses", "last")
    rows = [["", "measured", *(pages.format_interval(measured_gain(results, o).interval()) for o in over), "", "", ""]]
    for around, name in AROUND.items():
        for kind in KINDS:
            gains = [pages.format_interval(predicted_gain(results, around, kind, o).interval()) for o in over]
            explained = pages.format_percent_interval(explained_share(results, around, kind, over[0]).interval())
            shares = ["", ""]
            if around == "annealed":  # around their own mean, the sum is -1 by construction
                shares = [
                    pages.format_interval(off_diagonal_share(results, around, kind).interval(), 2),
                    mean_and_interval(results, lambda s, k=kind, a=around: negative_pairs(s, a, k), 2),
                ]
            rows.append([name, kind.replace("_", "-"), *gains, explained, *shares])
    header = ["expanded around", "", "over the mean of the losses", "over the last"]
    header += ["of the measured, over the mean", "off-diagonal over diagonal", "share of negative pairs"]
    window = results["window"]
    text = (
        f"Gain of the mean of the last {window} snapshots of one run, nats per token, with intervals over seeds and "
        "documents (of negative pairs: over seeds). The sum of the products of different deviations, over that of each "
        f"with itself, can be -1 (they cancel) to {window - 1} (they are equal); 0: they are orthogonal"
    )
    return f"**A quadratic.** {text}:\n\n{pages.format_table(header, rows)}"


def nats(results: dict[str, Any], model: str) -> np.ndarray:
    """Return the loss of a mean over replicas or over time, or of the annealed model, of each seed on each document.

    The loss of the mean of m replicas is linear in 1/m as far as the loss is quadratic; the extrapolated models are its
    limits.
    """
    of_seeds, count = [seed["noise"]["nats"] for seed in results["seeds"].values()], replicas(results)
    sources = {
        FLOOR: {m: f"mean of {m}" for m in range(2, count + 1)},
        FLOOR_OF_ENDS: {1: LAST, count: f"mean of {count}"},
        TIME_FLOOR: {1: "time", count: "both"},
    }
    if model not in sources:
        return np.array([of[model] for of in of_seeds])
    by_count = sources[model]
    return np.array([extrapolate_to_many(list(by_count), [of[name] for name in by_count.values()]) for of in of_seeds])


def replicas(results: dict[str, Any]) -> int:
    """Return the number of replicas, the trunk included."""
    return next(iter(results["seeds"].values()))["noise"]["replicas"]


def difference(results: dict[str, Any], first: str, second: str) -> MeanEstimate:
    """Estimate the loss of one model less that of another, over seeds and documents."""
    tokens_D = next(iter(results["seeds"].values()))["noise"]["document_tokens"]
    return difference_over_documents(nats(results, first), nats(results, second), tokens_D)


def noise_report(results: dict[str, Any]) -> str:
    """Format the losses of means over replicas and over time, and their differences from one run's last snapshot."""
    count, window, margin = replicas(results), results["window"], results["made"]["margin"]
    models = {
        LAST: "the last snapshot",
        "mean of 2": "mean of the last snapshots of 2 replicas",
        f"mean of {count}": f"of {count} replicas",
        FLOOR: f"of infinitely many, extrapolated from 2 to {count}",
        FLOOR_OF_ENDS: f"of infinitely many, extrapolated from 1 and {count}",
        "time": f"mean over time: the last {window} snapshots of one",
        "both": f"over both: {count} replicas, {window} snapshots each",
        TIME_FLOOR: f"over both: infinitely many, extrapolated from 1 and {count}",
        "annealed": "annealed over the last quarter",
    }
    tokens = sum(next(iter(results["seeds"].values()))["noise"]["document_tokens"])
    rows = []
    for model, title in models.items():
        loss = pages.format_mean((nats(results, model).sum(axis=1) / tokens).tolist())
        less = "" if model == LAST else pages.format_interval(difference(results, model, LAST).interval())
        rows.append([title, loss, less])
    pairs = (
        (f"mean of {count}", "time", f"the mean of the last snapshots of {count} replicas against the mean over time"),
        ("both", f"mean of {count}", f"averaging the mean of {count} replicas over time too"),
        (TIME_FLOOR, FLOOR_OF_ENDS, f"averaging the mean of infinitely many over time too (from 1 and {count})"),
        (f"mean of {count}", "annealed", f"the mean of {count} replicas against the annealed model"),
        (FLOOR, "annealed", f"infinitely many (from 2 to {count}) against the annealed model"),
    )
    lines = [f"- {words}: {pages.describe_difference(difference(results, *of), margin)}." for *of, words in pairs]
    head = f"The last {window} of {results['units']} units of a trunk, in {count} replicas with different data orders."
    table = pages.format_table(["model", "held-out loss", "less the last snapshot"], rows)
    note = (
        "Losses in nats per token (± over seeds); differences with 95% intervals over seeds and documents, which do "
        "not contain the error of an extrapolation by a line in 1/m."
    )
    return f"**Noise and drift.** {head}\n\n{table}\n\n{note}\n\n" + "\n".join(lines)


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
    """Summarize what a quadratic predicts of the gain, and what averaging over replicas and over time gains."""
    margin, count = results["made"]["margin"], replicas(results)
    share = explained_share(results, "merge", "hessian", "mean of the losses").interval()
    explained = pages.format_percent_interval(share)
    path = pages.describe_difference(difference(results, "both", f"mean of {count}"), margin)
    means = {
        "time": f"the mean of the last {results['window']} snapshots of one run",
        f"mean of {count}": f"that of the last snapshots of {count} replicas",
    }
    gains = [
        f"{words} {pages.format_interval(difference(results, model, LAST).interval())}"
        for model, words in means.items()
    ]
    return IndexRow(
        5,
        "Why does it work?",
        "PMA, Section 4.6 and Fig. 8: deviations from the optimum cancel",
        f"a quadratic (the Hessian at the merged model) predicts {explained} of the "
        f"difference between the mean loss of the snapshots and the loss of their mean; the mean of {count} replicas "
        "(runs from one state, each with its own order of the data), averaged over time too, less the mean of their "
        f"last snapshots: {path}",
        f"loss less that of the last snapshot: {', '.join(gains)} nats",
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
    counts = range(1, replicas(results) + 1)
    less = lambda model: difference(results, model, LAST).interval()  # noqa: E731
    lines = [interval_line("mean of m replicas", counts, [less(f"mean of {m}") for m in counts])]
    lines += [
        Line(label, counts, [less(model).mean] * len(counts), dashed=True)
        for label, model in (("mean over time", "time"), ("over both", "both"), ("annealed", "annealed"))
    ]
    line_panels = [LinePanel("loss less that of the last snapshot, nats", "replicas averaged, m", lines)]
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
