"""Markdown generated from results: tables, intervals, and the generated section of a page.

The generated section is the text between the lines RESULTS_BEGIN and RESULTS_END. All other text of a page is written
by hand and kept.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.data.sampling import SELECT
from pma_jax.studies.statistics import (
    MeanEstimate,
    MeanInterval,
    deviation_interval,
    judge,
    mean_interval,
    paired_difference,
)

ARXIV = r"arXiv[ :]\d{4}\.\d{5}"  # an address of a paper, which is no figure
RESULTS_BEGIN, RESULTS_END = "<!-- results: made by the script, not by hand -->", "<!-- end of results -->"
SETTINGS = "Settings that the others stand on, chosen on tuning seeds and the part `select` of the held-out documents"
INDEX_HEADER = ("question", "claim", "what we found", "effect (95% interval)")
SETTINGS_HEADER = ("question", "what we found")


@dataclasses.dataclass(frozen=True)
class IndexRow:
    """One experiment's row in the table of all experiments. results.json stores it under the key "row"."""

    number: int  # position in the table
    question: str
    claim: str  # the paper's claim, with the number of its figure or section
    found: str  # the finding: whether the claim holds, in one or two sentences
    effect: str  # effect size with its confidence interval


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table; `|` inside a cell is escaped."""
    lines = [list(header), ["---"] * len(header), *([str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def format_interval(interval: MeanInterval, digits: int = 4, unit: str = "") -> str:
    """Format a mean with its confidence interval: `+0.0123 [+0.0101, +0.0145]`."""
    mean, low, high = (f"{x:+.{digits}f}{unit}" for x in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def format_difference(first: Sequence[float], second: Sequence[float], digits: int = 4) -> str:
    """Format the mean paired difference `first - second` with its confidence interval."""
    return format_interval(paired_difference(first, second), digits)


def format_percent_interval(interval: MeanInterval) -> str:
    """Format a mean fraction as a percentage with its confidence interval: `85% [81%, 89%]`."""
    return f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def describe_difference(estimate: MeanEstimate, margin: float, digits: int = 4) -> str:
    """Say what an estimate of the loss of one model less that of another shows, in words that claim no more.

    "Equal" needs the test of equivalence (TOST) within `margin` nats, which is that the 90% interval lies within it. A
    95% interval that contains 0 shows no difference, and says how large one may be.
    """
    return describe_differences([estimate], margin, digits)[0]


def describe_differences(estimates: Sequence[MeanEstimate], margin: float, digits: int = 4) -> list[str]:
    """Say what each of several estimates shows, as `describe_difference`, tested together (`statistics.judge`)."""
    words = []
    for estimate, verdict in zip(estimates, judge(estimates, margin), strict=True):
        interval = estimate.interval()
        if verdict == "equal":
            words.append(f"equal within {margin:g} nats: {format_interval(estimate.interval(0.9), digits)} (90%)")
        elif verdict == "not shown":
            half_width = interval.high - interval.mean
            words.append(f"no difference shown: {interval.mean:+.{digits}f} ± {half_width:.{digits}f} nats")
        else:
            words.append(f"{verdict} by {format_size(interval, digits)} nats")
    return words


def format_size(interval: MeanInterval, digits: int = 4) -> str:
    """Format the size of a difference whose direction the words say: `0.0123 [0.0101, 0.0145]`."""
    low, high = sorted((abs(interval.low), abs(interval.high)))
    return f"{abs(interval.mean):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def format_tokens(size: Mapping[str, Any], units: int) -> str:
    """Format units of a size, as `Study.describe_size` describes it, as millions of tokens: `3.15M`."""
    return f"{units * size['unit_tokens'] / 1e6:.2f}M"


def format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Format the mean of values, one per seed, with half the width of its confidence interval: `1.4310 ± 0.0021`."""
    interval = mean_interval(values)
    return f"{interval.mean:.{digits}f} ± {interval.high - interval.mean:.{digits}f}"


def format_deviation(values: Sequence[float], digits: int = 4) -> str:
    """Format the standard deviation of values, one per seed, with its confidence interval (chi-squared)."""
    interval = deviation_interval(values)
    return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def find_bare_figures(text: str) -> list[str]:
    """Return the figures of a text, numbers of 3 or more decimals, that have no interval.

    An interval follows its figure as `[low, high]` or `± half width`. Settings stand in code spans, and a margin
    follows "within".
    """
    number = r"[-+]?\d+\.\d+%?"
    known = (
        r"`[^`]*`",
        r"\]\([^)]*\)",  # the target of a link
        ARXIV,
        rf"within {number} nats",
        rf"(?:{number} )?\[{number}, {number}\]",
        rf"(?:{number} )?± ?{number}",
    )
    return re.findall(r"[-+]?\d+\.\d{3,}", re.sub("|".join(known), "", " ".join(text.split())))


