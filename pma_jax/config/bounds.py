"""Ranges of numbers, as metadata of type annotations: `Annotated[int, Range(1)]`.

Both the keys of a configuration and the fields of the JSON files of a run are annotated with them.
"""

import dataclasses
import math
from typing import Annotated

NON_EMPTY = "not empty"  # metadata of a text that must not be empty
MAX_INTEGER = 2**63 - 1  # the largest int64; larger counts of tokens, steps or bytes do not exist


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`. A NaN is in no range, an infinity only in one with an infinite end.

    Attributes:
        low: Smallest number.
        high: Largest number.
        excludes_low: Whether `low` itself is excluded.
        excludes_high: Whether `high` itself is excluded.
    """

    low: float = -math.inf
    high: float = MAX_INTEGER
    excludes_low: bool = False
    excludes_high: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.excludes_low else number >= self.low
        return above and (number < self.high if self.excludes_high else number <= self.high)

    def __str__(self) -> str:
        """Format the range for a message: "above 0 and below 1", "from 1 to 4,096"."""
        if not self.excludes_low and not self.excludes_high:
            return f"from {_format(self.low)} to {_format(self.high)}"
        low = f"above {_format(self.low)}" if self.excludes_low else f"{_format(self.low)} or more"
        high = f"below {_format(self.high)}" if self.excludes_high else f"at most {_format(self.high)}"
        return f"{low} and {high}"


# Types of configuration keys; `config.rules` checks their ranges. The upper ends lie far beyond any real run: they turn
# a mistyped exponent into a message instead of an allocation that the machine cannot make.
MAX_TOKENS = 10**16
MAX_FLOAT32 = 3e38  # larger numbers are infinite in float32
TokenCount = Annotated[int, Range(0, MAX_TOKENS)]
PositiveTokens = Annotated[int, Range(1, MAX_TOKENS)]
Width = Annotated[int, Range(1, 2**24)]  # of a layer, a table or a head
Number = Annotated[int, Range(1, 10**6)]  # of layers, heads, snapshots, states
NumberOrNone = Annotated[int, Range(0, 10**6)]
Sequences = Annotated[int, Range(1, 2**30)]
PositiveFloat = Annotated[float, Range(0, MAX_FLOAT32, excludes_low=True)]
NonNegativeFloat = Annotated[float, Range(0, MAX_FLOAT32)]
DecayRate = Annotated[float, Range(0, 1, excludes_high=True)]
AxisSize = Annotated[int, Range(-1, 2**20)]
Text = Annotated[str, NON_EMPTY]


def _format(number: float) -> str:
    if number == MAX_INTEGER:
        return "2^63 - 1"
    if isinstance(number, int) and number >= 2**20 and number.bit_count() == 1:
        return f"2^{number.bit_length() - 1}"
    return f"{number:,}" if isinstance(number, int) and abs(number) < 10**10 else f"{number:g}".replace("e+", "e")
