"""The page of the experiment: tables, the row of the index, and the figure."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.parabola import find_vertex, find_vertices, lowest_mean
from pma_jax.studies.statistics import (
    MeanEstimate,
    MeanInterval,
    difference_over_documents,
    estimate_over_documents,
    statistic_over_documents,
)

MERGED, ANNEALED = "merged", "annealed"
SAME_RATE = "annealed at the best rate of merging"
# Windows on either side of the best one that a parabola is fitted to; tables and figures show the first.
NEIGHBOURS = (2, 1, 3)
SERIES = {
    "parameters": "More parameters, at equal tokens per parameter",
    "tokens": "More tokens, at equal parameters",
}
BASES = {"parameters": "the parameters (and the tokens)", "tokens": "the tokens"}  # what grows in a series
X_TITLES = {"parameters": "parameters, millions", "tokens": "tokens, millions"}


def gap(model: Mapping[str, Any], annealed: str = ANNEALED) -> MeanEstimate:
    """Estimate the loss of the best merge less that of the annealed model, by default each at its own rate."""
    return difference_over_documents(model[MERGED], model[annealed], model["document_tokens"])


def gap_of_branch(model: Mapping[str, Any]) -> MeanEstimate:
    """Estimate the loss of the best merge less that of the annealed branch of the same trunk."""
    return gap(model, SAME_RATE)


def gain(model: Mapping[str, Any]) -> MeanEstimate:
    """Estimate the raw loss less that of the best merge, at the rate that is the best for merging."""
    return difference_over_documents(model["raw"], model[MERGED], model["document_tokens"])


def best_span(model: Mapping[str, Any], neighbours: int = NEIGHBOURS[0]) -> MeanInterval:
    """Estimate the best span of plain means of points on the part `report`, as a share of the tokens.

    It is where a parabola in the log of the window, through the losses of each seed, is lowest.
    """
    x, nats_WSD = window_logs(model), list(model["windows"].values())
    lowest = lowest_mean(nats_WSD)
    return statistic_over_documents(
        lambda losses_WS: np.exp(find_vertices(x, losses_WS, lowest, neighbours)[0]) / model["end"],
        nats_WSD,
        model["document_tokens"],
    ).interval()


def window_logs(model: Mapping[str, Any]) -> np.ndarray:
    """Return the logs of the windows of a model."""
    return np.log([int(window) for window in model["windows"]])


def best_rate(model: Mapping[str, Any], kind: str) -> float:
    """Return the rate at the vertex of a parabola through the losses of the best rate and its neighbours."""
    losses = {math.log(float(rate)): loss for rate, loss in model["rates"][kind]["losses"].items() if loss is not None}
    if not losses:
        return model["rates"][kind]["rate"]  # no rate was searched
    return math.exp(find_vertex(list(losses), list(losses.values())).x)


def of_series(size: Mapping[str, Any], series: str) -> list[dict[str, Any]]:
    """Return the models of a series, the smallest first."""
    models = [model for model in size["models"].values() if model["series"] == series]
    return sorted(models, key=lambda model: model[series])


def slope(models: list[dict[str, Any]], series: str, first: str, second: str) -> MeanEstimate:
    """Estimate by how much the difference of two losses grows per doubling of the parameters or tokens.

    The slope of least squares over log2 is a weighted sum of the differences, so that it has, as they do, an error over
    seeds and documents.
    """
    x = np.log2([model[series] for model in models])
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    differences = [np.subtract(model[first], model[second]) for model in models]
    tokens = models[0]["document_tokens"]
    return estimate_over_documents(np.tensordot(weights, differences, 1) / np.array(tokens), tokens)


def gap_change(models: list[dict[str, Any]]) -> MeanEstimate:
    """Estimate the gap of the last model of a series less that of the first, both at the rate of merging."""
    first, last = (np.subtract(model[MERGED], model[SAME_RATE]) for model in (models[0], models[-1]))
    return difference_over_documents(last, first, models[0]["document_tokens"])


def span_exponent(models: list[dict[str, Any]], series: str, neighbours: int = NEIGHBOURS[0]) -> MeanInterval:
    """Estimate the power of the parameters or tokens with which the best span grows, in tokens.

    All models have the same windows and seeds.
    """
    x, windows = np.log2([model[series] for model in models]), window_logs(models[0])
    nats_MWSD = [list(model["windows"].values()) for model in models]
    lowest_M = [lowest_mean(nats_WSD) for nats_WSD in nats_MWSD]

    def exponents(losses_MWS: np.ndarray) -> np.ndarray:
        each = zip(models, losses_MWS, lowest_M, strict=True)
        # The log of N V: V is the tokens divided by the snapshots, which are as many in all models.
        spans_MS = [find_vertices(windows, of, at, neighbours)[0] + np.log(model["tokens"]) for model, of, at in each]
        return np.polyfit(x, np.array(spans_MS) / np.log(2), 1)[0]

    return statistic_over_documents(exponents, nats_MWSD, models[0]["document_tokens"]).interval()


def report(results: dict[str, Any]) -> str:
    """Format, for each size and series, the gap, the gain, the best span and the best rates, with slopes."""
    parts = []
    for size in results["sizes"].values():
        for series, title in SERIES.items():
            models = of_series(size, series)
            if models:
                parts += [f"### {title}", format_models(models)]
                parts += [format_slopes(models, series, results["made"]["margin"])] if len(models) > 1 else []
                parts += [format_rates(models)]
    return "\n\n".join(parts)


def format_models(models: list[dict[str, Any]]) -> str:
    """Format one row per model."""
    rows = []
    for model in models:
        rates = model["rates"]
        shown = [f"`{rates[kind]['rate']:g}`" + (" (edge)" if rates[kind]["is_at_edge"] else "") for kind in rates]
        rows.append(
            [
                f"{model['parameters'] / 1e6:.2f}M",
                f"{model['tokens'] / 1e6:.1f}M ({model['tokens'] / model['parameters']:.0f} per parameter)",
                pages.format_interval(gap(model).interval()),
                pages.format_interval(gap_of_branch(model).interval()),
                pages.format_interval(gain(model).interval()),
                model["best"],
                pages.format_percent_interval(best_span(model)),
                *shown,
            ]
        )
    header = [
        "parameters",
        "tokens",
        "merged − annealed",
        "the same, both at the rate of merging",
        "raw − merged",
        "best merge",
        "best span, share of the tokens",
    ]
    return pages.format_table([*header, "best rate, merged", "annealed"], rows) + (
        "\n\nNats per token, with 95% intervals over seeds and documents; merged and annealed models are each at their "
        "own best rate, which was searched in factors of 2 on one tuning seed. The best merge was chosen on the part "
        "`select`, on half as many tokens as the losses are judged on. The span is of plain means of points, on the "
        "part `report`, as no model is chosen by it."
    )


def format_slopes(models: list[dict[str, Any]], series: str, margin: float) -> str:
    """Format what a doubling of the parameters or tokens adds, and the power with which the best span grows."""
    pairs = {"merged − annealed": (MERGED, ANNEALED), "the same, both at the rate of merging": (MERGED, SAME_RATE)}
    pairs["raw − merged"] = ("raw", MERGED)
    slopes = {name: slope(models, series, *pair).interval() for name, pair in pairs.items()}
    lines = [f"- {name}: {pages.format_interval(each)} nats" for name, each in slopes.items()]
    ends = pages.describe_difference(gap_change(models), margin)
    lines.append(f"- merged − annealed of the last model less that of the first, at the rate of merging: {ends}")
    powers = {n: pages.format_interval(span_exponent(models, series, n), digits=2) for n in NEIGHBOURS}
    first, *others = NEIGHBOURS
    fits = ", ".join(f"{powers[n]} with {n}" for n in others)
    return (
        f"A doubling of the {series} adds, over seeds and documents:\n\n" + "\n".join(lines) + f"\n\nThe best span, in "
        f"tokens, grows as {BASES[series]} to the power {powers[first]}, from a parabola through the "
        f"losses of the best window and {first} on either side; {fits}. {format_carried_spans(models)}"
    )


def format_carried_spans(models: list[dict[str, Any]]) -> str:
    """Format what it costs each model to take the best window of the one before: the same share of its tokens."""
    windows = [min(model["windows"], key=lambda n, of=model: np.sum(of["windows"][n])) for model in models]
    costs = []
    for (before, own), model in zip(itertools.pairwise(windows), models[1:], strict=True):
        cost = difference_over_documents(model["windows"][before], model["windows"][own], model["document_tokens"])
        costs.append("nothing (the same N)" if before == own else pages.format_interval(cost.interval()))
    return (
        f"Of the last N of {models[0]['end']} snapshots, the best plain means have N = {', '.join(windows)}. With the "
        f"best N of the model before, each later one loses, in nats: {'; '.join(costs)}."
    )


def format_rates(models: list[dict[str, Any]]) -> str:
    """List the loss at every rate that was tried."""
    rows = []
    for model in models:
        for kind, found in model["rates"].items():
            losses = {rate: "diverged" if x is None else f"{x:.2f}" for rate, x in found["losses"].items()}
            each = "; ".join(f"`{rate}`: {loss}" for rate, loss in losses.items())
            rows.append([f"{model['parameters'] / 1e6:.2f}M", f"{model['tokens'] / 1e6:.1f}M", kind, each])
    table = pages.format_table(["parameters", "tokens", "model", "rates and losses"], rows)
    vertices = {kind: ", ".join(f"`{best_rate(model, kind):.2g}`" for model in models) for kind in (MERGED, ANNEALED)}
    between = "; ".join(f"{kind}, {rates}" for kind, rates in vertices.items())
    note = f"Between the rates of the grids, by a parabola in the log of the rate, the best are: {between}."
    costs = {kind: cost for kind in (MERGED, ANNEALED) if (cost := carried_rate_cost(models, kind)) is not None}
    if costs:
        each = " and ".join(f"`{cost:.3f}` ({kind})" for kind, cost in costs.items())
        note += f" At the best rate of the first model, the loss of the last one is higher by {each} nats, on one seed."
    return f"{note}\n\n<details><summary>All rates</summary>\n\n{table}\n\n</details>"


def carried_rate_cost(models: list[dict[str, Any]], kind: str) -> float | None:
    """Return by how much the last model is higher at the best rate of the first; None if that was not tried."""
    tried, carried = models[-1]["rates"][kind]["losses"], f"{models[0]['rates'][kind]['rate']:g}"
    if len(models) < 2 or tried.get(carried) is None:
        return None
    return tried[carried] - min(loss for loss in tried.values() if loss is not None)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the slope of the gap in both series."""
    found, effects = [], []
    for size in results["sizes"].values():
        for series in SERIES:
            models = of_series(size, series)
            if len(models) < 2:
                continue
            each, same = (slope(models, series, MERGED, kind).interval() for kind in (ANNEALED, SAME_RATE))
            verdict = "grows" if each.low > 0 else "shrinks" if each.high < 0 else "is not shown to change"
            first, *others = (pages.format_interval(span_exponent(models, series, n), digits=2) for n in NEIGHBOURS)
            span = f"the best span, in tokens, grows as {BASES[series]} to the power {first} (other fits "
            span += f"{', '.join(others)})"
            found.append(f"with the {series}, merged − annealed {verdict}; {span}")
            effects.append(
                f"a doubling of the {series} adds to merged − annealed, each at its best rate, "
                f"{pages.format_interval(each)}, both at that of merging {pages.format_interval(same)} nats"
            )
    seeds = len(results["made"]["seeds"])
    return IndexRow(
        14,
        "How do the gap to annealing and the best span grow?",
        "PMA, Section 4.3: the interval should grow with the size",
        f"annealed: a linear decay over the last quarter; {seeds} seeds: {'; '.join(found) or 'one model'}",
        "; ".join(effects) or "none",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the gap and the best span of both series."""
    panels = []
    for size in results["sizes"].values():
        for series in SERIES:
            models = of_series(size, series)
            if not models:
                continue
            x = [model[series] / 1e6 for model in models]
            gaps = {"merged − annealed": gap, "the same, at the rate of merging": gap_of_branch, "raw − merged": gain}
            lines = [interval_line(name, x, [of(model).interval() for model in models]) for name, of in gaps.items()]
            panels.append(LinePanel("nats per token", X_TITLES[series], lines, zero_line=True, log_x=True))
            lines = [interval_line("best span", x, [best_span(model) for model in models])]
            panels.append(LinePanel("share of the tokens", X_TITLES[series], lines, log_x=True, percent=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
