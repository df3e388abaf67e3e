"""Which batch size, learning rate and weight decay are the best of each size? (The settings of all other experiments)

Command:   python experiments/tuning/script.py --runs runs/science --jobs 2
"""

import itertools
from typing import Any

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages, run_cache, tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.statistics import mean_interval, paired_estimate
from pma_jax.studies.study import Study
from pma_jax.studies.tuning import TUNING_SEEDS, Axis, Contender, Tuned

BATCH, RATE, DECAY = "training.batch_size_sequences", "schedule.peak_rate", "optimizer.weight_decay"
UNITS = 32  # per run here: half as many snapshots as the trunks of other experiments
RAW_MARKS = (29, 30, 31, 32)  # the raw loss is the mean over these units: one snapshot is noise
SPANS = (3, 5, 8)  # units of the means of points; the best one counts
HORIZONS = {"a quarter": 4, "all": 1}  # of the size's tokens: name -> divisor
COARSE_BATCHES = (4, 8, 16, 32)
COARSE_RATES = (0.002, 0.004, 0.008)
EXPECTED_SETTINGS = 18  # with all tokens, for the estimate of the machine time
WEIGHT_DECAYS = (0.1, 0.5, 0.02, 0.0)  # the grid is at the first
CONTENDERS = ("raw", "merged")
DEFAULTS = {"sizes": ("science_small",), "seeds": TUNING_SEEDS, "evaluation_tokens": 65_536}


def plan(study: Study) -> Plan:
    """List the runs of the coarse grid; the search goes on from its best settings, in runs of all tokens."""
    settings = [[f"{BATCH}={b}", f"{RATE}={r:g}"] for b, r in itertools.product(COARSE_BATCHES, COARSE_RATES)]
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += runs_of(study, size, "a quarter", settings)
        config = study.trunk_config(size, study.seeds[0])
        done = [
            run.config.training.seed
            for run in run_cache.finished_runs(study.cache)
            if run.config.model == config.model and run.config.training.total_tokens == config.training.total_tokens
        ]
        read = (len(RAW_MARKS) + len(SPANS)) * study.evaluation_tokens
        for seed in study.seeds:
            missing = max(EXPECTED_SETTINGS - done.count(seed), 0)
            trained = missing * config.training.total_tokens
            work.append(OtherWork(f"{size}, search with all tokens", size, seed, trained, missing * read))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Tune every size: a grid at a quarter of its tokens, then around the best setting at all of them."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return the settings of a size that were tried, at both horizons, and the weight decays at the best one."""
    coarse_axes = (Axis(BATCH, COARSE_BATCHES[0], 2, minimum=1), Axis(RATE, COARSE_RATES[0], 2))
    grid = tuple(itertools.product(range(len(COARSE_BATCHES)), range(len(COARSE_RATES))))
    coarse = tune(study, size, "a quarter", dict.fromkeys(CONTENDERS, (coarse_axes, grid)))
    fine_axes = {name: centre_axes(one) for name, one in coarse.items()}
    fine = tune(study, size, "all", {name: (axes, ((0, 0),)) for name, axes in fine_axes.items()})
    around = dict.fromkeys(tuple(one.contender.overrides(one.best)) for one in fine.values())
    decays = [[*setting, f"{DECAY}={decay:g}"] for setting in around for decay in WEIGHT_DECAYS]
    by_decay = [
        {"setting": setting, "losses": losses}
        for setting, losses in zip(decays, measure_settings(study, size, "all", decays), strict=True)
    ]
    tried = {"a quarter": coarse, "all": fine}
    return study.describe_size(size) | {
        "tried": {horizon: {name: describe(one) for name, one in tuned.items()} for horizon, tuned in tried.items()},
        "weight_decays": by_decay,
        "best": {name: min(by_decay, key=lambda one: sum(one["losses"][name]))["setting"] for name in CONTENDERS},
    }


