"""Does a higher learning rate make merging gain more? (Sanyal et al.: yes; Ajroldi et al.: no; PMA: untested)

Command:   python experiments/learning_rate/script.py --runs runs/science --jobs 2
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.parabola import find_vertices, lowest_mean
from pma_jax.studies.planned import Branch, Plan, PlannedEvaluation, PlannedRun, get_by_seed
from pma_jax.studies.statistics import (
    MeanEstimate,
    MeanInterval,
    difference_over_documents,
    estimate_over_documents,
    statistic_over_documents,
)
from pma_jax.studies.study import Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the size's own rate
WINDOWS = (2, 3, 4, 6, 8, 10, 15)
PLAIN = Cell("sma", 10)  # PMA's default: the same merge at every rate
SHORT = Cell("sma", 3)  # where there are too few snapshots for it
MERGES = tuple(Cell("sma", window, kind=kind) for kind in ("point", "block_mean") for window in WINDOWS)
MODELS = RAW.text, "merged", "annealed"
BEST = "the best merge"  # at each rate


def trunk_and_branch(study: Study, size: str, factor: float, seed: int, part: str) -> tuple[PlannedRun, PlannedRun]:
    """Return the trunk of half of the tokens at a rate, and the branch that anneals over its last quarter."""
    units, changes = study.half_length_changes(size, factor)
    end = study.units // 2
    tokens = study.evaluation_tokens // 2 if part == SELECT else 0
    trunk = PlannedEvaluation((RAW, *MERGES), (end // 4, end // 2, end), part)
    branch, decay = PlannedEvaluation((RAW,), (end,), part), Branch(end - end // 4, end)
    return (
        PlannedRun(size, seed, changes, None, (trunk,), units, tokens),
        PlannedRun(size, seed, changes, decay, (branch,), units, tokens),
    )


def plan(study: Study) -> Plan:
    """List the trunks of all rates and their annealed branches."""
    return [
        run
        for size in study.sizes
        for factor in FACTORS
        for seed in study.seeds
        for part in (REPORT, SELECT)
        for run in trunk_and_branch(study, size, factor, seed, part)
    ]


def measure(study: Study) -> dict[str, Any]:
    """Return raw, merged and annealed losses at each rate, over half of the tokens of each size's trunk."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the losses of a size at each rate, in the layout of `Study.document_losses_over_seeds`."""
    rate, rates = study.trunk_config(size, study.seeds[0]).schedule.peak_rate, {}
    at = [study.units // divisor for divisor in (8, 4, 2)]
    for factor in FACTORS:
        measured = {}
        for part in (REPORT, SELECT):
            runs = [trunk_and_branch(study, size, factor, seed, part) for seed in study.seeds]
            reading = runs[0][0].study(study)
            for i, name in enumerate(("trunk", "annealed")):
                get = get_by_seed(study, [run[i] for run in runs])
                cells = runs[0][i].evaluations[0].cells
                ends = at if name == "trunk" else at[-1:]
                key = name if part == REPORT else f"select_{name}"
                measured[key] = reading.document_losses_over_seeds(get, cells, ends, part)
        rates[f"{factor * rate:.4g}"] = measured
    return study.describe_size(size) | {"ends": at, "rates": rates}


def best_merge(measured: Mapping[str, Any], end: int, kinds: tuple[str, ...] = ("point", "block_mean")) -> str:
    """Return the text of the merge with the lowest mean loss over seeds on the part `select`, at one rate."""
    losses = measured["select_trunk"]
    texts = [cell.text for cell in MERGES if cell.kind in kinds and str(end) in losses["nats"].get(cell.text, {})]
    return min(texts, key=lambda text: sum(pages.seed_losses(losses, text, end)))


def gain(measured: Mapping[str, Any], text: str, end: int) -> MeanEstimate:
    """Estimate the raw loss less that of a merge, over seeds and documents."""
    trunk = measured["trunk"]
    raw, merged = trunk["nats"][RAW.text][str(end)], trunk["nats"][text][str(end)]
    return difference_over_documents(raw, merged, trunk["document_tokens"])


def nats_of(size: Mapping[str, Any], model: str) -> np.ndarray:
    """Return the summed losses at the end of the raw, merged or annealed model: [rates, seeds, documents]."""
    end, rows = size["ends"][-1], []
    for measured in size["rates"].values():
        text = best_merge(measured, end) if model == "merged" else RAW.text
        rows.append(measured["annealed" if model == "annealed" else "trunk"]["nats"][text][str(end)])
    return np.array(rows)


def mean_losses(size: Mapping[str, Any], model: str) -> list[float]:
    """Return the mean loss over seeds at the end, at each rate, in nats per token."""
    return (nats_of(size, model).sum(axis=2).mean(axis=1) / sum(document_tokens(size))).tolist()


def document_tokens(size: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each document on which all models are judged."""
    return next(iter(size["rates"].values()))["trunk"]["document_tokens"]


def log_rates(size: Mapping[str, Any]) -> np.ndarray:
    """Return log2 of the rates."""
    return np.log2([float(rate) for rate in size["rates"]])


def at_best_rate(size: Mapping[str, Any], axis: int, first: str, second: str = "") -> MeanEstimate:
    """Estimate log2 of a model's best rate (axis 0) or its loss there (axis 1), or the difference of two models' ones.

    The best rate of each seed is where a parabola through three rates is lowest: those around the lowest mean loss, of
    two models around that of both, so that their fits do not differ by their points.
    """
    names = [first, *([second] if second else [])]
    nats_NRSD, x = np.array([nats_of(size, name) for name in names]), log_rates(size)
    lowest = lowest_mean(nats_NRSD.mean(axis=0))

    def statistic(losses_NRS: np.ndarray) -> np.ndarray:
        of_first, *rest = (find_vertices(x, losses_RS, lowest)[axis] for losses_RS in losses_NRS)
        return of_first - rest[0] if rest else of_first

    return statistic_over_documents(statistic, nats_NRSD, document_tokens(size))


def gains(size: Mapping[str, Any], merge: str, end: int) -> np.ndarray | None:
    """Return what a merge, or the best one (BEST), gains at each rate, in nats per token; None without snapshots.

    Returns:
        [rates, seeds, documents].
    """
    rows, tokens_D = [], np.array(document_tokens(size))
    for measured in size["rates"].values():
        trunk, text = measured["trunk"], best_merge(measured, end) if merge == BEST else merge
        if str(end) not in trunk["nats"].get(text, {}):
            return None
        raw, merged = (np.array(trunk["nats"][name][str(end)]) for name in (RAW.text, text))
        rows.append((raw - merged) / tokens_D)
    return np.array(rows)


def gain_per_doubling(size: Mapping[str, Any], merge: str, end: int) -> MeanInterval | None:
    """Return what doubling the rate adds to the gain of a merge, on average over the rates: the slope."""
    gains_RSD = gains(size, merge, end)
    if gains_RSD is None:
        return None
    x = log_rates(size) - log_rates(size).mean()
    slopes_SD = np.tensordot(x / np.sum(x**2), gains_RSD, 1)  # the slope of least squares is a weighted sum
    return estimate_over_documents(slopes_SD, document_tokens(size)).interval()


def report(results: dict[str, Any]) -> str:
    """Format, for each size, losses and gains at each rate, the best rates, and what doubling the rate adds."""
    parts = []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_rates(size), format_best_rates(size), format_slopes(size)]
    return "\n\n".join(parts)


def format_rates(size: Mapping[str, Any]) -> str:
    """Format the losses and the gains at the end at each rate."""
    end, rows = size["ends"][-1], []
    for rate, measured in size["rates"].items():
        text, trunk, annealed = best_merge(measured, end), measured["trunk"], measured["annealed"]
        over_annealing = difference_over_documents(
            trunk["nats"][text][str(end)], annealed["nats"][RAW.text][str(end)], trunk["document_tokens"]
        )
        has_plain = str(end) in trunk["nats"].get(PLAIN.text, {})
        points = best_merge(measured, end, ("point",))
        rows.append(
            [
                f"`{rate}`",
                pages.format_mean(pages.seed_losses(trunk, RAW.text, end)),
                pages.format_interval(gain(measured, PLAIN.text, end).interval()) if has_plain else "",
                f"{pages.format_interval(gain(measured, points, end).interval())} ({points})",
                f"{pages.format_interval(gain(measured, text, end).interval())} ({text})",
                pages.format_interval(over_annealing.interval()),
            ]
        )
    header = ["rate", "raw loss", f"raw − {PLAIN.text}", "raw − best merge of points", "raw − best merge"]
    header.append("best merge − annealed")
    return pages.format_table(header, rows) + (
        f"\n\nAt {pages.format_tokens(size, end)} tokens, nats per token; annealed linearly over the last quarter. "
        "Differences here and below have 95% intervals over seeds and documents, a raw loss over seeds. The best "
        "merge at each rate was chosen on the part `select`."
    )


def format_best_rates(size: Mapping[str, Any]) -> str:
    """Format the best rate of each model, and the losses of merging and annealing, each at its own best rate."""
    lines = []
    for model in MODELS:
        center, low, high = (f"`{2**x:.2g}`" for x in interval_of(at_best_rate(size, 0, model).interval()))
        nats_RSD = nats_of(size, model)
        losses_RS = nats_RSD.sum(axis=2) / sum(document_tokens(size))
        loss = pages.format_mean(find_vertices(log_rates(size), losses_RS, lowest_mean(nats_RSD))[1].tolist())
        name = "raw" if model == RAW.text else model
        lines.append(f"- {name}: {center} [{low}, {high}], loss {loss}")
    for first, second in (("merged", RAW.text), ("annealed", "merged")):
        factor = at_best_rate(size, 0, first, second).interval()
        center, low, high = (f"`{2**x:.2f}`" for x in interval_of(factor))
        names = ("raw" if model == RAW.text else model for model in (first, second))
        lines.append(f"- {' over '.join(names)}: {center} [{low}, {high}]")
    difference = pages.format_interval(at_best_rate(size, 1, "merged", "annealed").interval())
    return (
        "Best rate of each model, where a parabola through the losses of each seed at the three rates around the "
        "lowest mean is lowest (geometric mean over seeds; the loss there has its interval over seeds). Two models are "
        "compared on the same seed, at the three rates around the lowest mean of both:\n\n"
        + "\n".join(lines)
        + f"\n\nMerged less annealed, each at its own best rate: {difference} nats."
    )


def interval_of(interval: MeanInterval) -> tuple[float, float, float]:
    """Return the mean and the ends of an interval."""
    return interval.mean, interval.low, interval.high


def format_slopes(size: Mapping[str, Any]) -> str:
    """Format what doubling the rate adds to the gain at each position."""
    lines = []
    for end in size["ends"]:
        for merge in (BEST, PLAIN.text, SHORT.text):
            added = gain_per_doubling(size, merge, end)
            if added:
                at = pages.format_tokens(size, end)
                lines.append(f"- {merge} at {at} tokens: {pages.format_interval(added)} nats")
    gains_RSD = gains(size, BEST, size["ends"][-1])
    assert gains_RSD is not None, "each rate has a merge"
    steps = [estimate_over_documents(step_SD, document_tokens(size)) for step_SD in np.diff(gains_RSD, axis=0)]
    each = [pages.format_interval(step.interval()) for step in steps]
    return (
        "What doubling the rate adds to the gain over raw, on average over these rates:\n\n"
        + "\n".join(lines)
        + f"\n\nFrom each rate to the next one, {BEST} at the end: {', '.join(each)} nats."
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize whether the gain grows with the rate, and merging less annealing, each at its best rate."""
    verdicts, effects = [], []
    for name, size in results["sizes"].items():
        end = size["ends"][-1]
        added = gain_per_doubling(size, BEST, end)
        assert added is not None, "each rate has a merge"
        verdict = "grows" if added.low > 0 else "shrinks" if added.high < 0 else "does not clearly change"
        difference = pages.format_interval(at_best_rate(size, 1, "merged", "annealed").interval())
        verdicts.append(
            f"{name} at {end * size['unit_tokens'] / 1e6:.2f}M tokens: what {BEST} gains {verdict} with the rate; "
            f"merged − annealed over the last quarter, each at its own best rate: {difference} nats"
        )
        effects.append(f"{name}: {pages.format_interval(added)} nats")
    return IndexRow(
        7,
        "Does a higher rate make merging gain more?",
        "Sanyal et al.: yes; Ajroldi et al.: no; PMA believes so, untested",
        "; ".join(verdicts),
        f"what a doubling of the rate adds to raw − merged, on average: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the losses at the end and the gains against the rate."""
    panels = []
    for name, size in results["sizes"].items():
        rates, end = [float(rate) for rate in size["rates"]], size["ends"][-1]
        lines = [
            Line("raw" if m == RAW.text else m, rates, mean_losses(size, m), dashed=m == "annealed") for m in MODELS
        ]
        panels.append(
            LinePanel(f"{name}: loss at {pages.format_tokens(size, end)} tokens", "peak rate", lines, log_x=True)
        )
        lines = []
        for at in size["ends"]:
            cell = PLAIN if gain_per_doubling(size, PLAIN.text, at) else SHORT
            if gain_per_doubling(size, cell.text, at):
                intervals = [gain(measured, cell.text, at).interval() for measured in size["rates"].values()]
                lines.append(interval_line(f"{cell.text} at {pages.format_tokens(size, at)}", rates, intervals))
        panels.append(LinePanel(f"{name}: raw − merged, nats", "peak rate", lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
