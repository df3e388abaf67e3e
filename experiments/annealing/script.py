"""Which annealing is the best: which shape, length, rate and batch? (The target of the comparisons with merging)

Command:   python experiments/annealing/script.py --runs runs/science --jobs 2
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pma_jax.data.sampling import SELECT
from pma_jax.evaluation.sweep import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.studies import pages, tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.statistics import paired_estimate
from pma_jax.studies.study import Study
from pma_jax.studies.targets import HORIZONS
from pma_jax.studies.tuning import TUNING_SEEDS, Axis, Contender, Tuned

RATE, BATCH = "schedule.peak_rate", "training.batch_size_sequences"
UNITS = 16  # per run: only the last snapshot is read
COARSE = "a quarter, all shapes"
RATES, BATCHES = (-1, 0, 1, 2), (-1, 0)  # of the first grid, in factors of 2 of the size's configuration
FINALISTS = 3  # settings of each shape that are measured on all seeds
SHAPES_KEPT = 2  # the best ones, that are searched at every horizon; so is the cosine
EXPECTED_SETTINGS = 7  # per shape, horizon and search, for the estimate of the machine time
EXPECTED_NEIGHBOURS = 2  # of the best finalist, per shape and horizon, that are measured on all seeds; likewise
DEFAULTS = {"sizes": ("science_small", "science_long"), "seeds": TUNING_SEEDS, "evaluation_tokens": 65_536}


class Shape(NamedTuple):
    """A schedule: constant, then a decay to 0 over the last share of the tokens; a share of 1 follows the warm-up."""

    decay: str
    share: float


COSINE = "cosine over 100%"  # searched at every horizon: many runs are planned with it
SHAPES = {
    "linear over 25%": Shape("linear", 0.25),
    "linear over 50%": Shape("linear", 0.5),
    "linear over 100%": Shape("linear", 1.0),
    "1 - sqrt over 25%": Shape("minus_sqrt", 0.25),
    COSINE: Shape("cosine", 1.0),
}


def axes(study: Study, size: str, factor: float) -> tuple[Axis, Axis]:
    """Return the axes of the search: the rate, by this factor, and the batch, by factors of 2."""
    config = study.trunk_config(size, study.seeds[0])
    return (
        Axis(RATE, config.schedule.peak_rate, factor),
        Axis(BATCH, config.training.batch_size_sequences, 2, minimum=1),
    )


def overrides(study: Study, size: str, horizon: str, shape: str, setting: Sequence[str]) -> tuple[str, ...]:
    """Return the horizon, the decay and a setting as overrides."""
    total = study.trunk_config(size, study.seeds[0]).training.total_tokens // HORIZONS[horizon]
    changes = (f"training.total_tokens={total}", *setting)
    # A run has a whole number of steps per unit, so that its horizon can differ from `total`.
    config = dataclasses.replace(study, units=UNITS).trunk_config(size, study.seeds[0], changes)
    start = max(round(config.training.total_tokens * (1 - SHAPES[shape].share)), config.schedule.warmup_tokens)
    return (*changes, f"schedule.decay={SHAPES[shape].decay}", f"schedule.decay_start_tokens={start}")


def runs_of(
    study: Study, size: str, horizon: str, settings: dict[str, list[list[str]]], seeds: Sequence[int]
) -> list[PlannedRun]:
    """List the runs of settings of shapes: shape after shape, and all seeds of one setting after the other."""
    evaluation = PlannedEvaluation((RAW,), (UNITS,), SELECT)
    planned = []
    for shape, of_one in settings.items():
        for setting in of_one:
            changes = (*overrides(study, size, horizon, shape, setting), "checkpoint.kinds=point")
            run = PlannedRun(size, seeds[0], changes, None, (evaluation,), UNITS, keeps_snapshots=False)
            planned += [dataclasses.replace(run, seed=seed) for seed in seeds]
    return planned


def plan(study: Study) -> Plan:
    """List the runs of the first grid; the search goes on from its best settings."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        grid = [tuning.overrides(axes(study, size, 2), at) for at in itertools.product(RATES, BATCHES)]
        work += runs_of(study, size, "a quarter", dict.fromkeys(SHAPES, grid), study.seeds[:1])
        total = study.trunk_config(size, study.seeds[0]).training.total_tokens
        for horizon, divisor in HORIZONS.items():
            on_all = FINALISTS * (len(study.seeds) - 1) + EXPECTED_NEIGHBOURS * len(study.seeds)
            runs = (SHAPES_KEPT + 1) * (EXPECTED_SETTINGS + on_all)
            trained, read = runs * total // divisor, runs * study.evaluation_tokens
            work.append(OtherWork(f"{size}, search over {horizon}", size, study.seeds[0], trained, read))
    return work


