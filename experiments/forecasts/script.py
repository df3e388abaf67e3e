"""Can merges of the first part of a run forecast the annealed loss, and which setting will be best?

Command:   python experiments/forecasts/script.py --runs runs/science

Three parts: a sweep of hyperparameters, whose ranking is forecast; the annealed loss at the end of the trunks, which a
power law of tokens forecasts; and L(N, D) over four sizes, fitted to merges and to annealed branches.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike

from pma_jax.analysis.scaling import ScalingLaw, fit_loss_curve, fit_scaling_law
from pma_jax.config import Config
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import pages, statistics
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.study import Study

SHARES = (0.25, 0.5, 0.75)  # of a run that a forecast uses
# Settings of the sweep, which changes one key at a time: factors of the size's rate and batch size; weight decays.
RATES, BATCHES, DECAYS = (0.25, 0.5, 2.0, 4.0), (0.5, 2.0), (0.1, 0.5)
SWEEP_DIVISOR, SWEEP_UNITS = 4, 32  # a run of the sweep takes 1/4 of a trunk's tokens, in 32 units
WIDTHS = (0.5, 1.5)  # additional models: factors of the first size's width, on half of its tokens
ENDS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # where a trunk is evaluated, in 32nds of its length
FORECASTS = ("raw", "sma", "block/sma")
LAWS = ("merged", "annealed")  # losses that L(N, D) is fitted to


def plan(study: Study) -> Plan:
    """List the runs of the sweep, of the curves and of the sizes, and their annealed branches."""
    work: list[PlannedRun] = []
    end, quarter = Branch(SWEEP_UNITS * 3 // 4, SWEEP_UNITS), Branch(study.units * 3 // 4, study.units)
    for seed in study.seeds:
        for changes in sweep_settings(study, seed).values():
            marks = [int(SWEEP_UNITS * share) for share in (*SHARES, 1.0)]
            evaluations = tuple(PlannedEvaluation(tuple(cells(unit // 4).values()), (unit,), SELECT) for unit in marks)
            last = (PlannedEvaluation((RAW,), (SWEEP_UNITS,), REPORT),)
            work.append(PlannedRun(study.sizes[0], seed, changes, None, evaluations, SWEEP_UNITS))
            work.append(PlannedRun(study.sizes[0], seed, changes, end, last, SWEEP_UNITS))
        for size in study.sizes[:2]:
            ends = sorted({study.units * k // 32 for k in ENDS})
            evaluations = tuple(PlannedEvaluation(tuple(cells(max(at // 8, 1)).values()), (at,), REPORT) for at in ends)
            work.append(PlannedRun(size, seed, (), None, evaluations))
            work.append(PlannedRun(size, seed, (), quarter, (PlannedEvaluation((RAW,), (study.units,), REPORT),)))
        for size, changes in sizes_of(study, seed):
            ends = range(study.units // 4, study.units + 1, study.units // 8)
            evaluations = tuple(PlannedEvaluation((cells(max(at // 8, 1))["block/sma"],), (at,), REPORT) for at in ends)
            work.append(PlannedRun(size, seed, changes, None, evaluations))
            for at in (study.units // 4, study.units // 2, study.units):
                evaluation = PlannedEvaluation((RAW,), (at,), REPORT)
                work.append(PlannedRun(size, seed, changes, Branch(at - at // 4, at), (evaluation,)))
    return work


def sizes_of(study: Study, seed: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the models of several sizes: a configuration and its changes."""
    first = study.trunk_config(study.sizes[0], seed)
    half = f"training.total_tokens={first.training.total_tokens // 2}"
    widths = [(study.sizes[0], (half, *width_overrides(first, factor))) for factor in WIDTHS]
    return [*widths, *((size, ()) for size in study.sizes[:2])]


def sweep_settings(study: Study, seed: int) -> dict[str, tuple[str, ...]]:
    """Return the changes of each setting of the sweep, by name."""
    base = study.trunk_config(study.sizes[0], seed)
    batch, rate = base.training.batch_size_sequences, base.schedule.peak_rate
    settings = {"as it is": ()}
    settings |= {f"rate x{x:g}": (f"schedule.peak_rate={rate * x}",) for x in RATES}
    settings |= {f"batch x{x:g}": (f"training.batch_size_sequences={int(batch * x)}",) for x in BATCHES}
    settings |= {f"weight decay {x:g}": (f"optimizer.weight_decay={x}",) for x in DECAYS}
    total = f"training.total_tokens={base.training.total_tokens // SWEEP_DIVISOR}"
    return {name: (total, *changes) for name, changes in settings.items()}


