"""Can merges of the first part of a run forecast the annealed loss, and which setting will be best?

Command:   python experiments/forecasts/script.py --runs runs/science --jobs 2

Two parts: a sweep of hyperparameters, whose ranking is forecast; and the annealed loss at the end of the trunks, which
a power law of tokens forecasts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike

from pma_jax.analysis.scaling import fit_loss_curve
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import MeanEstimate, find_clear, mean_interval, paired_estimate
from pma_jax.studies.study import Study

DEFAULTS = {"sizes": ("science_small",), "seeds": tuple(range(8))}
SHARES = (0.25, 0.5, 0.75)  # of a run that a forecast uses
# Settings of the sweep, which changes one key at a time: factors of the size's rate and batch size; weight decays.
RATES, BATCHES, DECAYS = (0.25, 0.5, 2.0, 4.0), (0.5, 2.0), (0.1, 0.5)
SWEEP_DIVISOR, SWEEP_UNITS = 4, 32  # a run of the sweep takes 1/4 of a trunk's tokens, in 32 units
ENDS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # where a trunk is evaluated, in 32nds of its length
NEWEST_DIVISOR = 4  # forecasts use the newest quarter of the snapshots so far
MODELS = ("raw", "sma", "block/sma")
MEAN_LOSS = "raw, mean of losses"  # of the same snapshots of which the merges are means
HIGHEST_RATE = f"rate x{RATES[-1]:g}"  # the setting without which the rankings are judged too
RANKED_BY = (MODELS[0], MEAN_LOSS, *MODELS[1:])
ANNEALED = "annealed, another seed"  # a ranking by the annealed losses of one seed, which have noise too


def cells(window: int) -> dict[str, Cell]:
    """Return the merges that forecasts use, by name: the newest snapshot alone, and means of the newest `window`."""
    return dict(zip(MODELS, (RAW, Cell("sma", window), Cell("sma", window, kind="block_mean")), strict=True))


def sweep_settings(study: Study, size: str) -> dict[str, tuple[str, ...]]:
    """Return the changes of each setting of the sweep, by name."""
    base = study.trunk_config(size, study.seeds[0])
    batch, rate = base.training.batch_size_sequences, base.schedule.peak_rate
    settings = {"as it is": ()}
    settings |= {f"rate x{x:g}": (f"schedule.peak_rate={rate * x}",) for x in RATES}
    settings |= {f"batch x{x:g}": (f"training.batch_size_sequences={int(batch * x)}",) for x in BATCHES}
    settings |= {f"weight decay {x:g}": (f"optimizer.weight_decay={x}",) for x in DECAYS}
    total = f"training.total_tokens={base.training.total_tokens // SWEEP_DIVISOR}"
    return {name: (total, *changes) for name, changes in settings.items()}


def sweep_runs(study: Study, size: str, changes: tuple[str, ...], seed: int) -> tuple[PlannedRun, PlannedRun]:
    """Return the run of a setting and its annealed branch; forecasts are not judged on the text of the truth."""
    marks = [int(SWEEP_UNITS * share) for share in (*SHARES, 1.0)]
    evaluations = [PlannedEvaluation(tuple(cells(newest_count(unit)).values()), (unit,), SELECT) for unit in marks]
    evaluations += [PlannedEvaluation((RAW,), newest_units(unit), SELECT) for unit in marks]
    branch, last = Branch(SWEEP_UNITS * 3 // 4, SWEEP_UNITS), PlannedEvaluation((RAW,), (SWEEP_UNITS,), REPORT)
    return (
        PlannedRun(size, seed, changes, None, tuple(evaluations), SWEEP_UNITS),
        PlannedRun(size, seed, changes, branch, (last,), SWEEP_UNITS),
    )


def newest_count(unit: int) -> int:
    """Return how many of the newest snapshots forecasts use at `unit`."""
    return max(unit // NEWEST_DIVISOR, 1)


def newest_units(unit: int) -> tuple[int, ...]:
    """Return the units of the newest snapshots at `unit`, of which forecasts use the mean."""
    return tuple(range(unit - newest_count(unit) + 1, unit + 1))


def curve_runs(study: Study, size: str, seed: int) -> tuple[PlannedRun, PlannedRun]:
    """Return the trunk of a seed with its positions, and the branch that is annealed over its last quarter."""
    evaluations = tuple(
        PlannedEvaluation(tuple(cells(newest_count(at)).values()), (at,), REPORT) for at in curve_ends(study)
    )
    branch, last = Branch(study.units * 3 // 4, study.units), PlannedEvaluation((RAW,), (study.units,), REPORT)
    return PlannedRun(size, seed, (), None, evaluations), PlannedRun(size, seed, (), branch, (last,))


def curve_ends(study: Study) -> list[int]:
    """Return the positions along a trunk, in units."""
    return sorted({study.units * k // 32 for k in ENDS})


def plan(study: Study) -> Plan:
    """List the runs of the sweep and of the curves, and their annealed branches."""
    work: list[PlannedRun] = []
    for size in study.sizes:
        for seed in study.seeds:
            for changes in sweep_settings(study, size).values():
                work += sweep_runs(study, size, changes, seed)
            work += curve_runs(study, size, seed)
    return work


def measure(study: Study) -> dict[str, Any]:
    """Return the losses that both parts need."""
    return {
        "sizes": {
            size: study.describe_size(size)
            | {"sweep": measure_sweep(study, size), "curves": measure_curves(study, size)}
            for size in study.sizes
        }
    }


def measure_sweep(study: Study, size: str) -> dict[str, dict[str, Any]]:
    """Return, for each setting, "annealed": the loss of each seed, and by the share seen, that of each model."""
    small = dataclasses.replace(study, units=SWEEP_UNITS)
    measured: dict[str, dict[str, Any]] = {}
    for name, changes in sweep_settings(study, size).items():
        runs = [sweep_runs(study, size, changes, seed) for seed in study.seeds]
        entry: dict[str, Any] = {"annealed": [small.loss(branch.get(study)) for _, branch in runs]}
        for share in (*SHARES, 1.0):
            unit = int(SWEEP_UNITS * share)
            merges = cells(newest_count(unit))
            each = [small.losses(run.get(study), merges.values(), [unit], SELECT) for run, _ in runs]
            entry[f"{share:g}"] = {key: [x[cell, unit] for x in each] for key, cell in merges.items()}
            raw = [small.losses(run.get(study), [RAW], newest_units(unit), SELECT) for run, _ in runs]
            entry[f"{share:g}"][MEAN_LOSS] = [float(np.mean(list(x.values()))) for x in raw]
        measured[name] = entry
    return measured


def measure_curves(study: Study, size: str) -> dict[str, Any]:
    """Return losses along the trunks, of means of the newest quarter of the snapshots, and of annealed branches.

    Returns:
        "tokens": positions; each model and "annealed": losses, [positions, seeds] and [seeds].
    """
    runs = [curve_runs(study, size, seed) for seed in study.seeds]
    curves: dict[str, Any] = {name: [] for name in MODELS}
    for end in curve_ends(study):
        chosen = cells(newest_count(end))
        each = [study.losses(run.get(study), chosen.values(), [end]) for run, _ in runs]
        for name, cell in chosen.items():
            curves[name].append([x[cell, end] for x in each])
    unit = study.trunk_config(size, study.seeds[0]).checkpoint.interval_tokens
    curves["tokens"] = [end * unit for end in curve_ends(study)]
    return curves | {"annealed": [study.loss(branch.get(study)) for _, branch in runs]}


def forecast_end(tokens: Sequence[float], losses: Sequence[float], share: float) -> float | None:
    """Forecast the loss at the last point of a curve by a power law through the points of its first `share`.

    Fewer than 4 points give None.
    """
    x, y = np.array(tokens), np.array(losses)
    used = x <= share * x[-1]
    return float(fit_loss_curve(x[used], y[used]).predict(x[-1])) if used.sum() >= 4 else None


def kendall_tau(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Compute Kendall's tau-b of two rankings: 1 if they are the same, 0 if unrelated, -1 if reversed.

    Raises:
        ValueError: `forecast` or `truth` is constant, has fewer than 2 values, or contains NaN.
    """
    tau = scipy.stats.kendalltau(forecast, truth).statistic
    if not np.isfinite(tau):
        raise ValueError(
            "Kendall's tau is undefined: forecast or truth has no ranking, because it is constant or contains NaN"
        )
    return float(tau)


