"""Can the first part of a run, merged, forecast what annealing will give, and which setting will be best?

Command:   python experiments/forecasts/script.py --runs runs/science

Three parts: a sweep of hyper-parameters whose rankings are forecast; the annealed loss at the end of the trunks,
forecast by a power law of tokens; and L(N, D) over four sizes, from merges and from annealed branches.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pma_jax.analysis import comparison
from pma_jax.analysis.scaling import ScalingLaw, fit_loss_curve, fit_scaling_law
from pma_jax.config import Config
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import RAW
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.study import Study, run_experiment

SHARES = (0.25, 0.5, 0.75)  # of a run that a forecast sees
# Settings of the sweep: one key at a time around the size's own. Rates are factors of its rate, batches of its batch.
RATES, BATCHES, DECAYS = (0.25, 0.5, 2.0, 4.0), (0.5, 2.0), (0.0, 0.5)
SWEEP_PART, SWEEP_UNITS = 4, 32  # the sweep's runs take one over so many of a trunk's tokens, in so many units
WIDTHS = (0.5, 1.5)  # of more models, times the first size's; they take half of its tokens
ENDS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # where losses are taken along a trunk, 32nds of it
FORECASTS = ("raw", "sma", "block/sma")
LAWS = ("merged", "annealed")  # what L(N, D) is fitted to


def measure(study: Study) -> dict[str, Any]:
    """Every loss that the three parts need, and what is fitted to them."""
    each = {str(seed): sizes(study, seed) for seed in study.seeds}
    return {
        "sweep": {str(seed): sweep(study, seed) for seed in study.seeds},
        "curves": {size: {str(s): curves(study, size, s) for s in study.seeds} for size in study.sizes[:2]},
        "sizes": each,
        "laws": {seed: {kind: law(entries, kind) for kind in LAWS} for seed, entries in each.items()},
    }


def cells(window: int) -> dict[str, Cell]:
    """What forecasts are made from: the newest snapshot, and merges of the newest `window`."""
    return dict(zip(FORECASTS, (RAW, Cell("sma", window), Cell("sma", window, kind="block_mean")), strict=True))


def sweep(study: Study, seed: int) -> dict[str, dict[str, Any]]:
    """Setting -> losses along its run, and of its annealed branch."""
    base = study.trunk_config(study.sizes[0], seed)
    small = dataclasses.replace(study, units=SWEEP_UNITS)
    batch = base.training.batch_size_sequences
    settings = {"as it is": []}
    settings |= {f"rate x{x:g}": [f"schedule.peak_rate={base.schedule.peak_rate * x}"] for x in RATES}
    settings |= {f"batch x{x:g}": [f"training.batch_size_sequences={int(batch * x)}"] for x in BATCHES}
    settings |= {f"weight decay {x:g}": [f"optimizer.weight_decay={x}"] for x in DECAYS}
    found: dict[str, dict[str, Any]] = {}
    for name, changes in settings.items():
        total = f"training.total_tokens={base.training.total_tokens // SWEEP_PART}"
        run = small.trunk(study.sizes[0], seed, [total, *changes])
        annealed = small.anneal(run, SWEEP_UNITS * 3 // 4, SWEEP_UNITS)
        found[name] = {"annealed": small.loss(annealed)}
        for share in (*SHARES, 1.0):
            unit = int(SWEEP_UNITS * share)
            losses = small.losses(run, cells(unit // 4).values(), [unit])
            found[name][f"{share:g}"] = {key: losses[cell, unit] for key, cell in cells(unit // 4).items()}
    return found


def curves(study: Study, size: str, seed: int) -> dict[str, Any]:
    """Losses along a trunk, of merges that span an eighth of the tokens so far, and of its annealed branch."""
    run = study.trunk(size, seed)
    found: dict[str, Any] = {name: [] for name in FORECASTS}
    for end in sorted({study.units * k // 32 for k in ENDS}):
        window = max(end // 8, 1)
        losses = study.losses(run, cells(window).values(), [end])
        for name, cell in cells(window).items():
            found[name].append([end * study.unit_tokens(run), losses[cell, end]])
    found["forecasts"] = {name: {f"{share:g}": forecast(found[name], share) for share in SHARES} for name in FORECASTS}
    return found | {"annealed": study.loss(study.anneal(run, study.units * 3 // 4, study.units))}


def sizes(study: Study, seed: int) -> list[dict[str, Any]]:
    """Of each size: its parameters, losses of merges along one run, and of annealed branches that end on the way."""
    first = study.trunk_config(study.sizes[0], seed)
    half = f"training.total_tokens={first.training.total_tokens // 2}"
    runs = [study.trunk(study.sizes[0], seed, [half, *of_width(first, share)]) for share in WIDTHS]
    runs += [study.trunk(size, seed) for size in study.sizes[:2]]
    found = []
    for run in runs:
        at = {end: end * study.unit_tokens(run) for end in range(study.units // 4, study.units + 1, study.units // 8)}
        ends = (study.units // 4, study.units // 2, study.units)
        merged = {end: cells(max(end // 8, 1))["block/sma"] for end in at}
        found.append(
            {
                "parameters": parameter_count(abstract_params(run.config.model, make_mesh(run.config.mesh))),
                "merged": [[at[end], study.losses(run, [cell], [end])[cell, end]] for end, cell in merged.items()],
                "annealed": [[at[end], study.loss(study.anneal(run, end - end // 4, end))] for end in ends],
            }
        )
    return sorted(found, key=lambda entry: entry["parameters"])


def of_width(config: Config, share: float) -> list[str]:
    """Changes that make a model so many times as wide, with heads of the same size."""
    model = config.model
    keys = {"width": model.width, "heads": model.heads, "kv_heads": model.kv_heads, "hidden": model.hidden}
    return [f"model.{key}={max(int(size * share), 1)}" for key, size in keys.items()]


def forecast(points: Sequence[Sequence[float]], share: float) -> float | None:
    """The loss at the last point, by a power law through those of the first `share`, warm-up left out."""
    at, losses = np.array(points).T
    seen = (at <= share * at[-1]) & (at >= at[-1] / 8)
    return float(fit_loss_curve(at[seen], losses[seen]).at(at[-1])) if seen.sum() >= 4 else None


def law(entries: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """L(N, D) through one kind of losses; and, fitted without the largest size, less its annealed loss: `error`."""
    at, truth = entries[-1]["annealed"][-1]
    without = float(fitted_law(entries[:-1], kind).at(entries[-1]["parameters"], at))
    return dataclasses.asdict(fitted_law(entries, kind)) | {"error": without - truth}


def fitted_law(entries: Sequence[dict[str, Any]], kind: str) -> ScalingLaw:
    """L(N, D) through one kind of losses."""
    points = [(entry["parameters"], at, loss) for entry in entries for at, loss in entry[kind]]
    parameters_n, tokens_n, loss_n = zip(*points, strict=True)
    return fit_scaling_law(parameters_n, tokens_n, loss_n)


# --- What the page shows ----------------------------------------------------------------------------------------------


def ranking(results: dict[str, Any], name: str, share: float) -> dict[str, list[float]]:
    """Kendall's tau with the annealed ranking, and the regret of its best, of each seed."""
    taus, regrets = [], []
    for settings in results["sweep"].values():
        truth = [s["annealed"] for s in settings.values()]
        forecast = [s[f"{share:g}"][name] for s in settings.values()]
        taus.append(comparison.kendall_tau(forecast, truth))
        regrets.append(comparison.regret(forecast, truth))
    return {"tau": taus, "regret": regrets}


