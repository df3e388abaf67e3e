"""The page of the experiment: tables, the row of the index, and the figures."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from contours import ContourPanel, draw_contours
from numpy.typing import ArrayLike
from parameter_path import power_spectral_density
from quadratic import (
    KINDS,
    curvature_ratio,
    explained_share,
    kept_share,
    mean_cosine,
    measured_gain,
    negative_pairs,
    predicted_gain,
)
from replica_noise import AT_THE_END, OVER_TIME, extrapolate_to_many, name_of_mean

from pma_jax.analysis import spectrum
from pma_jax.merging import recipes
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, MeanInterval, difference_over_documents, mean_interval

RANDOM_DIRECTIONS, TOP_DIRECTIONS = 32, 4
RECIPES = ("sma", "wma", "ema:alpha=0.2", "decay:shape=cosine", "decay:shape=minus_sqrt", "lagfree:lag=0.5", "lagfree")
DISPLAY = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton"}
DIRECTIONS = {"random": f"{RANDOM_DIRECTIONS} random", "top": f"{TOP_DIRECTIONS} most curved"}
RATES, WHITE = ("constant", "decaying"), "white noise"
AROUND = {"merge": "the merged model", "annealed": "the annealed model"}
LAST = "the last snapshot of one replica"  # in the table on noise
# Fits of the loss against 1/m, for infinitely many replicas: the degree, and the smallest number of replicas m.
FITS = {"a curve": (2, 1), "a line": (1, 2)}


def mean_and_interval(results: dict[str, Any], statistic: Callable[[dict[str, Any]], float], digits: int = 4) -> str:
    """Format the mean over seeds of `statistic` of each seed's results, with its interval."""
    values = [statistic(seed) for seed in results["seeds"].values()]
    return pages.format_interval(mean_interval(values), digits)


def report(results: dict[str, Any]) -> str:
    """Format three parts: the quadratic, noise and drift, the spectrum."""
    return "\n\n".join([quadratic_report(results), noise_report(results), spectrum_report(results)])


def quadratic_report(results: dict[str, Any]) -> str:
    """Format the gain of merging the last snapshots as measured and as a quadratic predicts it."""
    over, window = ("mean of the losses", "last"), results["window"]
    rows = [["", "measured", *(pages.format_interval(measured_gain(results, o).interval()) for o in over), "", "", ""]]
    for around, name in AROUND.items():
        for kind in KINDS:
            gains = [pages.format_interval(predicted_gain(results, around, kind, o).interval()) for o in over]
            explained = pages.format_percent_interval(explained_share(results, around, kind, over[0]).interval())
            kept = "0"  # around their own mean, the deviations add up to 0
            if around == "annealed":
                kept = pages.format_percent_interval(kept_share(results, around, kind).interval())
            negative = [negative_pairs(seed, around, kind) for seed in results["seeds"].values()]
            fewest, most = min(negative), max(negative)
            pairs = f"{fewest}{f' to {most}' if most > fewest else ''} of {window * (window - 1) // 2}"
            rows.append([name, DISPLAY[kind], *gains, explained, kept, pairs])
    header = ["expanded around", "", "over the mean of the losses", "over the last"]
    header += ["of the measured, over the mean", "what the mean keeps", "negative pairs, by seed"]
    text = (
        f"Gain of the mean of the last {window} snapshots of the trunk, nats per token, with intervals over seeds and "
        "documents. What the mean keeps: its quadratic loss, as a share of the mean of those of the snapshots. It is "
        f"{1 / window:.1%} if the products of different deviations add up to 0, as those of orthogonal ones; less if "
        "most are negative, more if most are positive; and 0 around the merged model, by construction"
    )
    lines = "\n".join(f"- {line}." for line in (describe_cosines(results), describe_curvature(results, over[0])))
    return f"**A quadratic.** {text}:\n\n{pages.format_table(header, rows)}\n\n{lines}"


