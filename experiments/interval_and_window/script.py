"""Which interval V and window N? A grid at several lengths of training, and how the best span scales (PMA, Figure 5).

Command:   python experiments/interval_and_window/script.py --runs runs/science --jobs 2
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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
from pma_jax.studies.parabola import find_vertices, lowest_mean
from pma_jax.studies.planned import Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import (
    MeanEstimate,
    MeanInterval,
    difference_over_documents,
    judge,
    statistic_over_documents,
)
from pma_jax.studies.study import Study
from pma_jax.studies.targets import horizon_units

DEFAULTS = {"sizes": ("science_small", "science_long", "science_moe"), "seeds": tuple(range(8))}
INTERVALS = (1, 2, 4, 8)  # in units: every snapshot of the trunk, every second, ...
WINDOWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
FEW_AND_MANY = (3, 16)  # PMA's Figure 5 compares 3 with 15
# Windows on either side of the best one that a parabola is fitted to; spans and figures have the first.
NEIGHBOURS = (2, 1, 3)
# The span in two ways, and the intervals that each takes off N V. One interval more or less changes powers of tokens.
OLDEST_TO_NEWEST = 1
SPANS = {"(N − 1) V": OLDEST_TO_NEWEST, "N V": 0}


def merges() -> list[Cell]:
    """Return the raw model, and the mean of every window and interval."""
    return [RAW, *(Cell("sma", window, interval) for interval in INTERVALS for window in WINDOWS)]


def trunk_runs(study: Study, size: str, part: str) -> list[PlannedRun]:
    """List the trunks of a size; the best merge is chosen on half of the study's tokens of the part `select`."""
    evaluation = PlannedEvaluation(tuple(merges()), tuple(horizon_units(study).values()), part)
    tokens = study.evaluation_tokens // 2 if part == SELECT else 0
    return [PlannedRun(size, seed, (), None, (evaluation,), 0, tokens) for seed in study.seeds]


def plan(study: Study) -> Plan:
    """List the trunks of all sizes."""
    return [run for size in study.sizes for part in (REPORT, SELECT) for run in trunk_runs(study, size, part)]


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of every mean of N points, V apart, at a quarter, half and the end of each trunk."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the losses of a size on documents of the part `report`, and their means on the part `select`."""
    get_trunk, at = functools.partial(study.trunk, size), list(horizon_units(study).values())
    reading = trunk_runs(study, size, SELECT)[0].study(study)
    description = study.describe_size(size)
    is_mixture = study.trunk_config(size, study.seeds[0]).model.experts > 0
    interval, window = recommend_interval_and_window(description["active_parameters"], is_mixture)
    return description | {
        "ends": horizon_units(study),
        "select": reading.losses_over_seeds(get_trunk, merges(), at, SELECT),
        "rule": {"interval_tokens": interval, "window": window},
        **study.document_losses_over_seeds(get_trunk, merges(), at, REPORT),
    }


def difference(size: Mapping[str, Any], first: str, second: str, end: int) -> MeanEstimate:
    """Estimate the loss of one merge less that of another, over seeds and documents."""
    a, b = (size["nats"][text][str(end)] for text in (first, second))
    return difference_over_documents(a, b, size["document_tokens"])


def available(size: Mapping[str, Any], end: int, interval: int) -> dict[int, str]:
    """Return the texts of the means at an interval by their windows, as far as there are enough snapshots."""
    texts = {window: Cell("sma", window, interval).text for window in WINDOWS}
    return {window: text for window, text in texts.items() if str(end) in size["nats"].get(text, {})}


def best_window(size: Mapping[str, Any], end: int, interval: int) -> int:
    """Return the window with the lowest mean loss on the part `select` at an interval."""
    texts = available(size, end, interval)
    return min(texts, key=lambda window: sum(size["select"][texts[window]][str(end)]))


