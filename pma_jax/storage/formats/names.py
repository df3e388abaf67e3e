"""Parse the step, tokens, epoch and stage from names of checkpoints and revisions, and expand brace patterns.

Trainers and public suites write training progress into directory and branch names: `checkpoint-500`, `iter_0000500`,
`stage1-step140000-tokens294B`. A number counts as a step only after a word that says so, or if it is the whole name.
Other numbers are versions, dates or model sizes (`v2`, `2024-01-05`, `llama-3-8b`).
"""

import itertools
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePath

from pma_jax.config.errors import UserError


@dataclass(frozen=True)
class NameProgress:
    """Training progress that a name states; None for what it does not state.

    Attributes:
        step: Optimizer steps.
        tokens: Tokens consumed.
        epoch: Epochs; they order checkpoints but do not convert to steps.
        stage: The rest of the name, which is the same for all checkpoints of one stage of one run: "" for
            `checkpoint-500`, "stage2-ingredient1" for `stage2-ingredient1-step500`, "anneal" for `step500-anneal`.
    """

    step: int | None = None
    tokens: int | None = None
    epoch: int | None = None
    stage: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the name states a position in training."""
        return not self.step is self.tokens is self.epoch is None


MAX_POSITION = 10**18  # below 2^63, and far above every step and token count

_FLAGS = re.IGNORECASE | re.ASCII
_NUMBER = r"(\d+(?:\.\d+)?)"
_STEP_WORD = r"(?<![a-z])(?:global[-_ ]?)?(?:steps?|iter(?:ation)?s?|updates?|ba)[-_=.: ]?"
_END = r"(?![a-z0-9]|[-_.]\d)"  # "step_1_1000" has two numbers, and it is unclear which is the step
# A token count has the word "tokens" ("tokens294B", "100B-tokens"), or follows a step at the end of the name
# ("step-50K-105b", "step-001000-2BT": 2 billion tokens), or is the whole name ("100BT").
_TOKENS_AFTER_WORD = re.compile(rf"(?<![a-z])tokens?[-_=]?{_NUMBER}([KMBT]?)T?(?![a-z0-9])", _FLAGS)
_TOKENS_BEFORE_WORD = re.compile(rf"(?<![a-z0-9.]){_NUMBER}([KMBT]?)T?[-_ ]?tokens?(?![a-z0-9])", _FLAGS)
_TOKENS_AFTER_STEP = re.compile(rf"{_STEP_WORD}\d+(?:\.\d+)?[km]?[-_]{_NUMBER}([BT]|[KMBT](?=T))T?$", _FLAGS)
_TOKENS_ALONE = re.compile(rf"{_NUMBER}([KMBT])T", _FLAGS)
_ENDS_WITH_STEP_WORD = re.compile(rf"{_STEP_WORD}$", _FLAGS)
_EPOCH = re.compile(r"(?<![a-z])(?:epochs?|ep)[-_=.]?(\d+)(?![a-z0-9]|\.\d)", _FLAGS)
_STEP = re.compile(rf"{_STEP_WORD}{_NUMBER}([KM]?){_END}", _FLAGS)
# "checkpoint.bv-000000200" is big_vision's.
_CHECKPOINT_WORD = r"(?<![a-z])(?:checkpoint(?:\.bv)?|ch?k?pt)s?"
_CHECKPOINT = re.compile(rf"{_CHECKPOINT_WORD}[-_=.]?{_NUMBER}(K?){_END}", _FLAGS)
_DAY = r"(?:19|20)\d\d{0}(?:0[1-9]|1[0-2]){0}(?:0[1-9]|[12]\d|3[01])"
_DATE = re.compile(rf"(?<!\d){_DAY.format('[-_.]')}(?:[-_ T]?\d\d[-_:h]?\d\d(?:[-_:m]?\d\d)?s?)?(?!\d)", _FLAGS)
_COMPACT_DATE = re.compile(rf"(?<!\d){_DAY.format('')}(?:[-_T]?\d{{4}}(?:\d\d)?)?(?!\d)", _FLAGS)
_METRIC = re.compile(r"(?<![a-z])(?:[a-z]+[-_])?(?:loss|ppl|perplexity|acc|accuracy|bpb)[-_=]?\d+(?:\.\d+)?", _FLAGS)
# A number without one of the words of `_STEP_WORD` from here on is a time stamp.
_MAX_PLAIN_STEP = 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STAGE_NUMBER = re.compile(r"(?<![a-z])(?:stage|phase)[-_ ]?(\d{1,6})(?!\d)", _FLAGS)
_ANNEALING = re.compile(r"(?<![a-z])(?:anneal(?:ed|ing)?|cool-?down|decay(?:ed|ing)?)(?![a-z])", _FLAGS)
_STAGE_WORD = re.compile(
    rf"{_STAGE_NUMBER.pattern}|{_ANNEALING.pattern}|(?<![a-z])(?:ingredient|run|seed|replica)[-_ ]?\d+", _FLAGS
)
# Parts of one checkpoint: the items of Orbax, DeepSpeed's ranks, and the usual names of files with weights.
_ITEM = re.compile(
    r"items|default|params|state|train_state|target|weights|ema|hf|huggingface|safetensors|checkpoint|unsharded|"
    r"mp_rank_\d+\w*|(?:[a-z]+_)*model(?:[-.]\d+-of-\d+)?|consolidated(?:\.\d+)?",
    _FLAGS,
)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_MAX_EXPANSIONS = 10_000


def parse_name(name: str) -> NameProgress:
    """Parse the progress from one name, such as stage1-step140000-tokens294B, checkpoint-500 or epoch_2."""
    tokens, rest = _parse_tokens(name)
    epoch, rest = _cut(rest, list(_EPOCH.finditer(rest)))
    rest = _DATE.sub(" ", _METRIC.sub(" ", rest))
    steps = list(_STEP.finditer(rest))
    step, rest = _cut(rest, steps)
    plain_steps = list(_CHECKPOINT.finditer(rest))
    if steps:
        _, rest = _cut(rest, plain_steps)
    elif _COMPACT_DATE.search(rest) is None:
        step, rest = _cut(rest, plain_steps or [m for m in [re.fullmatch(r"[-_. ]*(\d+)()[-_. ]*", rest)] if m])
        step = None if step is not None and step >= _MAX_PLAIN_STEP else step
    words = re.sub(rf"{_CHECKPOINT_WORD}(?![a-z0-9])", " ", _COMPACT_DATE.sub(" ", rest), flags=_FLAGS)
    stage = "-".join(word for word in (word.strip(".") for word in re.split(r"[-_=: ]+", words)) if word)
    return NameProgress(step, tokens, epoch, stage)


def owner_of_item(path: PurePath) -> PurePath:
    """Return the directory whose name states the progress of the checkpoint at `path`.

    It is `path` itself, or the directory above if `path` is named like a part of a checkpoint: `1000/items`,
    `checkpoint-500/model`, `step1000/model.safetensors`.
    """
    name = _strip_suffix(path.name)
    while _ITEM.fullmatch(name) and path.parent != path and not parse_name(name).is_known:
        path = path.parent
        name = path.name
    return path


def parse_path(path: PurePath) -> NameProgress:
    """Parse the progress from the name of a checkpoint's directory or file, or of the directory that contains it."""
    owner = owner_of_item(path)
    return parse_name(_strip_suffix(owner.name) if owner == path else owner.name)


