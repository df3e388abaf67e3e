"""Is the merged model better than the raw one throughout the constant phase? (PMA, Figures 1 and 9)

Command:   python experiments/stable_phase/script.py --runs runs/science
"""

from typing import Any

from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanInterval, paired_difference
from pma_jax.studies.study import Study, run_experiment

WINDOWS = (3, 6, 10, 15)  # PMA's, Figure 5
DEFAULT_WINDOW = 10  # PMA's
MERGES = [Cell("sma", window) for window in WINDOWS]
EIGHTHS = range(1, 9)  # positions along a trunk
TABLE_EIGHTHS = (1, 2, 4, 6, 8)  # positions that the table shows


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of the raw and the merged models at every eighth of every trunk."""
    ends = [study.units * eighth // 8 for eighth in EIGHTHS]
    sizes = {}
    for size in study.sizes:
        losses = study.losses_over_seeds(lambda seed, size=size: study.trunk(size, seed), [RAW, *MERGES], ends)
        sizes[size] = study.describe_size(size) | {"losses": losses}
    return {"ends": ends, "sizes": sizes}


def gain(size: dict[str, Any], text: str, end: int) -> MeanInterval | None:
    """Return the raw loss minus the merged loss, over seeds; None if there are too few snapshots."""
    merged = size["losses"].get(text, {}).get(str(end))
    return merged and paired_difference(size["losses"][RAW.text][str(end)], merged)


def report(results: dict[str, Any]) -> str:
    """Format the table: the gain of each window over the raw loss, at five positions of each size."""
    rows = []
    for name, size in results["sizes"].items():
        for end in [results["ends"][eighth - 1] for eighth in TABLE_EIGHTHS]:
            raw = size["losses"][RAW.text][str(end)]
            gains = [gain(size, cell.text, end) for cell in MERGES]
            shown = [pages.format_interval(g) if g else "too few snapshots" for g in gains]
            tokens = f"{end * size['unit_tokens'] / 1e6:.2f}M"
            rows.append([name, f"{size['parameters'] / 1e6:.2f}M", tokens, f"{sum(raw) / len(raw):.4f}", *shown])
    header = ["size", "parameters", "tokens", "raw loss", *(f"raw − SMA of {w}" for w in WINDOWS)]
    note = (
        "Positive: merging is better. Each cell is the mean over seeds with its 95% interval, in nats per token; a "
        f"snapshot is saved at every {results['ends'][-1]}th of the horizon."
    )
    return f"{pages.format_table(header, rows)}\n\n{note}\n\n{count_verdicts(results)}"


def count_verdicts(results: dict[str, Any]) -> str:
    """Count the positions at which merging is better and worse than raw, in one sentence per window."""
    lines = []
    for cell in MERGES:
        gains = [gain(size, cell.text, end) for size in results["sizes"].values() for end in results["ends"]]
        known = [g for g in gains if g]
        better, worse = sum(g.low > 0 for g in known), sum(g.high < 0 for g in known)
        lines.append(
            f"SMA of {cell.window}: clearly better than raw at {better} of {len(known)} positions, clearly worse at "
            f"{worse}, not distinguishable at {len(known) - better - worse}."
        )
    return " ".join(lines)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the gain of PMA's default window at the end of each trunk, and since when it is clear."""
    effects, verdicts = [], []
    for name, size in results["sizes"].items():
        gains = {end: gain(size, f"sma:{DEFAULT_WINDOW}", end) for end in results["ends"]}
        last = gains[results["ends"][-1]]
        effects.append(f"{name}: {pages.format_interval(last)} nats" if last else f"{name}: too few snapshots")
        clear = [end for end, g in gains.items() if g and g.low > 0]
        since = min((end for end in clear if all(e in clear for e in gains if e >= end)), default=None)
        verdicts.append(
            f"{name}: never to the end"
            if since is None
            else f"{name}: from {since * size['unit_tokens'] / 1e6:.2f}M on"
        )
    return IndexRow(
        1,
        "Stable phase: is merged better than raw?",
        "PMA, Figs. 1 and 9: yes, along the whole constant phase, dense and mixtures, at every size",
        f"SMA of {DEFAULT_WINDOW} is clearly better, and stays so: {'; '.join(verdicts)}",
        f"raw − merged at the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the gain of each window along each trunk."""
    panels = []
    for name, size in results["sizes"].items():
        lines = []
        for cell in MERGES:
            at = {end: g for end in results["ends"] if (g := gain(size, cell.text, end))}
            if at:
                x = [end * size["unit_tokens"] / 1e6 for end in at]
                lines.append(interval_line(f"SMA of {cell.window}", x, list(at.values())))
        panels.append(LinePanel(f"{name}: raw − merged, nats", "tokens, millions", lines, zero_line=True))
    return {"figure.png": to_png(draw_lines(panels))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
