"""Progress of a command: a bar on a terminal, and a line now and then in a log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from pma_jax.runtime.formatting import format_duration, format_storage_bytes

Progress = Callable[[int, int], None]  # what is done, of how much
LINE_SECONDS = 30.0  # between lines in a log


@contextlib.contextmanager
def show_progress(unit: str, is_shown: bool = True) -> Iterator[Progress | None]:
    """Show the progress of a block on standard error; yield the function that reports it, or None if it is not shown.

    Args:
        unit: What is counted, such as "merges"; "bytes" are formatted as sizes.
        is_shown: Whether this process shows it.
    """
    if not is_shown:
        yield None
    elif not sys.stderr.isatty():
        yield _make_line_printer(unit)
    else:
        # Imported here, because it takes longer than a small merge's own imports.
        from rich import progress as bars
        from rich.console import Console

        counts = (bars.DownloadColumn(), bars.TransferSpeedColumn())
        if unit != "bytes":
            counts = (bars.MofNCompleteColumn(), bars.TextColumn(unit))
        columns = (bars.BarColumn(), *counts, bars.TimeRemainingColumn())
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _make_line_printer(unit: str) -> Progress:
    started = printed = time.monotonic()

    def print_line(done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if 0 < done < total and now - printed >= LINE_SECONDS:
            printed = now
            print(describe_progress(unit, done, total, now - started), file=sys.stderr, flush=True)

    return print_line


def describe_progress(unit: str, done: int, total: int, seconds: float) -> str:
    """Format progress as a line: "3 of 16 merges, about 2 min left"."""
    amounts = [format_storage_bytes(n) if unit == "bytes" else f"{n:,}" for n in (done, total)]
    left = format_duration(seconds * (total - done) / done, digits=2)
    return f"{amounts[0]} of {amounts[1]}{'' if unit == 'bytes' else f' {unit}'}, about {left} left"
