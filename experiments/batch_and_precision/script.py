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
from pma_jax.studies.parabola import find_vertex
from pma_jax.studies.planned import (
    OtherWork,
    Plan,
    PlannedEvaluation,
    PlannedRun,
    complete_all,
    get_by_seed,
    measure_raw_and_merged,
)
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, estimate_over_documents, judge
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
    """Return the loss of a model of a variant at a rate, of each seed on each document [S, D].

    The model is "raw", the mean over the last marks; "newest", the last mark alone; or "merged".
    """
    of = size["measured"][variant][str(rate)]
    if model == "raw":
        return np.mean([of["nats"][RAW.text][str(end)] for end in RAW_MARKS], axis=0)
    if model == "newest":
        return np.array(of["nats"][RAW.text][str(UNITS)])
    return np.array(of["nats"][of["merge"]][str(UNITS)])


def tokens_of(size: Mapping[str, Any]) -> list[float]:
    """Return the tokens of each document."""
    return next(iter(size["measured"][BASE].values()))["document_tokens"]


# Definitions of the gain of merging: name -> (which model less the merged one, for which of them the rates of each are
# the best).
GAINS = {
    "own rates": ("raw", "raw", "merged"),
    "run best for merging": ("raw", "merged", "merged"),
    "run best for raw": ("raw", "raw", "raw"),
    "own rates, newest snapshot": ("newest", "raw", "merged"),
}
OWN = next(iter(GAINS))


def gain(size: Mapping[str, Any], variant: str, kind: str = OWN) -> np.ndarray:
    """Return the loss of the raw model of a variant less that of the merged one [S, D]."""
    model, *rate_of = GAINS[kind]
    first, second = (size["best"][variant][name] for name in rate_of)
    return nats(size, variant, first, model) - nats(size, variant, second, "merged")


def tuning_gains(size: Mapping[str, Any], variant: str, is_between: bool) -> list[float]:
    """Return the gain of merging of a variant on each tuning seed, each model at its own rate.

    Args:
        size: The results of a size.
        variant: The variant.
        is_between: Take the lowest point of a parabola through the best rate and its neighbours, in place of the best
            rate of the grid.
    """
    tried = {float(rate): of for rate, of in size["tried"][variant].items() if of}
    lowest = {}
    for model in MODELS:
        if is_between:
            each = zip(*[of[model] for of in tried.values()], strict=True)
            lowest[model] = [find_vertex(np.log(list(tried)).tolist(), losses).y for losses in each]
        else:
            lowest[model] = tried[size["best"][variant][model]][model]
    return [raw - merged for raw, merged in zip(lowest["raw"], lowest["merged"], strict=True)]


def own_nats(size: Mapping[str, Any], variant: str, model: str) -> np.ndarray:
    """Return the loss of a model of a variant at its own best rate, of each seed on each document [S, D]."""
    return nats(size, variant, size["best"][variant][model], model)


def against_base(size: Mapping[str, Any], variant: str, kind: str = OWN) -> MeanEstimate:
    """Estimate the gain of merging of a variant less that of the base."""
    return difference_over_documents(gain(size, variant, kind), gain(size, BASE, kind), tokens_of(size))


def estimate(size: Mapping[str, Any], nats_SD: np.ndarray) -> MeanEstimate:
    """Estimate a mean of losses or gains, in nats per token."""
    return estimate_over_documents(nats_SD / np.array(tokens_of(size)), tokens_of(size))


