"""`pma report`: of one run and its forks, or of the root of a grid."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from pma_jax.reporting import grid_report, report
from pma_jax.reporting.grid_rows import runs_below
from pma_jax.runs.directory import is_run, open_run
from pma_jax.storage.paths import absolute_path


def write(options: argparse.Namespace) -> tuple[Mapping[str, Any], str, Sequence[epath.Path]]:
    """Build and write the report that the options name; return its contents, its text, and the paths written."""
    root = options.run[0]
    if len(options.run) == 1 and not is_run(root) and runs_below(root):
        grid = grid_report.build_grid_report(root)
        written = grid_report.write_grid_report(grid, options.out or root)
        return grid, grid_report.format_grid_report(grid), written
    run, *forks = [open_run(path) for path in options.run]
    if options.out:  # before the evaluations, which take minutes and write RUN/document_losses.json
        absolute_path(options.out).mkdir(parents=True, exist_ok=True)
    contents = report.build_report(run, forks)
    written = report.write_report(contents, run, options.out or run.path)
    return contents, report.format_report(contents), written
