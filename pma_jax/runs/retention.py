"""Which checkpoints a run keeps: two rules, of snapshots and of states."""

from collections.abc import Sequence

from pma_jax.config import Config


def kept_snapshots(config: Config, tokens: Sequence[int]) -> list[bool]:
    """Whether each snapshot is kept, by its tokens, in ascending order: the newest windows, and the archive's."""
    keep = config.checkpoint
    newest = keep.keep_windows * keep.window if keep.keep_windows else len(tokens)
    archive = keep.archive_interval_tokens
    return [i >= len(tokens) - newest or bool(archive and config.is_mark(at, archive)) for i, at in enumerate(tokens)]


def kept_states(config: Config, tokens: Sequence[int]) -> list[bool]:
    """Whether each state is kept, given by tokens in ascending order: the newest `keep_states`, and those named.

    A state that a preemption saved between the marks is kept while it is the newest, and counts as none: the others
    are those of a run that was never stopped.
    """
    regular = [at for at in tokens if config.is_state(at)]
    newest = {*regular[-config.checkpoint.keep_states :], *tokens[-1:]}
    return [at in newest or config.is_named_state(at) for at in tokens]
