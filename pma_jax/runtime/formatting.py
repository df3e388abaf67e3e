"""Numbers with units (counts, bytes, durations), losses and tables, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

_COUNT_UNITS = (("Y", 1e24), ("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_POWERS_OF_2 = ((" GiB", 2**30), (" MiB", 2**20), (" KiB", 2**10))
_POWERS_OF_10 = ((" TB", 1e12), (" GB", 1e9), (" MB", 1e6), (" kB", 1e3))
_DURATION_UNITS = ((" h", 3.6e6), (" min", 6e4), (" s", 1e3))


def format_count(number: float, digits: int = 4) -> str:
    """Format a count (of parameters, tokens or FLOPs) to `digits` significant digits: 1.5B, 2M, 3k."""
    return _format_scaled(number, digits, _COUNT_UNITS, "")


def format_memory_bytes(number_bytes: float, digits: int = 4) -> str:
    """Format bytes of memory in powers of 2: 1.5 GiB."""
    return _format_scaled(number_bytes, digits, _POWERS_OF_2, " B")


def format_storage_bytes(number_bytes: float, digits: int = 4) -> str:
    """Format bytes of storage or network traffic in powers of 10: 1.5 GB."""
    return _format_scaled(number_bytes, digits, _POWERS_OF_10, " B")


def format_duration(seconds: float, digits: int = 3) -> str:
    """Format a duration in the largest unit that fits: 1.5 h, 2 min, 3 s, 4 ms."""
    return _format_scaled(seconds * 1e3, digits, _DURATION_UNITS, " ms")


def format_loss(evaluated: Mapping[str, Any]) -> str:
    """Format the keys loss and standard_error, if it is known: 1.2345 ± 0.0123."""
    return format_estimate(evaluated["loss"], evaluated.get("standard_error"))


def format_estimate(value: float, standard_error: float | None) -> str:
    """Format a number and its standard error, if it is known: 1.2345 ± 0.0123."""
    return f"{value:.4f}" + ("" if standard_error is None else f" ± {standard_error:.4f}")


def format_difference(compared: Mapping[str, Any]) -> str:
    """Format the keys difference and difference_standard_error, if they are known: -0.1234 ± 0.0012."""
    if compared.get("difference") is None:
        return "-"
    error = compared.get("difference_standard_error")
    return f"{compared['difference']:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def format_text(text: Mapping[str, Any]) -> str:
    """Format how held-out text was sampled (`data.sampling.Sample.describe`)."""
    return f"{text['tokens']:,} tokens of {text['documents']:,} documents of the part {text['part']}"


def _format_scaled(number: float, digits: int, units: tuple[tuple[str, float], ...], base_unit: str) -> str:
    unit, size = next(((unit, size) for unit, size in units if number >= size), (base_unit, 1))
    value = number / size
    # If the integer part has more than `digits` digits, `g` would switch to scientific notation.
    return f"{value:.0f}{unit}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}{unit}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of a table: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