def ranking_report(results: dict[str, Any]) -> str:
    """How well rankings are forecast."""
    rows = []
    for share in (*SHARES, 1.0):
        found = {name: ranking(results, name, share) for name in FORECASTS}
        for name in FORECASTS:
            tau, regret = found[name]["tau"], found[name]["regret"]
            against = "" if name == "raw" else pages.format_difference(tau, found["raw"]["tau"], 2)
            saved = f"{1 - share:.0%}"
            rows.append([f"{share:.0%}", saved, name, f"{np.mean(tau):.2f}", against, f"{np.mean(regret):.4f}"])
    header = ["seen of the run", "tokens saved", "ranked by", "Kendall tau", "less that of raw", "regret, nats"]
    settings = next(iter(results["sweep"].values()))
    spread = np.mean([np.ptp([s["annealed"] for s in each.values()]) for each in results["sweep"].values()])
    text = (
        f"{len(settings)} settings ({', '.join(settings)}); the truth is the order of their annealed losses, which "
        f"span {spread:.3f} nats. An annealed run takes as many tokens as the whole of one at a constant rate: what is "
        "not seen is saved."
    )
    return f"**Rankings.** {text}\n\n{pages.format_table(header, rows)}"


def curve_report(results: dict[str, Any]) -> str:
    """How far forecasts of the annealed loss are off."""
    rows = []
    for size, seeds in results["curves"].items():
        annealed = [seed["annealed"] for seed in seeds.values()]
        for name in FORECASTS:
            cells_of_row = []
            for share in (*SHARES, 1.0):
                found = [s["forecasts"][name].get(f"{share:g}", s[name][-1][1]) for s in seeds.values()]
                known = [value for value in found if value is not None]
                cells_of_row.append(
                    pages.format_difference(known, annealed) if len(known) == len(found) else "too few points"
                )
            rows.append([size, name, *cells_of_row])
    header = ["size", "from", *(f"the first {share:.0%}" for share in SHARES), "itself, at the end"]
    return (
        "**The annealed loss at the end** (over the last quarter), forecast less measured, nats per token."
        f"\n\n{pages.format_table(header, rows)}"
    )