def stage_words(name: str) -> str:
    """Return the words of a name that state a stage or one of several runs: "stage2 ingredient3"; "" if none."""
    return " ".join(match[0] for match in _STAGE_WORD.finditer(name))


def stage_rank(stage: str) -> tuple[int | None, bool]:
    """Return a sort key of a stage within its run: (its number, or None; whether it anneals), both later if greater."""
    number = _STAGE_NUMBER.search(stage)
    return int(number[1]) if number else None, _ANNEALING.search(stage) is not None


def _parse_tokens(name: str) -> tuple[int | None, str]:
    """Return the token count and the rest of a name."""
    for pattern in (_TOKENS_AFTER_WORD, _TOKENS_BEFORE_WORD):
        matches = [m for m in pattern.finditer(name) if not _ENDS_WITH_STEP_WORD.search(name[: m.start()])]
        if matches:
            return _cut(name, matches)
    match = _TOKENS_AFTER_STEP.search(name)
    if match:
        return _value(match), name[: match.start(1)]
    match = _TOKENS_ALONE.fullmatch(name)
    return (_value(match), "") if match else (None, name)


def _cut(text: str, matches: list[re.Match[str]]) -> tuple[int | None, str]:
    """Return the number of the matches, None if they differ, and the text without them."""
    values = {_value(match) for match in matches}
    for match in reversed(matches):
        text = f"{text[: match.start()]} {text[match.end() :]}"
    return (values.pop() if len(values) == 1 else None), text


def _value(match: re.Match[str]) -> int | None:
    """Return group 1 times the unit in group 2, or None if this is not a whole number within the bounds."""
    unit = match[2] if match.re.groups > 1 else ""
    value = Decimal(match[1]) * _UNITS[unit.upper()]
    return int(value) if value <= MAX_POSITION and value == int(value) else None


def _strip_suffix(name: str) -> str:
    return re.sub(r"\.(?:safetensors(?:\.index\.json)?|npz)$", "", name)


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
