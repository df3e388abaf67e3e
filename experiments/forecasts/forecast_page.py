"""The page of the experiment: rankings, forecasts of the annealed loss, the row of the index, and the figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from rankings import ANNEALED, Ranking, estimate, judge_ranking

from pma_jax.analysis.scaling import fit_loss_curve
from pma_jax.data.sampling import REPORT
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, mean_interval

SHARES = (0.25, 0.5, 0.75)  # of a run that a forecast uses
MODELS = ("raw", "sma", "block/sma")
MEAN_LOSS = "raw, mean of losses"  # of the same snapshots of which the merges are means
HIGHEST_RATE = "rate x4"  # the setting without which the rankings are judged too
RANKED_BY = (MODELS[0], MEAN_LOSS, *MODELS[1:])
BASE = "as it is"  # the setting that the others change


def report(results: dict[str, Any]) -> str:
    """Format the tables of both parts for each size."""
    parts = []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_rankings(size), format_other_judgements(size)]
        parts += [format_settings(size), format_curves(size)]
    return "\n\n".join(parts)


def rankings_of(size: Mapping[str, Any]) -> dict[tuple[float, str], Ranking]:
    """Return how well each forecast ranks the settings, by the share of the run that it uses and its name."""
    listed = [(share, name) for share in (*SHARES, 1.0) for name in RANKED_BY]
    return {(share, name): judge_ranking(size, name, share) for share, name in [*listed, (1.0, ANNEALED)]}


def against_mean_loss(
    size: Mapping[str, Any], rankings: Mapping[tuple[float, str], Ranking]
) -> dict[tuple[float, str], MeanEstimate]:
    """Estimate the tau of each forecast less that by the mean raw loss, for the same share of the run."""
    return {
        (share, name): estimate(size, judged.tau - rankings[share, MEAN_LOSS].tau)
        for (share, name), judged in rankings.items()
        if name != MEAN_LOSS
    }


def judge_rankings(estimates: Mapping[tuple[float, str], MeanEstimate]) -> dict[tuple[float, str], tuple[str, float]]:
    """Judge whether the tau of each forecast is "better" or "worse" than that of `MEAN_LOSS`, or "not shown".

    Args:
        estimates: From `against_mean_loss`.

    Returns:
        {forecast: (verdict, p-value after Benjamini and Hochberg's correction)}.
    """
    corrected = scipy.stats.false_discovery_control([one.p_value() for one in estimates.values()]).tolist()
    verdicts = ["better" if one.mean > 0 else "worse" for one in estimates.values()]
    return {
        key: (said if p <= 0.05 else "not shown", p)
        for key, said, p in zip(estimates, verdicts, corrected, strict=True)
    }


def describe_tau(size: Mapping[str, Any], tau_NS: np.ndarray) -> str:
    """Format Kendall's tau, or a difference of two, with its interval over seeds and documents."""
    return pages.format_interval(estimate(size, tau_NS).interval(), 2)


def format_rankings(size: Mapping[str, Any]) -> str:
    """Format how well rankings are forecast."""
    rankings, rows = rankings_of(size), []
    differences = against_mean_loss(size, rankings)
    verdicts = judge_rankings(differences)
    for (share, name), judged in rankings.items():
        tau = describe_tau(size, judged.tau)
        less_raw = "" if name == MEAN_LOSS else pages.format_interval(differences[share, name].interval(), 2)
        said, p = verdicts.get((share, name), ("", 1.0))
        verdict = said and f"{said} (p = `{p:.2g}`)"
        less_newest = "" if name == MODELS[0] else describe_tau(size, judged.tau - rankings[share, MODELS[0]].tau)
        yardstick = "" if name == ANNEALED else describe_tau(size, judged.tau - rankings[1.0, ANNEALED].tau)
        shown = [tau, less_raw, verdict, less_newest, yardstick, *describe_regret(size, judged.regret)]
        rows.append([f"{share:.0%}", f"{1 - share:.0%}", name, *shown])
    header = [
        "seen of the run",
        "tokens saved",
        "ranked by",
        "Kendall tau",
        f"less that of `{MEAN_LOSS}`",
        "against it",
        f"less that of `{MODELS[0]}`",
        f"less that of `{ANNEALED}`",
    ]
    return (
        f"**Rankings** of {len(size['sweep'])} settings ({', '.join(size['sweep'])}) by losses on the part `select`, "
        "compared with that by the annealed loss (its mean over the seeds other than the forecast's, on `report`). "
        "An annealed run takes as many tokens as a full run at a constant rate, so tokens that the forecast does "
        "not use are saved. The regret is the annealed loss of the setting that a forecast puts first, less the "
        "lowest: never below 0, though its symmetric interval may be. Intervals are over seeds and documents "
        "(bootstrap), for these settings; better and worse with at most 5% false findings (Benjamini and Hochberg), "
        "with the corrected p.\n\n"
        + pages.format_table([*header, "seeds that put the best first", "regret, nats"], rows)
    )


def format_gain_in_tau(size: Mapping[str, Any], share: float, **way: Any) -> str:
    """Format the tau of means of points less that of the mean loss; `judge_ranking` takes the keywords."""
    sma, losses = (judge_ranking(size, name, share, **way).tau for name in ("sma", MEAN_LOSS))
    difference = estimate(size, sma - losses)
    return pages.format_interval(difference.interval(), 2) if difference.standard_error else "0"


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


def describe_regret(size: Mapping[str, Any], regrets_NS: np.ndarray) -> tuple[str, str]:
    """Return how many seeds put the best setting first, and the mean regret."""
    right = int((regrets_NS[0] == 0).sum())
    return f"{right} of {regrets_NS.shape[1]}", pages.format_interval(estimate(size, regrets_NS).interval())


def format_settings(size: Mapping[str, Any]) -> str:
    """Format the annealed loss of each setting less that of the setting as it is."""
    tokens, annealed = size["document_tokens"][REPORT], {name: of["annealed"] for name, of in size["sweep"].items()}
    each = {
        name: pages.format_interval(difference_over_documents(of, annealed[BASE], tokens).interval())
        for name, of in annealed.items()
        if name != BASE
    }
    table = pages.format_table(["setting", f"annealed loss, less that of `{BASE}`"], list(each.items()))
    return f"Annealed losses of the settings, nats per token, over seeds and documents:\n\n{table}"


def forecast_end(tokens: Sequence[float], losses: Sequence[float], share: float) -> float | None:
    """Forecast the loss at the last point of a curve by a power law through the points of its first `share`.

    Fewer than 4 points give None.
    """
    x, y = np.array(tokens), np.array(losses)
    used = x <= share * x[-1]
    return float(fit_loss_curve(x[used], y[used]).predict(x[-1])) if used.sum() >= 4 else None


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
        differences = against_mean_loss(size, rankings_of(size))
        said = judge_rankings(differences)
        each = [f"{said[share, 'sma'][0]} at {share:.0%}" for share in (*SHARES, 1.0)]
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
            judged = {name: [getattr(judge_ranking(size, name, share), key) for share in shares] for name in RANKED_BY}
            lines = [
                interval_line(name, shares, [estimate(size, values).interval() for values in of])
                for name, of in judged.items()
            ]
            panels.append(LinePanel(f"{size_name}: {title}", "share of the run seen", lines))
        curves = size["curves"]
        tokens_m = (np.array(curves["tokens"]) / 1e6).tolist()
        lines = [Line(name, tokens_m, np.mean(curves[name], axis=1).tolist()) for name in MODELS]
        annealed = float(np.mean(curves["annealed"]))
        lines.append(Line("annealed at the end", [tokens_m[0], tokens_m[-1]], [annealed] * 2, dashed=True))
        panels.append(LinePanel(f"{size_name}: held-out loss", "tokens, millions", lines))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
