"""Is a merge a better start for continued training and fine-tuning? (PMA, Figures 6 and 7, Table 1)

Command:   python experiments/pma_init/script.py --runs runs/science

Runs start from the last snapshot of a trunk, and from a merge of its newest snapshots. They continue training on the
sources of another package, or fine-tune on Python functions (signature and docstring -> body, loss on bodies only).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pma_jax.analysis.comparison import roughness
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import OtherWork, Plan, PlannedRun
from pma_jax.studies.study import Study

STARTS = {"last": RAW, "sma:8": Cell("sma", 8)}  # merges that runs start from
TASKS = {
    "continued training": {
        "token_divisor": 4,  # runs take 1/4 of the trunk's tokens
        "rates": (1.0, 0.25),  # times the trunk's
        "changes": ["data.package=scipy"],
    },
    "fine-tuning": {
        "token_divisor": 8,
        "rates": (0.5, 0.2, 0.05),
        # Byte 0 ends each pair, so that packed pairs do not attend to each other.
        "changes": ["data.task=functions", "data.pair_bytes=512", "model.separator_token=0"],
    },
}
TEXT_TOKENS = 16_384  # held-out tokens for evaluation; the held-out functions have 31,000
EARLY = 100  # steps whose gradient norms are compared
UNITS = 8  # snapshots of each run


def plan(study: Study) -> Plan:
    """List the trunks; the runs that start from their snapshots are estimated."""
    size = study.sizes[0]
    tokens = study.describe_size(size)["tokens"]
    runs = len(STARTS) * sum(len(keys["rates"]) for keys in TASKS.values())
    shares = sum(len(keys["rates"]) / keys["token_divisor"] for keys in TASKS.values())
    trained = round(len(STARTS) * shares * tokens)
    read = runs * (UNITS + 2) * min(study.evaluation_tokens, TEXT_TOKENS)
    work: list[PlannedRun | OtherWork] = [PlannedRun(size, seed) for seed in study.seeds]
    return [*work, *(OtherWork("runs from its snapshots", size, seed, trained, read) for seed in study.seeds)]


def measure(study: Study) -> dict[str, Any]:
    """Return losses and gradient norms of each task, rate and start, for each seed of the first size."""
    seeds = {str(seed): measure_seed(study, seed) for seed in study.seeds}
    return {"size": study.sizes[0], "begins": list(STARTS), "seeds": seeds}


def measure_seed(study: Study, seed: int) -> dict[str, Any]:
    """Return task -> rate -> start -> losses and gradient norms, for one seed."""
    trunk = study.trunk(study.sizes[0], seed)
    starts = {name: study.merge(trunk, cell, study.units) for name, cell in STARTS.items()}
    return {
        task: {
            f"{rate:g}": {
                name: measure_run(study, train_from(study, trunk, start, keys, rate), start)
                for name, start in starts.items()
            }
            for rate in keys["rates"]
        }
        for task, keys in TASKS.items()
    }


def train_from(study: Study, trunk: Run, start: Snapshot, keys: dict[str, Any], rate: float) -> Run:
    """Train a run from a snapshot's weights with a fresh optimizer, a short warm-up and a cosine decay to 0."""
    config = trunk.config
    total = config.training.total_tokens // keys["token_divisor"]
    changes = [
        f"training.start_from={start.path}",
        f"training.total_tokens={total}",
        f"training.log_interval_tokens={config.batch_tokens}",
        f"schedule.peak_rate={config.schedule.peak_rate * rate}",
        f"schedule.warmup_tokens={total // 32}",
        "schedule.decay=cosine",
        f"schedule.decay_start_tokens={total // 32}",
        "checkpoint.keep_states_at_tokens=()",
        "checkpoint.kinds=point",
    ]
    short_study = dataclasses.replace(study, units=UNITS)
    return short_study.trunk(study.sizes[0], config.training.seed, [*changes, *keys["changes"]])


def measure_run(study: Study, run: Run, start: Snapshot) -> dict[str, Any]:
    """Return the losses before the first step and at every snapshot, and the gradient norms of the first steps."""
    evaluation = dataclasses.replace(run.config.evaluation, tokens=min(study.evaluation_tokens, TEXT_TOKENS))
    config = dataclasses.replace(run.config, evaluation=evaluation)
    snapshots = [start, *run.snapshots]
    losses = [x.loss for x in evaluate_merges(config, snapshots, np.eye(len(snapshots)), REPORT).losses]
    (last,) = evaluate_merges(config, snapshots[-1:], [[1]], SELECT).losses
    norms = [r["gradient_norm"] for r in run.metrics if r["kind"] == "train"]
    early = norms[:EARLY]
    return {
        "curve": [[0, losses[0]], *([s.tokens, loss] for s, loss in zip(run.snapshots, losses[1:], strict=True))],
        "select_end": last.loss,
        "gradient_norms": [round(norm, 4) for norm in early],
        "roughness": roughness(norms),
        "early_roughness": roughness(early),
        "early_peak": max(early) / float(np.median(norms)),
    }