def window_nats(size: Mapping[str, Any], end: int, interval: int = 1) -> np.ndarray:
    """Return the summed losses of the means at an interval, of all windows, seeds and documents: [W, S, D]."""
    return np.array([size["nats"][text][str(end)] for text in available(size, end, interval).values()])


def best_span(size: Mapping[str, Any], end: int, interval: int = 1, less: int = 0) -> MeanInterval:
    """Estimate the best span (N - `less`) V, as a share of the tokens, over seeds and documents.

    It is where a parabola in log N, through the losses of each seed around the lowest mean, is lowest. The losses are
    those on the part `report`: no model is chosen by the span.
    """
    x, nats_WSD = np.log(list(available(size, end, interval))), window_nats(size, end, interval)
    lowest = lowest_mean(nats_WSD)
    return statistic_over_documents(
        lambda losses_WS: (np.exp(find_vertices(x, losses_WS, lowest, NEIGHBOURS[0])[0]) - less) * interval / end,
        nats_WSD,
        size["document_tokens"],
    ).interval()


def growth(
    size: Mapping[str, Any], intervals: Sequence[int], less: int = 0, neighbours: int = NEIGHBOURS[0]
) -> MeanInterval:
    """Estimate the exponent p of the best span against the tokens trained, span = tokens^p, over seeds and documents.

    Args:
        size: The results of a size.
        intervals: The interval V at each length, in units.
        less: Intervals to take off the span N V: 1 for the distance from the oldest snapshot to the newest one.
        neighbours: See `NEIGHBOURS`.
    """
    units, each = list(size["ends"].values()), list(zip(size["ends"].values(), intervals, strict=True))
    windows = [np.log(list(available(size, end, interval))) for end, interval in each]
    nats = [window_nats(size, end, interval) for end, interval in each]
    lowest, starts = [lowest_mean(of) for of in nats], np.cumsum([len(of) for of in nats])[:-1]

    def exponents(losses_XS: np.ndarray) -> np.ndarray:
        of_ends = zip(windows, np.split(losses_XS, starts), lowest, strict=True)
        best_ES = np.exp([find_vertices(x, losses_WS, at, neighbours)[0] for x, losses_WS, at in of_ends])
        spans_ES = (best_ES - less) * np.array(intervals)[:, None]
        return np.polyfit(np.log(units), np.log(spans_ES), 1)[0]

    return statistic_over_documents(exponents, np.concatenate(nats), size["document_tokens"]).interval()


