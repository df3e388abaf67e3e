"""The plan of a sweep that a program scores: what is left to do, and all that can be refused before the work.

Does not import JAX.
"""

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax.config.errors import UserError
from pma_jax.evaluation import grid_file, scorer
from pma_jax.evaluation.grid import Grid, GridCell, cell_digests, find_cells
from pma_jax.merging import from_storage
from pma_jax.merging.engine.plan import MergePlan

KEEP = ("best", "all", "none")


@dataclass(frozen=True)
class SweepSettings:
    """How to make, score and keep the merges of a grid.

    Attributes:
        command: The scorer's command line, as the user gave it.
        addresses: The addresses of the checkpoints, as absolute paths.
        out: The directory of sweep.json and of the merges.
        keep: Which merges stay, one of `KEEP`.
        best: "lowest" or "highest": which score is the best.
        metric: Name of the number that ranks the merges, if the scorer prints several.
        parallel: Number of scorers that run at the same time.
        disk_limit_bytes: Limit of the merges that exist at the same time.
        timeout_seconds: A scorer that runs longer is ended.
        subtrees: The subtrees that are read of each checkpoint.
        merge_options: `dtype`, `integers`, `format`, `memory_limit_bytes` and `is_alone` of `from_storage.plan_merge`.
        pma_command: The command line of `pma`, for the provenance.
        words: The words that run the command, if they are not those of `command`.
        held_out: Digest of the held-out text that the scores are losses on, if they are.
        asked: Digest of the tasks that the scores are of, if they are.
    """

    command: str
    addresses: tuple[str, ...]
    out: Path
    keep: str = "best"
    best: str = "lowest"
    metric: str | None = None
    parallel: int = 1
    disk_limit_bytes: int = 50 * 10**9
    timeout_seconds: float = 86400.0
    subtrees: tuple[str, ...] = ()
    merge_options: Mapping[str, Any] = field(default_factory=dict)
    pma_command: str = ""
    words: tuple[str, ...] = ()
    held_out: str | None = None
    asked: str | None = None

    @property
    def scorer_words(self) -> tuple[str, ...]:
        """The words that run the scorer.

        Raises:
            UserError: As `scorer.parse_command`.
        """
        return self.words or scorer.parse_command(self.command)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep has to do.

    Attributes:
        grid: The merges.
        settings: How to make them.
        content: The content of sweep.json, with the rows that are reused.
        digests: Digest of each cell, by its key.
        cells: The cells of the grid and of the rows that are reused, by their keys.
        todo: The cells without a score, oldest end first.
        merge_bytes: Upper limit of the size of one merge on the disk.
        peak_bytes: The same while it is made.
        read_bytes: Bytes of one checkpoint; 0 if that is only known after a download.
    """

    grid: Grid
    settings: SweepSettings
    content: dict[str, Any]
    digests: Mapping[tuple[str, int], str]
    cells: Mapping[tuple[str, int], GridCell]
    todo: tuple[GridCell, ...]
    merge_bytes: int
    peak_bytes: int
    read_bytes: int

    def batches(self, cells: Sequence[GridCell]) -> list[list[GridCell]]:
        """Divide cells into those that are made in one pass: of one end, and as many as the disk limit admits."""
        spare = self.settings.disk_limit_bytes - self.kept_bytes
        # With "all", the merges that are made stay, and `kept_bytes` counts them.
        per_cell = self.peak_bytes - (self.merge_bytes if self.settings.keep == "all" else 0)
        count = max(1, spare // per_cell) if per_cell else max(1, len(cells))
        of_end = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.end)]
        return [group[i : i + count] for group in of_end for i in range(0, len(group), count)]

    @property
    def kept_bytes(self) -> int:
        """Upper limit of the size of the merges that are kept beside those that are being made or scored."""
        kept = {(row["text"], row["end"]): row["kept"] for row in self.content["rows"] if row["path"] is not None}
        if self.settings.keep == "all":  # and the raw checkpoint of an end
            merges = [*self.grid.merges, *self.missing]
            count = len(kept.keys() | {cell.key for cell in merges}) + bool(self.todo)
        elif self.settings.keep == "best":
            count = list(kept.values()).count("all") + (1 if len(self.grid.merges) > 1 else 0)
        else:
            count = len(kept)
        return count * self.merge_bytes

    @property
    def missing(self) -> list[GridCell]:
        """The merges that have a score and are kept, and whose directories do not exist: they are made again."""
        rows, out = self.content["rows"], self.settings.out
        best = grid_file.best_row(rows, self.settings.best)
        chosen = {"best": [best] if best else [], "all": rows, "none": []}[self.settings.keep]
        found = [row for row in chosen if row["score"] is not None and (row["text"], row["end"]) in self.cells]
        is_made = [row["path"] is not None and (out / row["path"]).exists() for row in found]
        return [self.cells[row["text"], row["end"]] for row, made in zip(found, is_made, strict=True) if not made]


def plan_sweep(grid: Grid, settings: SweepSettings) -> SweepPlan:
    """Check all that can be known before the work, and return what remains to be done. Writes nothing.

    Raises:
        UserError: The merges cannot be made, they do not fit the disk or the limit, OUT has another sweep, or a
            directory that would be written exists.
    """
    command, out = settings.command, settings.out
    settings.scorer_words  # noqa: B018  checks the command
    paths = [Path(source.path).absolute() for source in grid.series.sources if source.format != "deferred"]
    if any(
        out == path.parent or out.is_relative_to(path) for path in [Path(a) / "x" for a in settings.addresses] + paths
    ):
        raise UserError(f"--out {out} is among the inputs: give another directory for the merges and their scores")
    stored = grid_file.read_grid(out)
    if stored is not None:
        grid_file.check_same_sweep(stored, out, command, settings.addresses, settings.held_out, settings.asked)
    cells = {cell.key: cell for cell in grid.cells}
    if stored is not None:
        cells = find_cells(grid.series, [*stored["rows"], *stored["raw"]]) | cells
    options = {name: settings.merge_options.get(name) for name in ("dtype", "integers", "format")}
    digests = cell_digests(grid.series, tuple(cells.values()), options | {"subtrees": settings.subtrees})
    content = _reusable(stored, grid, settings, digests)
    finished = {(row["text"], row["end"]) for row in [*content["rows"], *content["raw"]] if row["metrics"]}
    todo = tuple(cell for cell in grid.cells if cell.key not in finished)
    merge_bytes, peak_bytes, read_bytes = _sizes(grid, todo, settings)
    plan = SweepPlan(grid, settings, content, digests, cells, todo, merge_bytes, peak_bytes, read_bytes)
    _check_disk(plan)
    _check_outputs(plan)
    return plan


def describe_sweep(plan: SweepPlan) -> dict[str, Any]:
    """Return what a sweep will do as JSON values: merges, bytes, and seconds if they are known."""
    # With "best", which merge is kept is known when all have a score.
    again = plan.missing if plan.settings.keep == "all" or not plan.todo else []
    batches = [*plan.batches(plan.todo), *plan.batches(again)]
    counts = [int(np.any([cell.coefficients != 0 for cell in batch], axis=0).sum()) for batch in batches]
    read, written = sum(counts) * plan.read_bytes, (len(plan.todo) + len(again)) * plan.merge_bytes
    rates, seconds = plan.content["rates"], None
    if {"bytes_per_second", "score_seconds"} <= rates.keys():
        scoring = rates["score_seconds"] * len(plan.todo) / plan.settings.parallel
        seconds = (read + written) / rates["bytes_per_second"] + scoring
    return {
        "merges": sum(not cell.is_raw for cell in plan.todo),
        "raw": sum(cell.is_raw for cell in plan.todo),
        "again": len(again),
        "finished": len(plan.grid.cells) - len(plan.todo),
        "ends": sorted({cell.end for cell in plan.todo}),
        "passes": len(batches),
        "read_bytes": read,
        "write_bytes": written,
        "disk_bytes": max((len(batch) for batch in batches), default=0) * plan.peak_bytes,
        "seconds": seconds,
        "left_out": dict(plan.grid.left_out),
        "notes": [*plan.grid.series.notes, *plan.content["notes"]],
    }


def _reusable(
    stored: dict[str, Any] | None,
    grid: Grid,
    settings: SweepSettings,
    digests: Mapping[tuple[str, int], str],
) -> dict[str, Any]:
    """Return the content of sweep.json for a grid, with the stored rows whose checkpoints have not changed."""
    content: dict[str, Any] = {
        "score": settings.command,
        "checkpoints": list(settings.addresses),
        "unit": grid.series.unit,
        "held_out": settings.held_out or (stored or {}).get("held_out"),
        "asked": settings.asked or (stored or {}).get("asked"),
        "metric": settings.metric,
        "best": settings.best,
        "rows": [],
        "raw": [],
        "left_out": dict(grid.left_out),
        "notes": list(grid.notes),
        "rates": {},
    }
    if stored is None:
        return content
    for key in ("rows", "raw"):
        is_current = [digests.get((row["text"], row["end"])) == row["digest"] for row in stored[key]]
        content[key] = [row for row, is_same in zip(stored[key], is_current, strict=True) if is_same]
        if not all(is_current):
            changed = is_current.count(False)
            content["notes"].append(f"{changed} scores of sweep.json are of checkpoints or options that have changed")
    grid_file.rank_rows(content, settings.metric)
    return content | {"rates": stored["rates"]}


def _sizes(grid: Grid, todo: Sequence[GridCell], settings: SweepSettings) -> tuple[int, int, int]:
    """Plan each end's merges; return the bytes of a merge, its bytes while it is made, and those of a checkpoint.

    Checkpoints on the hub are downloaded when they are merged; their sizes are not known before, and 0 here.
    """
    sizes = [(0, 0, 0)]
    for _, group in itertools.groupby(todo or grid.cells[:1], key=lambda cell: cell.end):
        cells = list(group)
        rows = np.stack([cell.coefficients for cell in cells])
        used = [grid.series.sources[k] for k in np.flatnonzero(rows.any(axis=0)).tolist()]
        if any(source.format == "deferred" for source in used):
            continue
        plan, _ = from_storage.plan_rows(
            grid.series, rows, [cell.recipe_text for cell in cells], **settings.merge_options
        )
        written = _disk_bytes(plan)
        extra = plan.disk_bytes // len(cells) - plan.layout.nbytes
        sizes.append((written, written + extra, max(source.nbytes for source in plan.sources)))
    return max(size[0] for size in sizes), max(size[1] for size in sizes), max(size[2] for size in sizes)


def _disk_bytes(plan: MergePlan) -> int:
    """Return an upper limit of the size of one merge: leaves, small files, and the provenance."""
    layout = plan.layout
    small = sum(map(len, layout.texts.values())) + sum(path.stat().st_size for path in layout.copies.values())
    provenance = (len(plan.sources) + 1) * sum(len(name) + 90 for name in plan.leaves) + 8192
    return layout.nbytes + small + provenance


def _check_disk(plan: SweepPlan) -> None:
    """Raise UserError if the merges that exist at the same time exceed the limit or the free space."""
    is_all_made = not (plan.todo or (plan.settings.keep == "all" and plan.missing))
    if is_all_made or not plan.merge_bytes:
        return
    settings, parent = plan.settings, plan.settings.out
    while not parent.exists():
        parent = parent.parent
    needed = plan.kept_bytes + plan.peak_bytes - (plan.merge_bytes if settings.keep == "all" else 0)
    kept = sum(row["path"] is not None for row in plan.content["rows"]) * plan.merge_bytes
    free = shutil.disk_usage(parent).free + kept
    for limit, name in ((settings.disk_limit_bytes, "--disk-limit is"), (free, f"the free space of {parent} is")):
        if needed > limit:
            raise UserError(
                f"the grid does not fit the disk: a merge takes {plan.merge_bytes:,} bytes, --keep {settings.keep} "
                f"needs {needed:,}, and {name} {limit:,}: raise --disk-limit, free some space, or use --keep none"
            )


def _check_outputs(plan: SweepPlan) -> None:
    """Raise UserError if a directory that a merge may be kept in exists and is not of this sweep."""
    own = {row["path"] for row in plan.content["rows"]}
    for cell in plan.grid.merges if plan.settings.keep != "none" else ():
        path = plan.settings.out / cell.directory_name
        if path.exists() and cell.directory_name not in own:
            raise UserError(f"{path}: exists already, and is not of this sweep: choose another --out, or remove it")
