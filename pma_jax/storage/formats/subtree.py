"""Choose the leaves of a stored training state that hold the parameters."""

import re
from collections.abc import Sequence
from pathlib import Path

from pma_jax.config.errors import UserError

# Top-level keys of the subtree that holds the parameters, in order of preference.
PARAMETER_KEYS = ("params", "target", "model", "weights")
# Top-level keys of trees that hold more than the parameters. MaxText keeps the state of its modules in `nnx_aux`, and
# levanter 1.1 its optimizer's in `training_state`.
STATE_KEYS = frozenset(
    {"opt_state", "opt", "optim", "optimizer", "optimizer_state", "param_states", "state", "tx"}
    | {"step", "global_step", "rng", "rngs", "training_key", "training_state", "nnx_aux", "iterator", "data_iter"}
)
# Words in the top-level key of a running average of the parameters, such as `ema_params` and levanter's
# `model_averaging`. It is another model, not a part of the parameters.
_AVERAGE_WORDS = frozenset({"ema", "averaged", "averaging", "polyak"})


def choose_subtrees(
    what: Path,
    paths: Sequence[Sequence[str]],
    subtrees: Sequence[Sequence[str]],
    empty_paths: Sequence[Sequence[str]] = (),
) -> tuple[list[list[str]], list[str]]:
    """Return the key paths of the subtrees to read, and notes on what was guessed and what is left out.

    Args:
        what: The checkpoint, for messages.
        paths: Key path of each stored array, outermost key first.
        subtrees: Key paths of the subtrees that the user named. If there are none, it is the complete tree, or the
            parameters of a tree that also holds a training state.
        empty_paths: Key path of each leaf without a value: None, or an empty container. It may be named beside others.

    Raises:
        UserError: A subtree does not exist, none holds an array, or it is not clear where the parameters are.
    """
    top = list(dict.fromkeys(path[0] for path in paths))
    for keys in subtrees:
        if not any(is_below(path, [keys]) for path in (*paths, *empty_paths)):
            raise UserError(f"{what}: has no subtree {'/'.join(keys)!r}; it has {', '.join(top[:10])}")
    if subtrees and not any(is_below(path, subtrees) for path in paths):
        raise UserError(f"{what}: the subtree {'/'.join(subtrees[0])!r} holds no arrays; it has {', '.join(top[:10])}")
    if subtrees:
        return [list(keys) for keys in subtrees], []
    state = [key for key in top if _is_state(key)]
    if not state:
        return [[]], []
    parameters = next((key for key in PARAMETER_KEYS if key in top), None)
    if parameters is None:
        raise UserError(
            f"{what}: holds {', '.join(state[:5])} and it is not clear where the parameters are; "
            f"name the subtree, one of {', '.join(top[:10])}"
        )
    return [[parameters]], [f"the parameters are taken from the subtree {parameters!r} (of {', '.join(top[:10])})"]


def _is_state(key: str) -> bool:
    """Return whether the top-level key of a tree tells that the tree holds more than the parameters."""
    return key in STATE_KEYS or not _AVERAGE_WORDS.isdisjoint(re.split(r"[^a-z]+", key.lower()))


def split_subtrees(subtrees: Sequence[str]) -> list[list[str]]:
    """Return the keys of each subtree that the user named, as in "params" or "target/model".

    Raises:
        UserError: One is part of another.
    """
    split = [[part for part in text.split("/") if part] for text in subtrees]
    for number, keys in enumerate(split):
        other = next((other for other in split[:number] + split[number + 1 :] if is_below(keys, [other])), None)
        if other is not None:
            raise UserError(f"the subtree {'/'.join(keys)!r} is part of {'/'.join(other)!r}, or the same; name one")
    return [keys for keys in split if keys]


def is_below(path: Sequence[str], prefixes: Sequence[Sequence[str]]) -> bool:
    """Return whether a key path starts with one of `prefixes`."""
    return any(list(path[: len(prefix)]) == list(prefix) for prefix in prefixes)
