"""Seconds of the cells of the notebooks that read a run.

Command:   make demo; python experiments/benchmarks/notebooks.py
Bar:       no cell takes 30 s.

Each notebook is executed in a process of its own, in the order of `NOTEBOOKS`, on copies of runs/demo and
runs/demo-annealed as `make demo` leaves them. Requires `pip install -e '.[test]'`.
"""

import argparse
import os
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
NOTEBOOKS = (
    "quickstart",
    "explore_a_run",
    "sweep_windows_and_recipes",
    "forecasts_and_scaling",
    "landscape_and_curvature",
)


def main() -> None:
    """Print the seconds of each notebook, and its slowest cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="the directory that `make demo` filled")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for variable, name in (("PMA_RUN", "demo"), ("PMA_ANNEALED", "demo-annealed")):
            shutil.copytree(options.runs / name, Path(folder, name))
            os.environ[variable] = str(Path(folder, name))
        for name in NOTEBOOKS:
            seconds, source = max(times := time_cells(ROOT / "notebooks" / f"{name}.ipynb"))
            first_line = source.strip().splitlines()[0]
            print(f"{name}: {sum(s for s, _ in times):.1f} s; slowest cell {seconds:.1f} s: {first_line}", flush=True)


def time_cells(path: Path) -> list[tuple[float, str]]:
    """Execute a notebook; return the seconds and the source of each cell with code."""
    notebook: Any = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    times = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            began, ended = (
                datetime.fromisoformat(cell.metadata.execution[key])
                for key in ("iopub.status.busy", "shell.execute_reply")
            )
            times.append(((ended - began).total_seconds(), cell.source))
    return times


if __name__ == "__main__":
    main()
