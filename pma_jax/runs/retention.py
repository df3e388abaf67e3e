"""Retention: which published snapshots and training states of a run are kept.

A run that is killed resumes from its newest published state. It then writes everything after that state again, with the
same previews, so the snapshots that these previews merge must still exist. Retention therefore keeps them, although
`checkpoint.keep_windows` alone would remove them. While a loss spike is open, which may last longer than
`spikes.patience_tokens`, it also keeps what a rollback needs from before the spike.
"""

import bisect
from collections.abc import Mapping, Sequence

from pma_jax.config import Config
from pma_jax.runs.states import STATES
from pma_jax.runs.steps import StepWriter


class Retention:
    """Removes the published steps of a run that are not kept. Call `apply` after each save, with the writers open.

    Args:
        config: The run's configuration.
        writers: The open writer of each folder of steps.
    """

    def __init__(self, config: Config, writers: Mapping[str, StepWriter]):
        self._config, self._writers = config, writers

    def apply(self, tokens: int, onset_tokens: int = 0) -> None:
        """Remove what is not kept once the run has trained on `tokens`. With several processes, all must call it.

        `onset_tokens` is that of `tokens_to_keep`.
        """
        for writer in self._writers.values():
            writer.finish_if_published()
        published = {folder: sorted(writer.published.values()) for folder, writer in self._writers.items()}
        pending = self._writers[STATES].pending
        resume_points = [newest_resume_point(published[STATES], tokens), *([pending.tokens] if pending else [])]
        for folder, writer in self._writers.items():
            kept = tokens_to_keep(self._config, folder, published[folder], tokens, resume_points, onset_tokens)
            writer.remove([step for step, step_tokens in writer.published.items() if step_tokens not in kept])


def tokens_to_keep(
    config: Config,
    folder: str,
    published: Sequence[int],
    tokens: int,
    resume_points: Sequence[int],
    onset_tokens: int = 0,
) -> set[int]:
    """Decide which published steps of a folder are kept.

    Args:
        config: The run's configuration.
        folder: `STATES`, or a folder of snapshots.
        published: Token count of each published step of the folder, ascending.
        tokens: Number of tokens that the run has trained on. After resuming, there may be newer published steps.
        resume_points: Token counts of the states from which the run may resume if it is killed now.
        onset_tokens: Token count at which a loss spike began, or may have begun, that the run may roll back from; 0 if
            it does not roll back.

    Returns:
        The token counts of the steps that are kept.
    """
    before_spike = [t for t in published if t < onset_tokens]
    if folder == STATES:
        needed = int(config.spikes.optimizer == "restore")
        return _states_to_keep(config, published, tokens) | set(before_spike[len(before_spike) - needed :])
    needed = config.spikes.snapshots + config.spikes.attempts - 1  # each retry leaves one more out
    return _snapshots_to_keep(config, published, [tokens, *resume_points]) | set(before_spike[-needed:])


def newest_resume_point(state_tokens: Sequence[int], tokens: int) -> int:
    """Return the newest of the ascending `state_tokens` that is at most `tokens`; 0 if there is none."""
    return next((t for t in reversed(state_tokens) if t <= tokens), 0)


def peak_snapshots(config: Config, snapshot_tokens: Sequence[int], state_tokens: Sequence[int]) -> int:
    """Return the largest number of snapshots of each kind that are kept at one time during a run.

    Args:
        config: The run's configuration.
        snapshot_tokens: Token counts at which the run saves snapshots, ascending.
        state_tokens: Token counts at which it saves states, ascending.
    """
    if not config.checkpoint.keep_windows:
        return len(snapshot_tokens)
    archived = [0]
    for tokens in snapshot_tokens:
        archived.append(archived[-1] + _is_archived(config, tokens))
    newest, needed = config.checkpoint.keep_windows * config.checkpoint.window, config.snapshots_to_resume
    peak = 0
    for end, tokens in enumerate(snapshot_tokens, start=1):
        # The state saved last may not be published yet, so the run may resume from it or from the one before.
        states = bisect.bisect_right(state_tokens, tokens)
        ends = [bisect.bisect_right(snapshot_tokens, t) for t in state_tokens[max(states - 2, 0) : states]]
        count, upper = 0, end
        for stop, size in [(end, max(newest, needed)), *((stop, needed) for stop in reversed(ends))]:
            start = min(max(stop - size, 0), upper)
            stop = min(stop, upper)
            count += stop - start + archived[upper] - archived[stop]
            upper = start
        peak = max(peak, count + archived[upper])
    return peak


def _snapshots_to_keep(config: Config, published: Sequence[int], positions: Sequence[int]) -> set[int]:
    """Keep the newest windows, archived snapshots, and those that the run needs to resume from each of `positions`."""
    if not config.checkpoint.keep_windows:
        return set(published)
    kept = {t for t in published if _is_archived(config, t)}
    kept.update(published[-config.checkpoint.keep_windows * config.checkpoint.window :])
    for tokens in positions:
        if not config.is_run_complete(tokens):
            end = bisect.bisect_right(published, tokens)
            kept.update(published[max(end - config.snapshots_to_resume, 0) : end])
    return kept


def _states_to_keep(config: Config, published: Sequence[int], tokens: int) -> set[int]:
    """Keep the newest `keep_states`, those listed in `keep_states_at_tokens`, and those that are not reached yet.

    A state saved on preemption, between the regular saves, does not count towards `keep_states` and is kept only while
    it is the newest. An interrupted run therefore keeps the same states as an uninterrupted one.
    """
    reached = [t for t in published if t <= tokens]
    regular = [t for t in reached if config.is_state_due(t)]
    kept = {*regular[-config.checkpoint.keep_states :], *reached[-1:], *published[len(reached) :]}
    return kept | {t for t in reached if config.is_permanent_state(t)}


def _is_archived(config: Config, tokens: int) -> bool:
    interval_tokens = config.checkpoint.archive_interval_tokens
    return bool(interval_tokens) and config.is_mark(tokens, interval_tokens)