def report(results: dict[str, Any]) -> str:
    """Format the losses and gains of the variants, their differences from the base, and the rates that were tried."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        tables = [format_variants(size), describe_table(size), format_losses(size), format_gains(size, margin)]
        parts += [f"### {name}", *tables, format_between(size), format_tried(size)]
    return "\n\n".join(parts)


def others() -> list[str]:
    """Return the variants that are compared with the base."""
    return [variant for variant in VARIANTS if variant != BASE]


def format_variants(size: Mapping[str, Any]) -> str:
    """Format one row per variant: its best rates, its losses there and the gain of merging."""
    rows = []
    for variant in VARIANTS:
        rates_of = size["best"][variant]
        losses = [estimate(size, own_nats(size, variant, model)) for model in MODELS]
        rows.append(
            [
                variant,
                ", ".join(f"`{rates_of[model]:g}`" for model in MODELS),
                *(f"{one.mean:.4f} ± {one.interval().high - one.mean:.4f}" for one in losses),
                *(pages.format_interval(estimate(size, gain(size, variant, kind)).interval()) for kind in GAINS),
            ]
        )
    gains = (f"raw − merged, {kind}" for kind in GAINS)
    return pages.format_table(["variant", "best rates: raw, merged", "raw", "merged", *gains], rows)


def format_losses(size: Mapping[str, Any]) -> str:
    """Format the losses of each variant less those of the base, each at its own best rate."""
    pairs, rows = (("raw", "raw"), ("merged", "merged"), ("merged", "raw")), []
    for variant in others():
        each = [
            difference_over_documents(own_nats(size, variant, ours), own_nats(size, BASE, theirs), tokens_of(size))
            for ours, theirs in pairs
        ]
        rows.append([variant, *(pages.format_interval(one.interval()) for one in each)])
    header = [f"its {ours} − the {theirs} of {BASE}" for ours, theirs in pairs]
    return f"The losses against {BASE}:\n\n" + pages.format_table(["variant", *header], rows)


def format_between(size: Mapping[str, Any]) -> str:
    """Format how much the grid of rates matters: the gains of each variant less those of the base on tuning seeds."""
    rows = []
    for variant in others():
        pairs = [[tuning_gains(size, of, is_between) for of in (variant, BASE)] for is_between in (False, True)]
        rows.append([variant, *(pages.format_difference(ours, theirs) for ours, theirs in pairs)])
    return (
        f"The gain less that of {BASE} on the three tuning seeds and the part `select`, at own rates, which are those "
        "of the grid or the lowest point of a parabola in the logarithm of the rate, through the best one and its "
        "neighbours:\n\n" + pages.format_table(["variant", "rates of the grid", "between them"], rows)
    )


def format_gains(size: Mapping[str, Any], margin: float) -> str:
    """Format the gains of each variant less those of the base."""
    verdicts = judge([against_base(size, variant) for variant in others()], margin)
    rows = []
    for variant, verdict in zip(others(), verdicts, strict=True):
        each = [pages.format_interval(against_base(size, variant, kind).interval()) for kind in GAINS]
        rows.append([variant, verdict, *each])
    table = pages.format_table(["variant", f"at {OWN} it is", *GAINS], rows)
    return (
        f"The gain (raw − merged) less that of {BASE}:\n\n{table}\n\nThe verdicts are tested over all rows: lower, "
        f"higher, or equal within {margin:g} nats, each with at most 5% false findings (Benjamini and Hochberg)."
    )


def describe_table(size: Mapping[str, Any]) -> str:
    """Say what the table has."""
    return (
        f"Nats per token after {size['tokens'] // SHARE / 1e6:.2f}M tokens, 95% intervals over seeds and documents. "
        "The raw loss is the mean over the last 4 of 32 snapshots, and `newest snapshot` is that of the last alone; "
        "the merge is the best plain mean of the last 3, 5 or 8. Rates and windows were chosen on three tuning seeds "
        "and on the part `select`. `own rates`: the raw and the merged model each at its best; otherwise both "
        "at the best of one of them. Single losses and gains have wide intervals because documents differ; the "
        "differences below are paired."
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
        found.append(f"{name}, what merging gains, less that with {BASE}: {'; '.join(said)}")
        each = [
            f"{variant} {pages.format_interval(estimate(size, gain(size, variant)).interval())}" for variant in VARIANTS
        ]
        effects.append(f"{name}: {', '.join(each)} nats")
    return IndexRow(
        12,
        "Does merging help more with large batches or bfloat16?",
        "ours: it might help most where the batch is large or the precision low",
        "; ".join(found),
        f"raw − merged, each at its own rate: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the gain of merging of each batch less that of the base."""
    panels = []
    for name, size in results["sizes"].items():
        batches = {variant: VARIANTS[variant][0] for variant in others() if not VARIANTS[variant][1]}
        lines = [
            interval_line(kind, list(batches.values()), [against_base(size, v, kind).interval() for v in batches])
            for kind in GAINS
        ]
        title = f"{name}: raw − merged, less that of {BASE}, nats"
        panels.append(LinePanel(title, "sequences per step", lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=1))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