def describe_cosines(results: dict[str, Any]) -> str:
    """Format how similar deviations around the annealed model are, by how far their snapshots are apart."""
    window, shown = results["window"], []
    distances = {"neighbours": range(1, 2), f"{window // 2} or more apart": range(window // 2, window)}
    for kind in KINDS:
        each = [
            f"{words} {mean_and_interval(results, lambda s, k=kind, a=apart: mean_cosine(s, 'annealed', k, a), 2)}"
            for words, apart in distances.items()
        ]
        shown.append(f"{DISPLAY[kind]}: {', '.join(each)}")
    return f"The cosine of two deviations around the annealed model, over seeds, in the metric of {'; '.join(shown)}"


def describe_curvature(results: dict[str, Any], over: str) -> str:
    """Format how much the predicted gain depends on the model that the quadratic is expanded around."""
    each = [
        f"{DISPLAY[kind]} {pages.format_percent_interval(curvature_ratio(results, kind, over).interval())}"
        for kind in KINDS
    ]
    return (
        f"The gain over the {over} that is predicted around the annealed model, as a share of that around the merged "
        f"one: {', '.join(each)}"
    )


def nats(results: dict[str, Any], model: str) -> np.ndarray:
    """Return the loss of a mean over replicas or over time, or of the annealed model, of each seed on each document."""
    return np.array([seed["noise"]["nats"][model] for seed in results["seeds"].values()])


def extrapolated_nats(results: dict[str, Any], fit: str, time: str) -> np.ndarray:
    """Return the loss of the mean of infinitely many replicas by a fit of `FITS`, of each seed on each document."""
    degree, fewest = FITS[fit]
    counts = range(fewest, replicas(results) + 1)
    of_counts = [nats(results, name_of_mean(m, time)) for m in counts]
    return np.array([extrapolate_to_many(counts, loss_nxD, degree) for loss_nxD in zip(*of_counts, strict=True)])


def replicas(results: dict[str, Any]) -> int:
    """Return the number of replicas, the trunk included."""
    return next(iter(results["seeds"].values()))["noise"]["replicas"]


def difference(results: dict[str, Any], first: ArrayLike, second: ArrayLike) -> MeanEstimate:
    """Estimate the losses of one model less those of another, [seeds, documents], over seeds and documents."""
    tokens_D = next(iter(results["seeds"].values()))["noise"]["document_tokens"]
    return difference_over_documents(first, second, tokens_D)


def noise_report(results: dict[str, Any]) -> str:
    """Format the losses of means over replicas and over time, and their differences from one run's last snapshot."""
    count, window, losses = replicas(results), results["window"], noise_losses(results)
    tokens = sum(next(iter(results["seeds"].values()))["noise"]["document_tokens"])
    rows = []
    for title, loss in losses.items():
        less = "" if title == LAST else pages.format_interval(difference(results, loss, losses[LAST]).interval())
        rows.append([title, pages.format_mean((loss.sum(axis=1) / tokens).tolist()), less])
    head = f"The last {window} of {results['units']} units of a trunk, in {count} replicas with different data orders."
    table = pages.format_table(["model", "held-out loss", "less the last snapshot"], rows)
    note = (
        f"The trunk is one of the replicas; for m < {count}, a loss is the mean over all subsets of m replicas. In "
        "nats per token (± over seeds); differences with 95% intervals over seeds and documents. By a curve: a + b / m "
        f"+ c / m² through the means of m = 1 to {count} replicas; by a line: a + b / m through those of 2 to "
        f"{count}. The intervals do not contain the error of these forms. Tested together, at most 5% false findings:"
    )
    lines = "\n".join(f"- {words}: {verdict}." for words, verdict in compare_noise(results).items())
    return f"**Noise and drift.** {head}\n\n{table}\n\n{note}\n\n{lines}"


def noise_losses(results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the losses of the models of the table on noise, of each seed on each document, by their titles."""
    count, window = replicas(results), results["window"]
    return {
        LAST: nats(results, name_of_mean(1, AT_THE_END)),
        "mean of the last snapshots of 2 replicas": nats(results, name_of_mean(2, AT_THE_END)),
        f"of {count} replicas": nats(results, name_of_mean(count, AT_THE_END)),
        **{f"of infinitely many, by {fit}": extrapolated_nats(results, fit, AT_THE_END) for fit in FITS},
        f"mean over time: the last {window} snapshots of one replica": nats(results, name_of_mean(1, OVER_TIME)),
        f"over both: 2 replicas, {window} snapshots each": nats(results, name_of_mean(2, OVER_TIME)),
        f"over both: {count} replicas": nats(results, name_of_mean(count, OVER_TIME)),
        **{f"over both: infinitely many, by {fit}": extrapolated_nats(results, fit, OVER_TIME) for fit in FITS},
        "annealed over the last quarter": nats(results, "annealed"),
    }


def compare_noise(results: dict[str, Any]) -> dict[str, str]:
    """Judge means over replicas against means over time and the annealed model, all together: words -> verdict."""
    count = replicas(results)
    of_all = f"the mean of {count} replicas"
    all_at_the_end, all_over_time = (nats(results, name_of_mean(count, time)) for time in (AT_THE_END, OVER_TIME))
    annealed, many = nats(results, "annealed"), "the mean of infinitely many"
    pairs = {
        f"{of_all} against the mean over time": (all_at_the_end, nats(results, name_of_mean(1, OVER_TIME))),
        f"averaging {of_all} over time too": (all_over_time, all_at_the_end),
        f"{of_all} against the annealed model": (all_at_the_end, annealed),
    }
    for fit in FITS:
        at_the_end, over_time = (extrapolated_nats(results, fit, time) for time in (AT_THE_END, OVER_TIME))
        pairs[f"averaging {many} over time too, by {fit}"] = over_time, at_the_end
        pairs[f"{many} against the annealed model, by {fit}"] = at_the_end, annealed
    estimates = [difference(results, *pair) for pair in pairs.values()]
    return dict(zip(pairs, pages.describe_differences(estimates, results["made"]["margin"]), strict=True))


def power_of(seed: dict[str, Any], directions: str, rate: str) -> np.ndarray:
    """Return the power of the path of one seed at each frequency, the mean over directions."""
    return np.array(seed["spectrum"][directions][rate])


def white_power(results: dict[str, Any]) -> np.ndarray:
    """Return the expected power at each frequency of a path of independent values: the sum over single impulses."""
    return power_spectral_density(np.eye(results["units"] // 4))[1].sum(axis=1)


def fast_share(results: dict[str, Any], power: np.ndarray) -> float:
    """Return the share of the power in the upper half of the frequencies."""
    return float(power[frequencies(results) > 0.25].sum() / power.sum())


def frequencies(results: dict[str, Any]) -> np.ndarray:
    """Return the frequencies of the path's power, in cycles per unit."""
    return np.array(next(iter(results["seeds"].values()))["spectrum"]["frequencies"])


def response(results: dict[str, Any], recipe: str, at_F: np.ndarray) -> np.ndarray:
    """Return |H(f)| of a recipe over the window: the factor by which it scales a wave of each frequency."""
    weights = recipes.coefficients(recipe, range(1, results["window"] + 1))
    return np.abs(spectrum.frequency_response(weights, at_F))


def passed_share(results: dict[str, Any], power: np.ndarray, recipe: str) -> float:
    """Return the share of a power that a recipe passes."""
    return float((response(results, recipe, frequencies(results)) ** 2 * power).sum() / power.sum())


def spectrum_report(results: dict[str, Any]) -> str:
    """Format the share of fast movement of the weights, and the share of power that recipes and annealing leave."""
    white = white_power(results)

    def each(statistic: Callable[[np.ndarray], float], directions: str, rate: str) -> str:
        return mean_and_interval(results, lambda seed: statistic(power_of(seed, directions, rate)), 2)

    fast = functools.partial(fast_share, results)
    fast_rows = [[name, *(each(fast, d, rate) for rate in RATES)] for d, name in DIRECTIONS.items()]
    fast_rows.append([WHITE, *[f"{fast(white):+.2f}"] * len(RATES)])
    remaining_rows = []
    for recipe in RECIPES:
        passed = functools.partial(passed_share, results, recipe=recipe)
        shares = [each(passed, directions, RATES[0]) for directions in DIRECTIONS]
        remaining_rows.append([display_name(recipe), *shares, f"{passed(white):+.2f}"])
    decays = [
        mean_and_interval(results, lambda s, d=d: power_of(s, d, RATES[1]).sum() / power_of(s, d, RATES[0]).sum(), 2)
        for d in DIRECTIONS
    ]
    remaining_rows.append(["annealing over the last quarter", *decays, ""])
    text = (
        "Power of the path over the last quarter, linear trends removed; fast: above 0.25 cycles per unit. Intervals "
        f"are over seeds; the random directions are the same for all. {WHITE.capitalize()}: what is expected of a path "
        "without any memory."
    )
    remaining = (
        f"Share of that power that a recipe over {results['window']} snapshots passes, and that annealing leaves:"
    )
    names = [*(f"along {name}" for name in DIRECTIONS.values()), WHITE]
    tables = (
        pages.format_table(["directions", *(f"fast share, {rate} rate" for rate in RATES)], fast_rows),
        pages.format_table(["", *names], remaining_rows),
    )
    return f"**The filter view.** {text}\n\n{tables[0]}\n\n{remaining}\n\n{tables[1]}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize what a quadratic predicts of the gain, and what averaging over replicas and over time gains."""
    count, last = replicas(results), nats(results, name_of_mean(1, AT_THE_END))
    share = explained_share(results, "merge", "hessian", "mean of the losses").interval()
    explained = pages.format_percent_interval(share)
    path = compare_noise(results)[f"averaging the mean of {count} replicas over time too"]
    means = {
        f"the mean of the last {results['window']} snapshots of one run": name_of_mean(1, OVER_TIME),
        f"that of the last snapshots of {count} replicas": name_of_mean(count, AT_THE_END),
    }
    gains = [
        f"{words} {pages.format_interval(difference(results, nats(results, name), last).interval())}"
        for words, name in means.items()
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

    def less(model: str) -> MeanInterval:
        return difference(results, nats(results, model), nats(results, name_of_mean(1, AT_THE_END))).interval()

    lines = [
        interval_line(words, counts, [less(name_of_mean(m, time)) for m in counts])
        for words, time in (("last snapshots", AT_THE_END), ("over time too", OVER_TIME))
    ]
    lines.append(Line("annealed", counts, [less("annealed").mean] * len(counts), dashed=True))
    line_panels = [LinePanel("loss less that of the last snapshot, nats", "replicas averaged, m", lines)]
    measured_F = frequencies(results)[1:].tolist()
    for directions, name in (("random", "random directions"), ("top", "most curved directions")):
        power = {
            rate: np.log10(np.mean([power_of(seed, directions, rate) for seed in seeds], axis=0))[1:].tolist()
            for rate in RATES
        }
        spectral = [Line(f"{rate} rate", measured_F, values) for rate, values in power.items()]
        line_panels.append(LinePanel(f"log10 of power, {name}", "cycles per unit", spectral))
    at = np.linspace(0, 0.5, 21)
    responses = [Line(display_name(recipe), at.tolist(), response(results, recipe, at).tolist()) for recipe in RECIPES]
    line_panels.append(
        LinePanel(f"response |H| of recipes over {results['window']}", "cycles per unit", responses, zero_line=True)
    )
    return {"planes.png": to_png(draw_contours(panels)), "figure.png": to_png(draw_lines(line_panels, columns=2))}
