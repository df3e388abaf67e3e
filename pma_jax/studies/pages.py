"""Markdown that is made from results: tables, intervals, and the part of a page between two marks.

A page keeps what people wrote; what stands between BEGIN and END is replaced by whatever made the results.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pma_jax.analysis.comparison import Difference, mean_interval, paired_difference

BEGIN, END = "<!-- results: made by the script, not by hand -->", "<!-- end of results -->"
INDEX_HEADER = ("question", "claim", "what we found", "effect (95% interval)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One question on the page of all: what a reader cites."""

    number: int  # its place on the page
    question: str
    claim: str  # of the source, with the figure's number
    found: str  # holds, holds in part, does not hold; in a sentence or two
    effect: str  # with its interval


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [list(header), ["---"] * len(header), *([str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def interval(difference: Difference, digits: int = 4, unit: str = "") -> str:
    """`+0.0123 [+0.0101, +0.0145]`."""
    mean, low, high = (f"{x:+.{digits}f}{unit}" for x in (difference.mean, difference.low, difference.high))
    return f"{mean} [{low}, {high}]"


def paired(first: Sequence[float], second: Sequence[float], digits: int = 4) -> str:
    """`interval` of the mean of first - second over pairs."""
    return interval(paired_difference(first, second), digits)


def percent(shares: Sequence[float]) -> str:
    """The mean of shares over seeds, with its interval: `85% [81%, 89%]`."""
    return percent_interval(mean_interval(shares))


def percent_interval(difference: Difference) -> str:
    """`interval` of shares: `85% [81%, 89%]`."""
    return f"{difference.mean:.0%} [{difference.low:.0%}, {difference.high:.0%}]"


def with_results(page: str, report: str) -> str:
    """`page` with `report` between its marks. Raises ValueError when it does not have each mark once."""
    before, _, after = _parts(page)
    return f"{before}{BEGIN}\n\n{report.strip()}\n\n{END}{after}"


def results_of(page: str) -> str:
    """What stands between the marks of `page`. Raises ValueError as `with_results`."""
    return _parts(page)[1].strip()


def _parts(page: str) -> tuple[str, str, str]:
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r}, once each")
    before, _, rest = page.partition(BEGIN)
    between, _, after = rest.partition(END)
    return before, between, after


def index(folder: Path) -> str:
    """The table of all questions: of every FOLDER/*/results.json that has a row, by number, each with a link."""
    found = []
    for path in sorted(folder.glob("*/results.json")):
        stored = json.loads(path.read_text()).get("row")
        if stored:
            found.append((Row(**stored), path.parent.name))
    found.sort(key=lambda pair: pair[0].number)
    return table(INDEX_HEADER, ([f"[{r.question}]({name}/README.md)", r.claim, r.found, r.effect] for r, name in found))


def write_index(folder: Path) -> None:
    """Put the table of all questions between the marks of FOLDER/README.md."""
    path = folder / "README.md"
    path.write_text(with_results(path.read_text(), index(folder)))
