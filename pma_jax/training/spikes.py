"""Detection of loss spikes: robust z-scores of loss and gradient norm over a trailing window of calm steps.

A step is an outlier if its loss, or its gradient norm, is more than a threshold above the median of the window, in
units of the window's spread (1.4826 times the median absolute deviation: the standard deviation of normal noise).
Medians ignore a few outliers, and follow a drift or a warm-up half a window late. A spike begins when a majority of the
last `confirm_steps` steps are outliers: a hard batch is one step, a model that diverged stays out. While the loss is
out the window is not updated, so that a spike never becomes its own baseline. A spike ends when the loss has been back
for a quarter of the patience; it is declared irrecoverable when the patience is over, the loss is out, and was out in
most steps.

Everything here is a pure function of arrays, traced into the train step: the detector is a part of the train state, so
it resumes exactly, and all processes compute the same.

Legend: W steps of the window.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pma_jax.config import Config

CALM, OPEN, RECOVERED, IRRECOVERABLE = 0, 1, 2, 3  # codes of a reading
NORMAL_MAD = 1.4826  # standard deviations in one median absolute deviation of normal noise
# Lower bounds of the spreads: in a trace without noise any step would be an outlier.
MIN_LOSS_SPREAD, MIN_LOG_NORM_SPREAD = 1e-3, 1e-2  # nats; natural logarithm of the norm
CALM_SHARE = 4  # a spike is over when the loss has been back for the patience divided by this
TINY = 1e-30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detector:
    """The window, and the spike that is open, if one is: two float32 [W] rings, and scalars."""

    recent_losses: jax.Array  # float32 [W], nats
    recent_log_norms: jax.Array  # float32 [W], natural logarithm of the gradient norm
    losses: jax.Array  # int32: losses ever added; the ring's next index is this modulo W
    norms: jax.Array  # int32: norms ever added
    far_out: jax.Array  # int32: one bit per step, the newest lowest: whether it was an outlier
    onset: jax.Array  # int32: first step of the open spike; 0: none is open
    loss_out: jax.Array  # int32: steps of the open spike with the loss out
    back: jax.Array  # int32: consecutive steps, up to the newest, with the loss back
    declared: jax.Array  # int32: step at which the open spike was declared irrecoverable; 0: it was not
    skips: jax.Array  # int32: updates ever skipped
    peak: jax.Array  # float32: highest loss of the open spike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """What the detector measured at one step: scalars, float32 unless noted."""

    code: jax.Array  # int32: CALM, OPEN, RECOVERED or IRRECOVERABLE
    onset: jax.Array  # int32: first step of the spike that is open, or that ended here; 0: none
    declared: jax.Array  # int32: step at which it was declared irrecoverable; 0: it was not
    loss_z: jax.Array
    gradient_z: jax.Array
    median_loss: jax.Array  # of the window
    spread: jax.Array  # of the window's losses, nats
    median_norm: jax.Array
    peak: jax.Array  # highest loss since the spike was detected
    skipped: jax.Array  # bool: the update of this step must be skipped
    skips: jax.Array  # int32: updates skipped so far, this one included


def empty_detector(window_steps: int) -> Detector:
    """Return a detector with an empty window; traceable."""
    rings = [jnp.zeros(window_steps, jnp.float32) for _ in range(2)]
    counts = [jnp.zeros((), jnp.int32) for _ in range(8)]
    return Detector(*rings, *counts, peak=jnp.zeros((), jnp.float32))


def observe(
    detector: Detector, config: Config, step: jax.Array, loss: jax.Array, gradient_norm: jax.Array
) -> tuple[Detector, Reading]:
    """Add the loss and gradient norm of one step.

    Nothing is an outlier before the window is full, except a loss or norm that is not finite: that is irrecoverable at
    once, unless its update is skipped, because it has made all weights NaN.

    Args:
        detector: After the step before.
        config: Of the run; with `spikes.attempts` a declared spike stays declared until the run rolls back.
        step: int32 scalar, from 1.
        loss: Scalar, nats per token.
        gradient_norm: Scalar, before clipping.
    """
    keys, patience_steps = config.spikes, config.tokens_to_steps(config.spikes.patience_tokens)
    loss, log_norm = loss.astype(jnp.float32), jnp.log(gradient_norm.astype(jnp.float32) + TINY)
    finite = jnp.isfinite(loss) & jnp.isfinite(log_norm)
    median, spread = _centre(detector.recent_losses, MIN_LOSS_SPREAD)
    median_norm, spread_norm = _centre(detector.recent_log_norms, MIN_LOG_NORM_SPREAD)
    full = jnp.minimum(detector.losses, detector.norms) >= detector.recent_losses.size
    gradient_z = jnp.where(full, (log_norm - median_norm) / spread_norm, 0)
    rise = jnp.maximum(keys.loss_z * spread, keys.minimum_rise_nats)
    loss_far = ~finite | (full & (loss - median > rise))
    skipped = jnp.zeros((), bool)
    if keys.skip_gradient_z:
        skipped = ~jnp.isfinite(log_norm) | (gradient_z > keys.skip_gradient_z)

    far = loss_far | (gradient_z > keys.gradient_z)
    # Half of the threshold that begins a spike ends it: a loss near the threshold does not begin and end one per step.
    out = ~finite | (loss - median > rise / 2)
    before = detector
    detector = _track_spike(before, keys.confirm_steps, patience_steps, step, far, out, ~finite & ~skipped)
    is_open, irrecoverable = detector.onset > 0, detector.declared > 0
    recovered = is_open & ~irrecoverable & (detector.back >= max(patience_steps // CALM_SHARE, 1))
    code = jnp.where(recovered, RECOVERED, jnp.where(irrecoverable, IRRECOVERABLE, jnp.where(is_open, OPEN, CALM)))
    peak = jnp.where(before.onset > 0, jnp.maximum(before.peak, loss), loss)
    loss_z = jnp.where(full, (loss - median) / spread, 0)
    spike = (code, detector.onset, detector.declared)
    window = (loss_z, gradient_z, median, spread, jnp.exp(median_norm))
    reading = Reading(*spike, *window, peak, skipped, detector.skips + skipped)

    # An outlying norm is added as one at the limit: where gradients stay larger and the loss is normal, the window has
    # adapted after half its length.
    limit = jnp.where(full, median_norm + keys.gradient_z * spread_norm, jnp.inf)
    is_calm = finite & ~loss_far
    detector = _add_to_window(detector, loss, jnp.minimum(log_norm, limit), is_calm & ~is_open, is_calm)
    ends = recovered
    if not keys.attempts:
        # The run does not roll back: a loss that stays is the new normal, and the window starts over.
        ends = recovered | (irrecoverable & finite)
        detector = dataclasses.replace(detector, losses=jnp.where(irrecoverable, 0, detector.losses))
    detector = jax.tree.map(lambda closed, kept: jnp.where(ends, closed, kept), close_spike(detector), detector)
    return dataclasses.replace(detector, skips=reading.skips, peak=reading.peak), reading


def close_spike(detector: Detector) -> Detector:
    """Return the detector with its window and no open spike, as after a rollback to before the spike."""
    zero = jnp.zeros_like(detector.onset)
    return dataclasses.replace(detector, far_out=zero, onset=zero, loss_out=zero, back=zero, declared=zero)


def _track_spike(
    detector: Detector,
    confirm_steps: int,
    patience_steps: int,
    step: jax.Array,
    far: jax.Array,
    out: jax.Array,
    poisoned: jax.Array,
) -> Detector:
    """Begin a spike or continue the open one.

    Args:
        detector: After the step before.
        confirm_steps: A majority of these newest steps must be outliers to begin a spike.
        patience_steps: A spike may be declared irrecoverable after these.
        step: int32 scalar.
        far: Whether the step is an outlier.
        out: Whether its loss is far enough out to continue a spike.
        poisoned: Whether it made the weights NaN.
    """
    far_out = (2 * detector.far_out + far) % 2**confirm_steps
    majority = 2 * jax.lax.population_count(far_out) > confirm_steps
    begins = (detector.onset == 0) & (majority | poisoned)
    first = 31 - jax.lax.clz(far_out)  # steps since the first outlier of these
    onset = jnp.where(begins, step - first, detector.onset)
    out &= onset > 0
    loss_out = jnp.where(begins, 0, detector.loss_out) + out
    back = jnp.where((onset > 0) & ~out, jnp.where(begins, 0, detector.back) + 1, 0)
    length = step - onset + 1
    lost = out & (poisoned | ((length >= patience_steps) & (2 * loss_out > length)))
    declared = jnp.where(detector.declared > 0, detector.declared, jnp.where(lost, step, 0))
    return dataclasses.replace(detector, far_out=far_out, onset=onset, loss_out=loss_out, back=back, declared=declared)


def _centre(values_W: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Return the median and the spread, which is at least `least`."""
    median = jnp.median(values_W)
    return median, jnp.maximum(NORMAL_MAD * jnp.median(jnp.abs(values_W - median)), least)


def _add_to_window(
    detector: Detector, loss: jax.Array, log_norm: jax.Array, takes_loss: jax.Array, takes_norm: jax.Array
) -> Detector:
    def push(ring_W: jax.Array, count: jax.Array, value: jax.Array, takes: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = count % ring_W.size
        return ring_W.at[index].set(jnp.where(takes, value, ring_W[index])), count + takes

    losses_W, losses = push(detector.recent_losses, detector.losses, loss, takes_loss)
    norms_W, norms = push(detector.recent_log_norms, detector.norms, log_norm, takes_norm)
    return dataclasses.replace(detector, recent_losses=losses_W, recent_log_norms=norms_W, losses=losses, norms=norms)
