"""What do averagers that work during training reach with the same tokens, and does merging add to them?

Command:   python experiments/other_averagers/script.py --runs runs/science

Schedule-free AdamW (arXiv 2405.15682) at several rates, and a moving average of the weights over every step at several
half-lives are compared with a trunk's raw weights, its merges and its annealed branch.
"""

from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.study import Study

RATES = (1.0, 3.0)  # of schedule-free, times the size's own; its authors advise 1 to 10 times
HALF_LIVES = (1, 4)  # of the moving average, in units
WINDOWS = (2, 4, 8, 16)  # snapshots per merge
TRUNK = "AdamW"
BLOCKS = "AdamW, block means"


def plan(study: Study) -> Plan:
    """List the trunks and the annealed branches; forks with a moving average are estimated."""
    size, end, rate = study.sizes[0], study.units, study.describe_size(study.sizes[0])["peak_rate"]
    points = tuple(PlannedEvaluation(tuple(merges(study, "point").values()), (end,), part) for part in (REPORT, SELECT))
    blocks = tuple(
        PlannedEvaluation(tuple(merges(study, "block_mean").values()), (end,), part) for part in (REPORT, SELECT)
    )
    work: list[PlannedRun | OtherWork] = []
    for seed in study.seeds:
        work.append(PlannedRun(size, seed, (), None, (*points, *blocks)))
        work += [PlannedRun(size, seed, schedule_free(rate * factor), None, points) for factor in RATES]
        work.append(PlannedRun(size, seed, (), Branch(end * 3 // 4, end), (PlannedEvaluation((RAW,), (end,), REPORT),)))
        trained = end // 4 * study.describe_size(size)["unit_tokens"] * len(HALF_LIVES)
        read = 2 * len(HALF_LIVES) * len(merges(study, "point")) * study.evaluation_tokens
        work.append(OtherWork("moving averages", size, seed, trained, read))
    return work


def schedule_free(rate: float) -> tuple[str, ...]:
    """Return the changes of a configuration that make its optimizer schedule-free."""
    return ("optimizer.name=schedule_free_adamw", f"schedule.peak_rate={rate}")


def merges(study: Study, kind: str) -> dict[int, Cell]:
    """Return the merges of snapshots of a kind, by window; window 1 is the newest snapshot alone."""
    of_one = RAW if kind == "point" else Cell("sma", 1, kind=kind)
    return {1: of_one} | {w: Cell("sma", w, kind=kind) for w in WINDOWS if w <= study.units // 4}


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of each method's model and of merges of its snapshots, for each seed."""
    seeds = {str(seed): measure_seed(study, seed) for seed in study.seeds}
    return {"size": study.sizes[0], "facts": study.describe_size(study.sizes[0]), "seeds": seeds}


def measure_seed(study: Study, seed: int) -> dict[str, Any]:
    """Return the losses of each method, and of the annealed branch, for one seed."""
    size, end = study.sizes[0], study.units
    trunk = study.trunk(size, seed)
    rate = trunk.config.schedule.peak_rate
    runs = {TRUNK: trunk}
    for factor in RATES:
        runs[f"schedule-free, rate x{factor:g}"] = study.trunk(size, seed, schedule_free(rate * factor))
    for units in HALF_LIVES:
        # The average does not change training: the fork has the trunk's weights, averaged over the last quarter.
        half_life = f"optimizer.ema_half_life_tokens={units * study.unit_tokens(trunk)}"
        runs[f"EMA, half-life {units}"] = study.fork(trunk, end * 3 // 4, end, [half_life])
    measured: dict[str, Any] = {"annealed": study.loss(study.anneal(trunk, end * 3 // 4, end))}
    for key, part in (("methods", REPORT), ("select_methods", SELECT)):
        measured[key] = {name: losses_by_window(study, run, "point", part) for name, run in runs.items()}
        measured[key][BLOCKS] = losses_by_window(study, trunk, "block_mean", part)
    return measured


def losses_by_window(study: Study, run: Run, kind: str, part: str) -> dict[str, float]:
    """Return the loss at the end of the run by window; window 1 is the newest snapshot alone."""
    by_window = merges(study, kind)
    losses = study.losses(run, by_window.values(), [study.units], part)
    return {str(w): losses[cell, study.units] for w, cell in by_window.items()}


# --- The page ---------------------------------------------------------------------------------------------------------


def losses_of(results: dict[str, Any], name: str, window: str) -> list[float]:
    """Return the losses of one merge of one method over seeds."""
    return [seed["methods"][name][window] for seed in results["seeds"].values()]


def mean_to_choose_by(results: dict[str, Any], name: str, window: str) -> float:
    """Return the mean over seeds of the losses by which the best merge and method are chosen."""
    seeds = results["seeds"].values()
    return float(np.mean([pages.to_choose_by(seed, "methods")[name][window] for seed in seeds]))


def best_window(results: dict[str, Any], name: str) -> str:
    """Return the window of two or more snapshots with the lowest mean loss over seeds."""
    windows = next(iter(results["seeds"].values()))["methods"][name]
    return min(
        (window for window in windows if window != "1"), key=lambda window: mean_to_choose_by(results, name, window)
    )


def report(results: dict[str, Any]) -> str:
    """Format the table of each method's model, its best merge, and what merging adds."""
    annealed = [seed["annealed"] for seed in results["seeds"].values()]
    raw = losses_of(results, TRUNK, "1")
    rows = []
    for name in next(iter(results["seeds"].values()))["methods"]:
        model, window = losses_of(results, name, "1"), best_window(results, name)
        merged = losses_of(results, name, window)
        better = min("1", window, key=lambda window, name=name: mean_to_choose_by(results, name, window))
        rows.append(
            [
                name,
                f"{np.mean(model):.4f}",
                pages.format_difference(model, raw) if name != TRUNK else "",
                f"{np.mean(merged):.4f} (N = {window})",
                pages.format_difference(merged, model),
                pages.format_difference(losses_of(results, name, better), annealed),
            ]
        )
    rows.append(
        ["AdamW, annealed over the last quarter", f"{np.mean(annealed):.4f}", pages.format_difference(annealed, raw)]
    )
    header = [
        "method",
        "its model",
        "less raw",
        "best merge of its snapshots",
        "less its model",
        "the better, less annealed",
    ]
    unit = results["facts"]["unit_tokens"]
    chosen_on = pages.describe_choice(next(iter(results["seeds"].values())), "methods")
    note = (
        f"{results['size']}, {results['facts']['tokens'] / 1e6:.2f}M tokens, one snapshot per unit of {unit:,} tokens. "
        f"Half-lives are in units. The window of the best merge was chosen on {chosen_on}, by its mean over "
        "seeds."
    )
    return f"{pages.format_table(header, [r + [''] * (len(header) - len(r)) for r in rows])}\n\n{note}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize what the best schedule-free run and the best moving average reach, and what merging adds to them."""
    names = list(next(iter(results["seeds"].values()))["methods"])
    merged = losses_of(results, TRUNK, best_window(results, TRUNK))
    effects = []
    for kind in ("schedule-free", "EMA"):
        variants = [name for name in names if name.startswith(kind)]
        best = min(variants, key=lambda name: mean_to_choose_by(results, name, "1"))
        added = pages.format_difference(
            losses_of(results, best, best_window(results, best)), losses_of(results, best, "1")
        )
        against = pages.format_difference(losses_of(results, best, "1"), merged)
        effects.append((best, against, added))
    verdict = "; ".join(
        f"{name}, less the best merge of AdamW's snapshots: {against} nats" for name, against, _ in effects
    )
    return IndexRow(
        9,
        "With other averagers: what is left to merge?",
        "Tuned averages of one trajectory are alike (Ajroldi et al.); schedule-free needs no decay (Defazio et al.)",
        verdict,
        "best merge less the newest snapshot: " + "; ".join(f"{name}: {added}" for name, _, added in effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss of each method against the window."""
    lines = []
    for name, windows in next(iter(results["seeds"].values()))["methods"].items():
        means = [float(np.mean(losses_of(results, name, window))) for window in windows]
        lines.append(Line(name, [int(window) for window in windows], means))
    annealed = float(np.mean([seed["annealed"] for seed in results["seeds"].values()]))
    lines.append(Line("AdamW, annealed", [1, max(WINDOWS)], [annealed] * 2, dashed=True))
    panel = LinePanel("held-out loss, nats per token", "snapshots merged, N", lines, log_x=True)
    return {"figure.png": to_png(draw_lines([panel]))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
