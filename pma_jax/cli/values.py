"""The values of options: functions that parse a text, as the `type` of an argparse option. Does not import JAX.

Each raises `argparse.ArgumentTypeError`, whose one line says what is wrong with the text.
"""

import argparse
import math
import string
from collections.abc import Callable
from decimal import Decimal

from pma_jax import config
from pma_jax.config.errors import UserError

_TOKEN_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def number(text: str, description: str, is_valid: Callable[[float], bool]) -> float:
    """Parse a number for which `is_valid` holds; `description` names such numbers in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
    return value


def snapshot_kind(text: str) -> str:
    """Parse a kind of snapshots: `point`, `block_mean` or `worker_<k>`."""
    try:
        return config.snapshot_kind(text).name
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def tokens(text: str) -> int:
    """Parse a whole number of tokens, such as 4.9e6, 300M or 20B."""
    number, unit = text, 1
    if text[-1:].upper() in _TOKEN_UNITS:
        number, unit = text[:-1], _TOKEN_UNITS[text[-1].upper()]
    try:
        count = Decimal(number) * unit
    except ArithmeticError:
        count = Decimal("NaN")
    # The bound comes first: making an integer of 1e999999999 would not end.
    if not (count.is_finite() and 0 <= count < 2**63 and count == int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens, such as 4.9e6, 300M or 20B")
    return int(count)


def positive_tokens(text: str) -> int:
    """Parse a number of tokens above 0."""
    count = tokens(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 tokens")
    return count


def host(text: str) -> tuple[int, ...]:
    """Parse the index of a host, such as 3; or in slices, of its slice and of it there, such as 1-3."""
    parts = text.split("-")
    if not (len(parts) <= 2 and all(part.isascii() and part.isdigit() for part in parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not the index of a host, such as 0, or of its slice and it, 1-3")
    return tuple(map(int, parts))


def share(text: str) -> float:
    """Parse a share above 0 and up to 1."""
    return number(text, "a share above 0 and up to 1, such as 0.2", lambda share: 0 < share <= 1)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    return number(text, "a number of seconds above 0", lambda seconds: 0 < seconds < math.inf)


def token_range(text: str) -> tuple[int | None, int | None]:
    """Parse a range of tokens A:B, of which one end may be open (None)."""
    first, colon, last = text.partition(":")
    if not colon or not (first or last):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of tokens, such as 2e6:6e6, 20B:40B, 20B: or :40B")
    start, end = (tokens(number) if number else None for number in (first, last))
    if start is not None and end is not None and start > end:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range: it ends before it starts")
    return start, end


def size(text: str) -> int:
    """Parse a size in bytes, such as 2GiB or 500MB."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip(string.ascii_letters)
    try:
        count = int(float(number) * units[text[len(number) :].upper()])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500MB") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 bytes")
    return count


def rate(text: str) -> int:
    """Parse bytes per second, such as 500MB/s."""
    if not text.endswith("/s"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 500MB/s or 2GiB/s")
    return size(text.removesuffix("/s"))


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def names(text: str) -> list[str]:
    """Parse names, separated by commas, each once."""
    names = [name(item.strip()) for item in text.split(",")]
    repeated = next((item for item in names if names.count(item) > 1), None)
    if repeated is not None:
        raise argparse.ArgumentTypeError(f"{repeated!r} is named twice")
    return names


def positives(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    return [positive(item) for item in text.split(",")]


def ends(text: str) -> list[tuple[float, bool]]:
    """Parse end points; each is a number of tokens or steps, or a percentage, and whether it is a percentage."""
    return [
        (number(item[:-1], "a percentage above 0% and up to 100%", lambda p: 0 < p <= 100), True)
        if item.endswith("%")
        else (tokens(item), False)
        for item in text.split(",")
    ]


def recipes(text: str) -> list[str]:
    """Parse recipes, separated by commas."""
    # Commas also separate the arguments of a recipe (lagfree:lag=0.5,order=1): a recipe starts with a letter and has no
    # "=" before its colon.
    recipes: list[str] = []
    for item in text.split(","):
        is_new = item[:1].isalpha() and "=" not in item.split(":")[0]
        if recipes and not is_new:
            recipes[-1] += f",{item}"
        else:
            recipes.append(item)
    return recipes


def name(text: str) -> str:
    """Parse a name: printable text that is not empty."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name: give printable text")
    return text


def parameter(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE, with the value as it is."""
    key, _, value = text.partition("=")
    if not (key and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as partition=gpu")
    return key, value


def setting(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, separator, value = text.partition("=")
    if not (key and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, such as rope_type=default")
    return key, value.lower()
