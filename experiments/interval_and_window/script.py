"""Which interval V and window N? A grid at several lengths of training, and how the best span scales (PMA, Figure 5).

Command:   python experiments/interval_and_window/script.py --runs runs/science
"""

import functools
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.model.ladder import recommend_interval_and_window
from pma_jax.reporting.drawing import PAGE_DPI, to_png
from pma_jax.reporting.heat_map import HeatMap, draw_heat_maps
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import MeanInterval, mean_interval, paired_difference
from pma_jax.studies.study import Study

INTERVALS = (1, 2, 4, 8)  # in units: every snapshot of the trunk, every second, ...
WINDOWS = (1, 2, 3, 4, 6, 8, 10, 12, 15, 20, 25, 32)  # 1 is the raw model, whatever the interval
END_DIVISORS = (4, 2, 1)  # merges are evaluated at the trunk's length divided by each of these


def merges() -> list[Cell]:
    """Return the raw model, and the mean of every window and interval."""
    return [RAW, *(Cell("sma", w, i) for i in INTERVALS for w in WINDOWS if w > 1)]


def plan(study: Study) -> Plan:
    """List the trunks of all sizes."""
    ends = tuple(study.units // divisor for divisor in END_DIVISORS)
    evaluations = tuple(PlannedEvaluation(tuple(merges()), ends, part) for part in (REPORT, SELECT))
    return [PlannedRun(size, seed, (), None, evaluations) for size in study.sizes for seed in study.seeds]


def measure(study: Study) -> dict[str, Any]:
    """Return the loss of every mean of N points, V apart, at a quarter, half and the end of each trunk."""
    ends = [study.units // divisor for divisor in END_DIVISORS]
    cells, sizes = merges(), {}
    for size in study.sizes:
        get_trunk = functools.partial(study.trunk, size)
        losses, select_losses = (study.losses_over_seeds(get_trunk, cells, ends, part) for part in (REPORT, SELECT))
        description = study.describe_size(size)
        is_mixture = study.trunk_config(size, study.seeds[0]).model.experts > 0
        interval, window = recommend_interval_and_window(description["active_parameters"], is_mixture)
        rule = {"interval_tokens": interval, "window": window}
        sizes[size] = description | {"losses": losses, "select_losses": select_losses, "rule": rule}
    return {"ends": ends, "sizes": sizes}


def losses_by_cell(size: dict[str, Any], end: int, to_choose: bool = False) -> dict[tuple[int, int], list[float]]:
    """Return the loss of each seed by (interval, window), to publish or to choose by.

    Cells with too few snapshots are omitted.
    """
    cells, all_losses = {}, pages.to_choose_by(size) if to_choose else size["losses"]
    for interval in INTERVALS:
        for window in WINDOWS:
            losses = all_losses.get(Cell("sma", window, interval).text, {}).get(str(end))
            if losses:
                cells[interval, window] = losses
    return cells


def best_cell(size: dict[str, Any], end: int, interval: int | None = None) -> tuple[int, int]:
    """Return the (interval, window) with the lowest mean loss, for one interval or, by default, all."""
    cells = {key: losses for key, losses in losses_by_cell(size, end, True).items() if interval in (None, key[0])}
    return min(cells, key=lambda key: sum(cells[key]))


def best_span(size: dict[str, Any], end: int) -> MeanInterval:
    """Return the best span N V as a share of the tokens trained: each seed's best window at the finest interval."""
    cells = {window: losses for (interval, window), losses in losses_by_cell(size, end, True).items() if interval == 1}
    windows = [min(cells, key=lambda w: cells[w][i]) for i in range(len(next(iter(cells.values()))))]
    return mean_interval([w / end for w in windows])


def report(results: dict[str, Any]) -> str:
    """Format the best cells and spans, the cost of coarser intervals, and what the paper's rule recommends."""
    rows, coarse = [], []
    for name, size in results["sizes"].items():
        unit = size["unit_tokens"]
        for end in results["ends"]:
            cells, raw = losses_by_cell(size, end), size["losses"][RAW.text][str(end)]
            interval, window = best_cell(size, end)
            span = best_span(size, end)
            rows.append(
                [
                    name,
                    f"{end * unit / 1e6:.2f}M",
                    f"N = {window}, V = {interval * unit / 1e3:.0f}k",
                    pages.format_difference(raw, cells[interval, window]),
                    pages.format_percent_interval(span),
                    f"{span.mean * end * unit / size['active_parameters']:.2f}",
                ]
            )
            best = {i: best_cell(size, end, i) for i in INTERVALS if any(key[0] == i for key in cells)}
            costs = [
                f"{pages.format_difference(cells[best[i]], cells[best[1]])} (N = {best[i][1]})" if i in best else "–"
                for i in INTERVALS[1:]
            ]
            coarse.append([name, f"{end * unit / 1e6:.2f}M", *costs])
    spans = ["best span N V, share of the tokens", "span, tokens per parameter"]
    lines = [pages.format_table(["size", "tokens", "best of the grid", "raw − best", *spans], rows)]
    lines.append(
        "Plain means of N points, V tokens apart; mean over seeds and 95% interval. The span is that of each seed's "
        "best N at the finest V. The last column divides by activated parameters. PMA's rule of thumb, extrapolated to "
        f"these sizes, recommends {'; '.join(recommended_span(name, size) for name, size in results['sizes'].items())}."
    )
    lines.append("Cost of a coarser interval against the finest one, each at its best N (nats, positive: worse):")
    lines.append(pages.format_table(["size", "tokens", *(f"V × {i}" for i in INTERVALS[1:])], coarse))
    lines.append(describe_scaling(results))
    return "\n\n".join(lines)


def recommended_span(name: str, size: dict[str, Any]) -> str:
    """Format the span N V that `recommend_interval_and_window` recommends."""
    span = size["rule"]["window"] * size["rule"]["interval_tokens"]
    return f"{span / 1e6:.1f}M tokens ({name}, {span / size['active_parameters']:.0f} per parameter)"


def describe_scaling(results: dict[str, Any]) -> str:
    """Describe how the best span grows with the length of training, for each size."""
    lines = []
    for name, size in results["sizes"].items():
        spans = [best_span(size, end) for end in results["ends"]]
        tokens = [span.mean * end * size["unit_tokens"] for span, end in zip(spans, results["ends"], strict=True)]
        x = np.log([end * size["unit_tokens"] for end in results["ends"]])
        slope = np.polyfit(x, np.log(tokens), 1)[0]
        first, last = tokens[0] / 1e6, tokens[-1] / 1e6
        lines.append(f"{name}: the best span grows as tokens^{slope:.2f}, from {first:.2f}M to {last:.2f}M.")
    return "Growth with the length of training: " + " ".join(lines)


def spans_at_common_tokens(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return (size, tokens, best span in tokens) where the tokens are nearest to the shortest trunk's total."""
    common = min(size["tokens"] for size in results["sizes"].values())
    spans = []
    for name, size in results["sizes"].items():
        end = min(results["ends"], key=lambda end: abs(end * size["unit_tokens"] - common))
        tokens = end * size["unit_tokens"]
        spans.append((name, float(tokens), best_span(size, end).mean * tokens))
    return spans


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the best span of each size at the end, and at the same number of tokens."""
    last = results["ends"][-1]
    spans = []
    for name, size in results["sizes"].items():
        spans.append(f"{name}: {pages.format_percent_interval(best_span(size, last))}")
    common = "; ".join(
        f"{name}: {span / 1e6:.2f}M of {tokens / 1e6:.1f}M" for name, tokens, span in spans_at_common_tokens(results)
    )
    early = results["ends"][0]
    worse = []
    for name, size in results["sizes"].items():
        cells, raw = losses_by_cell(size, early), size["losses"][RAW.text][str(early)]
        widest = max(window for interval, window in cells if interval == 1)
        d = paired_difference(cells[1, widest], raw)
        worse.append(f"{name}: {pages.format_interval(d)}")
    return IndexRow(
        4,
        "Which interval and window?",
        "PMA, Fig. 5: wide windows hurt early and help late; the interval should grow with the size",
        f"best span at the same tokens: {common}; the widest mean at the first position, less raw: {'; '.join(worse)}",
        f"best span at the end, share of the tokens: {'; '.join(spans)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the mean loss over seeds minus raw of every cell: one figure per size, one panel per length of training."""
    figures = {}
    for name, size in results["sizes"].items():
        panels, lowest = [], 0.0
        for end in results["ends"]:
            raw = np.mean(size["losses"][RAW.text][str(end)])
            cells = losses_by_cell(size, end)
            table = np.array([[np.mean(cells.get((i, w), np.nan)) - raw for w in WINDOWS] for i in INTERVALS])
            intervals = [f"V = {i * size['unit_tokens'] / 1e3:.0f}k" for i in INTERVALS]
            title = f"{end * size['unit_tokens'] / 1e6:.2f}M tokens (raw {raw:.4f})"
            lowest = min(lowest, np.nanmin(table))
            panels.append(HeatMap(title, intervals, [str(w) for w in WINDOWS], table))
        title = f"{name}: held-out loss of means of N points, less raw (nats, below 0 better)"
        figure = draw_heat_maps(panels, title, maps_per_row=1, max_loss=max(-lowest, 0.01))
        figures[f"{name}.png"] = to_png(figure, PAGE_DPI)
    return figures


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
