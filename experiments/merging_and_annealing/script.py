"""How far, and over which horizon, does merging replace annealing? (PMA, Figures 2 and 3)

Command:   python experiments/merging_and_annealing/script.py --runs runs/science

A branch forks from a trunk, and its rate decays to 0. The trunk continues at a constant rate over the same tokens, and
its snapshots since the fork are merged.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch as PlannedBranch
from pma_jax.studies.planned import Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import mean_interval, paired_difference
from pma_jax.studies.study import Study

SHAPES = ("linear", "cosine", "minus_sqrt")
WINDOWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of points
BLOCK_WINDOWS = (2, 4, 8, 16, 32)  # of block means
INSIDE_WINDOWS = (2, 3, 6)
INSIDE_SHAPES = ("linear", "cosine")
Branch = dict[str, Any]


def branches(study: Study) -> Iterator[tuple[str, int, int, str]]:
    """Yield (size, end, length, shape) of every annealed branch, in units; most are of the first size."""
    units = study.units
    first, *others = study.sizes
    for end in (units // 4, units // 2, units):
        for length in study.branch_lengths(end):
            yield first, end, length, "linear"
    for end in (units // 2, units):
        for length in (end // 8, end // 4):
            yield from ((first, end, length, shape) for shape in SHAPES[1:])
    for size in others:
        yield from ((size, units, length, "linear") for length in (units // 8, units // 4))


def merges(length: int) -> dict[str, list[Cell]]:
    """Return the merges of the `length` snapshots since the fork that are compared with a branch.

    The first block mean after the fork contains only weights since the fork, so block means use the same tokens.

    Returns:
        `mean` and `block_mean`: the plain mean of all points or block means; `any`: merges of which the best is chosen.
    """
    points, blocks = (
        list(dict.fromkeys(w for w in (*windows, length) if w <= length)) for windows in (WINDOWS, BLOCK_WINDOWS)
    )
    every = [Cell("sma", w) for w in points]
    for recipe in ("sma", "wma", "lagfree:lag=0.5", "lagfree"):
        every += [Cell(recipe, w, kind="block_mean") for w in blocks if w > 2 or recipe in ("sma", "wma")]
    if length == 1:
        every = [RAW, Cell("sma", 1, kind="block_mean")]
    return {"mean": [Cell("sma", length)], "block_mean": [Cell("sma", length, kind="block_mean")], "any": every}


def plan(study: Study) -> Plan:
    """List the trunks and the annealed branches."""
    work: list[PlannedRun] = []
    wanted = list(branches(study))
    for (size, end), seed in itertools.product(dict.fromkeys(branch[:2] for branch in wanted), study.seeds):
        evaluations = tuple(
            PlannedEvaluation(tuple(trunk_cells(wanted, size, end)), (end,), part) for part in (REPORT, SELECT)
        )
        work.append(PlannedRun(size, seed, (), None, evaluations))
    for (size, end, length, shape), seed in itertools.product(wanted, study.seeds):
        evaluation = PlannedEvaluation((RAW,), (end,), REPORT)
        work.append(PlannedRun(size, seed, (), PlannedBranch(end - length, end, shape), (evaluation,)))
    size, end = study.sizes[0], study.units
    for shape, seed in itertools.product(INSIDE_SHAPES, study.seeds):
        evaluation = PlannedEvaluation(tuple(inside_cells(study)), tuple(inside_ends(study)), REPORT)
        work.append(PlannedRun(size, seed, (), PlannedBranch(end - end // 4, end, shape), (evaluation,)))
    return work


def trunk_cells(wanted: list[tuple[str, int, int, str]], size: str, end: int) -> list[Cell]:
    """Return the merges of a trunk at an end that are compared with its branches of all lengths."""
    lengths = sorted({branch[2] for branch in wanted if branch[:2] == (size, end)})
    return list(dict.fromkeys([RAW, *(cell for n in lengths for group in merges(n).values() for cell in group)]))


def inside_cells(study: Study) -> list[Cell]:
    """Return the merges of an annealed branch's own snapshots."""
    length = study.units // 4
    return [RAW, *(Cell("sma", w) for w in (*INSIDE_WINDOWS, length) if w <= length)]


