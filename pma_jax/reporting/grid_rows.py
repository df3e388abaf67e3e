"""The runs of a grid as rows: what differs between their configurations, and the results of each."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax.config import Config, differences_affecting_results
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import read_sweep
from pma_jax.runs.directory import Run, is_run, open_run
from pma_jax.storage.paths import absolute_path, exists


def runs_below(folder: epath.PathLike) -> list[Run]:
    """Open the run directories in a directory, in the order of their names."""
    path = absolute_path(folder)
    return [open_run(child) for child in sorted(path.iterdir() if exists(path) else ()) if is_run(child)]


def open_grid(root: epath.PathLike) -> list[Run]:
    """Open the runs in the root of a grid.

    Raises:
        UserError: There is none, or a file of one is corrupt.
    """
    runs = runs_below(root)
    if not runs:
        raise UserError(f"{root} has no runs: name the directory that contains the run directories of a grid")
    return runs


def varied_keys(configs: Sequence[Config]) -> list[str]:
    """List the `section.key`s that affect results and differ between the configurations, in the schema's order."""
    changed = {line.partition(":")[0] for c in configs for line in differences_affecting_results(configs[0], c)}
    return [key for key in _keys(configs[0]) if key in changed]


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def results_of(run: Run) -> dict[str, Any]:
    """Return a run's results: its raw and its best merged loss at the newest mark that it evaluated."""
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


def _keys(config: Config) -> Iterator[str]:
    for section in dataclasses.fields(config):
        for key in dataclasses.fields(getattr(config, section.name)):
            yield f"{section.name}.{key.name}"


def _merges_at(run: Run, records: Sequence[Mapping[str, Any]], mark: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the previews, and the merges of a sweep, of the snapshot and the held-out text of an evaluation."""
    tokens, text = mark["tokens"], mark.get("text")
    previews = [r for r in records if r["kind"] == "preview" and (r["tokens"], r.get("text")) == (tokens, text)]
    swept = read_sweep(run)
    if swept and swept["tokens"] == tokens and (swept.get("held_out") or {}).get("digest") == text:
        return [*previews, *(row | {"recipe": row["text"]} for row in swept["rows"])]
    return previews
