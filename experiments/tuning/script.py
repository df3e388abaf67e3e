"""Which batch size, learning rate and weight decay are the best of each size? (The settings of all other experiments)

Command:   python experiments/tuning/script.py --runs runs/science --jobs 2
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages, run_cache, tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, measure_raw_and_merged
from pma_jax.studies.statistics import mean_interval, paired_estimate
from pma_jax.studies.study import SIZES, Study
from pma_jax.studies.tuning import TUNING_SEEDS, Axis, Contender, Position, Tuned

RATE, BATCH, DECAY = "schedule.peak_rate", "training.batch_size_sequences", "optimizer.weight_decay"
UNITS = 32  # per run here: half as many snapshots as the trunks of other experiments
RAW_MARKS = (29, 30, 31, 32)  # the raw loss is the mean over these units: one snapshot is noise
SPANS = (3, 5, 8)  # units of the means of points; the best one counts
HORIZONS = {"a quarter": 4, "all": 1}  # of the size's tokens: name -> divisor
NO_DECAY = -2  # position of a weight decay of 0
BATCHES = Axis(BATCH, 4, 2, minimum=1)
COARSE_AXES = (Axis(RATE, 0.002, 2), BATCHES, Axis(DECAY, 0.1, 5))
COARSE_GRID = tuple(itertools.product(range(3), range(4), [0]))  # three rates, four batch sizes
FINE_AXES = (Axis(RATE, 0.002, 2**0.5), BATCHES, Axis(DECAY, 0.1, 5, zero_at=NO_DECAY))
STATIONARY = ("science_long",)  # sizes of which only settings are tried at which AdamW becomes stationary
STATIONARY_AXES = (*FINE_AXES[:2], Axis(DECAY, 0.1, 2))
EXPECTED_SETTINGS = 9  # with all tokens, for the estimate of the machine time
CONTENDERS = ("raw", "merged")
DEFAULTS = {"sizes": (SIZES[0], *STATIONARY), "seeds": TUNING_SEEDS, "evaluation_tokens": 65_536}


def plan(study: Study) -> Plan:
    """List the runs of the coarse grid; the search goes on from its best settings, in runs of all tokens."""
    grid = [tuning.overrides(COARSE_AXES, position) for position in COARSE_GRID]
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        work += runs_of(study, size, "a quarter", grid)
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
    """Return the settings of a size that were tried, at both horizons, and the best one of each contender."""
    coarse = tune(study, size, "a quarter", COARSE_AXES, dict.fromkeys(CONTENDERS, COARSE_GRID), lambda p: p[2] == 0)
    axes, decays, is_allowed = FINE_AXES, [NO_DECAY], lambda position: True
    if size in STATIONARY:
        axes, decays, is_allowed = STATIONARY_AXES, range(10), functools.partial(is_stationary, study, size)
    starts: dict[str, tuple[Position, ...]] = {}
    for name, one in coarse.items():
        rate, batch, _ = one.best
        # The coarse rates are every second one of the fine scale. The lowest weight decay that is allowed comes first.
        starts[name] = (next(filter(is_allowed, ((2 * rate, batch, decay) for decay in decays))),)
    fine = tune(study, size, "all", axes, starts, is_allowed)
    tried = {"a quarter": coarse, "all": fine}
    return study.describe_size(size) | {
        "tried": {horizon: {name: describe(one) for name, one in tuned.items()} for horizon, tuned in tried.items()},
        "best": {name: one.contender.overrides(one.best) for name, one in fine.items()},
        "configuration": tuning.overrides(axes, best_for_both(fine)),
    }


def best_for_both(tuned: dict[str, Tuned]) -> Position:
    """Return the setting of the size's configuration: of those that both measured, that with the lowest mean loss."""
    raw, merged = tuned.values()
    both = raw.losses.keys() & merged.losses.keys()
    return min(both, key=lambda position: raw.mean(position) + merged.mean(position))


def is_stationary(study: Study, size: str, position: Position) -> bool:
    """Return whether a run at a setting has more steps than AdamW needs to become stationary."""
    rate, batch, decay = (axis.value(i) for axis, i in zip(STATIONARY_AXES, position, strict=True))
    training = study.trunk_config(size, study.seeds[0]).training
    steps = count_steps(training.total_tokens, batch, training.sequence_length_tokens)
    return steps > stationary_after_steps(rate, decay)