def inside_ends(study: Study) -> list[int]:
    """Return each quarter of an annealed branch, in units."""
    length = study.units // 4
    return [study.units - length + length * quarter // 4 for quarter in (1, 2, 3, 4)]


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of every branch, of its trunk's merges at the same end, and of merges inside two branches."""
    wanted = list(branches(study))
    trunks: dict[tuple[str, int, str], dict[str, dict[str, list[float]]]] = {}
    for size, end in dict.fromkeys((size, end) for size, end, _, _ in wanted):
        # Evaluate the merges of all lengths together, so that each snapshot is read once.
        cells = trunk_cells(wanted, size, end)
        for part in (REPORT, SELECT):
            get_trunk = functools.partial(study.trunk, size)
            trunks[size, end, part] = study.losses_over_seeds(get_trunk, cells, [end], part)
    measured = []
    for size, end, length, shape in wanted:
        annealed = [study.loss(study.anneal(study.trunk(size, seed), end - length, end, shape)) for seed in study.seeds]
        texts = dict.fromkeys([RAW.text, *(c.text for group in merges(length).values() for c in group)])
        measured.append(
            {
                "size": size,
                "end": end,
                "length": length,
                "shape": shape,
                "annealed": annealed,
                "trunk": {text: trunks[size, end, REPORT][text][str(end)] for text in texts},
                "select_trunk": {text: trunks[size, end, SELECT][text][str(end)] for text in texts},
            }
        )
    sizes = {size: study.describe_size(size) for size in study.sizes}
    return {"units": study.units, "sizes": sizes, "branches": measured, "inside": measure_inside(study)}


def measure_inside(study: Study) -> dict[str, Any]:
    """Return the losses of merges of an annealed branch's own snapshots, at each quarter of the branch."""
    size, end = study.sizes[0], study.units
    length, ends, cells = end // 4, inside_ends(study), inside_cells(study)
    losses = {}
    for shape in INSIDE_SHAPES:
        losses[shape] = study.losses_over_seeds(
            lambda seed, shape=shape: study.anneal(study.trunk(size, seed), end - length, end, shape),
            cells,
            ends,
        )
    return {"size": size, "length": length, "ends": ends, "losses": losses}


def best_merge(branch: Branch) -> str:
    """Return the text of the merge with the lowest mean loss over seeds, on the part `select`."""
    texts = [cell.text for cell in merges(branch["length"])["any"] if cell.text in branch["trunk"]]
    return min(texts, key=lambda text: sum(pages.to_choose_by(branch, "trunk")[text]))


def mean_of(branch: Branch, kind: str = "mean") -> str:
    """Return the text of the plain mean of all points (`mean`) or block means (`block_mean`) since the fork."""
    return merges(branch["length"])[kind][0].text


def gain_shares(branch: Branch, text: str) -> list[float]:
    """Return the share of annealing's gain over raw that a merge reaches, for each seed."""
    raws = branch["trunk"][RAW.text]
    return [
        (raw - merged) / (raw - annealed)
        for raw, merged, annealed in zip(raws, branch["trunk"][text], branch["annealed"], strict=True)
    ]


def branches_of(results: dict[str, Any], size: str, shape: str) -> list[Branch]:
    """Return the branches of one size and shape, in order."""
    return [b for b in results["branches"] if b["size"] == size and b["shape"] == shape]


def report(results: dict[str, Any]) -> str:
    """Format two tables: merging against every branch, and merging inside the branches."""
    header = [
        "size",
        "decay",
        "end",
        "length",
        "annealing gains",
        "SMA of all",
        "block means of all",
        "best merge",
        "best − annealed",
    ]
    rows = []
    for b in results["branches"]:
        best = best_merge(b)
        unit = results["sizes"][b["size"]]["unit_tokens"] / 1e6
        rows.append(
            [
                b["size"],
                b["shape"],
                f"{b['end'] * unit:.2f}M",
                f"{b['length'] * unit:.2f}M ({b['length'] / b['end']:.0%})",
                pages.format_difference(b["trunk"][RAW.text], b["annealed"]),
                pages.format_mean_percent(gain_shares(b, mean_of(b))),
                pages.format_mean_percent(gain_shares(b, mean_of(b, "block_mean"))),
                f"{best}: {pages.format_mean_percent(gain_shares(b, best))}",
                pages.format_difference(b["trunk"][best], b["annealed"]),
            ]
        )
    note = (
        "A branch anneals over its length up to its end; merges use the trunk's snapshots over the same tokens. "
        "Percentages are shares of the annealing's gain (mean over seeds, 95% interval). The best merge was chosen, on "
        f"{pages.describe_choice(results['branches'][0], 'trunk')}, from plain means of points, and plain, weighted "
        "and lag-free means of block means. Last column: nats; positive: annealing is better."
    )
    within = results["inside"]
    texts = list(dict.fromkeys(text for losses in within["losses"].values() for text in losses))
    inside_rows = []
    for shape, losses in within["losses"].items():
        final = losses[RAW.text][str(results["units"])]
        for end in within["ends"]:
            cells = [losses.get(text, {}).get(str(end)) for text in texts]
            done = (end - (results["units"] - within["length"])) / within["length"]
            inside_rows.append(
                [shape, f"{done:.0%}", *(pages.format_difference(c, final) if c else "–" for c in cells)]
            )
    names = ["raw" if text == RAW.text else text for text in texts]
    inside_note = (
        f"Merging inside the annealing ({within['size']}, the last quarter of the tokens): loss of each model minus "
        "that of the annealed model at the end of the branch."
    )
    return "\n\n".join(
        [
            pages.format_table(header, rows),
            note,
            inside_note,
            pages.format_table(["decay", "of it done", *names], inside_rows),
        ]
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize for which lengths merging reached the annealed loss."""
    size = next(iter(results["sizes"]))
    at_end = [b for b in branches_of(results, size, "linear") if b["end"] == results["units"]]
    reached = [b for b in at_end if paired_difference(b["trunk"][best_merge(b)], b["annealed"]).low <= 0]
    missed = [b for b in at_end if b not in reached]
    lengths = lambda group: ", ".join(f"{b['length'] / b['end']:.0%}" for b in group)  # noqa: E731
    verdict = f"{size}, linear decay over a share of the tokens: "
    verdict += f"the best merge is not clearly worse for {lengths(reached)}" if reached else "no merge reaches it"
    verdict += f"; it is clearly worse for {lengths(missed)}" if missed else ""
    shares = []
    for b in at_end:
        mean, best = (pages.format_mean_percent(gain_shares(b, text)) for text in (mean_of(b), best_merge(b)))
        shares.append(f"{b['length'] / b['end']:.0%}: SMA {mean}, best {best}")
    return IndexRow(
        2,
        "Does merging replace annealing?",
        "PMA, Fig. 3, and WSM: it does; Ajroldi et al. and Nemotron: over short horizons only",
        verdict,
        f"share of the annealing's gain, by its length: {'; '.join(shares)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the share of the gain against the length of the branch, and the losses inside the annealing."""
    size = next(iter(results["sizes"]))
    panels = []
    for end in sorted({b["end"] for b in branches_of(results, size, "linear")}):
        group = [b for b in branches_of(results, size, "linear") if b["end"] == end]
        lines = [
            shares_line("SMA of points of the same tokens", group, [mean_of(b) for b in group]),
            shares_line("block means of the same tokens", group, [mean_of(b, "block_mean") for b in group]),
            shares_line("best merge of the same tokens", group, [best_merge(b) for b in group]),
        ]
        tokens = end * results["sizes"][size]["unit_tokens"] / 1e6
        panels.append(
            LinePanel(
                f"end at {tokens:.2f}M: share of annealing's gain",
                "length of the branch, share of the tokens",
                lines,
                zero_line=True,
                log_x=True,
                percent=True,
                y_limits=(0.0, 1.6),
            )
        )
    within = results["inside"]
    for shape, losses in within["losses"].items():
        lines = []
        for text, by_end in losses.items():
            x = [int(end) * results["sizes"][within["size"]]["unit_tokens"] / 1e6 for end in by_end]
            y = [sum(seeds) / len(seeds) for seeds in by_end.values()]
            lines.append(Line("annealing, raw" if text == RAW.text else f"annealing, {text}", x, y))
        panels.append(LinePanel(f"inside {shape} annealing: held-out loss", "tokens, millions", lines))
    return {"figure.png": to_png(draw_lines(panels))}


def shares_line(name: str, group: list[Branch], texts: list[str]) -> Line:
    """Make the line of the mean share of each branch, with its interval."""
    intervals = [mean_interval(gain_shares(b, text)) for b, text in zip(group, texts, strict=True)]
    return interval_line(name, [b["length"] / b["end"] for b in group], intervals)


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
