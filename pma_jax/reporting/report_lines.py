"""The lines of a report's figures as numbers: what report.png and the plots of report.html show."""

from typing import Any, NamedTuple

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.reporting.drawing import group_by_series_and_window

MERGES_TITLE = "Loss of the merges, nats per token"
WORKERS = "single workers"  # name of the curves of workers


class MergeLines(NamedTuple):
    """The losses of the merges at the horizon, one line per series."""

    lines: dict[str, list[tuple[int, float]]]  # series -> (window, loss), by window
    references: dict[str, float]  # losses of the raw model and, if there is one, of the annealed run
    limits: tuple[float, float]  # of the y axis


def merge_lines(report: dict[str, Any]) -> MergeLines:
    """Return the losses of the merges. Only the smallest interval is shown; sweep.png shows all."""
    interval = min(m["interval"] for m in report["merges"])
    merges = [m for m in report["merges"] if m["interval"] == interval]
    lines = {
        name: sorted((n, m["loss"]) for n, m in by.items()) for name, by in group_by_series_and_window(merges).items()
    }
    annealed = report["annealed_loss"]
    references = {"raw": report["raw_loss"]} | ({} if annealed is None else {"annealed": annealed})
    values = [value for points in lines.values() for _, value in points] + list(references.values())
    margin = 0.04 * max(max(values) - min(values), 1e-6)
    return MergeLines(lines, references, (min(values) - margin, max(values) + margin))


def annealed_branch(report: dict[str, Any]) -> list[list[float]]:
    """Return the points of the annealed run, from the fork on if the raw run was evaluated there."""
    curves = report["curves"]
    return [point for point in curves["raw"] if point[0] == report["fork_tokens"]] + curves["annealed"]


def raw_name(report: dict[str, Any]) -> str:
    """Return the name of the model without merging: with workers, the parameters that stand for all of them."""
    return "all workers together" if report["curves"]["workers"] else "raw"


def visible_range(report: dict[str, Any]) -> tuple[float, float, float]:
    """Return the axis limits (min tokens, min loss, max loss) that show the end of the run and the gain of merging."""
    raw, horizon = report["curves"]["raw"], report["tokens"]
    later = [loss for tokens, loss in raw if tokens >= horizon / 2]
    lowest = min(
        [loss for _, loss in report["curves"]["annealed"]]
        + [curve[-1][1] for curve in report["curves"]["previews"].values()]
        + [m["loss"] for m in report["merges"]]
        + later
    )
    highest = max([report["raw_loss"], *(curve[-1][1] for curve in report["curves"]["workers"].values())])
    # The scale is the gain (raw minus lowest loss), or half the range of the raw losses in the second half of the run
    # if that is larger.
    scale = max(report["raw_loss"] - lowest, (max(later) - min(later)) / 2, 1e-3)
    high = max(report["raw_loss"] + 1.6 * scale, max(later) + 0.1 * scale, highest + 0.1 * scale)
    left = next((tokens for tokens, loss in raw if loss <= high), horizon)
    # Show at least half of the tokens before the fork.
    left = min(left, 0.5 * (report["fork_tokens"] or horizon))
    return left, lowest - 0.25 * scale, high


def is_block_mean(text: str) -> bool:
    """Return whether the text of a merge or of a series is one of block means."""
    return text.startswith(SNAPSHOT_KINDS["block_mean"].label_prefix)
