"""The page of the experiment: tables, the row of the index, and the figure.

Differences are of the loss of a merge less that of the best plain mean of the same kind of snapshot at the same tokens,
so that a negative one says that the weights are better.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.merging.lagfree import mean_age
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, judge

KINDS = tuple(SNAPSHOT_KINDS)
# `decay:shape=linear` has the weights of `sma`. EMA is included in both forms, recursive and closed.
RECIPES = (
    "sma",
    "wma",
    "ema:alpha=0.1",
    "ema:alpha=0.2",
    "ema_closed:alpha=0.1",
    "ema_closed:alpha=0.2",
    "decay:shape=cosine",
    "decay:shape=minus_sqrt",
    "lagfree:lag=0.5",
    "lagfree",
    "lagfree:order=2",
)
POWER = tuple(f"power:sigma_rel={s:g}" for s in (0.025, 0.05, 0.1, 0.15))  # over all snapshots from token 0 on
BASELINE = "sma"
WORDS = {"equal": "equal", "higher": "worse", "lower": "better", "not shown": "not shown"}


def series(text: str) -> str:
    """Return what the merges have in common of which one is chosen: the recipe without its window, or width."""
    before, power, _ = text.partition("power:")
    return before + power.rstrip(":") if power else text.rpartition(":")[0]


def series_of(recipe: str, kind: str) -> str:
    """Return the series of a recipe over one kind of snapshot."""
    return series(Cell(recipe, 1, kind=kind).text)


def rows(size: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the recipes with each kind of snapshot; the power function once, at its best width."""
    return [
        (recipe, kind) for recipe in (*RECIPES, POWER[0]) for kind in KINDS if series_of(recipe, kind) in chosen(size)
    ]


def chosen(size: Mapping[str, Any]) -> dict[str, str]:
    """Return the chosen merges at the last horizon, where each recipe has one."""
    return size["chosen"][list(size["ends"])[-1]]


def nats(size: Mapping[str, Any], horizon: str, text: str) -> list[list[float]]:
    """Return the losses of a merge at a horizon, of each seed on each document."""
    end = str(size["ends"][horizon])
    return size["merges"][end]["nats"][text][end]


def difference(size: Mapping[str, Any], horizon: str, text: str, other: str) -> MeanEstimate:
    """Estimate the loss of a merge at a horizon less that of another."""
    tokens_D = size["merges"][str(size["ends"][horizon])]["document_tokens"]
    return difference_over_documents(nats(size, horizon, text), nats(size, horizon, other), tokens_D)


def plain_mean(size: Mapping[str, Any], horizon: str, kind: str) -> str:
    """Return the best plain mean of a kind of snapshot."""
    return size["chosen"][horizon][series_of(BASELINE, kind)]


def differences(size: Mapping[str, Any]) -> dict[tuple[str, str, str], MeanEstimate]:
    """Return the difference of each recipe at each horizon from the best plain mean of the same kind of snapshot."""
    found = {}
    for recipe, kind in rows(size):
        for horizon in size["ends"]:
            text = size["chosen"][horizon].get(series_of(recipe, kind))
            if text and recipe != BASELINE:
                found[recipe, kind, horizon] = difference(size, horizon, text, plain_mean(size, horizon, kind))
    return found


def best_fixed(size: Mapping[str, Any], horizon: str, kinds: Sequence[str] = KINDS) -> str:
    """Return the merge with the lowest loss of all, or of those of some kinds of snapshot, on the part `select`."""
    of_kinds = {series_of(recipe, kind) for recipe, kind in rows(size) if kind in kinds}
    listed = [text for name, text in size["chosen"][horizon].items() if name in of_kinds]
    return min(listed, key=size["select"][horizon].__getitem__)


