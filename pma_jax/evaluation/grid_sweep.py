"""Make the merges of a grid, score each with a program of the user, and keep the best.

Merges with the same end are made in one pass over the checkpoints, as many at a time as the disk limit admits, and are
removed when they are scored. Each finished row is written to sweep.json at once, so that an interrupted sweep resumes.
Does not import JAX.
"""

import concurrent.futures
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError, error_line
from pma_jax.evaluation import grid_file, scorer
from pma_jax.evaluation.grid import Grid, GridCell
from pma_jax.evaluation.grid_plan import SweepPlan, SweepSettings, plan_sweep
from pma_jax.merging import from_storage
from pma_jax.merging.engine import merge as engine
from pma_jax.runtime import signals
from pma_jax.runtime.failures import is_temporary
from pma_jax.storage.locks import locked

_WORK_DIRECTORY = ".working"
_LOCK_NAME = ".grid.lock"


def sweep_grid(grid: Grid, settings: SweepSettings, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Make and score the merges of a grid, keep those that `settings.keep` says, and return the content of sweep.json.

    A failure of a scorer, or of a merge, is a row that says so; the next call tries it again.

    Raises:
        UserError: As `plan_sweep`, another process writes to OUT, or the disk is full. Rows that are finished stay.
    """
    plan_sweep(grid, settings)  # before anything is written
    out = settings.out
    out.mkdir(parents=True, exist_ok=True)
    if scorer.PLACEHOLDER not in settings.command:
        log(
            f"note: the command has no {scorer.PLACEHOLDER}: it finds the merge only in the environment variable "
            f"{scorer.DIRECTORY_VARIABLE}"
        )
    with locked(out / _LOCK_NAME, _raise_in_use):
        plan = plan_sweep(grid, settings)  # again: another process may have added rows
        work = out / _WORK_DIRECTORY
        shutil.rmtree(work, ignore_errors=True)  # of an interrupted sweep
        work.mkdir()
        sweep = _Sweep(plan, log)
        sweep.write()
        sweep.score_all()
        sweep.keep_chosen()
        shutil.rmtree(work)
        return sweep.content


class _Sweep:
    """The state of a running sweep. Only the main thread changes it; threads only wait for scorers."""

    def __init__(self, plan: SweepPlan, log: Callable[[str], None]):
        self.plan, self.log = plan, log
        self.settings = plan.settings
        self.work = plan.settings.out / _WORK_DIRECTORY
        self.words = plan.settings.scorer_words
        self.content = plan.content
        self.order = {cell.key: i for i, cell in enumerate(plan.grid.cells)}
        self.merged = [0.0, 0.0]  # bytes read and written, seconds
        self.running: dict[concurrent.futures.Future[scorer.Score], tuple[GridCell, Path]] = {}
        self.finished = 0

    def write(self) -> None:
        """Rank the rows and write sweep.json."""
        grid_file.rank_rows(self.content, self.settings.metric)
        signals.wait_if_ending()
        grid_file.write_grid(self.settings.out, self.content)

    def score_all(self) -> None:
        """Make and score the merges that have no score."""
        with (
            concurrent.futures.ThreadPoolExecutor(self.settings.parallel) as pool,
            scorer.running_scorers() as scorers,
        ):
            for batch in self.plan.batches(self.plan.todo):
                while self.running and not self._fits(len(batch)):
                    self._collect()
                for cell, path in self._merge(batch):
                    arguments = (self.words, path, Path(f"{path}.log"), self.settings.timeout_seconds)
                    self.running[pool.submit(scorers.score, *arguments)] = (cell, path)
                self._collect(timeout=0)
            while self.running:
                self._collect()

    def keep_chosen(self) -> None:
        """Remove what was the best before, and make chosen merges again whose directories are missing."""
        best, out = grid_file.best_row(self.content["rows"], self.settings.best), self.settings.out
        for row in self.content["rows"]:
            if row["kept"] == "best" and row is not best and self.settings.keep == "best":
                shutil.rmtree(out / row["path"], ignore_errors=True)
                row |= {"path": None, "kept": None}
        if self.settings.keep == "all":  # they stay when another is the best
            self.content["rows"] = [row | {"kept": row["path"] and "all"} for row in self.content["rows"]]
        rows = {(row["text"], row["end"]): row for row in self.content["rows"]}
        for batch in self.plan.batches(self.plan.missing):
            for cell, path in self._merge(batch):
                self._move(rows[cell.key], cell, path)
        self.write()

    def _fits(self, count: int) -> bool:
        """Return whether so many merges can be made beside those that exist."""
        kept = sum(row["path"] is not None for row in self.content["rows"])
        used = (len(self.running) + kept) * self.plan.merge_bytes
        return used + count * self.plan.peak_bytes <= self.settings.disk_limit_bytes

    def _merge(self, batch: list[GridCell]) -> Iterator[tuple[GridCell, Path]]:
        """Make the merges of a batch in one pass; yield each with its directory. One that fails is a row.

        Raises:
            UserError: The disk is full.
        """
        needed, free = len(batch) * self.plan.peak_bytes, shutil.disk_usage(self.work).free
        if needed > free:
            raise UserError(
                f"{self.settings.out}: {free:,} bytes are free and the next merges need {needed:,}: free some space, "
                "or lower --disk-limit; the same command continues"
            )
        paths = [self.work / cell.directory_name for cell in batch]
        began = time.perf_counter()
        try:
            rows = np.stack([cell.coefficients for cell in batch])
            texts = [cell.recipe_text for cell in batch]
            plan, _ = from_storage.plan_rows(self.plan.grid.series, rows, texts, **self.settings.merge_options)
            result = engine.merge(plan, paths, command=self.settings.pma_command)
        except UserError as error:
            if is_temporary(error):
                raise
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)
            if len(batch) > 1:  # the checkpoints of the others may be sound
                for cell in batch:
                    yield from self._merge([cell])
            else:
                self._finish(batch[0], scorer.Score({}, f"the merge failed: {error_line(error)}", 0.0), None)
            return
        self.merged[0] += result.read_bytes + plan.write_bytes
        self.merged[1] += time.perf_counter() - began
        self._note(result.notes)
        yield from zip(batch, paths, strict=True)

    def _collect(self, timeout: float | None = None) -> None:
        """Wait for scorers that end, and finish their rows."""
        done, _ = concurrent.futures.wait(self.running, timeout, concurrent.futures.FIRST_COMPLETED)
        for future in sorted(done, key=lambda future: self.order[self.running[future][0].key]):
            cell, path = self.running.pop(future)
            self._finish(cell, future.result(), path)

    def _finish(self, cell: GridCell, score: scorer.Score, path: Path | None) -> None:
        """Add a row to sweep.json, and keep or remove the merge's directory."""
        key = "raw" if cell.is_raw else "rows"
        row = _new_row(cell, score, self.plan.digests[cell.key])
        others = [other for other in self.content[key] if (other["text"], other["end"]) != cell.key]
        self.content[key] = sorted([*others, row], key=self._place)
        self._update_rates()
        grid_file.rank_rows(self.content, self.settings.metric)
        is_best = row is grid_file.best_row(self.content["rows"], self.settings.best)
        is_chosen = {"best": is_best, "all": row["score"] is not None, "none": False}[self.settings.keep]
        if path is not None and is_chosen and not cell.is_raw:
            self._move(row, cell, path)
        elif path is not None:
            shutil.rmtree(path, ignore_errors=True)
        self.write()
        self.finished += 1
        outcome = f"failed: {row['failure']}" if row["score"] is None else f"{row['score']:.6g}"
        self.log(f"{self.finished}/{len(self.plan.todo)} {cell.text} at {cell.end:,}: {outcome}")

    def _move(self, row: dict[str, Any], cell: GridCell, path: Path) -> None:
        """Move a merge to its final name; with keep "best", remove the one that was the best until now."""
        row |= {"path": cell.directory_name, "kept": self.settings.keep}
        self.write()  # first, so that a directory without a row is never of this sweep
        with contextlib.suppress(FileNotFoundError):  # if the scorer has removed it, it is made again at the end
            path.rename(self.settings.out / cell.directory_name)
        if self.settings.keep == "best":
            for other in self.content["rows"]:
                if other["kept"] == "best" and other is not row:
                    shutil.rmtree(self.settings.out / other["path"], ignore_errors=True)
                    other |= {"path": None, "kept": None}

    def _place(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return the position of a row: in the order of the grid, after rows of earlier grids."""
        return row["end"], self.order.get((row["text"], row["end"]), -1)

    def _note(self, notes: Sequence[str]) -> None:
        self.content["notes"] = list(dict.fromkeys([*self.content["notes"], *notes]))

    def _update_rates(self) -> None:
        rows = [row for row in [*self.content["rows"], *self.content["raw"]] if row["metrics"]]
        if rows:
            self.content["rates"]["score_seconds"] = sum(row["seconds"] for row in rows) / len(rows)
        if self.merged[1]:
            self.content["rates"]["bytes_per_second"] = self.merged[0] / self.merged[1]


def _new_row(cell: GridCell, score: scorer.Score, digest: str) -> dict[str, Any]:
    return {
        "text": cell.text,
        "recipe": cell.recipe,
        "window": cell.window,
        "interval": cell.interval,
        "end": cell.end,
        "score": None,
        "metrics": score.metrics,
        "failure": score.failure,
        "seconds": score.seconds,
        "digest": digest,
        "path": None,
        "kept": None,
    }


def _raise_in_use(file: Any) -> None:
    raise UserError(f"another process sweeps into {Path(file.name).parent}: wait for it, or choose another --out")