def measure(study: Study) -> dict[str, Any]:
    """Return the losses that the three parts need, and the fits to them."""
    entries_by_seed = {str(seed): measure_sizes(study, seed) for seed in study.seeds}
    return {
        "sweep": {str(seed): measure_sweep(study, seed) for seed in study.seeds},
        "curves": {size: {str(s): measure_curves(study, size, s) for s in study.seeds} for size in study.sizes[:2]},
        "sizes": entries_by_seed,
        "laws": {seed: {kind: fit_law(entries, kind) for kind in LAWS} for seed, entries in entries_by_seed.items()},
    }


def cells(window: int) -> dict[str, Cell]:
    """Return the merges that forecasts use, by name: the newest snapshot alone, and means of the newest `window`."""
    return dict(zip(FORECASTS, (RAW, Cell("sma", window), Cell("sma", window, kind="block_mean")), strict=True))


def measure_sweep(study: Study, seed: int) -> dict[str, dict[str, Any]]:
    """Return the losses along the run of each setting, and that of its annealed branch."""
    small = dataclasses.replace(study, units=SWEEP_UNITS)
    losses_by_setting: dict[str, dict[str, Any]] = {}
    for name, changes in sweep_settings(study, seed).items():
        run = small.trunk(study.sizes[0], seed, changes)
        annealed = small.anneal(run, SWEEP_UNITS * 3 // 4, SWEEP_UNITS)
        entry: dict[str, Any] = {"annealed": small.loss(annealed)}
        for share in (*SHARES, 1.0):
            unit = int(SWEEP_UNITS * share)
            # Forecasts choose a setting, so they are not on the text of the truth that judges them.
            losses = small.losses(run, cells(unit // 4).values(), [unit], SELECT)
            entry[f"{share:g}"] = {key: losses[cell, unit] for key, cell in cells(unit // 4).items()}
        losses_by_setting[name] = entry
    return losses_by_setting


def measure_curves(study: Study, size: str, seed: int) -> dict[str, Any]:
    """Return losses along a trunk, of merges that span an eighth of the tokens so far, and of its annealed branch."""
    run = study.trunk(size, seed)
    curves: dict[str, Any] = {name: [] for name in FORECASTS}
    for end in sorted({study.units * k // 32 for k in ENDS}):
        window = max(end // 8, 1)
        losses = study.losses(run, cells(window).values(), [end])
        for name, cell in cells(window).items():
            curves[name].append([end * study.unit_tokens(run), losses[cell, end]])
    curves["forecasts"] = {n: {f"{share:g}": forecast_end(curves[n], share) for share in SHARES} for n in FORECASTS}
    return curves | {"annealed": study.loss(study.anneal(run, study.units * 3 // 4, study.units))}


def measure_sizes(study: Study, seed: int) -> list[dict[str, Any]]:
    """Return, for each size, its parameters and the losses of merges and annealed branches along one run."""
    runs = [study.trunk(size, seed, changes) for size, changes in sizes_of(study, seed)]
    entries = []
    for run in runs:
        unit = study.unit_tokens(run)
        tokens = {end: end * unit for end in range(study.units // 4, study.units + 1, study.units // 8)}
        ends = (study.units // 4, study.units // 2, study.units)
        merged = {end: cells(max(end // 8, 1))["block/sma"] for end in tokens}
        entries.append(
            {
                "parameters": parameter_count(abstract_params(run.config.model, make_mesh(run.config.mesh))),
                "merged": [[tokens[end], study.losses(run, [cell], [end])[cell, end]] for end, cell in merged.items()],
                "annealed": [[tokens[end], study.loss(study.anneal(run, end - end // 4, end))] for end in ends],
            }
        )
    return sorted(entries, key=lambda entry: entry["parameters"])


def width_overrides(config: Config, factor: float) -> list[str]:
    """Return overrides that make a model `factor` times as wide, with heads of the same size."""
    model = config.model
    keys = {"width": model.width, "heads": model.heads, "kv_heads": model.kv_heads, "hidden": model.hidden}
    return [f"model.{key}={max(int(size * factor), 1)}" for key, size in keys.items()]


def forecast_end(curve: Sequence[Sequence[float]], share: float) -> float | None:
    """Forecast the loss at the last point of a curve by a power law through the points of its first `share`.

    Points in the first eighth of the curve are not used. Fewer than 4 points give None.
    """
    tokens, losses = np.array(curve).T
    used = (tokens <= share * tokens[-1]) & (tokens >= tokens[-1] / 8)
    return float(fit_loss_curve(tokens[used], losses[used]).predict(tokens[-1])) if used.sum() >= 4 else None


def fit_law(entries: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Fit L(N, D) to merged or annealed losses.

    `error` is the annealed loss of the largest size as forecast by a fit without that size, minus the measured one.
    """
    tokens, annealed = entries[-1]["annealed"][-1]
    forecast = float(fit_scaling_law_to(entries[:-1], kind).predict(entries[-1]["parameters"], tokens))
    return dataclasses.asdict(fit_scaling_law_to(entries, kind)) | {"error": forecast - annealed}


def fit_scaling_law_to(entries: Sequence[dict[str, Any]], kind: str) -> ScalingLaw:
    """Fit L(N, D) to the losses of one kind in `entries`."""
    points = [(entry["parameters"], tokens, loss) for entry in entries for tokens, loss in entry[kind]]
    parameters_n, tokens_n, loss_n = zip(*points, strict=True)
    return fit_scaling_law(parameters_n, tokens_n, loss_n)


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


def judge_ranking(results: dict[str, Any], name: str, share: float) -> dict[str, list[float]]:
    """Return Kendall's tau with the annealed ranking, and the regret of the best setting, for each seed."""
    taus, regrets = [], []
    for settings in results["sweep"].values():
        annealed = [s["annealed"] for s in settings.values()]
        forecast = [s[f"{share:g}"][name] for s in settings.values()]
        taus.append(kendall_tau(forecast, annealed))
        regrets.append(regret(forecast, annealed))
    return {"tau": taus, "regret": regrets}


def ranking_report(results: dict[str, Any]) -> str:
    """Format how well rankings are forecast."""
    rows = []
    for share in (*SHARES, 1.0):
        rankings = {name: judge_ranking(results, name, share) for name in FORECASTS}
        for name in FORECASTS:
            tau, regret = rankings[name]["tau"], rankings[name]["regret"]
            against_raw = "" if name == "raw" else pages.format_difference(tau, rankings["raw"]["tau"], 2)
            saved = f"{1 - share:.0%}"
            rows.append([f"{share:.0%}", saved, name, f"{np.mean(tau):.2f}", against_raw, f"{np.mean(regret):.4f}"])
    header = ["seen of the run", "tokens saved", "ranked by", "Kendall tau", "less that of raw", "regret, nats"]
    settings = next(iter(results["sweep"].values()))
    spread = np.mean([np.ptp([s["annealed"] for s in each.values()]) for each in results["sweep"].values()])
    text = (
        f"{len(settings)} settings ({', '.join(settings)}), compared with the ranking by annealed loss; annealed "
        f"losses span {spread:.3f} nats. An annealed run takes as many tokens as a full run at a constant rate, so "
        "tokens that the forecast does not use are saved."
    )
    return f"**Rankings.** {text}\n\n{pages.format_table(header, rows)}"


def curve_report(results: dict[str, Any]) -> str:
    """Format the errors of forecasts of the annealed loss."""
    rows = []
    for size, seeds in results["curves"].items():
        annealed = [seed["annealed"] for seed in seeds.values()]
        for name in FORECASTS:
            errors = []
            for share in (*SHARES, 1.0):
                forecasts = [s["forecasts"][name].get(f"{share:g}", s[name][-1][1]) for s in seeds.values()]
                known = [value for value in forecasts if value is not None]
                errors.append(
                    pages.format_difference(known, annealed) if len(known) == len(forecasts) else "too few points"
                )
            rows.append([size, name, *errors])
    header = ["size", "from", *(f"the first {share:.0%}" for share in SHARES), "itself, at the end"]
    return (
        "**The annealed loss at the end** (annealed over the last quarter): forecast minus measured, nats per token."
        f"\n\n{pages.format_table(header, rows)}"
    )


def law_report(results: dict[str, Any]) -> str:
    """Format L(N, D) fitted to merges and to annealed branches, and the error of each at the largest size."""
    rows = []
    for kind in LAWS:
        fits = [laws[kind] for laws in results["laws"].values()]
        numbers = [f"{np.mean([fit[key] for fit in fits]):.3g}" for key in ("e", "a", "alpha", "b", "beta")]
        rows.append([kind, *numbers, pages.format_interval(statistics.mean_interval([fit["error"] for fit in fits]))])
    sizes_shown = ", ".join(f"{entry['parameters']:,}" for entry in next(iter(results["sizes"].values())))
    header = ["fitted to", "E", "A", "alpha", "B", "beta", "largest size, forecast less annealed"]
    extra = extra_share(results)
    return (
        f"**L(N, D) = E + A / N^alpha + B / D^beta**, models of {sizes_shown} parameters. The last column is from a "
        f"fit without the largest model. The annealed branches take {extra:.0%} more tokens than the runs alone, so "
        f"merging saves {extra / (1 + extra):.0%} of all tokens."
        f"\n\n{pages.format_table(header, rows)}"
    )


def extra_share(results: dict[str, Any]) -> float:
    """Return the tokens of the annealed branches divided by those of the runs."""
    entries = next(iter(results["sizes"].values()))
    branch_tokens = sum(end / 4 for entry in entries for end, _ in entry["annealed"])
    return branch_tokens / sum(entry["annealed"][-1][0] for entry in entries)


def report(results: dict[str, Any]) -> str:
    """Format the tables of the three parts."""
    return "\n\n".join([ranking_report(results), curve_report(results), law_report(results)])


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the forecast rankings after a quarter and three quarters, and the forecast of the annealed loss."""
    early, late = SHARES[0], SHARES[-1]
    verdicts, effects = [], []
    for share in (early, late):
        raw, merged = (judge_ranking(results, name, share) for name in ("raw", "sma"))
        verdicts.append(
            f"after {share:.0%} of the run the ranking by means agrees with the annealed one at a tau of "
            f"{np.mean(merged['tau']):.2f} (raw {np.mean(raw['tau']):.2f}), and its best setting is "
            f"{np.mean(merged['regret']):.4f} nats from the true best (raw {np.mean(raw['regret']):.4f})"
        )
        effects.append(f"tau at {share:.0%}, mean less raw: {pages.format_difference(merged['tau'], raw['tau'], 2)}")
    errors = {
        name: [
            value - seed["annealed"]
            for seed in next(iter(results["curves"].values())).values()
            if (value := seed["forecasts"][name][f"{late:g}"]) is not None
        ]
        for name in ("raw", "sma")
    }
    if all(len(each) > 1 for each in errors.values()):
        shown = {name: pages.format_interval(statistics.mean_interval(each)) for name, each in errors.items()}
        effects.append(
            f"annealed loss at the end from {late:.0%}, forecast less measured: {shown['sma']} (raw {shown['raw']})"
        )
    return IndexRow(
        6,
        "Can it forecast the annealed model early?",
        "Merging shows early what annealing will give (Section 4.2)",
        "; ".join(verdicts),
        "; ".join(effects),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw tau and regret against the share of the run that is used, and the loss curves of each size."""
    shares = [*SHARES, 1.0]
    panels = []
    for key, title in (("tau", "Kendall tau with the annealed ranking"), ("regret", "regret, nats per token")):
        lines = [
            Line(name, shares, [float(np.mean(judge_ranking(results, name, share)[key])) for share in shares])
            for name in FORECASTS
        ]
        panels.append(LinePanel(title, "share of the run seen", lines))
    for size, seeds in results["curves"].items():
        lines = []
        for name in FORECASTS:
            tokens_m = np.array(next(iter(seeds.values()))[name])[:, 0] / 1e6
            losses = np.mean([np.array(seed[name])[:, 1] for seed in seeds.values()], axis=0)
            lines.append(Line(name, tokens_m.tolist(), losses.tolist()))
        annealed = float(np.mean([seed["annealed"] for seed in seeds.values()]))
        lines.append(Line("annealed at the end", [tokens_m[0], tokens_m[-1]], [annealed] * 2, dashed=True))
        late = losses[len(losses) // 3]
        panels.append(
            LinePanel(
                f"{size}: held-out loss", "tokens, millions", lines, y_limits=(annealed - 0.02, float(late) + 0.1)
            )
        )
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
