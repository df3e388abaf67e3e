"""A run's metrics, a sweep and a grid of runs as pandas DataFrames, for notebooks: `pma.frames`.

Losses are in nats per token, on held-out text if not said otherwise; standard errors are over documents. A value that
does not exist is missing (NaN, None or <NA>). docs/frames.md documents every column.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from pma_jax.config import Config, differences_affecting_results
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import read_sweep
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.storage.paths import absolute_path, exists

if TYPE_CHECKING:
    import pandas as pd

# The columns that every run has, in this order; those of some runs follow, such as `load_max` of mixtures of experts.
_METRIC_COLUMNS = ("kind", "tokens", "step", "loss", "standard_error", "recipe", "learning_rate", "gradient_norm")
_METRIC_COLUMNS += ("tokens_per_second", "seconds", "text")
_SWEEP_COLUMNS = ("text", "recipe", "window", "interval", "kind", "tokens", "loss", "standard_error", "difference")
_SWEEP_COLUMNS += ("difference_standard_error",)
_RESULT_COLUMNS = ("tokens", "total_tokens", "train_loss", "raw_loss", "raw_standard_error", "merged", "merged_loss")
_RESULT_COLUMNS += ("merged_standard_error", "tokens_per_second", "forked_from", "path")
_COUNTS = ("tokens", "step", "total_tokens", "window", "interval")


def metrics(run: Run | epath.PathLike) -> "pd.DataFrame":
    """Return the records of RUN/metrics.jsonl and RUN/watch.jsonl, one per row.

    Raises:
        UserError: There is no run, a record is corrupt, or pandas is not installed.
    """
    return _frame(_METRIC_COLUMNS, _open(run).metrics)


def sweep(run: Run | epath.PathLike) -> "pd.DataFrame":
    """Return the merges of RUN/sweep.json, which `pma sweep RUN` evaluates, one per row, lowest loss first.

    Raises:
        UserError: There is no run or no sweep, the file is corrupt, or pandas is not installed.
    """
    run = _open(run)
    content = read_sweep(run)
    if content is None:
        raise UserError(f"{run.path} has no sweep.json: run `pma sweep {run.path}` first")
    rows = sorted(content["rows"], key=lambda row: row["loss"])
    return _frame(_SWEEP_COLUMNS, [row | {"tokens": content["tokens"]} for row in rows])


def grid(root: epath.PathLike) -> "pd.DataFrame":
    """Return the runs in the directory `root`, one per row, indexed by the names of their directories.

    The first columns are the configuration keys in which the runs differ, such as `schedule.peak_rate`. Then follow
    the results of each run so far, of its newest mark.

    Raises:
        UserError: There is no run in `root`, a file of one is corrupt, or pandas is not installed.
    """
    folder = absolute_path(root)
    runs = [open_run(path) for path in sorted(folder.iterdir() if exists(folder) else ()) if is_run(path)]
    if not runs:
        raise UserError(f"{root} has no runs: name the directory that contains the run directories of a grid")
    keys = _varied_keys([run.config for run in runs])
    rows = [
        {key: _value(run.config, key) for key in keys} | {"run": run.path.name, "path": str(run.path)} | _result(run)
        for run in runs
    ]
    return _frame(("run", *keys, *_RESULT_COLUMNS), rows).set_index("run")


def _open(run: Run | epath.PathLike) -> Run:
    return run if isinstance(run, Run) else open_run(run)


def _frame(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return a frame with these columns, and then those that only some rows have."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError("pma.frames needs pandas: pip install 'pma-jax[frames]'") from error
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    frame = pd.DataFrame([dict(row) for row in rows], columns=names)
    return frame.astype({name: "Int64" for name in _COUNTS if name in names})


def _varied_keys(configs: Sequence[Config]) -> list[str]:
    """List the `section.key`s that affect results and differ between the configurations, in the schema's order."""
    changed = {line.partition(":")[0] for c in configs for line in differences_affecting_results(configs[0], c)}
    return [key for key in _keys(configs[0]) if key in changed]


def _keys(config: Config) -> Iterator[str]:
    for section in dataclasses.fields(config):
        for key in dataclasses.fields(getattr(config, section.name)):
            yield f"{section.name}.{key.name}"


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _result(run: Run) -> dict[str, Any]:
    """Return the columns of a run's results: its raw and its best merged loss at the newest mark that it evaluated."""
    records = run.metrics
    steps = [r for r in records if r["kind"] == "train"]
    origin = run.metadata.get("forked_from")
    result: dict[str, Any] = {
        "tokens": max((r["tokens"] for r in records), default=0),
        "total_tokens": run.config.training.total_tokens,
        "forked_from": origin and origin["path"],
    }
    if steps:
        speeds = sorted(r["tokens_per_second"] for r in steps)
        result |= {"train_loss": steps[-1]["loss"], "tokens_per_second": speeds[len(speeds) // 2]}
    if marks := [r for r in records if r["kind"] == "evaluation"]:
        newest = marks[-1]
        result |= {"raw_loss": newest["loss"], "raw_standard_error": newest.get("standard_error")}
        if merges := _merges_at(run, records, newest):
            merge = min(merges, key=lambda merge: merge["loss"])
            result |= {"merged": merge["recipe"], "merged_loss": merge["loss"]}
            result["merged_standard_error"] = merge.get("standard_error")
    return result


def _merges_at(run: Run, records: Sequence[Mapping[str, Any]], mark: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the previews, and the merges of a sweep, of the snapshot and the held-out text of an evaluation."""
    tokens, text = mark["tokens"], mark.get("text")
    previews = [r for r in records if r["kind"] == "preview" and (r["tokens"], r.get("text")) == (tokens, text)]
    swept = read_sweep(run)
    if swept and swept["tokens"] == tokens and (swept.get("held_out") or {}).get("digest") == text:
        return [*previews, *(row | {"recipe": row["text"]} for row in swept["rows"])]
    return previews
