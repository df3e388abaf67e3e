"""Does training go better when it begins from a merge? Another domain, and fine-tuning (PMA, Figures 6 and 7, Table 1).

Command:   python experiments/pma_init/script.py --runs runs/science

From the last snapshot of a trunk, and from merges of its newest: training goes on with the sources of another package,
its rate decaying to 0; and the model is fine-tuned on pairs of signature and docstring to body, loss on bodies only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pma_jax.analysis.comparison import roughness
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.study import Study, run_experiment

BEGINS = {"last": RAW, "sma:8": Cell("sma", 8)}
TASKS = {
    "continued training": {
        "part": 4,  # of the trunk's tokens, one over so many
        "rates": (1.0, 0.25),  # times the trunk's
        "changes": ["data.package=scipy"],
    },
    "fine-tuning": {
        "part": 8,
        "rates": (0.5, 0.2, 0.05),
        # Packed pairs do not see each other; byte 0 ends each.
        "changes": ["data.task=functions", "data.pair_bytes=512", "model.separator_token=0"],
    },
}
TEXT_TOKENS = 16_384  # held-out text that these runs are judged by; the functions' own is 31,000 long
EARLY = 100  # steps whose gradient norms are compared
MARKS = 8  # snapshots of each of these runs


def measure(study: Study) -> dict[str, Any]:
    """Task -> rate -> begin -> losses and gradient norms, for each seed of the first size."""
    found = {str(seed): of_seed(study, seed) for seed in study.seeds}
    return {"size": study.sizes[0], "begins": list(BEGINS), "seeds": found}


def of_seed(study: Study, seed: int) -> dict[str, Any]:
    """The same of one seed."""
    trunk = study.trunk(study.sizes[0], seed)
    begins = {name: study.merge(trunk, cell, study.units) for name, cell in BEGINS.items()}
    return {
        task: {
            f"{rate:g}": {
                name: measured(study, trained(study, trunk, begin, keys, rate), begin) for name, begin in begins.items()
            }
            for rate in keys["rates"]
        }
        for task, keys in TASKS.items()
    }


def trained(study: Study, trunk: Run, begin: Snapshot, keys: dict[str, Any], rate: float) -> Run:
    """A run that starts from a snapshot's weights, a fresh optimizer and a short warm-up, and decays (cosine) to 0."""
    config = trunk.config
    total = config.training.total_tokens // keys["part"]
    changes = [
        f"training.start_from={begin.path}",
        f"training.total_tokens={total}",
        f"training.log_interval_tokens={config.batch_tokens}",
        f"schedule.peak_rate={config.schedule.peak_rate * rate}",
        f"schedule.warmup_tokens={total // 32}",
        "schedule.decay=cosine",
        f"schedule.decay_start_tokens={total // 32}",
        "checkpoint.keep_states_at_tokens=()",
        "checkpoint.kinds=point",
    ]
    marked = dataclasses.replace(study, units=MARKS)
    return marked.trunk(study.sizes[0], config.training.seed, [*changes, *keys["changes"]])


def measured(study: Study, run: Run, begin: Snapshot) -> dict[str, Any]:
    """Loss before the first step and at every mark, on the run's own held-out text; gradient norms of its beginning."""
    evaluation = dataclasses.replace(run.config.evaluation, tokens=min(study.evaluation_tokens, TEXT_TOKENS))
    config = dataclasses.replace(run.config, evaluation=evaluation)
    snapshots = [begin, *run.snapshots]
    losses = evaluate_merges(config, snapshots, np.eye(len(snapshots))).losses
    norms = [r["gradient_norm"] for r in run.metrics if r["kind"] == "train"]
    early = norms[:EARLY]
    return {
        "curve": [[0, losses[0]], *([s.tokens, loss] for s, loss in zip(run.snapshots, losses[1:], strict=True))],
        "gradient_norms": [round(norm, 4) for norm in early],
        "roughness": roughness(norms),
        "early_roughness": roughness(early),
        "early_peak": max(early) / float(np.median(norms)),
    }


# --- What the page shows ----------------------------------------------------------------------------------------------


def over_seeds(results: dict[str, Any], task: str, rate: str, begin: str, of: Any) -> list[float]:
    """`of` what was measured of one run, for each seed."""
    return [of(seed[task][rate][begin]) for seed in results["seeds"].values()]


