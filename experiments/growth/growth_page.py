"""The page of the experiment: tables, the row of the index, and the figure."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.parabola import find_vertex
from pma_jax.studies.statistics import MeanEstimate, MeanInterval, difference_over_documents, mean_interval

MERGED, ANNEALED = "merged", "annealed"
SERIES = {
    "parameters": "More parameters, at equal tokens per parameter",
    "tokens": "More tokens, at equal parameters",
}
X_TITLES = {"parameters": "parameters, millions", "tokens": "tokens, millions"}


def gap(model: Mapping[str, Any]) -> MeanEstimate:
    """Estimate the loss of the best merge less that of the annealed model, each at its own rate."""
    return difference_over_documents(model[MERGED], model[ANNEALED], model["document_tokens"])


def gain(model: Mapping[str, Any]) -> MeanEstimate:
    """Estimate the raw loss less that of the best merge, at the rate that is the best for merging."""
    return difference_over_documents(model["raw"], model[MERGED], model["document_tokens"])


def per_seed(model: Mapping[str, Any], first: str, second: str) -> list[float]:
    """Return the difference of two models of each seed, in nats per token."""
    tokens = sum(model["document_tokens"])
    return ((np.sum(model[first], axis=1) - np.sum(model[second], axis=1)) / tokens).tolist()


def spans(model: Mapping[str, Any]) -> list[float]:
    """Return the best span of plain means of points of each seed, as a share of the tokens."""
    windows = {int(window): losses for window, losses in model["windows"].items()}
    x = [math.log(window) for window in windows]
    each = zip(*windows.values(), strict=True)
    return [math.exp(find_vertex(x, list(losses), 2).x) / model["end"] for losses in each]


def of_series(size: Mapping[str, Any], series: str) -> list[dict[str, Any]]:
    """Return the models of a series, the smallest first."""
    models = [model for model in size["models"].values() if model["series"] == series]
    return sorted(models, key=lambda model: model[series])


def slope(models: list[dict[str, Any]], series: str, value: Callable[[dict[str, Any]], list[float]]) -> MeanInterval:
    """Estimate by how much a value grows per doubling, over seeds: the slope over log2 of the parameters or tokens."""
    x = np.log2([model[series] for model in models])
    return mean_interval(np.polyfit(x, np.array([value(model) for model in models]), 1)[0].tolist())


def report(results: dict[str, Any]) -> str:
    """Format, for each size and series, the gap, the gain, the best span and the best rates, with slopes."""
    parts = []
    for size in results["sizes"].values():
        for series, title in SERIES.items():
            models = of_series(size, series)
            if models:
                parts += [f"### {title}", format_models(models)]
                parts += [format_slopes(models, series)] if len(models) > 1 else []
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
                pages.format_interval(gain(model).interval()),
                model["best"],
                pages.format_percent_interval(mean_interval(spans(model))),
                *shown,
            ]
        )
    header = [
        "parameters",
        "tokens",
        "merged − annealed",
        "raw − merged",
        "best merge",
        "best span, share of the tokens",
    ]
    return pages.format_table([*header, "best rate, merged", "annealed"], rows) + (
        "\n\nNats per token, with 95% intervals over seeds and documents; merged and annealed models are each at their "
        "own best rate, which was searched in factors of 2 on one tuning seed. The best merge was chosen on the part "
        "`select`. The span is of plain means of points, its interval over seeds."
    )


def format_slopes(models: list[dict[str, Any]], series: str) -> str:
    """Format what a doubling of the parameters or tokens adds."""
    values = {
        "merged − annealed": lambda model: per_seed(model, MERGED, ANNEALED),
        "raw − merged": lambda model: per_seed(model, "raw", MERGED),
        "log2 of the best span, as a share of the tokens": lambda model: np.log2(spans(model)).tolist(),
    }
    lines = [f"- {name}: {pages.format_interval(slope(models, series, value))}" for name, value in values.items()]
    return f"Per doubling of the {series}, over seeds:\n\n" + "\n".join(lines)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the slope of the gap in both series."""
    found, effects = [], []
    for size in results["sizes"].values():
        for series in SERIES:
            models = of_series(size, series)
            if len(models) < 2:
                continue
            each = slope(models, series, lambda model: per_seed(model, MERGED, ANNEALED))
            verdict = "grows" if each.low > 0 else "shrinks" if each.high < 0 else "does not clearly change"
            found.append(f"the gap between merging and annealing {verdict} with the {series}")
            effects.append(f"per doubling of the {series} {pages.format_interval(each)} nats")
    return IndexRow(
        14,
        "How do the gap to annealing and the best span grow?",
        "PMA, Section 4.3: the interval should grow with the size",
        "; ".join(found) or "one model",
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
            gaps = {"merged − annealed": gap, "raw − merged": gain}
            lines = [interval_line(name, x, [of(model).interval() for model in models]) for name, of in gaps.items()]
            panels.append(LinePanel("nats per token", X_TITLES[series], lines, zero_line=True, log_x=True))
            lines = [interval_line("best span", x, [mean_interval(spans(model)) for model in models])]
            panels.append(LinePanel("share of the tokens", X_TITLES[series], lines, log_x=True, percent=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
