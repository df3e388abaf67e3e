"""The page of the experiment: tables, the row of the index, and the figures.

All differences are of a run that started from the merge less the run that started from the last snapshot.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, judge

LAST, MERGED = "last", "merged"
POSITIONS = ("begin", "early", "end")  # before the first step, after an eighth, at the end


def difference(task: Mapping[str, Any], rates: tuple[str, str], position: str) -> MeanEstimate:
    """Estimate the loss from the merge less that from the last snapshot, each at its rate, over seeds and documents."""
    merged, last = (
        [seed[position] for seed in task["rates"][rate][start]]
        for rate, start in zip(rates, (MERGED, LAST), strict=True)
    )
    return difference_over_documents(merged, last, task["document_tokens"])


def best_rate(task: Mapping[str, Any], start: str) -> str:
    """Return the rate with the lowest mean loss at the end on the part `select`."""
    mean = {rate: np.mean([seed["select_end"] for seed in of[start]]) for rate, of in task["rates"].items()}
    return min(mean, key=mean.__getitem__)


def best_rates(task: Mapping[str, Any]) -> tuple[str, str]:
    """Return the best rate from the merge, and that from the last snapshot."""
    return best_rate(task, MERGED), best_rate(task, LAST)


def losses(task: Mapping[str, Any], rate: str, start: str, position: str) -> list[float]:
    """Return the loss of each seed, in nats per token."""
    return [sum(seed[position]) / sum(task["document_tokens"]) for seed in task["rates"][rate][start]]


def report(results: dict[str, Any]) -> str:
    """Format, for each size and task, the losses from the last snapshot and the differences of those from the merge."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts.append(f"### {name}")
        verdicts = judge_ends(size, margin)
        for title, task in size["tasks"].items():
            parts += [f"**{title.capitalize()}.**", format_task(task), describe_best(task, verdicts[title])]
    parts.append(
        "Losses in nats per token, in fine-tuning of bodies only; ± and intervals of gradient norms are over seeds, "
        "those of differences over seeds and documents. Rates are multiples of the trunk's. Roughness is the root mean "
        "square change of the log of the gradient norm from step to step, over the first 100 steps. The verdicts at "
        f"the end are tested over the tasks: equal within {margin:g} nats, lower or higher, each with at most 5% false "
        "findings (Benjamini and Hochberg). Intervals of single cells are not corrected."
    )
    return "\n\n".join(parts)


def format_task(task: Mapping[str, Any]) -> str:
    """Format the losses from the last snapshot at each rate, and the differences of those from the merge."""
    rows = []
    for rate, of in task["rates"].items():
        less = {at: pages.format_interval(difference(task, (rate, rate), at).interval()) for at in POSITIONS}
        begin, end = (pages.format_mean(losses(task, rate, LAST, at)) for at in ("begin", "end"))
        merged, last = ([seed["early_roughness"] for seed in of[start]] for start in (MERGED, LAST))
        rough = pages.format_difference(merged, last)
        rows.append([f"`x{rate}`", begin, less["begin"], less["early"], end, less["end"], rough])
    header = ["rate", "last, before the first step", "merge less last", "merge less last, after an eighth"]
    header += ["last, at the end", "merge less last", "roughness of the first gradient norms, merge less last"]
    return pages.format_table(header, rows)


def judge_ends(size: Mapping[str, Any], margin: float) -> dict[str, str]:
    """Say of each task how the loss from the merge ends against that from the last snapshot, each at its best rate."""
    ends = [difference(task, best_rates(task), "end") for task in size["tasks"].values()]
    words = {"equal": f"equal within {margin:g} nats", "higher": "the merge ends higher"}
    words |= {"lower": "the merge ends lower", "not shown": "no difference shown"}
    return {title: words[verdict] for title, verdict in zip(size["tasks"], judge(ends, margin), strict=True)}


def describe_best(task: Mapping[str, Any], verdict: str) -> str:
    """Say how the ends compare, each start at its own best rate, and on which text."""
    rates = best_rates(task)
    shown = pages.format_interval(difference(task, rates, "end").interval())
    text = task["text"]
    return (
        f"At the end, each at its best rate ({describe_rate(task, rates[0])} from the merge, "
        f"{describe_rate(task, rates[1])} from the last one; chosen on the part `select`), the merge less the last "
        f"snapshot: {shown} nats, {verdict}. Judged on {text['tokens']:,} tokens of {text['documents']} documents."
    )


def describe_rate(task: Mapping[str, Any], rate: str) -> str:
    """Name a rate, and say if a better one may lie outside of those that were tried."""
    tried = sorted(task["rates"], key=float)
    edge = {tried[0]: ", the lowest that was tried,", tried[-1]: ", the highest that was tried,"}.get(rate, "")
    return f"`x{rate}`{edge}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the differences at the start and at the end of each task."""
    margin, verdicts, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        ends = {title: difference(task, best_rates(task), "end") for title, task in size["tasks"].items()}
        each = [f"{title}: {verdict}" for title, verdict in judge_ends(size, margin).items()]
        verdicts.append(f"{name}, each start at its best rate: {'; '.join(each)}")
        differences = [f"{title} {pages.format_interval(end.interval())}" for title, end in ends.items()]
        effects.append(f"{name}, at the end, each on the held-out text of its task: {'; '.join(differences)} nats")
    return IndexRow(
        8,
        "PMA-init: is a merge the better start?",
        "A slightly lower initial loss, parity at the end (Fig. 6); smoother gradient norms (Fig. 7); gains in "
        "fine-tuning that could not be repeated at other sizes (Table 1)",
        ". ".join(verdicts),
        ". ".join(effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the differences of each task and rate, and the gradient norms of the first steps of the first seed."""
    panels, norms = [], []
    for name, size in results["sizes"].items():
        for title, task in size["tasks"].items():
            lines = []
            for rate in task["rates"]:
                intervals = [difference(task, (rate, rate), position).interval() for position in POSITIONS]
                lines.append(interval_line(f"rate x{rate}", [0.0, 1 / 8, 1.0], intervals))
            panels.append(LinePanel(f"{name}, {title}", "share of the tokens", lines, zero_line=True))
            rate = best_rate(task, LAST)
            series = {start: task["rates"][rate][start][0]["gradient_norms"] for start in (LAST, MERGED)}
            lines = [Line(start, list(range(1, len(y) + 1)), y) for start, y in series.items()]
            norms.append(LinePanel(f"{name}, {title}, rate x{rate}: gradient norm", "step", lines))
    return {
        "figure.png": to_png(draw_lines(panels, columns=2)),
        "gradient_norms.png": to_png(draw_lines(norms, columns=1)),
    }
