"""How far, and over which horizon, does merging replace annealing? (PMA, Figures 2 and 3)

Command:   python experiments/merging_and_annealing/script.py --runs runs/science --jobs 2

A branch forks from a trunk, and its rate decays to 0. The trunk continues at a constant rate over the same tokens, and
its snapshots since the fork are merged.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from branches_page import BEST, BLOCKS, POINTS, draw, report, summarize

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch as PlannedBranch
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all, get_by_seed
from pma_jax.studies.study import Study
from pma_jax.studies.targets import ALL_SHAPES, COSINE, horizon_units, read_target, target_runs

ANNEALING = Path(__file__).resolve().parents[1] / "annealing" / "results.json"
DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
SHAPES = ("linear", "cosine", "minus_sqrt")
WINDOWS = (2, 4, 8, 16, 32)
BLOCK_RECIPES = ("sma", "wma", "lagfree:lag=0.5", "lagfree")
INSIDE_WINDOWS = (2, 3, 6)


class Branch(NamedTuple):
    """An annealed branch: positions in units, and the shape of its decay."""

    end: int
    length: int
    shape: str

    @property
    def text(self) -> str:
        """The key in results.json."""
        return f"{self.shape} over {self.length} to {self.end}"


def branches(study: Study) -> list[Branch]:
    """List the branches: several lengths at each horizon, and other shapes over a quarter at the last."""
    found = [
        Branch(end, length, "linear")
        for end in horizon_units(study).values()
        for length in study.branch_lengths(end)
        if end == study.units or end // length <= 8
    ]
    return found + [Branch(study.units, study.units // 4, shape) for shape in SHAPES[1:]]


def merges(length: int) -> list[Cell]:
    """List the merges of the snapshots since the fork, of points and of block means, that are compared with a branch.

    The first block mean after the fork contains only weights since the fork, so block means use the same tokens.
    """
    if length == 1:
        return [RAW, Cell("sma", 1, kind="block_mean")]
    windows = [n for n in dict.fromkeys((*WINDOWS, length)) if n <= length]
    listed = [Cell("sma", n) for n in windows]
    return listed + [
        Cell(recipe, n, kind="block_mean")
        for recipe in BLOCK_RECIPES
        for n in windows
        if n > 2 or recipe in ("sma", "wma")
    ]


def plain(length: int, kind: str = "point") -> Cell:
    """Return the plain mean of all snapshots since the fork."""
    return Cell("sma", length, kind=kind)


def inside_cells(study: Study) -> list[Cell]:
    """List the merges of an annealed branch's own snapshots."""
    return [RAW, *(Cell("sma", w) for w in (*INSIDE_WINDOWS, study.units // 4) if w <= study.units // 4)]


def inside_ends(study: Study) -> list[int]:
    """Return each quarter of an annealed branch of the last quarter, in units."""
    length = study.units // 4
    return [study.units - length + length * quarter // 4 for quarter in (1, 2, 3, 4)]


# --- Runs and losses --------------------------------------------------------------------------------------------------


def plan(study: Study) -> Plan:
    """List the trunks, the branches and the targets; which merges are judged on the part `report` is known later."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += trunk_runs(study, size)
        work += [run for of in branch_runs(study, size).values() for run in of.values()]
        for which in (ALL_SHAPES, COSINE):
            work += [run for of in target_runs(study, ANNEALING, size, which).values() for run in of]
        read = 3 * len(branches(study)) * study.evaluation_tokens
        work += [OtherWork(f"{size}, the chosen merges", size, seed, 0, read) for seed in study.seeds]
    return work


def trunk_cells(study: Study, end: int) -> list[Cell]:
    """List the merges of a trunk at an end that are compared with its branches of all lengths."""
    lengths = sorted({branch.length for branch in branches(study) if branch.end == end})
    return list(dict.fromkeys(cell for length in lengths for cell in merges(length)))


def trunk_runs(study: Study, size: str) -> list[PlannedRun]:
    """List the trunks, one per seed; their merges are judged on half of the tokens of the part `select`."""
    evaluations = tuple(
        PlannedEvaluation(tuple(trunk_cells(study, end)), (end,), SELECT) for end in horizon_units(study).values()
    )
    tokens = study.evaluation_tokens // 2
    return [PlannedRun(size, seed, (), None, evaluations, 0, tokens) for seed in study.seeds]


def branch_runs(study: Study, size: str) -> dict[Branch, dict[int, PlannedRun]]:
    """List the branches by their seeds; those over the last quarter are judged with merges of their own snapshots."""
    runs: dict[Branch, dict[int, PlannedRun]] = {}
    for branch in branches(study):
        is_inside = branch.end == study.units and branch.length == study.units // 4
        cells, at = (inside_cells(study), inside_ends(study)) if is_inside else ([RAW], [branch.end])
        evaluation = PlannedEvaluation(tuple(cells), tuple(at), REPORT)
        planned = PlannedBranch(branch.end - branch.length, branch.end, branch.shape)
        runs[branch] = {seed: PlannedRun(size, seed, (), planned, (evaluation,)) for seed in study.seeds}
    return runs


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of every branch, of the merges that are compared with it, and of the targets."""
    return {"units": study.units, "sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the losses of a size, in the layout of `Study.document_losses_over_seeds`."""
    chosen = choose(study, size)
    wanted: dict[int, set[Cell]] = {end: {RAW} for end in horizon_units(study).values()}
    for branch in branches(study):
        wanted[branch.end] |= {chosen[branch], plain(branch.length), plain(branch.length, "block_mean")}
    evaluations = tuple(
        PlannedEvaluation(tuple(sorted(cells, key=lambda cell: cell.text)), (end,), REPORT)
        for end, cells in wanted.items()
    )
    complete_all(study, [PlannedRun(size, seed, (), None, evaluations) for seed in study.seeds], study.workers)
    get_trunk = functools.partial(study.trunk, size)
    trunk = {str(e.ends[0]): study.document_losses_over_seeds(get_trunk, e.cells, e.ends, REPORT) for e in evaluations}
    annealed = {}
    for branch, runs in branch_runs(study, size).items():
        evaluation = runs[study.seeds[0]].evaluations[0]
        get = get_by_seed(study, runs.values())
        measured = study.document_losses_over_seeds(get, evaluation.cells, evaluation.ends, REPORT)
        compared = {BEST: chosen[branch].text, POINTS: plain(branch.length).text}
        compared[BLOCKS] = plain(branch.length, "block_mean").text
        annealed[branch.text] = {**branch._asdict(), "compared": compared, **measured}
    targets, cosines = (
        {horizon: read_target(study, runs) for horizon, runs in target_runs(study, ANNEALING, size, which).items()}
        for which in (ALL_SHAPES, COSINE)
    )
    return study.describe_size(size) | {
        "ends": horizon_units(study),
        "trunk": trunk,
        "branches": annealed,
        "targets": targets,
        "cosines": cosines,
    }


def choose(study: Study, size: str) -> dict[Branch, Cell]:
    """Choose the best merge for each branch by its mean over seeds on the part `select`."""
    means: dict[tuple[Cell, int], float] = {}
    for end in horizon_units(study).values():
        runs, cells = trunk_runs(study, size), trunk_cells(study, end)
        each = [run.study(study).losses(run.get(study), cells, [end], SELECT) for run in runs]
        means |= {pair: float(np.mean([losses[pair] for losses in each])) for pair in each[0]}
    return {
        branch: min(
            (cell for cell in merges(branch.length) if (cell, branch.end) in means),
            key=lambda cell, end=branch.end: means[cell, end],
        )
        for branch in branches(study)
    }


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