def measure(study: Study) -> dict[str, Any]:
    """Search the annealing of every size."""
    return {"sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Search all shapes at a quarter of the tokens, on one seed, then the best ones and the cosine at every horizon."""
    coarse_axes, fine_axes = axes(study, size, 2), axes(study, size, 2**0.5)
    grid = tuple(itertools.product(RATES, BATCHES))
    contenders = [Contender(shape, coarse_axes, grid) for shape in SHAPES]
    measure_on = functools.partial(losses, study, size, "a quarter")
    coarse, _ = tuning.search(contenders, measure_on, study.seeds[:1], 1, study.searches_settings)
    kept = sorted(coarse, key=lambda shape: coarse[shape].mean(coarse[shape].best))[:SHAPES_KEPT]
    kept = list(dict.fromkeys([*kept, COSINE]))
    starts = {shape: (2 * coarse[shape].best[0], coarse[shape].best[1]) for shape in kept}
    tried, best, cosine = {COARSE: coarse}, {}, {}
    for horizon in HORIZONS:
        contenders = [Contender(shape, fine_axes, (starts[shape],)) for shape in kept]
        tried[horizon], of_shape = search(study, size, horizon, contenders)
        best[horizon] = min(of_shape.values(), key=lambda one: sum(one["losses"]))
        cosine[horizon] = of_shape[COSINE]
    return study.describe_size(size) | {
        "tried": {stage: {shape: describe(one) for shape, one in of.items()} for stage, of in tried.items()},
        "best": best,
        "cosine": cosine,
    }


def search(
    study: Study, size: str, horizon: str, contenders: Sequence[Contender]
) -> tuple[dict[str, Tuned], dict[str, dict[str, Any]]]:
    """Search shapes on one seed, and measure the best settings of each and their neighbours on all seeds.

    Returns:
        The settings of each shape, and the best one of each in the layout of results.json.
    """
    measure_on = functools.partial(losses, study, size, horizon)
    tuned, finalists = tuning.search(contenders, measure_on, study.seeds, FINALISTS, study.searches_settings)
    if study.searches_settings:
        tuning.follow_best(tuned, finalists, functools.partial(measure_on, study.seeds))
    for shape, of_shape in finalists.items():
        tuned[shape].losses.update(of_shape.losses)
    best = {}
    for shape, one in finalists.items():
        setting = overrides(study, size, horizon, shape, one.contender.overrides(one.best))
        best[shape] = {"shape": shape, "units": UNITS, "setting": list(setting), "losses": one.losses[one.best]}
    return tuned, best


def losses(
    study: Study, size: str, horizon: str, seeds: Sequence[int], settings: dict[str, list[list[str]]]
) -> dict[str, list[list[float]]]:
    """Train and evaluate settings of shapes; return the losses of each, one per seed; infinite where a run diverged."""
    runs = runs_of(study, size, horizon, settings, seeds)
    complete_all(study, runs, study.workers)
    each = iter([math.inf if run.has_diverged(study) else loss(study, run) for run in runs])
    return {shape: [[next(each) for _ in seeds] for _ in of_one] for shape, of_one in settings.items()}


def loss(study: Study, run: PlannedRun) -> float:
    """Return the loss at the end of a run, in nats per token."""
    return run.study(study).loss(run.get(study), RAW, UNITS, SELECT)


def describe(tuned: Tuned) -> list[dict[str, Any]]:
    """Return the settings of a shape in the layout of results.json, the best first; a diverged one has no losses."""
    described = []
    for position in sorted(tuned.losses, key=lambda at: (-len(tuned.losses[at]), tuned.mean(at))):
        rate, batch = (axis.value(i) for axis, i in zip(tuned.contender.axes, position, strict=True))
        values = tuned.losses[position]
        is_at_edge = len(values) > 1 and bool(tuned.open_neighbours(position))
        described.append(
            {
                "rate": rate,
                "batch": batch,
                "losses": values if math.isfinite(sum(values)) else None,
                "is_at_edge": is_at_edge,
            }
        )
    return described


def report(results: dict[str, Any]) -> str:
    """Format, for each size, the best annealing of each horizon, and every setting that was tried."""
    parts, margin = [], results["made"]["margin"]
    for name, size in results["sizes"].items():
        parts += [f"### {name}", describe_best(size, margin), format_coarse(size)]
        for horizon, divisor in HORIZONS.items():
            for shape, settings in size["tried"][horizon].items():
                tokens = size["tokens"] / divisor / 1e6
                parts += [
                    f"{shape}, {tokens:.2f}M tokens ({horizon}): {len(settings)} settings",
                    format_settings(settings),
                ]
    return "\n\n".join(parts)


def describe_best(size: dict[str, Any], margin: float) -> str:
    """Say which annealing is the best at each horizon, and what the best of the other shape costs."""
    lines = []
    for horizon in HORIZONS:
        best = size["best"][horizon]
        of_shape = {shape: settings[0] for shape, settings in size["tried"][horizon].items()}
        chosen = of_shape.pop(best["shape"])
        line = f"- {horizon}: {name_setting(best['shape'], chosen)}, {pages.format_mean(best['losses'])}."
        for shape, other in of_shape.items():
            verdict = pages.describe_difference(paired_estimate(other["losses"], best["losses"]), margin)
            line += f" {name_setting(shape, other)}: {verdict}."
        if chosen["is_at_edge"]:
            line += " A neighbour of the best setting was not tried."
        if chosen["batch"] == 1:
            line += " No smaller batch exists."
        lines.append(line)
    return "\n".join(lines)


def name_setting(shape: str, setting: dict[str, Any]) -> str:
    """Format a shape, a rate and a batch."""
    return f"{shape}, rate `{setting['rate']:g}`, batch `{setting['batch']:g}`"


def format_coarse(size: dict[str, Any]) -> str:
    """Format the best setting of each shape in the first search."""
    shapes = sorted(size["tried"][COARSE].items(), key=lambda item: item[1][0]["losses"])
    lowest = shapes[0][1][0]["losses"][0]
    rows = [
        [
            shape,
            f"`{one[0]['rate']:g}`",
            f"`{one[0]['batch']:g}`",
            str(len(one)),
            f"{1000 * (one[0]['losses'][0] - lowest):.1f}",
        ]
        for shape, one in shapes
    ]
    tokens = size["tokens"] / HORIZONS["a quarter"] / 1e6
    title = f"All shapes over {tokens:.2f}M tokens, one seed: the best setting of each"
    header = ["shape", "rate", "batch", "settings", "above the best, thousandths of a nat"]
    return title + "\n\n" + pages.format_table(header, rows)


def format_settings(settings: list[dict[str, Any]]) -> str:
    """Format the settings of a shape: those measured on all seeds with the difference from the best."""
    rows, best = [], settings[0]["losses"]
    for one in settings:
        values = [f"`{one['rate']:g}`", f"`{one['batch']:g}`"]
        if one["losses"] is None:
            rows.append([*values, "diverged", ""])
        elif len(one["losses"]) < len(best):
            rows.append([*values, "", f"{1000 * (one['losses'][0] - best[0]):.1f} thousandths, on one seed"])
        else:
            cost = "" if one is settings[0] else pages.format_difference(one["losses"], best)
            rows.append([*values, pages.format_mean(one["losses"]), cost])
    return pages.format_table(["rate", "batch", "loss", "less the best of the shape"], rows)


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the best annealing of each size at its horizon."""
    found, effects = [], []
    for name, size in results["sizes"].items():
        best, tried = size["best"]["all"], size["tried"]["all"]
        chosen = tried[best["shape"]][0]
        edge = ", a neighbour of which was not tried" if chosen["is_at_edge"] else ""
        named = name_setting(best["shape"], chosen).replace("`", "")
        found.append(f"{name} ({size['parameters'] / 1e6:.2f}M parameters): {named}{edge}")
        for shape, settings in tried.items():
            if shape != best["shape"]:
                cost = pages.format_difference(settings[0]["losses"], best["losses"])
                effects.append(f"{name}: {shape} {cost} nats")
    return IndexRow(
        0,
        "Annealing: which shape, length, rate and batch?",
        "none: the target of the comparisons with merging",
        f"the lowest loss over all tokens: {'; '.join(found)}",
        f"the best of the other shape, less the best: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss of each shape against the rate on the first seed, with the best batch at each rate."""
    panels = []
    for name, size in results["sizes"].items():
        for stage, shapes in size["tried"].items():
            lines = []
            for shape, settings in shapes.items():
                finite = [one for one in settings if one["losses"]]
                rates = sorted({one["rate"] for one in finite})
                lowest = [min(one["losses"][0] for one in finite if one["rate"] == rate) for rate in rates]
                lines.append(Line(shape, rates, lowest))
            panels.append(LinePanel(f"{name}, {stage}: nats per token", "peak learning rate", lines, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, SELECT, by_size=True)
