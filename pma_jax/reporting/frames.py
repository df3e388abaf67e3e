"""A run's metrics, a sweep and a grid of runs as pandas DataFrames, for notebooks: `pma.frames`.

Losses are in nats per token, on held-out text if not said otherwise; standard errors are over documents. A value that
does not exist is missing (NaN, None or <NA>). docs/frames.md documents every column.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import read_sweep
from pma_jax.reporting.grid_rows import open_grid, results_of, value_of, varied_keys
from pma_jax.runs.directory import Run, open_run

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
    runs = open_grid(root)
    keys = varied_keys([run.config for run in runs])
    rows = [
        {key: value_of(run.config, key) for key in keys}
        | {"run": run.path.name, "path": str(run.path)}
        | results_of(run)
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