def describe_growth(name: str, size: Mapping[str, Any]) -> list[list[str]]:
    """Return rows with the power of the tokens with which the best span grows, at a fixed and at a growing interval."""
    ends = size["ends"].values()
    growing = tuple(end // min(ends) for end in ends)
    ways = {"fixed": (1,) * len(growing), f"growing, V × {', '.join(map(str, growing))}": growing}
    rows = []
    for words, intervals in ways.items():
        if all(available(size, *each) for each in zip(ends, intervals, strict=True)):  # a short run has too few
            rows.append([name, words])
            for less in SPANS.values():
                first, *others = (format_power(growth(size, intervals, less, n)) for n in NEIGHBOURS)
                rows[-1] += [first, " and ".join(others)]
    return rows


def report(results: dict[str, Any]) -> str:
    """Format the best cells and spans, the cost of coarser intervals, and what the paper's rule recommends."""
    margin = results["made"]["margin"]
    each = [(name, size, end) for name, size in results["sizes"].items() for end in size["ends"].values()]
    starts = [[name, pages.format_tokens(size, end)] for name, size, end in each]

    def table(header: Sequence[str], describe: Callable[[Mapping[str, Any], int], list[str]]) -> str:
        rows = [[*start, *describe(size, end)] for start, (_, size, end) in zip(starts, each, strict=True)]
        return pages.format_table(["size", "tokens", *header], rows)

    coarser = [f"V × {i}" for i in INTERVALS[1:]]
    best = ["best N", "raw − best", "equal to it", *(f"best {span}" for span in SPANS)]
    rules = "; ".join(recommended_span(name, size) for name, size in results["sizes"].items())
    grown = [row for name, size in results["sizes"].items() for row in describe_growth(name, size)]
    powers = [text for span in SPANS for text in (span, f"{span}, other fits")]
    return "\n\n".join(
        [
            table(best, functools.partial(describe_best, margin=margin)),
            "Plain means of N points at the finest interval; nats per token, mean over seeds, with its 95% interval "
            "over seeds and documents. The best N was chosen on the part `select`; those that are equal to it within "
            f"{margin:g} nats are tested together (two one-sided tests, at most 5% false ones). The best span, as a "
            "share of the tokens, is where a parabola through the losses of each seed on the part `report` is lowest; "
            "its interval is over seeds and documents (jackknife). (N − 1) V is the distance from the oldest snapshot "
            "to the newest, and N V one interval more. "
            f"{compare_few_with_many(results)} "
            f"PMA's rule of thumb, extrapolated to these sizes, recommends {rules}.",
            "Cost of a coarser interval against the finest one, each at its best N (nats, positive: worse):",
            table(coarser, describe_coarse),
            "The best span (N − 1) V at each interval that has 8 snapshots, as a share of the tokens (edge: the lowest "
            "mean is that of the fewest or the most snapshots):",
            table([f"V × {i}" for i in INTERVALS], describe_spans),
            "Cost of fewer snapshots over the same span N V, a quarter of the tokens (nats, positive: worse than those "
            "at the finest interval):",
            table(coarser, describe_fewer),
            "The power of the tokens with which the best span grows, from these three nested lengths of one run, over "
            f"seeds and documents; the fit has {NEIGHBOURS[0]} windows on either side of the best one, the others "
            f"{' and '.join(map(str, NEIGHBOURS[1:]))}:",
            pages.format_table(["size", "interval V", *powers], grown),
        ]
    )


def format_power(interval: MeanInterval) -> str:
    """Format an exponent with its interval."""
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def describe_best(size: Mapping[str, Any], end: int, margin: float) -> list[str]:
    """Return the best window, its gain over raw, the windows that are equal to it, and the best span."""
    texts, best = available(size, end, 1), best_window(size, end, 1)
    others = {window: difference(size, text, texts[best], end) for window, text in texts.items() if window != best}
    verdicts = judge(list(others.values()), margin)
    equal = [str(window) for window, verdict in zip(others, verdicts, strict=True) if verdict == "equal"]
    return [
        str(best),
        pages.format_interval(difference(size, RAW.text, texts[best], end).interval()),
        ", ".join(equal) or "none",
        *(pages.format_percent_interval(best_span(size, end, 1, less)) for less in SPANS.values()),
    ]


def compare_few_with_many(results: dict[str, Any]) -> str:
    """Compare few snapshots with many at the end of each size, as in PMA's Figure 5."""
    few, many = (Cell("sma", window).text for window in FEW_AND_MANY)
    shown = []
    for name, size in results["sizes"].items():
        end = max(size["ends"].values())
        if str(end) in size["nats"].get(many, {}):
            shown.append(f"{pages.format_interval(difference(size, few, many, end).interval())} ({name})")
    return f"At the end, N = {FEW_AND_MANY[0]} less N = {FEW_AND_MANY[1]}: {', '.join(shown) or 'too few snapshots'}."


def describe_coarse(size: Mapping[str, Any], end: int) -> list[str]:
    """Return what each coarser interval costs against the finest one, each at its best window."""
    finest, cells = available(size, end, 1)[best_window(size, end, 1)], []
    for interval in INTERVALS[1:]:
        if texts := available(size, end, interval):
            window = best_window(size, end, interval)
            cost = pages.format_interval(difference(size, texts[window], finest, end).interval())
            cells.append(f"{cost} (N = {window})")
        else:
            cells.append("")
    return cells


def describe_fewer(size: Mapping[str, Any], end: int) -> list[str]:
    """Return what snapshots at each coarser interval cost against those at the finest one, over the same span."""
    span, cells = end // 4, []
    for interval in INTERVALS[1:]:
        texts, window = available(size, end, interval), span // interval
        if window in texts and span in available(size, end, 1):
            estimate = difference(size, texts[window], available(size, end, 1)[span], end)
            cells.append(f"{pages.format_interval(estimate.interval())} (N = {window} for {span})")
        else:
            cells.append("")
    return cells


def describe_spans(size: Mapping[str, Any], end: int) -> list[str]:
    """Return the best span at every interval that has means of up to 8 snapshots, as shares of the tokens."""
    cells = []
    for interval in INTERVALS:
        if 8 in (windows := available(size, end, interval)):
            is_at_edge = lowest_mean(window_nats(size, end, interval)) in (0, len(windows) - 1)
            span = pages.format_percent_interval(best_span(size, end, interval, OLDEST_TO_NEWEST))
            cells.append(f"{span} (edge)" if is_at_edge else span)
        else:
            cells.append("")
    return cells


def recommended_span(name: str, size: Mapping[str, Any]) -> str:
    """Format the span N V that `recommend_interval_and_window` recommends."""
    span = size["rule"]["window"] * size["rule"]["interval_tokens"]
    return f"{span / 1e6:.1f}M tokens ({name}, {span / size['active_parameters']:.0f} per parameter)"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize how the best span of each size grows, the widest mean early in training, and the span at the end."""
    sizes = results["sizes"]
    first, last = (next(iter(sizes.values()))["ends"][at] for at in ("a quarter", "all"))

    def each(describe: Callable[[Mapping[str, Any]], str]) -> str:
        return ", ".join(f"{name} {describe(size)}" for name, size in sizes.items())

    def power(span: str) -> str:
        return each(lambda size: format_power(growth(size, (1,) * len(size["ends"]), SPANS[span])))

    def early(size: Mapping[str, Any]) -> str:
        widest = list(available(size, first, 1).values())[-1]
        return pages.format_interval(difference(size, widest, RAW.text, first).interval())

    return IndexRow(
        4,
        "Which interval and window?",
        "PMA, Fig. 5: wide windows hurt early and help late; the interval should grow with the size",
        "with a fixed interval, the best span, from the oldest snapshot to the newest, grows as the tokens to the "
        f"power: {power('(N − 1) V')}; with one interval more, N × V: {power('N V')}; "
        f"the mean of all snapshots − raw, at a quarter of the tokens: {each(early)} nats",
        "best span at the end, from the oldest snapshot to the newest, share of the tokens: "
        + each(lambda s: pages.format_percent_interval(best_span(s, last, 1, OLDEST_TO_NEWEST))),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the mean loss over seeds less raw of every cell: one figure per size, one panel per length of training."""
    figures = {}
    for name, size in results["sizes"].items():
        panels, lowest = [], 0.0
        for end in size["ends"].values():
            raw = float(np.mean(pages.seed_losses(size, RAW.text, end)))
            table = np.full((len(INTERVALS), len(WINDOWS)), np.nan)
            for i, interval in enumerate(INTERVALS):
                for window, text in available(size, end, interval).items():
                    table[i, WINDOWS.index(window)] = np.mean(pages.seed_losses(size, text, end)) - raw
            intervals = [f"V = {i * size['unit_tokens'] / 1e3:.0f}k" for i in INTERVALS]
            lowest = min(lowest, np.nanmin(table))
            panels.append(
                HeatMap(f"{pages.format_tokens(size, end)} tokens", intervals, [str(w) for w in WINDOWS], table)
            )
        title = f"{name}: held-out loss of means of N points, less raw (nats, below 0 better)"
        figure = draw_heat_maps(panels, title, maps_per_row=1, max_loss=max(-lowest, 0.01))
        figures[f"{name}.png"] = to_png(figure, PAGE_DPI)
    return figures


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