def stationary_after_steps(rate: float, decay: float) -> float:
    """Return the steps after which AdamW is stationary: three times its time scale, 1 / (rate x weight decay) steps."""
    return 3 / (rate * decay) if decay else math.inf


def count_steps(tokens: int, batch: float, sequence_tokens: int) -> float:
    """Return the optimizer steps of a run of `tokens`, with `batch` sequences per step."""
    return tokens / (batch * sequence_tokens)


def tune(
    study: Study,
    size: str,
    horizon: str,
    axes: tuple[Axis, ...],
    grids: dict[str, tuple[Position, ...]],
    is_allowed: Callable[[Position], bool],
) -> dict[str, Tuned]:
    """Tune the raw and the merged model of a size at a horizon, from the grid of each; they share their runs."""
    measured: dict[tuple[str, ...], dict[str, list[float]]] = {}

    def measure(settings: dict[str, list[list[str]]]) -> dict[str, list[list[float]]]:
        asked = dict.fromkeys(tuple(setting) for of_one in settings.values() for setting in of_one)
        if new := [list(setting) for setting in asked if setting not in measured]:
            losses = measure_settings(study, size, horizon, new)
            measured.update(zip(map(tuple, new), losses, strict=True))
        return {name: [measured[tuple(setting)][name] for setting in of_one] for name, of_one in settings.items()}

    return tuning.tune([Contender(name, axes, grid, is_allowed) for name, grid in grids.items()], measure)


def runs_of(study: Study, size: str, horizon: str, settings: list[list[str]]) -> list[PlannedRun]:
    """List the runs of settings, all seeds of one setting after the other, and what is read from them."""
    total = study.trunk_config(size, study.seeds[0]).training.total_tokens // HORIZONS[horizon]
    evaluations = (
        PlannedEvaluation((RAW,), RAW_MARKS, SELECT),
        PlannedEvaluation(tuple(Cell("sma", n) for n in SPANS), (UNITS,), SELECT),
    )
    common = (f"training.total_tokens={total}", "checkpoint.kinds=point")
    return [
        PlannedRun(size, seed, (*common, *setting), None, evaluations, UNITS)
        for setting in settings
        for seed in study.seeds
    ]


def measure_settings(study: Study, size: str, horizon: str, settings: list[list[str]]) -> list[dict[str, list[float]]]:
    """Train and evaluate settings; return, for each, the losses of each contender, one per seed."""
    return measure_raw_and_merged(study, runs_of(study, size, horizon, settings), len(study.seeds))


def describe(tuned: Tuned) -> dict[str, Any]:
    """Return the settings of a contender, and the position of the best, in the layout of results.json."""
    settings = []
    for position, values in tuned.losses.items():
        rate, batch, decay = (axis.value(i) for axis, i in zip(tuned.contender.axes, position, strict=True))
        losses = values if math.isfinite(sum(values)) else None  # None: the run of a seed diverged
        settings.append({"rate": rate, "batch": batch, "weight_decay": decay, "losses": losses})
    return {"settings": settings, "best": list(tuned.losses).index(tuned.best)}


def report(results: dict[str, Any]) -> str:
    """Format, for each size, the best settings, and the loss of every setting at both horizons."""
    parts, margin = [], results["made"]["margin"]
    for name, size in results["sizes"].items():
        parts += [f"### {name}", describe_best(size, margin)]
        for horizon, contenders in size["tried"].items():
            tokens = size["tokens"] // HORIZONS[horizon]
            for contender, tried in contenders.items():
                parts.append(f"{contender}, {tokens / 1e6:.2f}M tokens ({horizon}): {len(tried['settings'])} settings")
                parts.append(format_grid(tried) if horizon == "a quarter" else format_list(tried))
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
            losses = by_setting.get((batch, rate), [])
            cell = "diverged" if losses is None else pages.format_mean(losses) if losses else ""
            row.append(f"**{cell}**" if (batch, rate) == (best["batch"], best["rate"]) else cell)
        rows.append(row)
    return pages.format_table(["rate", *(f"batch `{batch:g}`" for batch in batches)], rows)


def format_list(tried: dict[str, Any]) -> str:
    """Format settings from the best to the worst, with the difference of each from the best."""
    ranked, rows = sort_settings(tried), []
    for one in ranked:
        values = [f"`{one[name]:g}`" for name in ("rate", "batch", "weight_decay")]
        if not one["losses"]:
            rows.append([*values, "diverged", ""])
            continue
        cost = "" if one is ranked[0] else pages.format_difference(one["losses"], ranked[0]["losses"])
        rows.append([*values, pages.format_mean(one["losses"]), cost])
    return pages.format_table(["rate", "batch", "weight decay", "loss", "less the best"], rows)