MEASURES = {
    "before the first step": lambda m: m["curve"][0][1],
    "after an eighth": lambda m: m["curve"][1][1],
    "at the end": lambda m: m["curve"][-1][1],
    "gradient norm: roughness": lambda m: m["roughness"],
    "of its first steps": lambda m: m["early_roughness"],
}


def report(results: dict[str, Any]) -> str:
    """A table for each task: losses of the last snapshot's run, and of the others less that."""
    parts = []
    for task in TASKS:
        rows = []
        for rate in next(iter(results["seeds"].values()))[task]:
            for begin in results["begins"]:
                shown = [cell_text(results, task, rate, begin, of) for of in MEASURES.values()]
                rows.append([f"x{rate}", begin, *shown])
        parts.append(f"**{task.capitalize()}.**\n\n{pages.format_table(['rate', 'started from', *MEASURES], rows)}")
    note = (
        f"{results['size']}. Of `last`: the mean over seeds; of the others: less that of `last`, with the interval. "
        f"Losses are on {TEXT_TOKENS:,} held-out tokens of the task itself, in fine-tuning of bodies alone. Roughness "
        "is the root mean square change of the log of the gradient norm from step to step; the first steps are "
        f"{EARLY}."
    )
    return "\n\n".join([*parts, note])


def cell_text(results: dict[str, Any], task: str, rate: str, begin: str, of: Any) -> str:
    """One cell of the table."""
    found, last = (over_seeds(results, task, rate, name, of) for name in (begin, "last"))
    return f"{np.mean(last):.4f}" if begin == "last" else pages.format_difference(found, last)


def best_rate(results: dict[str, Any], task: str, begin: str) -> str:
    """The rate with the lowest loss at the end, over seeds."""
    rates: Sequence[str] = list(next(iter(results["seeds"].values()))[task])
    return min(rates, key=lambda rate: np.mean(over_seeds(results, task, rate, begin, MEASURES["at the end"])))


def summarize(results: dict[str, Any]) -> IndexRow:
    """The question's row on the page of all."""
    found, effects = [], []
    for task in TASKS:
        rates = {begin: best_rate(results, task, begin) for begin in ("last", "sma:8")}
        ends = {b: over_seeds(results, task, rate, b, MEASURES["at the end"]) for b, rate in rates.items()}
        starts = {b: over_seeds(results, task, rates["last"], b, MEASURES["before the first step"]) for b in rates}
        rough = {b: over_seeds(results, task, rates["last"], b, MEASURES["of its first steps"]) for b in rates}
        start = pages.format_difference(starts["sma:8"], starts["last"])
        found.append(
            f"{task} begins {start} nats from the last snapshot's loss, with a "
            f"roughness of its first gradient norms of {pages.format_difference(rough['sma:8'], rough['last'], 3)}"
        )
        effects.append(
            f"{task}, at the end, each at its best rate: {pages.format_difference(ends['sma:8'], ends['last'])} nats"
        )
    return IndexRow(
        8,
        "PMA-init: is a merge the better start?",
        "A slightly lower initial loss, parity at the end (Fig. 6); smoother gradient norms (Fig. 7); gains in "
        "fine-tuning that could not be repeated at other sizes (Table 1)",
        "; ".join(found),
        "; ".join(effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Loss curves of each task at each rate, and the gradient norms of the first steps, of the first seed."""
    panels = []
    first = next(iter(results["seeds"].values()))
    for task in TASKS:
        for rate in first[task]:
            lines = []
            for begin in results["begins"]:
                curves = np.array([seed[task][rate][begin]["curve"] for seed in results["seeds"].values()])
                lines.append(Line(begin, (curves[0, :, 0] / 1e6).tolist(), curves[:, :, 1].mean(axis=0).tolist()))
            panels.append(LinePanel(f"{task}, rate x{rate}: loss", "tokens, millions", lines))
    norms = []
    for task in TASKS:
        rate = next(iter(first[task]))
        lines = [
            Line(begin, list(range(1, len(series) + 1)), series)
            for begin in results["begins"]
            for series in [first[task][rate][begin]["gradient_norms"]]
        ]
        norms.append(LinePanel(f"{task}, rate x{rate}: gradient norm", "step", lines))
    return {"figure.png": to_png(draw_lines(panels)), "gradient_norms.png": to_png(draw_lines(norms, columns=1))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