def centre_axes(tuned: Tuned) -> tuple[Axis, Axis]:
    """Return finer axes around the best setting of a coarse grid."""
    batch, rate = (axis.value(i) for axis, i in zip(tuned.contender.axes, tuned.best, strict=True))
    return Axis(BATCH, batch, 2, minimum=1), Axis(RATE, rate, 2**0.5)


def tune(study: Study, size: str, horizon: str, starts: dict[str, tuple[Any, Any]]) -> dict[str, Tuned]:
    """Tune the raw and the merged model of a size at a horizon, from the given axes and grids."""

    def contender(name: str) -> Contender:
        def measure_one(settings: list[list[str]]) -> list[list[float]]:
            return [losses[name] for losses in measure_settings(study, size, horizon, settings)]

        return Contender(name, *starts[name], measure_one)

    return tuning.tune([contender(name) for name in starts])


def runs_of(study: Study, size: str, horizon: str, settings: list[list[str]]) -> list[PlannedRun]:
    """List the runs of settings, all seeds of one setting after the other, and what is read from them."""
    total = study.trunk_config(size, study.seeds[0]).training.total_tokens // HORIZONS[horizon]
    evaluations = (
        PlannedEvaluation((RAW,), RAW_MARKS, SELECT),
        PlannedEvaluation(tuple(Cell("sma", n) for n in SPANS), (UNITS,), SELECT),
    )
    common = (f"training.total_tokens={total}", "checkpoint.kinds=point", f"{DECAY}={WEIGHT_DECAYS[0]:g}")
    return [
        PlannedRun(size, seed, (*common, *setting), None, evaluations, UNITS)
        for setting in settings
        for seed in study.seeds
    ]


def measure_settings(study: Study, size: str, horizon: str, settings: list[list[str]]) -> list[dict[str, list[float]]]:
    """Train and evaluate settings; return, for each, the losses of each contender, one per seed."""
    runs = runs_of(study, size, horizon, settings)
    complete_all(study, runs, study.workers)
    short, measured = runs[0].study(study), []
    for first in range(0, len(runs), len(study.seeds)):
        of_setting = runs[first : first + len(study.seeds)]
        raw, merged = (
            [short.losses(run.get(study), evaluation.cells, evaluation.ends, SELECT) for run in of_setting]
            for evaluation in runs[0].evaluations
        )
        by_span = [[one[Cell("sma", span), UNITS] for one in merged] for span in SPANS]
        measured.append({"raw": [sum(one.values()) / len(one) for one in raw], "merged": min(by_span, key=sum)})
    return measured


def describe(tuned: Tuned) -> dict[str, Any]:
    """Return the settings of a contender, and the position of the best, in the layout of results.json."""
    axes = tuned.contender.axes
    settings = []
    for position, values in tuned.losses.items():
        batch, rate = (axis.value(i) for axis, i in zip(axes, position, strict=True))
        settings.append({"batch": batch, "rate": rate, "losses": values})
    return {"settings": settings, "best": list(tuned.losses).index(tuned.best)}


def report(results: dict[str, Any]) -> str:
    """Format, for each size, the loss of every setting at both horizons, the best ones, and what a neighbour costs."""
    parts = []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", describe_best(name, size, results["made"]["margin"])]
        for horizon, contenders in size["tried"].items():
            tokens = size["tokens"] // HORIZONS[horizon]
            for contender, tried in contenders.items():
                parts.append(f"{contender}, {tokens / 1e6:.2f}M tokens ({horizon}): {len(tried['settings'])} settings")
                parts.append(format_grid(tried))
        rows = []
        for one in size["weight_decays"]:
            values = [f"`{float(text.partition('=')[2]):g}`" for text in one["setting"]]
            rows.append([*values, *(pages.format_mean(one["losses"][name]) for name in CONTENDERS)])
        parts.append("Weight decay, at the best settings of both, with all tokens:")
        parts.append(pages.format_table(["batch", "rate", "weight decay", *CONTENDERS], rows))
    return "\n\n".join(parts)