def report(results: dict[str, Any]) -> str:
    """Format the table of recipes of each size, and its learned weights."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_baselines(size, margin), format_recipes(size, margin)]
        parts += [format_learned(size, margin)]
    return "\n\n".join(parts)


def format_baselines(size: Mapping[str, Any], margin: float) -> str:
    """Say what the best plain mean of each kind gains over the raw model, and how the kinds and the best compare."""
    lines = []
    for horizon, end in size["ends"].items():
        points, blocks = (plain_mean(size, horizon, kind) for kind in KINDS)
        raw, best = difference(size, horizon, RAW.text, points), best_fixed(size, horizon)
        kinds = pages.describe_difference(difference(size, horizon, blocks, points), margin)
        lines.append(
            f"- {horizon} ({pages.format_tokens(size, end)} tokens): raw less {points} "
            f"{pages.format_interval(raw.interval())}; {blocks} against {points}, {kinds}; the best of all, {best}, "
            f"against {points}, {pages.describe_difference(difference(size, horizon, best, points), margin)}."
        )
    return (
        "The best plain means of points and of block means, and the best of all merges on the part `select` (nats per "
        "token, 95% intervals over seeds and documents):\n\n" + "\n".join(lines)
    )


def format_recipes(size: Mapping[str, Any], margin: float) -> str:
    """Format the difference of each recipe at its best window, and what is shown of it."""
    found = differences(size)
    verdicts = dict(zip(found, judge(list(found.values()), margin), strict=True))
    table = []
    for recipe, kind in rows(size):
        is_power = recipe in POWER
        row = ["power" if is_power else display_name(recipe), SNAPSHOT_KINDS[kind].title]
        for horizon in size["ends"]:
            text, cell = size["chosen"][horizon].get(series_of(recipe, kind)), (recipe, kind, horizon)
            if not text:
                row.append("")
                continue
            width = text.rpartition("=")[2].rpartition(":")[0] if is_power else text.rpartition(":")[2]
            width = f" ({'σ' if is_power else 'N'} = {width})"
            if cell in found:
                row.append(f"{pages.format_interval(found[cell].interval())}{width}, {WORDS[verdicts[cell]]}")
            else:
                row.append(f"0{width}")
        table.append(row)
    return pages.format_table(["recipe", "of", *size["ends"]], table) + (
        "\n\nLoss less that of the best plain mean of the same kind of snapshot, at each horizon; negative: better. "
        "The window N is the best on the part `select`, as is the width σ of the power function over all snapshots. "
        f"All cells are tested together, equal within {margin:g} nats and different, each with at most 5% false "
        "findings (Benjamini and Hochberg); a cell that is shown to be equal is called so, also if its difference from "
        "0 is clear."
    )


def learned_difference(size: Mapping[str, Any], fit: Mapping[str, Any], text: str) -> MeanEstimate:
    """Estimate the loss of learned weights less that of a merge, at the end."""
    last = list(size["ends"])[-1]
    tokens_D = size["merges"][str(size["ends"][last])]["document_tokens"]
    return difference_over_documents(fit["nats"], nats(size, last, text), tokens_D)


def format_learned(size: Mapping[str, Any], margin: float) -> str:
    """Say how learned weights compare with fixed ones, what they gain on the text of the fit, and their mean age."""
    last, lines = list(size["ends"])[-1], []
    for fit in size["learned"]:
        same = Cell(BASELINE, fit["window"], kind=fit["kind"]).text
        others = {
            f"the plain mean of the same ({same})": same,
            "the best plain mean of the kind": plain_mean(size, last, fit["kind"]),
            "the best fixed weights of the kind": best_fixed(size, last, (fit["kind"],)),
        }
        judged = [
            f"against {name}{'' if text == same else f' ({text})'}, "
            f"{pages.describe_difference(learned_difference(size, fit, text), margin)}"
            for name, text in others.items()
        ]
        on_fit = [start - end for start, end in fit["fit_losses"]]
        ages = [mean_age(weights, np.arange(len(weights))) for weights in fit["weights"]]
        lines.append(
            f"- {fit['window']} weights of {SNAPSHOT_KINDS[fit['kind']].title}: {'; '.join(judged)}. On the text that "
            f"they were learned on, lower than the plain mean by {pages.format_mean(on_fit)}. Their mean age is "
            f"{pages.format_mean(ages, 1)} intervals; that of the plain mean, {(fit['window'] - 1) / 2:.1f}."
        )
    return (
        "Weights that were learned on other documents, one fit per seed, at the end (the fit on the part `fit` begins "
        "at the plain mean):\n\n" + "\n".join(lines)
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the best merge of each size at each horizon, and how the recipes compare with the plain mean."""
    margin, found, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        last, estimates = list(size["ends"])[-1], differences(size)
        verdicts = zip(estimates, judge(list(estimates.values()), margin), strict=True)
        said = [verdict for (_, _, at), verdict in verdicts if at == last]
        counts = [f"{said.count(key)} {WORDS[key]}" for key in ("lower", "equal", "higher", "not shown")]
        best = [f"{best_fixed(size, horizon)} at {horizon}" for horizon in size["ends"]]
        found.append(
            f"{name}: the best are {', '.join(best)}; {len(said)} recipes over points or block means against the plain "
            f"mean of the same, at the end: {', '.join(counts)}"
        )
        text = best_fixed(size, last)
        gains = [
            f"of {SNAPSHOT_KINDS[kind].title} "
            + pages.format_interval(difference(size, last, text, plain_mean(size, last, kind)).interval())
            for kind in KINDS
        ]
        effects.append(f"{name}, {text} − the best plain mean {', '.join(gains)} nats")
    return IndexRow(
        3,
        "Which weights?",
        "PMA, Fig. 4: WMA best early, no difference later; WSM: 1 − sqrt and mean best, EMA worst",
        "; ".join(found),
        f"loss at the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss on the part `select` against the window, for points and block means, and the learned weights."""
    panels = []
    for name, size in results["sizes"].items():
        last = list(size["ends"])[-1]
        means = size["select"][last]
        reference = means[plain_mean(size, last, "point")]
        for kind in KINDS:
            lines = []
            for recipe in RECIPES:
                of_recipe = {
                    int(text.rpartition(":")[2]): loss - reference
                    for text, loss in means.items()
                    if series(text) == series_of(recipe, kind)
                }
                windows = sorted(of_recipe)
                dashed = recipe.startswith("lagfree")
                lines.append(Line(display_name(recipe), windows, [of_recipe[w] for w in windows], dashed=dashed))
            title = f"{name}, {SNAPSHOT_KINDS[kind].title}: nats above sma of points"
            panels.append(LinePanel(title, "snapshots merged", lines, zero_line=True, y_limits=(-0.01, 0.06)))
        panels.append(learned_panel(name, size))
    return {"figure.png": to_png(draw_lines(panels, columns=3))}


def learned_panel(name: str, size: Mapping[str, Any]) -> LinePanel:
    """Make the panel of the learned weights (mean over seeds) against the distance from the newest snapshot."""
    lines = []
    for fit in size["learned"]:
        mean = [sum(column) / len(column) for column in zip(*fit["weights"], strict=True)]
        label = f"learned, {SNAPSHOT_KINDS[fit['kind']].title}, {fit['window']}"
        lines.append(Line(label, range(1 - len(mean), 1), mean))
    return LinePanel(f"{name}: learned weights", "snapshots before the newest", lines, zero_line=True)
