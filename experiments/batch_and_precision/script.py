"""Does merging help more with large batches, or with bfloat16 compute?

Command:   python experiments/batch_and_precision/script.py --runs runs/science --jobs 2
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import (
    OtherWork,
    Plan,
    PlannedEvaluation,
    PlannedRun,
    complete_all,
    get_by_seed,
    measure_raw_and_merged,
)
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, estimate_over_documents
from pma_jax.studies.study import Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
SHARE = 4  # a run has the size's tokens divided by this: those of the search of experiments/tuning
UNITS = 32  # per run
RAW_MARKS = (29, 30, 31, 32)  # the raw loss is the mean over these units: one snapshot is noise
SPANS = (3, 5, 8)  # units of the means of points; the best one counts
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)
WEIGHT_DECAY = 0.1  # as in the search of experiments/tuning at these tokens
BFLOAT16 = ("model.compute_dtype=bfloat16",)
# Name -> sequences per step, and other changes of the configuration. The first is what the others are compared with.
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "batch 4": (4, ()),
    "batch 8": (8, ()),
    "batch 16": (16, ()),
    "batch 32": (32, ()),
    "batch 4, bfloat16": (4, BFLOAT16),
}
BASE = next(iter(VARIANTS))
MODELS = ("raw", "merged")


def rates(study: Study) -> tuple[float, ...]:
    """Return the rates that are tried of every variant."""
    return RATES if study.searches_settings else RATES[1:3]


def setting(variant: str, rate: float) -> tuple[str, ...]:
    """Return the changes of a variant's run."""
    batch, changes = VARIANTS[variant]
    values = (f"schedule.peak_rate={rate:g}", f"training.batch_size_sequences={batch}")
    return (*values, f"optimizer.weight_decay={WEIGHT_DECAY:g}", *changes)


def run_of(study: Study, size: str, variant: str, rate: float, seed: int, part: str) -> PlannedRun:
    """Return the run of a variant at a rate, judged by its raw marks and its merges."""
    total = study.trunk_config(size, study.seeds[0]).training.total_tokens // SHARE
    merges = tuple(Cell("sma", n) for n in SPANS)
    raw, merged = PlannedEvaluation((RAW,), RAW_MARKS, part), PlannedEvaluation(merges, (UNITS,), part)
    changes = (f"training.total_tokens={total}", "checkpoint.kinds=point", *setting(variant, rate))
    tokens = study.evaluation_tokens // 2 if part == SELECT else 0
    return PlannedRun(size, seed, changes, None, (raw, merged), UNITS, tokens)


def plan(study: Study) -> Plan:
    """List the runs of the search for rates; those of the chosen rates are estimated."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += search_runs(study, size)
        total = study.trunk_config(size, study.seeds[0]).training.total_tokens // SHARE
        read = len(VARIANTS) * (len(RAW_MARKS) + len(SPANS)) * study.evaluation_tokens
        # The raw model and the merged one often have one best rate.
        trained = round(1.5 * len(VARIANTS) * total)
        work += [OtherWork(f"{size}, the chosen rates", size, seed, trained, read) for seed in study.seeds]
    return work


def search_runs(study: Study, size: str) -> list[PlannedRun]:
    """List the runs of every variant at every rate on the tuning seeds, the seeds of one setting after the other."""
    return [
        run_of(study, size, variant, rate, seed, SELECT)
        for variant in VARIANTS
        for rate in rates(study)
        for seed in study.tuning_seeds
    ]


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of every variant of every size, at its best rate for the raw and for the merged model."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Choose the rates of a size's variants, train the chosen ones on the seeds of the study, and read their losses."""
    found = measure_raw_and_merged(study, search_runs(study, size), len(study.tuning_seeds))
    of_variant = len(rates(study))
    tried = {
        variant: dict(zip(map(str, rates(study)), found[i * of_variant : (i + 1) * of_variant], strict=True))
        for i, variant in enumerate(VARIANTS)
    }
    best = {variant: {model: best_rate(losses, model) for model in MODELS} for variant, losses in tried.items()}
    wanted = {(variant, rate) for variant, of in best.items() for rate in of.values()}
    planned = {pair: [run_of(study, size, *pair, seed, REPORT) for seed in study.seeds] for pair in sorted(wanted)}
    complete_all(study, [run for of in planned.values() for run in of], study.workers)
    windows = {pair: choose_window(study, size, *pair) for pair in planned}
    measured: dict[str, dict[str, Any]] = {}
    for (variant, rate), runs in planned.items():
        measured.setdefault(variant, {})[str(rate)] = read(study, runs) | {"merge": windows[variant, rate]}
    return study.describe_size(size) | {"tried": finite(tried), "best": best, "measured": measured}


