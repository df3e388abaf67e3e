"""Metrics of the training steps: fetched one step late, checked for NaN and loss spikes, and logged at intervals."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pma_jax.config import Config
from pma_jax.config.errors import DivergenceError
from pma_jax.runs import integrity
from pma_jax.runs.states import Progress
from pma_jax.training import worker_metrics
from pma_jax.training.metrics import MetricsLog, Record
from pma_jax.training.spikes import IRRECOVERABLE, RECOVERED, Reading

SpikeRecord = Record  # a record of the kind "spike"


class StepRecords:
    """Logs the metrics of a training step at each log interval, and a record of each loss spike that ends.

    The metrics of a step are fetched after the next step is dispatched, so that the device does not wait for the host.
    Fetching blocks until the step is done, so at most two steps are in flight.
    """

    def __init__(self, config: Config, log: MetricsLog, tokens: int):
        self._config, self._log = config, log
        self._start = self._interval_start = time.perf_counter()
        self._interval_tokens = tokens
        self._pending: tuple[Record, dict[str, Any]] | None = None

    def add(self, progress: Progress, learning_rate: float, metrics: dict[str, Any], params: Any) -> SpikeRecord | None:
        """Make the step that was just dispatched the pending step, and `flush` the previous one; return its result."""
        spike = self.flush(params)
        record = {"kind": "train", "tokens": progress.tokens, "step": progress.step, "learning_rate": learning_rate}
        self._pending = record, metrics
        return spike

    def flush(self, params: Any) -> SpikeRecord | None:
        """Check the metrics of the pending step, and log them if it ends a log interval.

        Args:
            params: The newest parameters; an error message names those of their leaves that are not finite.

        Returns:
            The record of a spike if the run must roll back, else None.

        Raises:
            DivergenceError: A metric is not finite, and the run neither skipped the update nor rolls back.
        """
        if self._pending is None:
            return None
        (record, metrics), self._pending = self._pending, None
        config, spikes, tokens = self._config, self._config.spikes, record["tokens"]
        has_workers = config.replicas.method != "none"
        is_logged = config.is_mark(tokens, config.training.log_interval_tokens) or config.is_run_complete(tokens)
        # Each process looks at its own workers at every step; they communicate only for the log.
        each = worker_metrics.of_local_workers(metrics) if has_workers else [jax.device_get(metrics)]
        spike, rolls_back = None, False
        for worker in each:
            numbers = _numbers(worker)
            verdict = _spike_verdict(config, record | numbers, worker["spike"]) if spikes.detect else None
            spike = spike or verdict
            rolls_back |= bool(verdict and verdict["verdict"] == "irrecoverable" and spikes.attempts)
            if not rolls_back and not (spikes.skip_gradient_z and worker["spike"].skip):
                check_finite(record, numbers, params)
        if is_logged:
            logged = worker_metrics.over_all_workers(metrics) if has_workers else each[0]
            numbers = _numbers(logged)
            if spikes.skip_gradient_z:
                numbers["skipped_updates"] = int(jnp.sum(metrics["spike"].total_skips))  # of all workers
            self._log.write(record | numbers | self._end_interval(tokens))
        if spike:
            self._log.write(spike)
        return spike if rolls_back else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the `with` block (evaluation, checkpoints) from tokens per second."""
        start = time.perf_counter()
        yield
        self._interval_start += time.perf_counter() - start

    def _end_interval(self, tokens: int) -> dict[str, float]:
        """End the log interval: return its tokens per second, and the seconds since the start, pauses included."""
        now = time.perf_counter()
        tokens_per_second = (tokens - self._interval_tokens) / (now - self._interval_start)
        self._interval_tokens, self._interval_start = tokens, now
        return {"tokens_per_second": tokens_per_second, "seconds": now - self._start}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a step that are logged."""
    return {name: value.item() for name, value in metrics.items() if name not in ("count", "spike")}


def check_finite(record: Record, metrics: dict[str, float], params: Any) -> None:
    """Raise DivergenceError if a metric of a step is not finite, naming the step, the metrics and leaves of `params`.

    Args:
        record: Record of the step; its `step` and `tokens` go into the message.
        metrics: Metrics of the step by name.
        params: The newest parameters, after this step or the next.
    """
    bad = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if not bad:
        return
    leaves = integrity.non_finite_leaves(params)
    where = f"; {len(leaves)} leaves of the parameters are not finite: {', '.join(leaves[:10])}" if leaves else ""
    raise DivergenceError(
        f"step {record['step']:,} ({record['tokens']:,} tokens): {', '.join(bad)}{where}. This step was not saved. "
        "Running the command again will fail in the same way: run `pma fork` from an earlier state with a lower "
        "schedule.peak_rate or optimizer.clip_norm"
    )


def _spike_verdict(config: Config, step_record: Record, reading: Reading) -> SpikeRecord | None:
    """Return the record of a spike that recovered at this step or was declared irrecoverable, else None."""
    code, step = int(reading.status), step_record["step"]
    # If the run rolls back, also report a spike that was declared at an earlier step: the process may have been killed
    # before it read the declaration, and have resumed from a state that was saved after the declaration.
    is_irrecoverable = code == IRRECOVERABLE and (int(reading.declared) == step or config.spikes.attempts)
    if code != RECOVERED and not is_irrecoverable:
        return None
    onset = int(reading.onset)
    measured = {
        "loss": step_record["loss"],
        "peak_loss": reading.peak,
        "median_loss": reading.median_loss,
        "spread_nats": reading.loss_spread,
        "loss_z": reading.loss_z,
        "gradient_norm": step_record["gradient_norm"],
        "median_gradient_norm": reading.median_norm,
        "gradient_z": reading.gradient_z,
    }
    return {
        "kind": "spike",
        "tokens": step_record["tokens"],
        "step": step,
        "verdict": "recovered" if code == RECOVERED else "irrecoverable",
        "onset_tokens": step_record["tokens"] - (step - onset) * config.batch_tokens,
        "onset_step": onset,
    } | {name: float(value) if math.isfinite(value) else None for name, value in measured.items()}  # JSON has no NaN
