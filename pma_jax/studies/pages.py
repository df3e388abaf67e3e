"""Markdown generated from results: tables, intervals, and the generated section of a page.

The generated section is the text between the lines RESULTS_BEGIN and RESULTS_END. All other text of a page is written
by hand and kept.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.studies.statistics import MeanInterval, mean_interval, paired_difference

RESULTS_BEGIN, RESULTS_END = "<!-- results: made by the script, not by hand -->", "<!-- end of results -->"
INDEX_HEADER = ("question", "claim", "what we found", "effect (95% interval)")


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


def format_mean_percent(fractions: Sequence[float]) -> str:
    """Format the mean of fractions, one per seed, as a percentage with its confidence interval: `85% [81%, 89%]`."""
    return format_percent_interval(mean_interval(fractions))


def format_percent_interval(interval: MeanInterval) -> str:
    """Format a mean fraction as a percentage with its confidence interval: `85% [81%, 89%]`."""
    return f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


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


def format_index_table(folder: Path) -> str:
    """Format the table of the experiments in `folder` whose results.json has a row; each row links to a page."""
    rows = []
    for path in folder.glob("*/results.json"):
        if stored := json.loads(path.read_text()).get("row"):
            rows.append((IndexRow(**stored), path.parent.name))
    rows.sort(key=lambda pair: (pair[0].number, pair[1]))
    return format_table(
        INDEX_HEADER, ([f"[{r.question}]({name}/README.md)", r.claim, r.found, r.effect] for r, name in rows)
    )


def update_index(folder: Path) -> None:
    """Replace the generated section of FOLDER/README.md by the table of the experiments in `folder`."""
    path = folder / "README.md"
    path.write_text(replace_results(path.read_text(), format_index_table(folder)))


def to_choose_by(measured: dict[str, Any], key: str = "losses") -> Any:
    """Return the losses on the part `select`, by which the best is chosen, of an entry of results.json.

    Results of early versions, whose pages say that they were judged on other text, have only the losses to publish.
    """
    return measured.get(f"select_{key}", measured[key])


def describe_choice(measured: dict[str, Any], key: str = "losses") -> str:
    """Name the text of the losses that `to_choose_by` returns."""
    return "other held-out documents" if f"select_{key}" in measured else "the text on which it is reported"
