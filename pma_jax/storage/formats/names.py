"""Parse the step, token count and stage from names of checkpoints and revisions, and expand brace patterns.

Public suites write training progress into directory and branch names, for example `stage1-step140000-tokens294B`.
"""

import itertools
import re

from pma_jax.config.errors import UserError

_STEP = re.compile(r"(?:^|[^a-z])(?:step|iter|ckpt)[-_]?(\d+)(k?)(?![a-z0-9])", re.IGNORECASE)
# A number with a unit at the end of a name is a token count after "tokens" ("tokens294B"), right after a step
# ("step1000-4B"), or with a final T for tokens ("-2BT": 2 billion). Otherwise it is a model size ("OLMo-1B").
_TOKENS = re.compile(
    r"(?:tokens[-_]?|[-_](?=[\d.]+[KMBT]T$)|step[-_]?\d+k?[-_])(\d+(?:\.\d+)?)([KMBT])T?$", re.IGNORECASE
)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STAGE = re.compile(r"(?:stage|ingredient|phase|run)-?\d+", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_MAX_EXPANSIONS = 10_000


def progress_from_name(name: str) -> tuple[int | None, int | None]:
    """Parse (step, tokens), None if absent, from a name such as stage1-step140000-tokens294B or step-001000-2BT."""
    step, tokens = _STEP.search(name), _TOKENS.search(name)
    return (
        int(step[1]) * (1000 if step[2] else 1) if step else None,
        round(float(tokens[1]) * _UNITS[tokens[2].upper()]) if tokens else None,
    )


def stage_from_name(name: str) -> str:
    """Parse the training stage or parallel run from a name, for example "stage2 ingredient3"; "" if absent."""
    return " ".join(_STAGE.findall(name))


def expand_braces(pattern: str) -> list[str]:
    """Expand {first..last}, {first..last..step} and {x,y,z} in a name; braces cannot be nested.

    Ranges must ascend. Their numbers are expanded without leading zeros: {08..10} gives 8, 9 and 10.

    Raises:
        UserError: A range is empty or has step 0, or the pattern expands to more than 10,000 names.
    """
    parts: list[list[str]] = []
    total = 1
    for index, part in enumerate(_BRACES.split(pattern)):
        is_inside_braces = index % 2 == 1
        parts.append(_expand_group(part) if is_inside_braces else [part])
        total *= len(parts[-1])
    if total > _MAX_EXPANSIONS:
        raise UserError(f"{pattern[:80]} expands to more than {_MAX_EXPANSIONS} names; narrow it")
    return ["".join(choice) for choice in itertools.product(*parts)]


def _expand_group(group: str) -> list[str]:
    bounds = _RANGE.fullmatch(group)
    if bounds is None:
        return group.split(",")
    first, last, step = int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)
    if last < first or step < 1 or (last - first) // step >= _MAX_EXPANSIONS:
        raise UserError(f"{{{group}}} expands to no names or to more than {_MAX_EXPANSIONS}; correct the range")
    return [str(number) for number in range(first, last + 1, step)]