# --- The page ---------------------------------------------------------------------------------------------------------


def over_seeds(
    results: dict[str, Any], task: str, rate: str, start: str, statistic: Callable[[dict[str, Any]], float]
) -> list[float]:
    """Return `statistic` of what was measured of one run, for each seed."""
    return [statistic(seed[task][rate][start]) for seed in results["seeds"].values()]


STATISTICS = {
    "before the first step": lambda m: m["curve"][0][1],
    "after an eighth": lambda m: m["curve"][1][1],
    "at the end": lambda m: m["curve"][-1][1],
    "gradient norm: roughness": lambda m: m["roughness"],
    "of its first steps": lambda m: m["early_roughness"],
}


def report(results: dict[str, Any]) -> str:
    """Format one table per task: the run from the last snapshot, and the differences of the others from it."""
    parts = []
    for task in TASKS:
        rows = []
        for rate in next(iter(results["seeds"].values()))[task]:
            for start in results["begins"]:
                shown = [format_cell(results, task, rate, start, statistic) for statistic in STATISTICS.values()]
                rows.append([f"x{rate}", start, *shown])
        parts.append(f"**{task.capitalize()}.**\n\n{pages.format_table(['rate', 'started from', *STATISTICS], rows)}")
    note = (
        f"{results['size']}. Rows `last`: mean over seeds; other rows: difference from `last`, with its interval. "
        f"Losses are on {TEXT_TOKENS:,} held-out tokens of the task; in fine-tuning, on bodies only. Roughness is the "
        "root mean square change of the log of the gradient norm from step to step; the first steps are the first "
        f"{EARLY}."
    )
    return "\n\n".join([*parts, note])


def format_cell(
    results: dict[str, Any], task: str, rate: str, start: str, statistic: Callable[[dict[str, Any]], float]
) -> str:
    """Format the mean of the run from the last snapshot, or the difference of another run from it."""
    values, last = (over_seeds(results, task, rate, name, statistic) for name in (start, "last"))
    return f"{np.mean(last):.4f}" if start == "last" else pages.format_difference(values, last)


def best_rate(results: dict[str, Any], task: str, start: str) -> str:
    """Return the rate with the lowest mean loss at the end over seeds, on the part `select`."""
    rates: Sequence[str] = list(next(iter(results["seeds"].values()))[task])
    loss = lambda measured: measured.get("select_end", STATISTICS["at the end"](measured))  # noqa: E731
    return min(rates, key=lambda rate: np.mean(over_seeds(results, task, rate, start, loss)))


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the differences at the start and at the end of each task."""
    verdicts, effects = [], []
    for task in TASKS:
        rates = {start: best_rate(results, task, start) for start in ("last", "sma:8")}
        ends = {s: over_seeds(results, task, rate, s, STATISTICS["at the end"]) for s, rate in rates.items()}
        first, rough = (
            {s: over_seeds(results, task, rates["last"], s, STATISTICS[name]) for s in rates}
            for name in ("before the first step", "of its first steps")
        )
        verdicts.append(
            f"{task} begins {pages.format_difference(first['sma:8'], first['last'])} nats from the last snapshot's "
            f"loss, with a roughness of its first gradient norms of "
            f"{pages.format_difference(rough['sma:8'], rough['last'], 3)}"
        )
        effects.append(
            f"{task}, at the end, each at its best rate: {pages.format_difference(ends['sma:8'], ends['last'])} nats"
        )
    return IndexRow(
        8,
        "PMA-init: is a merge the better start?",
        "A slightly lower initial loss, parity at the end (Fig. 6); smoother gradient norms (Fig. 7); gains in "
        "fine-tuning that could not be repeated at other sizes (Table 1)",
        "; ".join(verdicts),
        "; ".join(effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw loss curves of each task at each rate, and the gradient norms of the first steps of the first seed."""
    panels = []
    first = next(iter(results["seeds"].values()))
    for task in TASKS:
        for rate in first[task]:
            lines = []
            for start in results["begins"]:
                curves = np.array([seed[task][rate][start]["curve"] for seed in results["seeds"].values()])
                lines.append(Line(start, (curves[0, :, 0] / 1e6).tolist(), curves[:, :, 1].mean(axis=0).tolist()))
            panels.append(LinePanel(f"{task}, rate x{rate}: loss", "tokens, millions", lines))
    norms = []
    for task in TASKS:
        rate = next(iter(first[task]))
        lines = [
            Line(start, list(range(1, len(series) + 1)), series)
            for start in results["begins"]
            for series in [first[task][rate][start]["gradient_norms"]]
        ]
        norms.append(LinePanel(f"{task}, rate x{rate}: gradient norm", "step", lines))
    return {"figure.png": to_png(draw_lines(panels)), "gradient_norms.png": to_png(draw_lines(norms, columns=1))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
