"""The learning rate as a function of tokens: warm-up, stable, decay (WSD), and a second warm-up after a rollback."""

import math
from collections.abc import Sequence

from pma_jax.config import DECAY_SHAPES, Config, ScheduleConfig


def learning_rate(schedule: ScheduleConfig, total_tokens: int, tokens: int) -> float:
    """Return the learning rate of the step that ends at `tokens`.

    The rate increases linearly from 0 to `peak_rate` over `warmup_tokens`, stays constant until `decay_start_tokens`,
    then decays to `final_rate` at `total_tokens` with the shape `schedule.decay` ("none": no decay). With
    "inverse_sqrt", it is peak_rate · sqrt(decay_start_tokens / tokens) from there on, whatever `total_tokens` is. It is
    evaluated on the host in float64.
    """
    if tokens < schedule.warmup_tokens:
        return schedule.peak_rate * tokens / schedule.warmup_tokens
    if schedule.decay == "none" or tokens <= schedule.decay_start_tokens:
        return schedule.peak_rate
    if schedule.decay == "inverse_sqrt":
        return schedule.peak_rate * math.sqrt(schedule.decay_start_tokens / tokens)
    t = min((tokens - schedule.decay_start_tokens) / (total_tokens - schedule.decay_start_tokens), 1.0)
    return schedule.final_rate + (schedule.peak_rate - schedule.final_rate) * DECAY_SHAPES[schedule.decay](t)


def learning_rate_with_rewarmup(config: Config, rollbacks: Sequence[int], tokens: int) -> float:
    """Return the learning rate of the step that ends at `tokens`, in a run with rollbacks.

    After the newest rollback, the scheduled rate is multiplied by a linear warm-up from 0 to 1 over
    `spikes.warmup_tokens`.

    Args:
        config: Configuration of the run.
        rollbacks: Token counts to which the run was rolled back, in order of occurrence.
        tokens: Token count at the end of the step.
    """
    rate = learning_rate(config.schedule, config.training.total_tokens, tokens)
    tokens_since_rollback = [tokens - start for start in rollbacks if start < tokens]
    if not tokens_since_rollback or not config.spikes.warmup_tokens:
        return rate
    return rate * min(tokens_since_rollback[-1] / config.spikes.warmup_tokens, 1.0)
