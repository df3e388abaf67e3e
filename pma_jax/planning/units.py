"""Numbers as people read them: counts, bytes, times, to so many digits."""

from collections.abc import Sequence

_COUNTS = (("Y", 1e24), ("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
_POWERS_OF_2 = ((" GiB", 2**30), (" MiB", 2**20), (" KiB", 2**10))
_POWERS_OF_10 = ((" TB", 1e12), (" GB", 1e9), (" MB", 1e6), (" kB", 1e3))
_TIMES = ((" h", 3.6e6), (" min", 6e4), (" s", 1e3))


def count(number: float, digits: int = 4) -> str:
    """1.5B, 2M, 3k: parameters, tokens, FLOPs."""
    return _scaled(number, digits, _COUNTS, "")


def memory(number_bytes: float, digits: int = 4) -> str:
    """Bytes as chips' memory is given, in powers of 2."""
    return _scaled(number_bytes, digits, _POWERS_OF_2, " B")


def data(number_bytes: float, digits: int = 4) -> str:
    """Bytes as storage and networks are given, in powers of 10."""
    return _scaled(number_bytes, digits, _POWERS_OF_10, " B")


def duration(seconds: float, digits: int = 3) -> str:
    """1.5 h, 2 min, 3 s, 4 ms."""
    return _scaled(seconds * 1e3, digits, _TIMES, " ms")


def _scaled(number: float, digits: int, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    unit, size = next(((unit, size) for unit, size in units if number >= size), (smallest, 1))
    value = number / size
    # To fewer digits than the integer has, `g` would turn to powers of ten.
    return f"{value:.0f}{unit}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}{unit}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of a table: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