def regret(forecast: ArrayLike, truth: ArrayLike) -> float:
    """Return the true loss of the candidate with the lowest forecast loss, minus the lowest true loss."""
    picked = int(np.argmin(np.asarray(forecast, np.float64)))
    truth = np.asarray(truth, np.float64)
    return float(truth[picked] - truth.min())


# --- The page ---------------------------------------------------------------------------------------------------------


def judge_ranking(
    size: Mapping[str, Any], name: str, share: float, settings: Sequence[str] = (), own_seed: bool = False
) -> dict[str, list[float]]:
    """Return Kendall's tau with the true ranking, and the regret of the best setting, of the forecast of each seed.

    Args:
        size: An entry of the results.
        name: The forecast.
        share: Of the run that it uses.
        settings: Those that are ranked; by default all.
        own_seed: Take the annealed loss of the same seed for the truth. By default it is the mean over the other seeds,
            so that one seed's noise is not taken for it.
    """
    chosen = [size["sweep"][setting] for setting in settings or size["sweep"]]
    annealed_CS = np.array([setting["annealed"] for setting in chosen])
    forecast_CS = annealed_CS
    if name != ANNEALED:
        forecast_CS = np.array([setting[f"{share:g}"][name] for setting in chosen])
    truth_CS = annealed_CS
    if not own_seed:
        truth_CS = (annealed_CS.sum(axis=1, keepdims=True) - annealed_CS) / (annealed_CS.shape[1] - 1)
    pairs = list(zip(forecast_CS.T, truth_CS.T, strict=True))
    return {"tau": [kendall_tau(*pair) for pair in pairs], "regret": [regret(*pair) for pair in pairs]}


