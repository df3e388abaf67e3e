"""The log of a run: metrics.jsonl, TensorBoard, an experiment tracker, and the terminal."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
from rich import progress as bars

from pma_jax.runs.directory import Run, read_metric_records, record_lines
from pma_jax.runs.steps import report_write_errors
from pma_jax.storage import atomic
from pma_jax.storage.lines import LineFile
from pma_jax.training import tracking
from pma_jax.training.event_file import EventFile

# One line of metrics.jsonl, with at least `kind` and `tokens`. `MetricsLog.write` accepts the kinds in `_LINE_FORMATS`
# and `spike`. A rollback appends records of the kind `recovery` to metrics.jsonl directly, not through `write`.
Record = dict[str, Any]

# Terminal lines by kind. A block mean is the mean of the parameters over the steps of one snapshot interval.
_LINE_FORMATS = {
    "train": "loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s",
    "evaluation": "held-out loss {loss:.4f}",
    "block_mean": "held-out loss of the block mean {loss:.4f}",
    "worker": "held-out loss of worker {worker} {loss:.4f}",
    "preview": "held-out loss of {recipe} {loss:.4f}",
    "task": "{task} of {model}: {metric} {value:.4f}",
}


class MetricsLog:
    """Log that appends records to RUN/metrics.jsonl, TensorBoard and a tracker, and prints them.

    On a terminal it shows a progress bar with the loss and the speed of the latest steps, below the lines of the other
    records, else one line per record.

    The constructor removes records after `tokens` from metrics.jsonl, because a resumed run writes them again.

    Args:
        run: Run directory and configuration.
        tokens: Number of tokens already trained on.
        is_writer: Whether this process writes (true only for process 0). In other processes the methods have no effect.
    """

    def __init__(self, run: Run, tokens: int, is_writer: bool):
        self._is_writer = is_writer
        if not is_writer:
            return
        path = run.path / "metrics.jsonl"
        records = read_metric_records(path)
        kept = [r for r in records if r["tokens"] <= tokens]
        atomic.write_text(path, record_lines(kept))
        self._path, self._file, self._text = path, LineFile(path), run.metadata.get("evaluation")
        self._board = EventFile(run.path / "tensorboard", tokens)
        self._start_tracker(run, records, tokens)
        self._console = rich.console.Console(stderr=True)
        total = run.config.training.total_tokens
        columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TextColumn("{task.description}"))
        left = (bars.TextColumn("left:"), bars.TimeRemainingColumn())
        self._bar = bars.Progress(*columns, *left, console=self._console, disable=not self._console.is_terminal)
        self._bar.add_task(f"of {total / 1e6:.2f}M tokens", total=total, completed=tokens)
        self._bar.start()

    def write(self, record: Record) -> None:
        """Append one record; its numbers must be of type int or float, not numpy or JAX scalars."""
        if not self._is_writer:
            return
        with report_write_errors(self._path):
            self._file.write_lines(record_lines([record]))
            self._board.write(_scalars(record, self._text), record["tokens"])
        self._track(record)
        line = _format_record(record)
        self._bar.update(self._bar.task_ids[0], completed=record["tokens"])
        if not self._console.is_terminal:
            print(line, file=sys.stderr, flush=True)
        elif record["kind"] == "train":
            self._bar.update(self._bar.task_ids[0], description=line)
        else:
            self.print(line)

    def print(self, line: str) -> None:
        """Print one line to stderr, above the progress bar if there is one."""
        if self._is_writer:
            self._console.print(line, highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Flush all records to durable storage.

        Call this before saving a training state. A run that resumes from the state does not repeat the steps before it,
        so the records of these steps must already be on disk.
        """
        if self._is_writer:
            with report_write_errors(self._path):
                self._file.sync()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        """Flush and close everything."""
        if self._is_writer:
            self._bar.stop()
            with report_write_errors(self._path):
                self._file.close()
                self._board.close()
            if self._tracker:
                self._tracker.finish()

    def _start_tracker(self, run: Run, records: Sequence[Record], tokens: int) -> None:
        """Start the tracker. What it has, it does not get again; a new one gets the records of a run that it lacks."""
        was_tracked = tracking.is_tracked(run)
        self._tracker = None if run.config.tracking.name == "none" else tracking.Tracker(run)
        self._tracked = {_without_clock(record) for record in records if was_tracked and record["tokens"] > tokens}
        for record in records:
            if not was_tracked and record["tokens"] <= tokens:
                self._track(record)

    def _track(self, record: Record) -> None:
        if self._tracker and _without_clock(record) not in self._tracked:
            self._tracker.log(dict(_scalars(record, self._text)), record["tokens"])


def _without_clock(record: Record) -> str:
    """Format what a resumed run writes again when it repeats a step."""
    return json.dumps({k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")}, sort_keys=True)


def _scalars(record: Record, text: str | None) -> list[tuple[str, float]]:
    """Return the tags and values of a record. Losses on other held-out text than `text` are curves of their own."""
    suffix = f" on {record['text']}" if record.get("text", text) != text else ""
    if record["kind"] == "preview":
        return [(f"preview/{record['recipe']}{suffix}", record["loss"])]
    if record["kind"] == "worker":
        return [(f"worker/{record['worker']}{suffix}", record["loss"])]
    if record["kind"] == "task":
        return [(f"task/{record['task']}/{record['metric']}/{record['model']}", record["value"])]
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("tokens", "step")}
    return [(f"{record['kind']}/{key}{suffix}", v) for key, v in numbers.items()]


def _format_record(record: Record) -> str:
    millions = f"{record['tokens'] / 1e6:.2f}M tokens"
    if record["kind"] != "spike":
        return f"{millions}  {_LINE_FORMATS[record['kind']].format_map(record)}"
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    return (
        f"loss spike from {record['onset_tokens']:,} to {record['tokens']:,} tokens ({record['verdict']}): loss "
        f"{loss}, median before {record['median_loss']:.4f}"
    )
