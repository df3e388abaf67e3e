"""The learning rate as a function of tokens: warm-up, stable, decay (WSD), and a second warm-up after a rollback."""

from collections.abc import Sequence

from pma_jax.config import DECAY_SHAPES, Config, ScheduleConfig


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


def learning_rate_after(rollbacks: Sequence[int], config: Config, tokens: int) -> float:
    """Return the rate of the step that ends at `tokens`, which rises linearly from 0 again after a rollback.

    Args:
        rollbacks: tokens to which the run rolled back, oldest first.
        config: of the run; the warm-up takes `spikes.warmup_tokens`.
        tokens: of the step's end.
    """
    rate = learning_rate(config.schedule, config.training.total_tokens, tokens)
    since = [tokens - at for at in rollbacks if at < tokens]
    if not since or not config.spikes.warmup_tokens:
        return rate
    return rate * min(since[-1] / config.spikes.warmup_tokens, 1.0)