def report(results: dict[str, Any]) -> str:
    """Format the tables of both parts for each size."""
    parts = []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_rankings(size), format_other_judgements(size), format_curves(size)]
    return "\n\n".join(parts)


def rankings_of(size: Mapping[str, Any]) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Return how well each forecast ranks the settings, by the share of the run that it uses and its name."""
    listed = [(share, name) for share in (*SHARES, 1.0) for name in RANKED_BY]
    return {(share, name): judge_ranking(size, name, share) for share, name in [*listed, (1.0, ANNEALED)]}


def against_mean_loss(
    rankings: Mapping[tuple[float, str], dict[str, list[float]]],
) -> dict[tuple[float, str], MeanEstimate]:
    """Estimate the tau of each forecast less that by the mean raw loss, for the same share of the run."""
    return {
        (share, name): paired_estimate(judged["tau"], rankings[share, MEAN_LOSS]["tau"])
        for (share, name), judged in rankings.items()
        if name != MEAN_LOSS
    }


def judge_rankings(size: Mapping[str, Any]) -> dict[tuple[float, str], str]:
    """Say of each forecast whether its tau is "better" or "worse" than that of `MEAN_LOSS`, or "not shown"."""
    estimates = against_mean_loss(rankings_of(size))
    clear = find_clear(list(estimates.values()))
    verdicts = ["better" if one.mean > 0 else "worse" for one in estimates.values()]
    return {
        key: said if is_clear else "not shown" for key, said, is_clear in zip(estimates, verdicts, clear, strict=True)
    }


def format_rankings(size: Mapping[str, Any]) -> str:
    """Format how well rankings are forecast."""
    rankings, rows = rankings_of(size), []
    differences, verdicts = against_mean_loss(rankings), judge_rankings(size)
    for (share, name), judged in rankings.items():
        tau = pages.format_interval(mean_interval(judged["tau"]), 2)
        less_raw = "" if name == MEAN_LOSS else pages.format_interval(differences[share, name].interval(), 2)
        verdict = verdicts.get((share, name), "")
        less_annealed = paired_estimate(judged["tau"], rankings[1.0, ANNEALED]["tau"])
        yardstick = "" if name == ANNEALED else pages.format_interval(less_annealed.interval(), 2)
        shown = [tau, less_raw, verdict, yardstick, *describe_regret(judged["regret"])]
        rows.append([f"{share:.0%}", f"{1 - share:.0%}", name, *shown])
    header = [
        "seen of the run",
        "tokens saved",
        "ranked by",
        "Kendall tau",
        f"less that of `{MEAN_LOSS}`",
        "against it",
        f"less that of `{ANNEALED}`",
    ]
    return (
        f"**Rankings** of {len(size['sweep'])} settings ({', '.join(size['sweep'])}) by losses on the part `select`, "
        "compared with that by the annealed loss (its mean over the seeds other than the forecast's, on `report`). "
        "An annealed run takes as many tokens as a full run at a constant rate, so tokens that the forecast does "
        "not use are saved. The regret is the annealed loss of the setting that a forecast puts first, less the "
        "lowest. Intervals are over seeds, for these settings; better and worse with at most 5% false findings "
        "(Benjamini and Hochberg).\n\n"
        + pages.format_table([*header, "seeds that put the best first", "regret, nats"], rows)
    )


def format_gain_in_tau(size: Mapping[str, Any], share: float, **way: Any) -> str:
    """Format the tau of means of points less that of the mean loss; `judge_ranking` takes the keywords."""
    sma, losses = (judge_ranking(size, name, share, **way)["tau"] for name in ("sma", MEAN_LOSS))
    return pages.format_interval(paired_estimate(sma, losses).interval(), 2) if sma != losses else "0"


def settings_without(size: Mapping[str, Any], left: str) -> list[str]:
    """Return the settings without one."""
    return [setting for setting in size["sweep"] if setting != left]


def format_other_judgements(size: Mapping[str, Any]) -> str:
    """Format how much better means of points rank than mean losses do, with another truth and with fewer settings."""
    ways: dict[str, dict[str, Any]] = {"as above": {}, "the truth is the same seed's annealed loss": {"own_seed": True}}
    ways[f"without `{HIGHEST_RATE}`"] = {"settings": settings_without(size, HIGHEST_RATE)}
    ways["only settings of one rate"] = {"settings": [one for one in size["sweep"] if not one.startswith("rate")]}
    rows = [
        [f"{share:.0%}", *(format_gain_in_tau(size, share, **way) for way in ways.values())] for share in (*SHARES, 1.0)
    ]
    table = pages.format_table(["seen of the run", *ways], rows)
    return f"Kendall tau of `sma` less that of `{MEAN_LOSS}`, judged in other ways:\n\n{table}"


def describe_regret(regrets: Sequence[float]) -> tuple[str, str]:
    """Return how many seeds put the best setting first, and the mean regret, with its interval if any seed has some."""
    right = sum(regret == 0 for regret in regrets)
    shown = "0" if right == len(regrets) else pages.format_interval(mean_interval(regrets))
    return f"{right} of {len(regrets)}", shown


def curve_errors(size: Mapping[str, Any], name: str, share: float) -> list[float] | None:
    """Return the forecast of the annealed loss at the end less the measured one, per seed; None with few points."""
    curves = size["curves"]
    errors = []
    for seed, annealed in enumerate(curves["annealed"]):
        along = [of_seeds[seed] for of_seeds in curves[name]]
        forecast = along[-1] if share == 1 else forecast_end(curves["tokens"], along, share)
        if forecast is None:
            return None
        errors.append(forecast - annealed)
    return errors


def format_curves(size: Mapping[str, Any]) -> str:
    """Format the errors of forecasts of the annealed loss."""
    rows = []
    for name in MODELS:
        each = [curve_errors(size, name, share) for share in (*SHARES, 1.0)]
        rows.append([name, *(pages.format_interval(mean_interval(x)) if x else "too few points" for x in each)])
    header = ["from", *(f"the first {share:.0%}" for share in SHARES), "itself, at the end"]
    return (
        "**The annealed loss at the end** (annealed over the last quarter): forecast minus measured, nats per token, "
        f"over seeds.\n\n{pages.format_table(header, rows)}"
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the rankings by means of points, and the forecast of the annealed loss."""
    verdicts, effects = [], []
    for name, size in results["sizes"].items():
        differences, said = against_mean_loss(rankings_of(size)), judge_rankings(size)
        each = [f"{said[share, 'sma']} at {share:.0%}" for share in (*SHARES, 1.0)]
        verdicts.append(
            f"{name}: rankings of {len(size['sweep'])} settings by means of the newest snapshots of a part of the run, "
            f"against those by the mean loss of the same snapshots: {', '.join(each)}"
        )
        shown = [f"{share:.0%} {pages.format_interval(differences[share, 'sma'].interval(), 2)}" for share in SHARES]
        fewer = settings_without(size, HIGHEST_RATE)
        shown[0] += f" (without {HIGHEST_RATE} {format_gain_in_tau(size, SHARES[0], settings=fewer)})"
        effects.append(f"{name}: Kendall tau, loss of the mean, less mean of the losses: {', '.join(shown)}")
        errors = curve_errors(size, "sma", SHARES[-1])
        if errors:
            found = pages.format_interval(mean_interval(errors))
            effects.append(f"annealed loss, forecast from {SHARES[-1]:.0%} of the run less measured: {found} nats")
    return IndexRow(
        6,
        "Can it forecast the annealed model early?",
        "PMA, Section 4.2: merging shows early what annealing will give",
        "; ".join(verdicts),
        "; ".join(effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw tau and regret against the share of the run that is used, and the loss curves of each size."""
    shares, panels = [*SHARES, 1.0], []
    for size_name, size in results["sizes"].items():
        for key, title in (("tau", "Kendall tau with the annealed ranking"), ("regret", "regret, nats per token")):
            judged = {name: [judge_ranking(size, name, share)[key] for share in shares] for name in RANKED_BY}
            lines = [interval_line(name, shares, [mean_interval(x) for x in of]) for name, of in judged.items()]
            panels.append(LinePanel(f"{size_name}: {title}", "share of the run seen", lines))
        curves = size["curves"]
        tokens_m = (np.array(curves["tokens"]) / 1e6).tolist()
        lines = [Line(name, tokens_m, np.mean(curves[name], axis=1).tolist()) for name in MODELS]
        annealed = float(np.mean(curves["annealed"]))
        lines.append(Line("annealed at the end", [tokens_m[0], tokens_m[-1]], [annealed] * 2, dashed=True))
        panels.append(LinePanel(f"{size_name}: held-out loss", "tokens, millions", lines))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS, by_size=True)
