"""The learning rate as a function of tokens: warm-up, stable, decay (WSD)."""

from pma_jax.config import DECAY_SHAPES, ScheduleConfig


def learning_rate(schedule: ScheduleConfig, total_tokens: int, tokens: int) -> float:
    """The rate of the step that ends at `tokens`.

    Linear from 0 to the peak over `warmup_tokens`; the peak; from `decay_start_tokens` to `total_tokens` the decay's
    shape from the peak to `final_rate`. Evaluated on the host in float64.
    """
    if tokens < schedule.warmup_tokens:
        return schedule.peak_rate * tokens / schedule.warmup_tokens
    if schedule.decay == "none" or tokens <= schedule.decay_start_tokens:
        return schedule.peak_rate
    t = min((tokens - schedule.decay_start_tokens) / (total_tokens - schedule.decay_start_tokens), 1.0)
    return schedule.final_rate + (schedule.peak_rate - schedule.final_rate) * DECAY_SHAPES[schedule.decay](t)
