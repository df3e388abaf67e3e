"""The record of each training step: fetched one step late, checked for NaN and loss spikes, and written."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax

from pma_jax.config import Config
from pma_jax.runs import integrity
from pma_jax.runs.states import Progress
from pma_jax.training.metrics import MetricsLog, Record
from pma_jax.training.spikes import IRRECOVERABLE, RECOVERED, Reading


class StepRecords:
    """Writes the record of each step, and of each loss spike that ends with it.

    The metrics of a step are fetched after the next step is dispatched, so that the device does not wait for the host.
    Fetching waits for the step: at most two are in flight.
    """

    def __init__(self, config: Config, log: MetricsLog, tokens: int):
        self._config, self._log = config, log
        self._start = self._lap_start = time.perf_counter()
        self._lap_tokens = tokens
        self._pending: tuple[Record, dict[str, Any]] | None = None

    def add(self, progress: Progress, rate: float, metrics: dict[str, Any], params: Any) -> Record | None:
        """Keep the metrics of the step that was dispatched last, and `flush` those of the step before."""
        spike = self.flush(params)
        record = {"kind": "train", "tokens": progress.tokens, "step": progress.step, "learning_rate": rate}
        self._pending = record, metrics
        return spike

    def flush(self, params: Any) -> Record | None:
        """Write the record of the pending step; return a spike from which the run has to roll back, or None.

        Args:
            params: The newest parameters, among which the leaves that an error names are searched.

        Raises:
            ValueError: A metric is not finite, and the run neither skipped the update nor rolls back.
        """
        if self._pending is None:
            return None
        (record, metrics), self._pending = self._pending, None
        config, keys, metrics = self._config, self._config.spikes, jax.device_get(metrics)
        numbers = {name: value.item() for name, value in metrics.items() if name not in ("count", "spike")}
        spike = spike_record(config, record | numbers, metrics["spike"]) if keys.detect else None
        rolls_back = bool(spike and spike["verdict"] == "irrecoverable" and keys.attempts)
        if not rolls_back and not (keys.skip_gradient_z and metrics["spike"].skipped):
            check_finite(record, numbers, params)
        if keys.skip_gradient_z:
            numbers["skipped_updates"] = metrics["spike"].skips.item()
        tokens = record["tokens"]
        if config.is_mark(tokens, config.training.log_interval_tokens) or config.is_run_complete(tokens):
            self._log.write(record | numbers | self._timing(tokens))
        if spike:
            self._log.write(spike)
        return spike if rolls_back else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block, for evaluation and checkpoints, out of the token rate."""
        start = time.perf_counter()
        yield
        self._lap_start += time.perf_counter() - start

    def _timing(self, tokens: int) -> dict[str, float]:
        """Return the tokens per second since the last call, and the wall seconds since the start, pauses included."""
        now = time.perf_counter()
        rate = (tokens - self._lap_tokens) / (now - self._lap_start)
        self._lap_tokens, self._lap_start = tokens, now
        return {"tokens_per_second": rate, "seconds": now - self._start}


def check_finite(record: Record, numbers: dict[str, float], params: Any) -> None:
    """Raise ValueError if one of a step's `numbers` is not finite, naming the step, the numbers and leaves of `params`.

    Args:
        record: Has the `step` and `tokens` to name.
        numbers: What the step measured.
        params: The newest parameters, after this step or the next.
    """
    bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if not bad:
        return
    leaves = integrity.non_finite_leaves(params)
    where = f"; {len(leaves)} leaves of the parameters are not finite: {', '.join(leaves[:10])}" if leaves else ""
    raise ValueError(
        f"step {record['step']:,} ({record['tokens']:,} tokens): {', '.join(bad)}{where}. This step was not saved. "
        "Repeating the command repeats the error: `pma fork` from an earlier state with a lower schedule.peak_rate or "
        "optimizer.clip_norm"
    )


def spike_record(config: Config, record: Record, reading: Reading) -> Record | None:
    """Return the record of a spike that recovered or was declared irrecoverable at the step of `record`, else None."""
    code, step = int(reading.code), record["step"]
    # A spike declared at an earlier step counts too where the run rolls back: the process may have been killed, and
    # resumed from a state saved after the declaration, before the declaration was read.
    is_due = code == IRRECOVERABLE and (int(reading.declared) == step or config.spikes.attempts)
    if code != RECOVERED and not is_due:
        return None
    onset = int(reading.onset)
    measured = {
        "loss": record["loss"],
        "peak_loss": reading.peak,
        "median_loss": reading.median_loss,
        "spread_nats": reading.spread,
        "loss_z": reading.loss_z,
        "gradient_norm": record["gradient_norm"],
        "median_gradient_norm": reading.median_norm,
        "gradient_z": reading.gradient_z,
    }
    return {
        "kind": "spike",
        "tokens": record["tokens"],
        "step": step,
        "verdict": "recovered" if code == RECOVERED else "irrecoverable",
        "onset_tokens": record["tokens"] - (step - onset) * config.batch_tokens,
        "onset_step": onset,
    } | {name: float(value) if math.isfinite(value) else None for name, value in measured.items()}  # JSON has no NaN
