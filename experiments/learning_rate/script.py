"""Does a higher learning rate make merging gain more? (Sanyal et al.: yes; Ajroldi et al.: no; PMA: untested)

Command:   python experiments/learning_rate/script.py --runs runs/science
"""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import MeanInterval, mean_interval
from pma_jax.studies.study import Study

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the size's own rate
WINDOWS = (3, 6, 10, 15)
MERGES = [Cell("sma", window) for window in WINDOWS]
MERGES += [Cell("sma", window, kind="block_mean") for window in WINDOWS]
PLAIN = Cell("sma", 10)  # PMA's default: the same merge at every rate


def plan(study: Study) -> Plan:
    """List the trunks of all rates and their annealed branches."""
    size, end = study.sizes[0], study.units // 2
    trunk = tuple(PlannedEvaluation((RAW, *MERGES), (end // 4, end // 2, end), part) for part in (REPORT, SELECT))
    branch = tuple(PlannedEvaluation((RAW,), (end,), part) for part in (REPORT, SELECT))
    work: list[PlannedRun] = []
    for factor, seed in itertools.product(FACTORS, study.seeds):
        units, changes = study.half_length_changes(size, factor)
        work.append(PlannedRun(size, seed, changes, None, trunk, units))
        work.append(PlannedRun(size, seed, changes, Branch(end - end // 4, end), branch, units))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Return raw, merged and annealed losses at each rate, over half of the tokens of the first size's trunk."""
    size, rates = study.sizes[0], {}
    rate, end = study.describe_size(size)["peak_rate"], study.units // 2
    ends = [end // 4, end // 2, end]
    for factor in FACTORS:
        half, trunks = study.half_length_trunks(size, factor)
        branches = [half.anneal(t, end - end // 4, end) for t in trunks.values()]
        rates[str(factor * rate)] = {
            f"{prefix}{key}": losses
            for prefix, part in (("", REPORT), ("select_", SELECT))
            for key, losses in (
                ("losses", half.losses_over_seeds(trunks.__getitem__, [RAW, *MERGES], ends, part)),
                ("annealed", [half.loss(branch, part=part) for branch in branches]),
            )
        }
    return {"size": size, "facts": study.describe_size(size), "ends": ends, "rates": rates}


def gains(results: dict[str, Any], text: str, end: int) -> dict[float, list[float]]:
    """Return the raw minus the merged loss of each seed by rate; rates with too few snapshots are omitted."""
    differences = {}
    for rate, measured in results["rates"].items():
        merged = measured["losses"].get(text, {}).get(str(end))
        if merged:
            raw = measured["losses"][RAW.text][str(end)]
            differences[float(rate)] = [a - b for a, b in zip(raw, merged, strict=True)]
    return differences


def best_merge(measured: dict[str, Any], end: int) -> str:
    """Return the text of the merge with the lowest mean loss over seeds at one rate."""
    available = [c.text for c in MERGES if str(end) in measured["losses"].get(c.text, {})]
    return min(available, key=lambda text: sum(pages.to_choose_by(measured)[text][str(end)]))


def gain_per_doubling(gain: dict[float, list[float]]) -> MeanInterval | None:
    """Return what doubling the rate adds to the gain: the slope over log2 of the rate of each seed, over seeds."""
    if not gain:
        return None
    x = np.log2(list(gain))
    slopes = [float(np.polyfit(x, seeds, 1)[0]) for seeds in zip(*gain.values(), strict=True)]
    return mean_interval(slopes)


def report(results: dict[str, Any]) -> str:
    """Format the table of losses and gains at the end at each rate, and what doubling the rate adds to the gain."""
    end, rows = results["ends"][-1], []
    for rate, measured in results["rates"].items():
        raw, text = measured["losses"][RAW.text][str(end)], best_merge(measured, end)
        merged = measured["losses"][text][str(end)]
        shares = [(a - b) / (a - c) for a, b, c in zip(raw, merged, measured["annealed"], strict=True)]
        plain = measured["losses"].get(PLAIN.text, {}).get(str(end))
        rows.append(
            [
                f"{float(rate):g}",
                format_mean(raw),
                format_mean(merged) + f" ({text})",
                format_mean(measured["annealed"]),
                pages.format_difference(raw, plain) if plain else "too few snapshots",
                pages.format_difference(raw, merged),
                pages.format_mean_percent(shares),
            ]
        )
    header = [
        "rate",
        "raw",
        "best merge",
        "annealed",
        f"raw − {PLAIN.text}",
        "raw − best merge",
        "best, share of annealing's gain",
    ]
    tokens = end * results["facts"]["unit_tokens"] / 1e6
    parts = [
        f"{results['size']} at {tokens:.2f}M tokens (annealed: linearly, over the last quarter of them):",
        pages.format_table(header, rows),
    ]
    lines = []
    for at in results["ends"]:
        added = gain_per_doubling(gains(results, PLAIN.text, at))
        if added:
            tokens = at * results["facts"]["unit_tokens"] / 1e6
            lines.append(f"{pages.format_interval(added)} nats at {tokens:.2f}M tokens")
    if lines:
        parts.append(f"What doubling the rate adds to the gain of {PLAIN.text}: {'; '.join(lines)}.")
    return "\n\n".join([*parts, describe_best_rates(results)])


def best_rate(results: dict[str, Any], model: str) -> tuple[float, list[float]]:
    """Return the rate at which a model (raw, merged or annealed) is best at the end, and its losses there."""
    end = results["ends"][-1]

    def losses_of(measured: dict[str, Any], get: Callable[[dict[str, Any], str], Any]) -> list[float]:
        text = RAW.text if model == "raw" else best_merge(measured, end)
        return get(measured, "annealed") if model == "annealed" else get(measured, "losses")[text][str(end)]

    rate = min(results["rates"], key=lambda rate: sum(losses_of(results["rates"][rate], pages.to_choose_by)))
    return float(rate), losses_of(results["rates"][rate], operator.getitem)


def describe_best_rates(results: dict[str, Any]) -> str:
    """Describe the best rate of each model, and how far the best merge is from the best annealed model."""
    best = {model: best_rate(results, model) for model in ("raw", "merged", "annealed")}
    rates = ", ".join(f"{model} at {rate:g} ({format_mean(losses)})" for model, (rate, losses) in best.items())
    difference = pages.format_difference(best["merged"][1], best["annealed"][1])
    return f"Each at its own best rate: {rates}. Merged less annealed, each at its best: {difference} nats."


def format_mean(losses: list[float]) -> str:
    """Format the mean over seeds."""
    return f"{sum(losses) / len(losses):.4f}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize whether the gain grows with the rate, and which rate is best for each model."""
    # A small study may have too few snapshots for PMA's default.
    plain = next(c for c in (PLAIN, *MERGES) if gains(results, c.text, results["ends"][-1]))
    added = gain_per_doubling(gains(results, plain.text, results["ends"][-1]))
    assert added is not None
    verdict = "grows" if added.low > 0 else "shrinks" if added.high < 0 else "does not clearly change"
    rates = [float(rate) for rate in results["rates"]]
    effect = f"the gain of {plain.text} {verdict} with the rate ({min(rates):g} to {max(rates):g})"
    return IndexRow(
        7,
        "Does a higher rate make merging gain more?",
        "Sanyal et al.: yes; Ajroldi et al.: no; PMA believes so, untested",
        f"{effect}. {describe_best_rates(results)}",
        f"doubling the rate adds {pages.format_interval(added)} nats to the gain",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the losses and the gains against the rate."""
    end, rates = results["ends"][-1], [float(rate) for rate in results["rates"]]
    measured = list(results["rates"].values())
    losses = {
        "raw": [m["losses"][RAW.text][str(end)] for m in measured],
        "best merge": [m["losses"][best_merge(m, end)][str(end)] for m in measured],
        "annealed": [m["annealed"] for m in measured],
    }
    lines = [
        Line(name, rates, [sum(seeds) / len(seeds) for seeds in by_rate], dashed=name == "annealed")
        for name, by_rate in losses.items()
    ]
    panels = [LinePanel("held-out loss at the end, by rate", "peak rate", lines, log_x=True)]
    for at in results["ends"]:
        lines = []
        for cell in MERGES:
            gain = gains(results, cell.text, at)
            if gain:
                lines.append(interval_line(cell.text, list(gain), [mean_interval(seeds) for seeds in gain.values()]))
        title = f"raw − merged at {at * results['facts']['unit_tokens'] / 1e6:.2f}M tokens, nats"
        panels += [LinePanel(title, "peak rate", lines, zero_line=True, log_x=True)] if lines else []
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
