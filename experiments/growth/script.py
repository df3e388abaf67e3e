"""How do the gap between merging and annealing, the best span and the best rate grow with parameters and tokens?

Command:   python experiments/growth/script.py --runs runs/science --jobs 2

Two series of models: several sizes at equal tokens per parameter, and one size with more and more tokens. The rate of
each is searched on a tuning seed, for the merged and for the annealed model.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from growth_page import ANNEALED, MERGED, SAME_RATE, draw, report, summarize

from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import tuning
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun, complete_all
from pma_jax.studies.study import Study
from pma_jax.studies.tuning import TUNING_SEEDS, Axis, Contender

DEFAULTS = {"sizes": ("science_small",), "seeds": (0, 1, 2), "units": 32}
RATE = "schedule.peak_rate"
WINDOWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
KINDS = ("point", "block_mean")
FITS = ("lagfree:lag=0.5", "lagfree")
FIRST_RATES = (-1, 0, 1)  # factors of 2 of the rate that is expected
EXPECTED_RATES = 4  # that are searched per model, for the estimate of the machine time
TOKENS_PER_PARAMETER = 3  # of the first series


class Shape(NamedTuple):
    """A model of the first series."""

    width: int
    heads: int
    layers: int
    hidden: int


# Two larger ones, of 0.9M and 1.5M parameters, would take three times as long as everything else here.
SHAPES = (
    Shape(48, 2, 3, 144),
    Shape(64, 2, 3, 192),
    Shape(96, 3, 3, 288),
)
SMALLEST = Shape(32, 2, 3, 96)  # of the second series, with these multiples of the size's tokens:
LENGTHS = (1, 2, 4, 8)


class Model(NamedTuple):
    """A model of a series: its configuration, and the middle of the rates that are tried."""

    series: str
    changes: tuple[str, ...]
    rate: float
    parameters: int
    tokens: int

    @property
    def name(self) -> str:
        """The key in results.json."""
        return f"{self.parameters} parameters, {self.tokens} tokens"


def list_models(study: Study, size: str) -> list[Model]:
    """List the models of both series; a larger model and a longer run are expected to need a lower rate."""
    config, models = study.trunk_config(size, study.seeds[0]), []
    wanted = [("parameters", shape, 0) for shape in SHAPES if study.searches_settings]
    wanted += [("tokens", SMALLEST, length) for length in LENGTHS]
    for series, shape, length in wanted if study.searches_settings else wanted[:2]:
        changes = shape_changes(shape) if study.searches_settings else ()
        model = study.trunk_config(size, study.seeds[0], changes).model
        parameters = parameter_count(abstract_params(model, make_mesh(config.mesh)))
        tokens = length * config.training.total_tokens if length else TOKENS_PER_PARAMETER * parameters
        rate = 2 * config.schedule.peak_rate * (64 / shape.width) / math.sqrt(max(length, 1))
        models.append(Model(series, (*changes, f"training.total_tokens={tokens}"), rate, parameters, tokens))
    return models


def shape_changes(shape: Shape) -> tuple[str, ...]:
    """Return a shape as overrides."""
    keys = {"width": shape.width, "heads": shape.heads, "kv_heads": shape.heads, "layers": shape.layers}
    keys |= {"head_dim": shape.width // shape.heads, "hidden": shape.hidden}
    return tuple(f"model.{key}={value}" for key, value in keys.items())


def merges(study: Study) -> list[Cell]:
    """List the merges: means of points, and of block means, and fits of block means with a lag and without."""
    windows = [n for n in WINDOWS if n <= study.units]
    listed = [Cell("sma", n, kind=kind) for kind in KINDS for n in windows]
    return listed + [Cell(fit, n, kind="block_mean") for fit in FITS for n in windows if n > 2]


def runs_of(
    study: Study, size: str, model: Model, rate: float, seed: int, part: str, keeps_snapshots: bool = True
) -> tuple[PlannedRun, PlannedRun]:
    """Return the trunk of a model at a rate, and the branch that anneals over its last quarter."""
    changes, end = (*model.changes, f"{RATE}={rate:g}"), study.units
    tokens = study.evaluation_tokens // 2 if part == SELECT else 0
    trunk, branch = (PlannedEvaluation(tuple(cells), (end,), part) for cells in ([RAW, *merges(study)], [RAW]))
    decay = Branch(end - end // 4, end)
    return (
        PlannedRun(size, seed, changes, None, (trunk,), 0, tokens, keeps_snapshots=keeps_snapshots),
        PlannedRun(size, seed, changes, decay, (branch,), 0, tokens, keeps_snapshots=keeps_snapshots),
    )


def plan(study: Study) -> Plan:
    """Estimate the work: the rates of the results are known when the search has ended."""
    work: list[PlannedRun | OtherWork] = []
    for size in study.sizes:
        first = study.trunk_config(size, study.seeds[0]).model
        parameters = parameter_count(abstract_params(first, make_mesh(study.trunk_config(size, 0).mesh)))
        for model in list_models(study, size):
            # In tokens of the first size, as if the time of a token were proportional to the parameters.
            share = model.parameters / parameters
            trained, read = 1.25 * model.tokens * share, (len(merges(study)) + 2) * study.evaluation_tokens * share
            work.append(
                OtherWork(
                    f"{model.name}, search",
                    size,
                    TUNING_SEEDS[0],
                    round(EXPECTED_RATES * trained),
                    round(EXPECTED_RATES * read / 2),
                )
            )
            # The best rates of the merged and of the annealed model may differ.
            work += [OtherWork(model.name, size, seed, round(1.5 * trained), round(2.5 * read)) for seed in study.seeds]
    return work


def measure(study: Study) -> dict[str, Any]:
    """Search the rates of all models, and measure them at the best on the seeds of the study."""
    return {"units": study.units, "sizes": {size: measure_size(study, size) for size in study.sizes}}


def measure_size(study: Study, size: str) -> dict[str, Any]:
    """Return, for each model, its best rates and its losses there."""
    models = list_models(study, size)
    rates = search(study, size, models)
    chosen = {model.name: {kind: rates[f"{model.name}, {kind}"] for kind in (MERGED, ANNEALED)} for model in models}
    runs = [
        run
        for model in models
        for kind in (MERGED, ANNEALED)
        for part in (REPORT, SELECT)
        for seed in study.seeds
        for run in runs_of(study, size, model, chosen[model.name][kind]["rate"], seed, part)
    ]
    complete_all(study, runs, study.workers)
    measured = {}
    for model in models:
        measured[model.name] = {
            "series": model.series,
            "parameters": model.parameters,
            "tokens": model.tokens,
            "rates": chosen[model.name],
            **measure_model(study, size, model, {kind: one["rate"] for kind, one in chosen[model.name].items()}),
        }
    return {"models": measured}


def search(study: Study, size: str, models: Sequence[Model]) -> dict[str, dict[str, Any]]:
    """Search the best rate of the merged and of the annealed model of each, on one tuning seed.

    Returns:
        {"NAME, KIND": {"rate", "losses": {rate: loss on the part `select`}, "is_at_edge"}}.
    """
    by_name = {model.name: model for model in models}
    seed = TUNING_SEEDS[0]

    def measure_on(settings: dict[str, list[list[str]]]) -> dict[str, list[list[float]]]:
        wanted = {
            (name, setting[0]): runs_of(
                study, size, by_name[name.rpartition(", ")[0]], float(setting[0].partition("=")[2]), seed, SELECT, False
            )
            for name, of_one in settings.items()
            for setting in of_one
        }
        # The branches first: they train their trunks and fork them. Then the trunks are evaluated and not kept.
        complete_all(study, [branch for _, branch in wanted.values()], study.workers)
        complete_all(study, [trunk for trunk, _ in wanted.values()], study.workers)
        return {
            name: [[loss(study, *wanted[name, setting[0]], name.rpartition(", ")[2])] for setting in of_one]
            for name, of_one in settings.items()
        }

    grid = tuple((position,) for position in FIRST_RATES)
    contenders = [
        Contender(f"{model.name}, {kind}", (Axis(RATE, model.rate, 2),), grid)
        for model in models
        for kind in (MERGED, ANNEALED)
    ]
    tuned = tuning.tune(contenders, measure_on) if study.searches_settings else None
    found = {}
    for contender in contenders:
        if tuned is None:
            found[contender.name] = {"rate": contender.axes[0].value(0), "losses": {}, "is_at_edge": False}
            continue
        one = tuned[contender.name]
        losses = {f"{contender.axes[0].value(at[0]):g}": one.mean(at) for at in sorted(one.losses)}
        is_at_edge = bool(one.open_neighbours(one.best))
        found[contender.name] = {
            "rate": contender.axes[0].value(one.best[0]),
            "losses": {rate: x if math.isfinite(x) else None for rate, x in losses.items()},
            "is_at_edge": is_at_edge,
        }
    return found


def loss(study: Study, trunk: PlannedRun, branch: PlannedRun, kind: str) -> float:
    """Return the loss of the best merge of a trunk, or of its branch, on the part `select`."""
    if trunk.has_diverged(study):
        return math.inf
    run = branch if kind == ANNEALED else trunk
    reading, evaluation = run.study(study), run.evaluations[0]
    cells = [cell for cell in evaluation.cells if kind == ANNEALED or cell != RAW]
    return min(reading.losses(run.get(study), cells, evaluation.ends, SELECT).values())


def measure_model(study: Study, size: str, model: Model, rates: dict[str, float]) -> dict[str, Any]:
    """Return the losses of a model on documents, at its best rates; "windows": those of plain means of points."""
    end = study.units

    def get(kind: str, is_branch: bool, seed: int) -> Any:
        return runs_of(study, size, model, rates[kind], seed, REPORT)[is_branch].get(study)

    reading = runs_of(study, size, model, rates[MERGED], study.seeds[0], SELECT)[0].study(study)
    get_trunk = functools.partial(get, MERGED, False)
    select = reading.losses_over_seeds(get_trunk, [RAW, *merges(study)], [end], SELECT)
    best = min(merges(study), key=lambda cell: float(np.mean(select[cell.text][str(end)])))
    means = [cell for cell in merges(study) if cell.recipe == "sma" and cell.kind == "point"]
    trunk = study.document_losses_over_seeds(get_trunk, list(dict.fromkeys([RAW, best, *means])), [end], REPORT)
    annealed, same_rate = (
        study.document_losses_over_seeds(functools.partial(get, kind, True), [RAW], [end], REPORT)["nats"]
        for kind in (ANNEALED, MERGED)
    )
    return {
        "end": end,
        "best": best.text,
        "document_tokens": trunk["document_tokens"],
        "raw": trunk["nats"][RAW.text][str(end)],
        MERGED: trunk["nats"][best.text][str(end)],
        ANNEALED: annealed[RAW.text][str(end)],
        SAME_RATE: same_rate[RAW.text][str(end)],
        "windows": {str(cell.window): trunk["nats"][cell.text][str(end)] for cell in means},
    }


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS)