def law_report(results: dict[str, Any]) -> str:
    """L(N, D) from merges and from annealed branches, and how well each reaches the largest size."""
    rows = []
    for kind in LAWS:
        fits = [laws[kind] for laws in results["laws"].values()]
        numbers = [f"{np.mean([fit[key] for fit in fits]):.3g}" for key in ("e", "a", "alpha", "b", "beta")]
        rows.append([kind, *numbers, pages.format_interval(comparison.mean_interval([fit["error"] for fit in fits]))])
    sizes_shown = ", ".join(f"{entry['parameters']:,}" for entry in next(iter(results["sizes"].values())))
    header = ["fitted to", "E", "A", "alpha", "B", "beta", "largest size, forecast less annealed"]
    extra = extra_share(results)
    return (
        f"**L(N, D) = E + A / N^alpha + B / D^beta**, models of {sizes_shown} parameters. The last column is fitted "
        f"without the largest. The annealed branches take {extra:.0%} more tokens than the runs alone: of all, merging "
        f"saves {extra / (1 + extra):.0%}."
        f"\n\n{pages.format_table(header, rows)}"
    )


def extra_share(results: dict[str, Any]) -> float:
    """Tokens of the annealed branches over those of the runs."""
    entries = next(iter(results["sizes"].values()))
    return sum(at / 4 for e in entries for at, _ in e["annealed"]) / sum(e["annealed"][-1][0] for e in entries)


def report(results: dict[str, Any]) -> str:
    """Three tables."""
    return "\n\n".join([ranking_report(results), curve_report(results), law_report(results)])


def summarize(results: dict[str, Any]) -> IndexRow:
    """The question's row on the page of all."""
    early, late = SHARES[0], SHARES[-1]
    found, against = [], []
    for share in (early, late):
        raw, merged = (ranking(results, name, share) for name in ("raw", "sma"))
        found.append(
            f"after {share:.0%} of the run the ranking by means agrees with the annealed one at a tau of "
            f"{np.mean(merged['tau']):.2f} (raw {np.mean(raw['tau']):.2f}), and its best setting is "
            f"{np.mean(merged['regret']):.4f} nats from the true best (raw {np.mean(raw['regret']):.4f})"
        )
        against.append(f"tau at {share:.0%}, mean less raw: {pages.format_difference(merged['tau'], raw['tau'], 2)}")
    errors = {
        name: [
            value - seed["annealed"]
            for seed in next(iter(results["curves"].values())).values()
            if (value := seed["forecasts"][name][f"{late:g}"]) is not None
        ]
        for name in ("raw", "sma")
    }
    if all(len(each) > 1 for each in errors.values()):
        off = {name: pages.format_interval(comparison.mean_interval(each)) for name, each in errors.items()}
        against.append(
            f"annealed loss at the end from {late:.0%}, forecast less measured: {off['sma']} (raw {off['raw']})"
        )
    return IndexRow(
        6,
        "Can it forecast the annealed model early?",
        "Merging shows early what annealing will give (Section 4.2)",
        "; ".join(found),
        "; ".join(against),
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Tau and regret by what is seen; errors of the forecasts of the end, of each size."""
    shares = [*SHARES, 1.0]
    panels = []
    for key, title in (("tau", "Kendall tau with the annealed ranking"), ("regret", "regret, nats per token")):
        lines = [
            Line(name, shares, [float(np.mean(ranking(results, name, share)[key])) for share in shares])
            for name in FORECASTS
        ]
        panels.append(LinePanel(title, "share of the run seen", lines))
    for size, seeds in results["curves"].items():
        lines = []
        for name in FORECASTS:
            at = np.array(next(iter(seeds.values()))[name])[:, 0] / 1e6
            losses = np.mean([np.array(seed[name])[:, 1] for seed in seeds.values()], axis=0)
            lines.append(Line(name, at.tolist(), losses.tolist()))
        annealed = float(np.mean([seed["annealed"] for seed in seeds.values()]))
        lines.append(Line("annealed at the end", [at[0], at[-1]], [annealed] * 2, dashed=True))
        late = losses[len(losses) // 3]
        panels.append(
            LinePanel(f"{size}: held-out loss", "tokens, millions", lines, limits=(annealed - 0.02, float(late) + 0.1))
        )
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
