"""Markdown generated from results: tables, intervals, and the generated section of a page.

The generated section is what stands between the lines BEGIN and END. Everything else on a page is written by hand and
kept.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pma_jax.analysis.comparison import Difference, mean_interval, paired_difference

BEGIN, END = "<!-- results: made by the script, not by hand -->", "<!-- end of results -->"
INDEX_HEADER = ("question", "claim", "what we found", "effect (95% interval)")


@dataclasses.dataclass(frozen=True)
class IndexRow:
    """One experiment's row in the index of all experiments. results.json stores it under the key "row"."""

    number: int  # position in the index
    question: str
    claim: str  # of the source, with the number of its figure
    found: str  # whether the claim holds, in a sentence or two
    effect: str  # with its interval


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table; `|` inside a cell is escaped."""
    lines = [list(header), ["---"] * len(header), *([str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def format_interval(difference: Difference, digits: int = 4, unit: str = "") -> str:
    """Format a mean with its interval: `+0.0123 [+0.0101, +0.0145]`."""
    mean, low, high = (f"{x:+.{digits}f}{unit}" for x in (difference.mean, difference.low, difference.high))
    return f"{mean} [{low}, {high}]"


def format_difference(first: Sequence[float], second: Sequence[float], digits: int = 4) -> str:
    """Format the mean of first - second over pairs, with its interval."""
    return format_interval(paired_difference(first, second), digits)


def format_mean_share(shares: Sequence[float]) -> str:
    """Format the mean of shares over seeds, with its interval: `85% [81%, 89%]`."""
    return format_share_interval(mean_interval(shares))


def format_share_interval(difference: Difference) -> str:
    """Format a share with its interval: `85% [81%, 89%]`."""
    return f"{difference.mean:.0%} [{difference.low:.0%}, {difference.high:.0%}]"


def replace_results(page: str, results: str) -> str:
    """Return `page` with `results` as its generated section.

    Raises:
      ValueError: the page does not contain BEGIN and END exactly once each.
    """
    before, _, after = _split(page)
    return f"{before}{BEGIN}\n\n{results.strip()}\n\n{END}{after}"


def extract_results(page: str) -> str:
    """Return the generated section of `page`. Raises ValueError like `replace_results`."""
    return _split(page)[1].strip()


def _split(page: str) -> tuple[str, str, str]:
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(
            f"the page must contain {BEGIN!r} and {END!r} once each: add the missing line or remove the extra"
        )
    before, _, rest = page.partition(BEGIN)
    between, _, after = rest.partition(END)
    return before, between, after


def format_index(folder: Path) -> str:
    """Format the table of all experiments in `folder` whose results.json has a row, each with a link to its page."""
    rows = []
    for path in folder.glob("*/results.json"):
        if stored := json.loads(path.read_text()).get("row"):
            rows.append((IndexRow(**stored), path.parent.name))
    rows.sort(key=lambda pair: (pair[0].number, pair[1]))
    return format_table(
        INDEX_HEADER, ([f"[{r.question}]({name}/README.md)", r.claim, r.found, r.effect] for r, name in rows)
    )


def write_index(folder: Path) -> None:
    """Write the table of all experiments into the generated section of FOLDER/README.md."""
    path = folder / "README.md"
    path.write_text(replace_results(path.read_text(), format_index(folder)))
