"""Does a higher learning rate make merging gain more? (Sanyal et al. yes, Ajroldi et al. no, PMA untested)

Command:   python experiments/learning_rate/script.py --runs runs/science
"""

from typing import Any

import numpy as np

from pma_jax.analysis.comparison import Difference, mean_interval
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.study import Study, run_experiment

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the size's own rate
WINDOWS = (3, 6, 10, 15)
MERGES = [Cell("sma", window) for window in WINDOWS]
MERGES += [Cell("sma", window, kind="block_mean") for window in WINDOWS]
PLAIN = Cell("sma", 10)  # PMA's default, the same at every rate


def measure(study: Study) -> dict[str, Any]:
    """Raw, merged and annealed losses at each rate, over half of the tokens of the first size's trunk."""
    size, found = study.sizes[0], {}
    rate, end = study.describe_size(size)["peak_rate"], study.units // 2
    ends = [end // 4, end // 2, end]
    for factor in FACTORS:
        half, trunks = study.trunks_at_rate(size, factor)
        losses = half.losses_over_seeds(trunks.__getitem__, [RAW, *MERGES], ends)
        annealed = [half.loss(half.anneal(t, end - end // 4, end)) for t in trunks.values()]
        found[str(factor * rate)] = {"losses": losses, "annealed": annealed}
    return {"size": size, "facts": study.describe_size(size), "ends": ends, "rates": found}


def gains(results: dict[str, Any], text: str, end: int) -> dict[float, list[float]]:
    """Rate -> raw less merged of each seed, where there are snapshots enough."""
    found = {}
    for rate, of_rate in results["rates"].items():
        merged = of_rate["losses"].get(text, {}).get(str(end))
        if merged:
            raw = of_rate["losses"][RAW.text][str(end)]
            found[float(rate)] = [a - b for a, b in zip(raw, merged, strict=True)]
    return found


def best(of_rate: dict[str, Any], end: int) -> str:
    """The merge of lowest mean loss over seeds at one rate."""
    there = [c.text for c in MERGES if str(end) in of_rate["losses"].get(c.text, {})]
    return min(there, key=lambda text: sum(of_rate["losses"][text][str(end)]))


def slope(gain: dict[float, list[float]]) -> Difference | None:
    """What doubling the rate adds to the gain: the slope over log2 of the rate, of each seed; over seeds."""
    if not gain:
        return None
    x = np.log2(list(gain))
    each = [float(np.polyfit(x, seeds, 1)[0]) for seeds in zip(*gain.values(), strict=True)]
    return mean_interval(each)


def report(results: dict[str, Any]) -> str:
    """Losses and gains at each rate at the end, then what doubling the rate adds."""
    end, rows = results["ends"][-1], []
    for rate, of_rate in results["rates"].items():
        raw, text = of_rate["losses"][RAW.text][str(end)], best(of_rate, end)
        merged = of_rate["losses"][text][str(end)]
        shares = [(a - b) / (a - c) for a, b, c in zip(raw, merged, of_rate["annealed"], strict=True)]
        plain = of_rate["losses"].get(PLAIN.text, {}).get(str(end))
        rows.append(
            [
                f"{float(rate):g}",
                mean(raw),
                mean(merged) + f" ({text})",
                mean(of_rate["annealed"]),
                pages.format_difference(raw, plain) if plain else "too few snapshots",
                pages.format_difference(raw, merged),
                pages.format_mean_share(shares),
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
        added = slope(gains(results, PLAIN.text, at))
        if added:
            tokens = at * results["facts"]["unit_tokens"] / 1e6
            lines.append(f"{pages.format_interval(added)} nats at {tokens:.2f}M tokens")
    if lines:
        parts.append(f"What doubling the rate adds to the gain of {PLAIN.text}: {'; '.join(lines)}.")
    return "\n\n".join([*parts, lowest_text(results)])


def lowest(results: dict[str, Any], of: str) -> tuple[float, list[float]]:
    """The rate at which the raw, merged or annealed model is best at the end, and its losses."""
    end = results["ends"][-1]
    losses = {}
    for rate, of_rate in results["rates"].items():
        text = RAW.text if of == "raw" else best(of_rate, end)
        losses[float(rate)] = of_rate["annealed"] if of == "annealed" else of_rate["losses"][text][str(end)]
    rate = min(losses, key=lambda rate: sum(losses[rate]))
    return rate, losses[rate]


def lowest_text(results: dict[str, Any]) -> str:
    """Which rate is best for whom, and how far the best merge is from the best annealed model, each at its own rate."""
    at = {of: lowest(results, of) for of in ("raw", "merged", "annealed")}
    named = ", ".join(f"{of} at {rate:g} ({mean(losses)})" for of, (rate, losses) in at.items())
    apart = pages.format_difference(at["merged"][1], at["annealed"][1])
    return f"Each at its own best rate: {named}. Merged less annealed, each at its best: {apart} nats."


def mean(losses: list[float]) -> str:
    """The mean over seeds."""
    return f"{sum(losses) / len(losses):.4f}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Whether the gain grows with the rate, and what a higher rate does to the merged model itself."""
    # At a small size of a study there may be too few snapshots for PMA's default.
    plain = next(c for c in (PLAIN, *MERGES) if gains(results, c.text, results["ends"][-1]))
    added = slope(gains(results, plain.text, results["ends"][-1]))
    assert added is not None
    verdict = "grows" if added.low > 0 else "shrinks" if added.high < 0 else "is not told to change"
    rates = [float(rate) for rate in results["rates"]]
    return IndexRow(
        7,
        "Does a higher rate make merging gain more?",
        "Sanyal et al.: yes; Ajroldi et al.: no; PMA believes so, untested",
        f"the gain of {plain.text} {verdict} with the rate ({min(rates):g} to {max(rates):g}). {lowest_text(results)}",
        f"doubling the rate adds {pages.format_interval(added)} nats to the gain",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Losses, and gains, against the rate."""
    end, rates = results["ends"][-1], [float(rate) for rate in results["rates"]]
    each = list(results["rates"].values())
    losses = {
        "raw": [r["losses"][RAW.text][str(end)] for r in each],
        "best merge": [r["losses"][best(r, end)][str(end)] for r in each],
        "annealed": [r["annealed"] for r in each],
    }
    lines = [
        Line(name, rates, [sum(seeds) / len(seeds) for seeds in at], dashed=name == "annealed")
        for name, at in losses.items()
    ]
    panels = [LinePanel("held-out loss at the end, by rate", "peak rate", lines, log_x=True)]
    for at in results["ends"]:
        lines = []
        for cell in MERGES:
            gain = gains(results, cell.text, at)
            if gain:
                lines.append(interval_line(cell.text, list(gain), [mean_interval(seeds) for seeds in gain.values()]))
        title = f"raw − merged at {at * results['facts']['unit_tokens'] / 1e6:.2f}M tokens, nats"
        panels += [LinePanel(title, "peak rate", lines, zero=True, log_x=True)] if lines else []
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