def sort_settings(tried: dict[str, Any]) -> list[dict[str, Any]]:
    """Return settings from the best to the worst."""
    return sorted(tried["settings"], key=lambda one: sum(one["losses"]) if one["losses"] else math.inf)


def describe_best(size: dict[str, Any], margin: float) -> str:
    """Say which setting is the best of each contender, and what the second best costs."""
    lines = []
    for contender, tried in size["tried"]["all"].items():
        best, second = sort_settings(tried)[:2]
        verdict = pages.describe_difference(paired_estimate(second["losses"], best["losses"]), margin)
        lines.append(f"- {contender}: {name_setting(best)}. The second best ({name_setting(second)}): {verdict}.")
    return "\n".join([*lines, describe_configuration(size, margin)])


def describe_configuration(size: dict[str, Any], margin: float) -> str:
    """Say what the size's configuration costs each contender, and whether AdamW becomes stationary."""
    chosen, costs = read_setting(size["configuration"]), []
    for contender, tried in size["tried"]["all"].items():
        best = tried["settings"][tried["best"]]
        losses = next(one["losses"] for one in tried["settings"] if chosen.items() <= one.items())
        cost = pages.describe_difference(paired_estimate(losses, best["losses"]), margin)
        is_best = chosen.items() <= best.items()
        costs.append(f"{contender}: its own best" if is_best else f"{contender} against its own best: {cost}")
    steps = count_steps(size["tokens"], chosen["batch"], size["sequence_tokens"])
    after = stationary_after_steps(chosen["rate"], chosen["weight_decay"])
    stationary = (
        f"AdamW is stationary after {after:,.0f} (3 / (rate x weight decay))"
        if math.isfinite(after)
        else "without weight decay, AdamW does not become stationary"
    )
    return (
        f"- the configuration, at which the mean of both is the lowest: {name_setting(chosen)}; {'; '.join(costs)}. "
        f"The run has {steps:,.0f} steps; {stationary}."
    )


def read_setting(overrides: list[str]) -> dict[str, float]:
    """Return the rate, the batch and the weight decay of a setting in results.json."""
    values = dict(text.split("=") for text in overrides)
    names = {"rate": RATE, "batch": BATCH, "weight_decay": DECAY}
    return {name: float(values[key]) for name, key in names.items()}


def name_setting(setting: dict[str, Any]) -> str:
    """Format the rate, the batch and the weight decay of a setting."""
    return f"rate `{setting['rate']:g}`, batch `{setting['batch']:g}`, weight decay `{setting['weight_decay']:g}`"


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the configuration of each size, and what the second best setting costs the merged model."""
    found, effects = [], []
    for name, size in results["sizes"].items():
        tried = size["tried"]["all"]["merged"]
        best = tried["settings"][tried["best"]]
        found.append(f"{name}: {name_setting(read_setting(size['configuration']))}".replace("`", ""))
        effects.append(f"{name}: {pages.format_difference(sort_settings(tried)[1]['losses'], best['losses'])} nats")
    return IndexRow(
        0,
        "Tuning: which batch, rate and weight decay?",
        "none: the settings on which the other experiments stand",
        f"lowest average of the raw and the merged loss: {'; '.join(found)}",
        f"merged, second best setting less the best: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss of each contender against the rate, a line per batch and weight decay, at both horizons."""
    panels = []
    for name, size in results["sizes"].items():
        for horizon, contenders in size["tried"].items():
            for contender, tried in contenders.items():
                lines = []
                for batch, decay in sorted({(one["batch"], one["weight_decay"]) for one in tried["settings"]}):
                    row = [one for one in tried["settings"] if (one["batch"], one["weight_decay"]) == (batch, decay)]
                    row = sorted((one for one in row if one["losses"]), key=lambda one: one["rate"])
                    intervals = [mean_interval(one["losses"]) for one in row]
                    label = f"batch {batch:g}, weight decay {decay:g}"
                    if row:
                        lines.append(interval_line(label, [one["rate"] for one in row], intervals))
                title = f"{name}, {contender}, {horizon} of its tokens: nats per token"
                panels.append(LinePanel(title, "learning rate", lines, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, SELECT, by_size=True)
