"""The learning rate as a function of tokens: warm-up, stable, decay (WSD), and a second warm-up after a rollback."""

from collections.abc import Sequence

from pma_jax.config import DECAY_SHAPES, ScheduleConfig


def learning_rate(schedule: ScheduleConfig, total_tokens: int, tokens: int) -> float:
    """Return the rate of the step that ends at `tokens`.

    Linear from 0 to the peak over `warmup_tokens`; the peak; from `decay_start_tokens` to `total_tokens` the decay's
    shape from the peak to `final_rate`. Evaluated on the host in float64.
    """
    if tokens < schedule.warmup_tokens:
        return schedule.peak_rate * tokens / schedule.warmup_tokens
    if schedule.decay == "none" or tokens <= schedule.decay_start_tokens:
        return schedule.peak_rate
    t = min((tokens - schedule.decay_start_tokens) / (total_tokens - schedule.decay_start_tokens), 1.0)
    return schedule.final_rate + (schedule.peak_rate - schedule.final_rate) * DECAY_SHAPES[schedule.decay](t)


def warmup_after_rollback(warmup_tokens: int, rollbacks: Sequence[int], tokens: int) -> float:
    """Return the factor in (0, 1] on the rate of the step that ends at `tokens`.

    Linear from 0 to 1 over `warmup_tokens` since the newest rollback.

    Args:
        warmup_tokens: `spikes.warmup_tokens`; 0: no warm-up.
        rollbacks: tokens to which the run rolled back, oldest first.
        tokens: of the step's end.
    """
    since = [tokens - at for at in rollbacks if at < tokens]
    return min(since[-1] / warmup_tokens, 1.0) if since and warmup_tokens else 1.0
