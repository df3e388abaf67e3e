"""How far the runs of a grid are, read from their directories: tokens, losses, best merge, age, failures."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from pma_jax.launch.combinations import GridRun
from pma_jax.launch.job import TRAIN, Job, holder_of, read_record
from pma_jax.merging.listing import is_run_directory
from pma_jax.runtime.formatting import align_columns, format_duration
from pma_jax.storage.json_files import read_json, read_json_lines
from pma_jax.storage.json_schema import Count, Loss, check_schema
from pma_jax.storage.paths import as_path, exists

FINISHED, RUNNING, FAILED, STOPPED, WAITING = "finished", "running", "failed", "stopped", "not started"
QUEUED = "queued"


class _Record(TypedDict):
    """A line of metrics.jsonl or watch.jsonl; the losses are those of evaluations and previews."""

    kind: str
    tokens: Count
    loss: NotRequired[Loss | None]
    recipe: NotRequired[str]


class _SweepRow(TypedDict):
    text: str
    loss: Loss


class _Sweep(TypedDict):
    """What a table needs of RUN/sweep.json."""

    tokens: Count
    rows: list[_SweepRow]


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """One row of the table of a grid."""

    name: str
    state: str  # of FINISHED, RUNNING, FAILED, STOPPED, WAITING and QUEUED
    tokens: int  # of the last record
    total_tokens: int  # the horizon
    loss: float | None  # held-out, of the newest snapshot
    best_merge: str | None
    best_merge_loss: float | None
    record_age_seconds: float | None  # since the last record was written
    line: str | None  # why it failed, or who works on it


def read_progress(run: GridRun, job: Job, scheduled: tuple[str, str] | None = None) -> RunProgress:
    """Read the progress of a run.

    Args:
        run: The run.
        job: Its job.
        scheduled: What a scheduler says of it: `QUEUED`, `RUNNING` or `FAILED`, and a line; None: nothing.
    """
    record, holder = read_record(run.path), holder_of(run.path)
    failure = record.get("failed")
    records, age = _read_records(run)
    if {step.text for step in job.steps} <= set(record["done"]) or _is_trained_only(run, job, records):
        state, line = FINISHED, None
    elif holder:
        state, line = RUNNING, holder
    elif scheduled and scheduled[0] != FAILED:
        state, line = scheduled
    elif failure:
        state, line = FAILED, f"{failure['step'].partition(' ')[0]}: {failure['line']}"
    elif scheduled:
        state, line = scheduled
    else:
        state, line = (STOPPED if records or record["done"] else WAITING), None
    merge, merge_loss = _best_merge(run, records)
    losses = [r["loss"] for r in records if r["kind"] == "evaluation" and r.get("loss") is not None]
    return RunProgress(
        run.name,
        state,
        max((r["tokens"] for r in records), default=0),
        run.config.training.total_tokens,
        losses[-1] if losses else None,
        merge,
        merge_loss,
        age,
        line,
    )


def format_progress(rows: Sequence[RunProgress]) -> str:
    """Format the table of a grid, and a line for each failed run."""
    cells = [["run", "state", "tokens", "of horizon", "loss", "best merge", "its loss", "last record"]]
    for row in rows:
        cells.append(
            [
                row.name,
                row.state,
                f"{row.tokens:,}",
                f"{min(row.tokens / row.total_tokens, 1):.0%}",
                _format_loss(row.loss),
                row.best_merge or "-",
                _format_loss(row.best_merge_loss),
                "-" if row.record_age_seconds is None else f"{format_duration(row.record_age_seconds)} ago",
            ]
        )
    failed = [f"failed: {row.name}: {row.line}" for row in rows if row.state == FAILED]
    return "\n".join([align_columns(cells), *failed])


def as_json(row: RunProgress) -> dict[str, Any]:
    """Return a row as JSON: losses that are not finite are null."""
    values = dataclasses.asdict(row)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _read_records(run: GridRun) -> tuple[list[Any], float | None]:
    """Return the records of a run, and the seconds since the last one was written."""
    records, written = [], []
    for name in ("metrics.jsonl", "watch.jsonl"):
        path = as_path(run.path / name)
        if exists(path):
            written.append(path.stat().st_mtime_ns / 1e9)
            records += read_json_lines(path, lambda value: check_schema(value, _Record, "record"))
    return records, max(time.time() - max(written), 0.0) if written else None


def _is_trained_only(run: GridRun, job: Job, records: Sequence[Any]) -> bool:
    """Return whether a job that only trains is done without a record, as of a run trained by `pma train`."""
    is_at_horizon = any(run.config.is_run_complete(r["tokens"]) for r in records)
    if [step.text for step in job.steps] != [TRAIN] or not is_at_horizon or not is_run_directory(as_path(run.path)):
        return False
    from pma_jax.runs.directory import open_run  # takes seconds, and only now is needed

    newest = open_run(run.path).newest_resumable_state
    return newest is not None and run.config.is_run_complete(newest.tokens)


def _best_merge(run: GridRun, records: Sequence[Any]) -> tuple[str | None, float | None]:
    """Return the merge with the lowest loss so far, of the previews and of sweep.json."""
    merges = [(r["loss"], r["recipe"]) for r in records if r["kind"] == "preview" and r.get("loss") is not None]
    path = as_path(run.path / "sweep.json")
    if exists(path):
        merges += [(row["loss"], row["text"]) for row in read_json(path, _Sweep, allow_nan=True)["rows"]]
    loss, text = min((merge for merge in merges if math.isfinite(merge[0])), default=(None, None))
    return text, loss


def _format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
