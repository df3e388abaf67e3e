"""The log of a run: metrics.jsonl, TensorBoard, and the terminal."""

import os
import sys
import time
from typing import Any

import rich.console
from rich import progress as bars
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from pma_jax.runs.directory import Run, read_metric_records, record_lines
from pma_jax.runs.steps import report_write_errors
from pma_jax.storage import atomic
from pma_jax.storage.lines import LineFile

_Event: Any = vars(event_pb2)["Event"]  # created by protobuf at import: type checkers do not see it
_START = 1  # SessionLog.START: TensorBoard drops an earlier process's events from that step on
# One record: always `kind` and `tokens`. `write` takes the kinds of `_LINE_FORMATS` and `spike`; a rollback appends
# `recovery` records to the file itself.
Record = dict[str, Any]

_LINE_FORMATS = {
    "train": "loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s",
    "evaluation": "held-out loss {loss:.4f}",
    "block_mean": "held-out loss of the block mean {loss:.4f}",
    "preview": "held-out loss of {recipe} {loss:.4f}",
}


class MetricsLog:
    """Appends records to RUN/metrics.jsonl and TensorBoard; shows a progress bar on a terminal, else plain lines.

    Creating it removes the records after `tokens` from the file, because a resumed run writes them again.

    Args:
        run: The run.
        tokens: Tokens at which training starts or resumes.
        is_writer: Whether this process writes; only process 0 does. In other processes the methods have no effect.
    """

    def __init__(self, run: Run, tokens: int, is_writer: bool):
        self._is_writer = is_writer
        if not is_writer:
            return
        path = run.path / "metrics.jsonl"
        kept = [r for r in read_metric_records(path) if r["tokens"] <= tokens]
        atomic.write_text(path, record_lines(kept))
        self._path, self._file = path, LineFile(path)
        folder = run.path / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # tensorboardX's public writers use a thread: on a full disk it dies, and training waits for it forever.
        self._board = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}")
        self._board.write_event(_Event(step=tokens + 1, session_log={"status": _START}))
        self._console = rich.console.Console(stderr=True)
        columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn())
        shown = bars.TextColumn("{task.description}")
        self._bar = bars.Progress(*columns, shown, console=self._console, disable=not self._console.is_terminal)
        self._bar.add_task("starting", total=run.config.training.total_tokens, completed=tokens)
        self._bar.start()

    def write(self, record: Record) -> None:
        """Append one record; its numbers must be of type int or float, not numpy or JAX scalars."""
        if not self._is_writer:
            return
        with report_write_errors(self._path):
            self._file.write_lines(record_lines([record]))
            for tag, value in _scalars(record):
                scalar = summary.scalar(tag, value)
                self._board.write_event(_Event(wall_time=time.time(), step=record["tokens"], summary=scalar))
        shown = _format_record(record)
        self._bar.update(self._bar.task_ids[0], completed=record["tokens"], description=shown)
        if not self._console.is_terminal:
            print(shown, file=sys.stderr, flush=True)

    def print(self, line: str) -> None:
        """Print one line to the terminal."""
        if self._is_writer:
            self._console.print(line, highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Flush the records to disk.

        Call it before saving a state: a run that resumes from the state does not write earlier records again.
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


def _scalars(record: Record) -> list[tuple[str, float]]:
    if record["kind"] == "preview":
        return [(f"preview/{record['recipe']}", record["loss"])]
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("tokens", "step")}
    return [(f"{record['kind']}/{key}", v) for key, v in numbers.items()]


def _format_record(record: Record) -> str:
    millions = f"{record['tokens'] / 1e6:.2f}M tokens"
    if record["kind"] != "spike":
        return f"{millions}  {_LINE_FORMATS[record['kind']].format_map(record)}"
    spike, loss = record, "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    return (
        f"loss spike from {spike['onset_tokens']:,} to {spike['tokens']:,} tokens ({spike['verdict']}): loss {loss}, "
        f"median before {spike['median_loss']:.4f}"
    )
