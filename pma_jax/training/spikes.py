"""The detector of loss spikes: robust z-scores of loss and gradient norm over a trailing window of calm steps.

A step is far out when its loss, or its gradient norm, lies more than a threshold above the median of the window, in
units of the window's spread (1.4826 times the median absolute deviation: the standard deviation of normal noise).
Medians are deaf to a few outliers, and they follow a drift or a warm-up, half a window late. A spike begins when most
of the last `confirm_steps` steps are far out: a hard batch is one step, a model that is thrown off stays off. While
the loss is out the window stands still, so that a spike never becomes its own yardstick. A spike ends when the loss
has been back for a quarter of the patience; it is declared irrecoverable when the patience is over, the loss is out,
and was in most steps.

Everything here is a pure function of arrays, traced into the train step: the detector is a part of the train state,
so it resumes exactly, and all processes see the same.

Legend: W steps of the window.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pma_jax.config import Config

CALM, OPEN, RECOVERED, IRRECOVERABLE = 0, 1, 2, 3  # codes of a reading
NORMAL_MAD = 1.4826  # standard deviations in one median absolute deviation of normal noise
# Spreads below these are taken for these: a trace without noise would make an outlier of anything.
LEAST_LOSS_SPREAD, LEAST_GRADIENT_SPREAD = 1e-3, 1e-2  # nats; natural logarithm of the norm
CALM_SHARE = 4  # a spike is over when the loss has been back for the patience over this
TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Limits:
    """What counts as a spike, in steps: derived from `spikes.*` of a configuration."""

    window_steps: int
    patience_steps: int
    confirm_steps: int
    loss_z: float
    gradient_z: float
    minimum_rise_nats: float
    skip_gradient_z: float
    stop: bool  # a declared spike stays declared: the run is about to go back

    @classmethod
    def of(cls, config: Config) -> "Limits":
        """The limits of a run."""
        keys = config.spikes
        return cls(
            config.steps(keys.window_tokens),
            config.steps(keys.patience_tokens),
            keys.confirm_steps,
            keys.loss_z,
            keys.gradient_z,
            keys.minimum_rise_nats,
            keys.skip_gradient_z,
            keys.attempts > 0,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detector:
    """The window and the spike that is open, if one is: two float32 [W] rings, and scalars."""

    recent_losses: jax.Array  # float32 [W], nats
    recent_log_norms: jax.Array  # float32 [W], natural logarithm of the gradient norm
    losses: jax.Array  # int32: losses ever added; the ring's next place is this modulo W
    norms: jax.Array  # int32, the same
    far_out: jax.Array  # int32: a bit a step, the last one lowest: whether it was far out
    onset: jax.Array  # int32: step that the open spike began with; 0: none is open
    loss_out: jax.Array  # int32: steps of the open spike with the loss out
    back: jax.Array  # int32: steps in a row, ending with the last one, with the loss back
    declared: jax.Array  # int32: step at which the open spike was declared irrecoverable; 0: it was not
    skips: jax.Array  # int32: updates ever left out
    peak: jax.Array  # float32: highest loss of the open spike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """What the detector says of a step: scalars, float32 where nothing else is said."""

    code: jax.Array  # int32: CALM, OPEN, RECOVERED or IRRECOVERABLE
    onset: jax.Array  # int32: first step of the spike that is open, or that ended here
    declared: jax.Array  # int32: step at which it was declared irrecoverable; 0: it was not
    loss_z: jax.Array
    gradient_z: jax.Array
    median_loss: jax.Array  # of the window
    spread: jax.Array  # of the window's losses, nats
    median_norm: jax.Array
    peak: jax.Array  # highest loss since the spike was noticed
    skipped: jax.Array  # bool: the update of this step is to be left out
    skips: jax.Array  # int32: such steps so far


def empty(window_steps: int) -> Detector:
    """A detector that has seen nothing; traceable."""

    def ring() -> jax.Array:
        return jnp.zeros(window_steps, jnp.float32)

    counts = [jnp.zeros((), jnp.int32) for _ in range(8)]
    return Detector(ring(), ring(), *counts, peak=jnp.zeros((), jnp.float32))


def observe(
    detector: Detector, limits: Limits, step: jax.Array, loss: jax.Array, gradient_norm: jax.Array
) -> tuple[Detector, Reading]:
    """Take in the loss and gradient norm of `step` (1 is the first); nothing is far out until the window is full.

    A loss or norm that is not finite is far out at any time, and irrecoverable at once, unless its update is skipped:
    it has made all weights NaN.
    """
    loss, log_norm = loss.astype(jnp.float32), jnp.log(gradient_norm.astype(jnp.float32) + TINY)
    finite = jnp.isfinite(loss) & jnp.isfinite(log_norm)
    median, spread = _centre(detector.recent_losses, LEAST_LOSS_SPREAD)
    median_norm, spread_norm = _centre(detector.recent_log_norms, LEAST_GRADIENT_SPREAD)
    full = (detector.losses >= limits.window_steps) & (detector.norms >= limits.window_steps)
    loss_z = jnp.where(full, (loss - median) / spread, 0)
    gradient_z = jnp.where(full, (log_norm - median_norm) / spread_norm, 0)

    # --- This step -------------------------------------------------------------------------------------------------
    rise = jnp.maximum(limits.loss_z * spread, limits.minimum_rise_nats)
    loss_far = ~finite | (full & (loss - median > rise))
    far = loss_far | (gradient_z > limits.gradient_z)
    skipped = jnp.zeros((), bool)
    if limits.skip_gradient_z:
        skipped = ~jnp.isfinite(log_norm) | (gradient_z > limits.skip_gradient_z)
    poisoned = ~finite & ~skipped

    # --- The spike: begun, going on, over or lost --------------------------------------------------------------------
    was_open = detector.onset > 0
    far_out = (2 * detector.far_out + far) % 2**limits.confirm_steps
    count = jax.lax.population_count(far_out)
    begins = ~was_open & ((2 * count > limits.confirm_steps) | poisoned)
    first = 31 - jax.lax.clz(far_out)  # steps ago that the first of them was
    onset = jnp.where(begins, step - first, detector.onset)
    is_open = was_open | begins
    # Half the threshold ends what the whole began: a loss that hovers there does not begin and end at every step.
    out = is_open & (~finite | (loss - median > rise / 2))
    loss_out = jnp.where(begins, 0, detector.loss_out) + out
    back = jnp.where(is_open & ~out, jnp.where(begins, 0, detector.back) + 1, 0)
    length = step - onset + 1
    lost = is_open & out & (poisoned | ((length >= limits.patience_steps) & (2 * loss_out > length)))
    declared = jnp.where(detector.declared > 0, detector.declared, jnp.where(lost, step, 0))
    irrecoverable = declared > 0
    recovered = is_open & ~irrecoverable & (back >= max(limits.patience_steps // CALM_SHARE, 1))
    peak = jnp.where(was_open, jnp.maximum(detector.peak, loss), loss)

    code = jnp.where(is_open, OPEN, CALM)
    code = jnp.where(recovered, RECOVERED, jnp.where(irrecoverable, IRRECOVERABLE, code))
    reading = Reading(
        code,
        jnp.where(is_open, onset, 0),
        declared,
        loss_z,
        gradient_z,
        median,
        spread,
        jnp.exp(median_norm),
        peak,
        skipped,
        detector.skips + skipped,
    )

    # --- What is remembered ------------------------------------------------------------------------------------------
    # The window learns no loss of a spike. A norm far out counts as one at the limit: where gradients are larger for
    # good and the loss is well, the window has learned it after half its length.
    losses_W, losses = _pushed(detector.recent_losses, detector.losses, loss, finite & ~is_open & ~loss_far)
    limit = jnp.where(full, median_norm + limits.gradient_z * spread_norm, jnp.inf)
    norms_W, norms = _pushed(
        detector.recent_log_norms, detector.norms, jnp.minimum(log_norm, limit), finite & ~loss_far
    )
    ends = recovered
    if not limits.stop:
        # Nobody goes back: a loss that stays where it is is the new normal, and the window begins anew.
        ends = recovered | (irrecoverable & finite)
        losses = jnp.where(irrecoverable, 0, losses)
    onset, loss_out, back, declared, far_out = (
        jnp.where(ends, 0, x) for x in (onset, loss_out, back, declared, far_out)
    )
    counts = (losses, norms, far_out, onset, loss_out, back, declared, reading.skips)
    return Detector(losses_W, norms_W, *counts, peak=peak), reading


def close_spike(detector: Detector) -> Detector:
    """The detector after the run has gone back to before the spike: the window as it was, and no spike open."""
    zero = jnp.zeros_like(detector.onset)
    return dataclasses.replace(detector, far_out=zero, onset=zero, loss_out=zero, back=zero, declared=zero)


def _centre(values_W: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Median and spread."""
    sorted_W = jnp.sort(values_W)
    low, high = (sorted_W.shape[0] - 1) // 2, sorted_W.shape[0] // 2
    median = (sorted_W[low] + sorted_W[high]) / 2
    deviation = (_nearest(sorted_W, median, low + 1) + _nearest(sorted_W, median, high + 1)) / 2
    return median, jnp.maximum(NORMAL_MAD * deviation, least)


def _nearest(sorted_W: jax.Array, point: jax.Array, count: int) -> jax.Array:
    """Distance from `point` within which `count` of the values lie, without sorting the distances.

    Those that are nearest are neighbours: of all runs of `count` neighbours, the one whose far end is nearest.
    """
    first, last = sorted_W[: sorted_W.shape[0] - count + 1], sorted_W[count - 1 :]
    return jnp.min(jnp.maximum(point - first, last - point))


def _pushed(ring_W: jax.Array, count: jax.Array, value: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    place = count % ring_W.shape[0]
    return ring_W.at[place].set(jnp.where(wanted, value, ring_W[place])), count + wanted