def best_rate(losses: Mapping[str, Mapping[str, Sequence[float]]], model: str) -> float:
    """Return the rate with the lowest mean loss of a model over the tuning seeds."""
    return float(min(losses, key=lambda rate: sum(losses[rate][model])))


def finite(tried: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of the search without those of runs that diverged."""
    return {
        variant: {rate: of if math.isfinite(sum(of["raw"])) else None for rate, of in by_rate.items()}
        for variant, by_rate in tried.items()
    }


def choose_window(study: Study, size: str, variant: str, rate: float) -> str:
    """Return the text of the merge with the lowest loss on the tuning seeds and the part `select`."""
    runs = [run_of(study, size, variant, rate, seed, SELECT) for seed in study.tuning_seeds]
    merges = runs[0].evaluations[1].cells
    each = [run.study(study).losses(run.get(study), merges, [UNITS], SELECT) for run in runs]
    return min(merges, key=lambda cell: sum(losses[cell, UNITS] for losses in each)).text


def read(study: Study, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the losses of the runs of a setting, one per seed, in the layout of results.json."""
    raw, merged = runs[0].evaluations
    reading, get = runs[0].study(study), get_by_seed(study, runs)
    of_raw = reading.document_losses_over_seeds(get, raw.cells, raw.ends, REPORT)
    of_merged = reading.document_losses_over_seeds(get, merged.cells, merged.ends, REPORT)
    return of_raw | {"nats": of_raw["nats"] | of_merged["nats"]}


# --- The page ---------------------------------------------------------------------------------------------------------


def nats(size: Mapping[str, Any], variant: str, rate: float, model: str) -> np.ndarray:
    """Return the loss of the raw or the merged model of a variant at a rate, of each seed on each document [S, D]."""
    of = size["measured"][variant][str(rate)]
    if model == "raw":
        return np.mean([of["nats"][RAW.text][str(end)] for end in RAW_MARKS], axis=0)
    return np.array(of["nats"][of["merge"]][str(UNITS)])


def tokens_of(size: Mapping[str, Any]) -> list[float]:
    """Return the tokens of each document."""
    return next(iter(size["measured"][BASE].values()))["document_tokens"]


def gain(size: Mapping[str, Any], variant: str, raw_rate: float, merged_rate: float) -> np.ndarray:
    """Return the raw loss less the merged one, in nats, of each seed on each document [S, D]."""
    return nats(size, variant, raw_rate, "raw") - nats(size, variant, merged_rate, "merged")


def own_gain(size: Mapping[str, Any], variant: str) -> np.ndarray:
    """Return the gain of merging with the raw and the merged model each at its own best rate [S, D]."""
    return gain(size, variant, *(size["best"][variant][model] for model in MODELS))


def against_base(size: Mapping[str, Any], variant: str) -> MeanEstimate:
    """Estimate the gain of merging of a variant less that of the base, each with its own best rates."""
    return difference_over_documents(own_gain(size, variant), own_gain(size, BASE), tokens_of(size))


def estimate(size: Mapping[str, Any], nats_SD: np.ndarray) -> MeanEstimate:
    """Estimate a mean of losses or gains, in nats per token."""
    return estimate_over_documents(nats_SD / np.array(tokens_of(size)), tokens_of(size))


def report(results: dict[str, Any]) -> str:
    """Format the gain of each variant, its difference from that of the base, and the rates that were tried."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        rows, lines = [], []
        for variant in VARIANTS:
            raw_rate, merged_rate = (size["best"][variant][model] for model in MODELS)
            losses = [
                estimate(size, nats(size, variant, rate, m)) for rate, m in ((raw_rate, "raw"), (merged_rate, "merged"))
            ]
            same = estimate(size, gain(size, variant, merged_rate, merged_rate))
            rows.append(
                [
                    variant,
                    f"`{raw_rate:g}`, `{merged_rate:g}`",
                    *(f"{one.mean:.4f} ± {one.interval().high - one.mean:.4f}" for one in losses),
                    pages.format_interval(estimate(size, own_gain(size, variant)).interval()),
                    pages.format_interval(same.interval()),
                ]
            )
            if variant != BASE:
                said = pages.describe_difference(against_base(size, variant), margin)
                lines.append(f"- {variant}, the gain of merging against that of {BASE}: {said}.")
        header = ["variant", "best rates: raw, merged", "raw", "merged", "raw − merged, each at its rate"]
        table = pages.format_table([*header, "raw − merged, same run"], rows)
        parts += [f"### {name}", table, describe_table(size), "\n".join(lines), format_tried(size)]
    return "\n\n".join(parts)


def describe_table(size: Mapping[str, Any]) -> str:
    """Say what the table has."""
    return (
        f"Nats per token after {size['tokens'] // SHARE / 1e6:.2f}M tokens, 95% intervals over seeds and documents. "
        "The raw loss is the mean over the last 4 of 32 marks; the merge is the best plain mean of 3, 5 or 8 points. "
        "Rates and windows were chosen on tuning seeds and on the part `select`."
    )


def format_tried(size: Mapping[str, Any]) -> str:
    """Format the losses of every rate of every variant on the tuning seeds."""
    rows = []
    for variant, by_rate in size["tried"].items():
        cells = [
            "diverged" if of is None else " / ".join(f"{sum(of[model]) / len(of[model]):.2f}" for model in MODELS)
            for of in by_rate.values()
        ]
        rows.append([variant, *cells])
    rates_tried = next(iter(size["tried"].values()))
    table = pages.format_table(["raw / merged", *(f"`{float(rate):g}`" for rate in rates_tried)], rows)
    return f"All rates that were tried, losses on tuning seeds:\n\n{table}"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the gain of the largest batch and of bfloat16 against the base."""
    margin, found, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        said = [f"{v}: {pages.describe_difference(against_base(size, v), margin)}" for v in list(VARIANTS)[-2:]]
        found.append(f"{name}, gain of merging against that of {BASE}: {'; '.join(said)}")
        each = [
            f"{variant} {pages.format_interval(estimate(size, own_gain(size, variant)).interval())}"
            for variant in VARIANTS
        ]
        effects.append(f"{name}: {', '.join(each)} nats")
    return IndexRow(
        12,
        "Does merging help more with large batches or bfloat16?",
        "said of PMA: it stabilises training, most where the batch is large or the precision low",
        "; ".join(found),
        f"raw − merged, each at its own rate: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the gain of merging against the batch size."""
    panels = []
    for name, size in results["sizes"].items():
        batches = {variant: batch for variant, (batch, changes) in VARIANTS.items() if not changes}
        lines = [
            interval_line(
                "float32", list(batches.values()), [estimate(size, own_gain(size, v)).interval() for v in batches]
            ),
            interval_line(
                "bfloat16",
                [VARIANTS[v][0] for v in VARIANTS if v not in batches],
                [estimate(size, own_gain(size, v)).interval() for v in VARIANTS if v not in batches],
            ),
        ]
        title = f"{name}: raw − merged, nats, each at its own rate"
        panels.append(LinePanel(title, "sequences per step", lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=1))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
