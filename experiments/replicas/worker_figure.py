"""The figure: the loss for the bytes sent, the four losses of experiment 1, and what merging adds to DiLoCo."""

from collections.abc import Sequence
from typing import Any

from worker_estimates import MODELS, gain_in_time, is_known, seed_losses
from worker_page import ground_of
from worker_settings import (
    BOTH,
    DILOCO,
    MOMENTA,
    NOLOCO,
    OUTER_AXES,
    OUTER_RATES,
    PERIODIC,
    PLAIN,
    ROUNDED,
    SHARES,
    SPARTA,
    STREAMING,
    WORKERS,
    intervals,
    outer_name,
    periodic_name,
)

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies.statistics import mean_interval

BESIDE = 0.06  # share of the bytes by which methods that send as much are drawn apart; others keep their order
LABELS = dict(zip(MODELS, ("a worker", "mean of workers", "a worker, merged", "mean, merged"), strict=True))


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the figure of the page."""
    ground = ground_of(results)
    counts = {one["workers"]: one["name"] for one in results["counts"]}
    steps = {number: periodic_name(WORKERS, number) for number in intervals(ground)}
    last = max(steps)
    by_interval = {number or 2 * last: name for number, name in steps.items()}  # never: drawn beyond the longest
    panels = [
        bytes_panel(results),
        four_losses(results, "loss by the interval (last: never), nats", "steps between averages, H", by_interval),
        four_losses(results, f"loss by the workers, H = {ground.unit_steps}, nats", "workers, K", counts),
        outer_panel(results),
    ]
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


def sending_methods() -> dict[str, str]:
    """Return the settings with K workers that are compared by what they send, and their labels.

    Variants that send as much as another one are in the tables.
    """
    named = {PLAIN: "data-parallel", PERIODIC: "periodic", f"{DILOCO}, K={WORKERS}": "DiLoCo"}
    named[f"{NOLOCO}, K={WORKERS}"] = "NoLoCo"
    named |= {f"{SPARTA}, p={p:g}": "SPARTA, by p" for p in SHARES}
    named[f"{BOTH}, p=0.005"] = "SPARTA and DiLoCo"
    return named | {STREAMING: "Streaming"} | {f"{STREAMING}, {dtype}": f"Streaming, {dtype}" for dtype in ROUNDED}


def bytes_panel(results: dict[str, Any]) -> LinePanel:
    """Draw, for each method, its loss without and with merging in time, above one another, at the bytes it sends."""
    lines: list[Line] = []
    for name, label in sending_methods().items():
        if is_known(results, name):
            sent = results["settings"][name]["sent_bytes"] / 1e6
            while any(abs(sent / line.x[0] - 1) < BESIDE / 2 for line in lines):
                sent *= 1 + BESIDE
            each = [mean_interval(seed_losses(results, (name, model))) for model in ("mean", "merged mean")]
            lines.append(interval_line(label, [sent, sent], each))
    title = "loss, raw (above) and merged in time, nats"
    return LinePanel(title, "MB that a worker sends (equal ones side by side)", lines, log_x=True)


def four_losses(results: dict[str, Any], title: str, x_label: str, names: dict[int, str]) -> LinePanel:
    """Draw the four losses of settings by a number."""
    known = {number: names[number] for number in sorted(names) if is_known(results, names[number])}
    lines = []
    for model in MODELS if known else ():
        each = [mean_interval(seed_losses(results, (name, model))) for name in known.values()]
        lines.append(interval_line(LABELS[model], list(known), each))
    return LinePanel(title, x_label, lines, log_x=True)


def outer_panel(results: dict[str, Any]) -> LinePanel:
    """Draw what merging gains on DiLoCo's outer parameters, by its outer rate and its momentum."""
    axis = OUTER_AXES[DILOCO]
    by_rate = {axis.value(i): outer_name(axis.value(i), 0.9) for i in OUTER_RATES}
    by_momentum = {momentum: outer_name(axis.base, momentum) for momentum in MOMENTA}
    lines: list[Line] = []
    for label, names in (("beta = 0.9", by_rate), *((f"beta = {m:g}", {axis.base: n}) for m, n in by_momentum.items())):
        known: Sequence[tuple[float, str]] = [(x, name) for x, name in names.items() if is_known(results, name)]
        if known:
            gains = [gain_in_time(results, name).interval() for _, name in known]
            lines.append(interval_line(label, [x for x, _ in known], gains))
    return LinePanel("gain of merging on DiLoCo, nats", "outer rate, eta", lines, zero_line=True)