def format_grid(tried: dict[str, Any]) -> str:
    """Format the losses of settings: one row per learning rate, one column per batch size; the best is bold."""
    by_setting = {(one["batch"], one["rate"]): one["losses"] for one in tried["settings"]}
    best = tried["settings"][tried["best"]]
    batches, rates = (sorted({setting[i] for setting in by_setting}) for i in (0, 1))
    rows = []
    for rate in rates:
        row = [f"`{rate:g}`"]
        for batch in batches:
            losses = by_setting.get((batch, rate))
            cell = pages.format_mean(losses) if losses else ""
            row.append(f"**{cell}**" if (batch, rate) == (best["batch"], best["rate"]) else cell)
        rows.append(row)
    return pages.format_table(["rate", *(f"batch `{batch:g}`" for batch in batches)], rows)


def describe_best(name: str, size: dict[str, Any], margin: float) -> str:
    """Say which settings are the best, what their neighbours cost, and whether AdamW becomes stationary."""
    lines = []
    for contender, tried in size["tried"]["all"].items():
        best = tried["settings"][tried["best"]]
        others = [one for one in tried["settings"] if one is not best]
        nearest = min(others, key=lambda one: sum(one["losses"]))
        verdict = pages.describe_difference(paired_estimate(nearest["losses"], best["losses"]), margin)
        lines.append(
            f"- {contender}: batch `{best['batch']:g}`, rate `{best['rate']:g}`. The second best (batch "
            f"`{nearest['batch']:g}`, rate `{nearest['rate']:g}`): {verdict}."
        )
    for contender, setting in size["best"].items():
        best = {text.partition("=")[0]: float(text.partition("=")[2]) for text in setting}
        steps = size["tokens"] / (best[BATCH] * size["sequence_tokens"])
        forgets = best[RATE] * best[DECAY]
        stationary = f"AdamW is stationary after {3 / forgets:,.0f} (3 / (rate x weight decay))" if forgets else ""
        lines.append(
            f"- {contender}, with the best weight decay that was tried there: batch `{best[BATCH]:g}`, rate "
            f"`{best[RATE]:g}`, weight decay `{best[DECAY]:g}`. The run has {steps:,.0f} steps. "
            f"{stationary or 'Without weight decay, AdamW does not become stationary'}."
        )
    lines.append("- The neighbours of these last settings, at their own weight decay, are not measured yet.")
    return "\n".join(lines)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the best settings of each size, and what the second best costs."""
    found, effects = [], []
    for name, size in results["sizes"].items():
        batch, rate, decay = (float(text.partition("=")[2]) for text in size["best"]["merged"])
        found.append(f"{name}: batch {batch:g}, rate {rate:g}, weight decay {decay:g}")
        tried = size["tried"]["all"]["merged"]
        best = tried["settings"][tried["best"]]
        others = [one["losses"] for one in tried["settings"] if one is not best]
        effects.append(f"{name}: {pages.format_difference(min(others, key=sum), best['losses'])} nats")
    return IndexRow(
        0,
        "Tuning: which batch, rate and weight decay?",
        "none: the settings on which the other experiments stand",
        f"merged, at all tokens: {'; '.join(found)}",
        f"second best batch and rate less the best: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss of each contender against the rate, a line per batch, at both horizons."""
    panels = []
    for name, size in results["sizes"].items():
        for horizon, contenders in size["tried"].items():
            for contender, tried in contenders.items():
                lines = []
                for batch in sorted({one["batch"] for one in tried["settings"]}):
                    row = sorted((o for o in tried["settings"] if o["batch"] == batch), key=lambda one: one["rate"])
                    intervals = [mean_interval(one["losses"]) for one in row]
                    lines.append(interval_line(f"batch {batch:g}", [one["rate"] for one in row], intervals))
                title = f"{name}, {contender}, {horizon} of its tokens"
                panels.append(LinePanel(title, "learning rate", lines, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, SELECT)