def find_unknown_figures(page: str) -> list[str]:
    """Return the figures of a page's hand-written text that its results do not contain.

    A figure is a number of 3 or more decimals, a number of nats, a percentage other than that of the intervals, a count
    such as "5 of 10", or a number with its interval: the results must contain the two together, or their negatives.
    Code spans and margins are settings, and are ignored. Whether a figure is in the right sentence is not checked.
    """
    before, results, after = _split(page)
    prose = " ".join((before + after).split())
    text = re.sub(rf"`[^`]*`|\]\([^)]*\)|{ARXIV}|within \d+\.\d+ nats|95%", "", prose)
    figure = r"\d+\.\d{3,}|\d+\.\d+(?= nats)|\d+(?:\.\d+)?%"
    known = set(re.findall(r"\d+(?:\.\d+)?%|\d+\.\d+", results))
    unknown = [number for number in re.findall(figure, text) if number not in known]
    return unknown + [words for find in (_find_intervals, _find_counts) for words in sorted(find(text) - find(results))]


def _find_intervals(text: str) -> set[str]:
    """Return the numbers with an interval, `[low, high]` or `± half width`; the mean is made positive."""
    number, unit, text = r"([-+]?\d+(?:\.\d+)?)", "%?", " ".join(text.replace("`", "").split())
    found = set()
    for numbers in re.findall(rf"{number}{unit} \[{number}{unit}, {number}{unit}\]", text):
        mean, low, high = map(float, numbers)
        mean, low, high = max((mean, low, high), (-mean, -high, -low))
        found.add(f"{mean} [{low}, {high}]")
    widths = re.findall(rf"{number} ?± ?{number}", text)
    return found | {f"{abs(float(mean))} ± {float(width)}" for mean, width in widths}


def _find_counts(text: str) -> set[str]:
    """Return the counts, such as "5 of 10"."""
    return {f"{some} of {all_}" for some, all_ in re.findall(r"\b(\d+) of (?:the )?(\d+)\b", " ".join(text.split()))}


def replace_results(page: str, results: str) -> str:
    """Return `page` with `results` as its generated section.

    Raises:
        UserError: The page does not contain RESULTS_BEGIN and RESULTS_END exactly once each.
    """
    before, _, after = _split(page)
    return f"{before}{RESULTS_BEGIN}\n\n{results.strip()}\n\n{RESULTS_END}{after}"


def extract_results(page: str) -> str:
    """Return the generated section of `page`.

    Raises:
        UserError: The page does not contain RESULTS_BEGIN and RESULTS_END exactly once each.
    """
    return _split(page)[1].strip()


def _split(page: str) -> tuple[str, str, str]:
    if page.count(RESULTS_BEGIN) != 1 or page.count(RESULTS_END) != 1:
        raise UserError(
            f"the page must contain {RESULTS_BEGIN!r} and {RESULTS_END!r} once each: add the missing line, or "
            "remove the extra one"
        )
    before, _, rest = page.partition(RESULTS_BEGIN)
    between, _, after = rest.partition(RESULTS_END)
    return before, between, after


def read_index(folder: Path) -> dict[str, dict[str, IndexRow]]:
    """Return the rows of the experiments in `folder`, in their order: by the text that they were judged on, and name.

    Only results of one text stand in one table.
    """
    rows: list[tuple[str, int, str, IndexRow]] = []
    for path in folder.glob("*/results.json"):
        results = json.loads(path.read_text())
        if stored := results.get("row"):
            row = IndexRow(**stored)
            rows.append((name_text(results["made"]), row.number, path.parent.name, row))
    by_text: dict[str, dict[str, IndexRow]] = {}
    for text, _, name, row in sorted(rows, key=lambda row: row[:3]):
        by_text.setdefault(text, {})[name] = row
    return by_text


def format_index(folder: Path) -> str:
    """Format a table of the experiments in `folder` per text that they were judged on; each row links to a page."""
    sections = []
    for text, rows in read_index(folder).items():
        linked = {f"[{row.question}]({name}/README.md)": row for name, row in rows.items()}
        if text.startswith(SETTINGS):
            table = format_table(SETTINGS_HEADER, ([link, row.found] for link, row in linked.items()))
        else:
            table = format_table(
                INDEX_HEADER, ([link, row.claim, row.found, row.effect] for link, row in linked.items())
            )
        sections.append(f"**{text}.**\n\n{table}")
    return "\n\n".join(sections)


def format_summary(folder: Path) -> str:
    """Format what the experiments in `folder` found, for a page beside it; settings are no findings."""
    return "\n".join(
        f"- [{row.question}]({folder.name}/{name}/README.md) {row.found} ({row.effect})."
        for text, rows in read_index(folder).items()
        if not text.startswith(SETTINGS)
        for name, row in rows.items()
    )


def name_text(made: Mapping[str, Any]) -> str:
    """Name the text that results were made on; results on the part `select` are settings, which others stand on."""
    name = f"{made['text']['corpus']} ({made['text']['corpus_digest'][:12]})"
    return (
        f"{SETTINGS} of {name}" if made["part"] == SELECT else f"Judged on a sample of all held-out documents of {name}"
    )


def update_index(folder: Path) -> None:
    """Replace the generated sections of FOLDER/README.md and of the README.md beside FOLDER."""
    for path, text in ((folder / "README.md", format_index), (folder.parent / "README.md", format_summary)):
        if path.exists():
            path.write_text(replace_results(path.read_text(), text(folder)))


def seed_losses(measured: Mapping[str, Any], text: str, end: int) -> list[float]:
    """Return the loss of a merge at a unit, one per seed, from what `Study.document_losses_over_seeds` returned."""
    tokens = sum(measured["document_tokens"])
    return [sum(nats_D) / tokens for nats_D in measured["nats"][text][str(end)]]
