"""The page of the experiment: tables, the row of the index, and the figure.

Differences are of the loss of a merge less that of the best plain mean of points at the same tokens, so that a negative
one says that the merge is better.
"""

from collections.abc import Mapping
from typing import Any

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.evaluation.sweep import RAW, Cell
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
POWER = ("power:sigma_rel=0.05", "power:sigma_rel=0.1", "power:sigma_rel=0.15")  # over all snapshots from token 0 on
BASELINE = "sma"
WORDS = {"equal": "equal", "higher": "worse", "lower": "better", "not shown": "not shown"}


def series(recipe: str, kind: str) -> str:
    """Return the key of a recipe over one kind of snapshot in the results."""
    return Cell(recipe, 1, kind=kind).text.rpartition(":")[0]


def rows(size: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the recipes with each kind of snapshot; the baseline first."""
    return [(recipe, kind) for recipe in (*RECIPES, *POWER) for kind in KINDS if series(recipe, kind) in chosen(size)]


def chosen(size: Mapping[str, Any]) -> dict[str, str]:
    """Return the chosen merges at the last horizon, where each recipe has one."""
    return size["chosen"][list(size["ends"])[-1]]


def nats(size: Mapping[str, Any], horizon: str, text: str) -> list[list[float]]:
    """Return the losses of a merge at a horizon, of each seed on each document."""
    end = str(size["ends"][horizon])
    return size["merges"][end]["nats"][text][end]


def difference(size: Mapping[str, Any], horizon: str, text: str) -> MeanEstimate:
    """Estimate the loss of a merge less that of the best plain mean of points."""
    baseline = size["chosen"][horizon][series(BASELINE, "point")]
    tokens_D = size["merges"][str(size["ends"][horizon])]["document_tokens"]
    return difference_over_documents(nats(size, horizon, text), nats(size, horizon, baseline), tokens_D)


def differences(size: Mapping[str, Any]) -> dict[tuple[str, str, str], MeanEstimate]:
    """Return the difference of each recipe and kind at each horizon from the baseline, without the baseline itself."""
    found = {}
    for recipe, kind in rows(size):
        for horizon in size["ends"]:
            text = size["chosen"][horizon].get(series(recipe, kind))
            if text and (recipe, kind) != (BASELINE, "point"):
                found[recipe, kind, horizon] = difference(size, horizon, text)
    return found


def best_fixed(size: Mapping[str, Any], horizon: str) -> str:
    """Return the merge with the lowest loss of all on the part `select`."""
    return min(size["chosen"][horizon].values(), key=size["select"][horizon].__getitem__)


def report(results: dict[str, Any]) -> str:
    """Format the table of recipes of each size, and its learned weights."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_baseline(size), format_recipes(size, margin)]
        parts += [format_best(size, margin), format_learned(size, margin)]
    return "\n\n".join(parts)


def format_baseline(size: Mapping[str, Any]) -> str:
    """Say what the best plain mean of points gains over the raw model at each horizon."""
    lines = []
    for horizon, end in size["ends"].items():
        text, raw = size["chosen"][horizon][series(BASELINE, "point")], difference(size, horizon, RAW.text)
        lines.append(
            f"- {horizon} ({pages.format_tokens(size, end)} tokens), {text}: {pages.format_interval(raw.interval())}"
        )
    return (
        "The best plain mean of points, with which the others are compared, and the loss of the raw model less its "
        "own (nats per token, 95% interval over seeds and documents):\n\n" + "\n".join(lines)
    )


def format_recipes(size: Mapping[str, Any], margin: float) -> str:
    """Format the difference of each recipe at its best window, and what is shown of it."""
    found = differences(size)
    verdicts = dict(zip(found, judge(list(found.values()), margin), strict=True))
    table = []
    for recipe, kind in rows(size):
        row = [display_name(recipe), SNAPSHOT_KINDS[kind].title]
        for horizon in size["ends"]:
            text, cell = size["chosen"][horizon].get(series(recipe, kind)), (recipe, kind, horizon)
            window = "" if recipe in POWER or not text else f" (N = {text.rpartition(':')[2]})"
            if cell in found:
                said = pages.format_interval(found[cell].interval())
                row.append(f"{said}{window}, {WORDS[verdicts[cell]]}")
            else:
                row.append(f"0{window}" if text else "")
        table.append(row)
    return pages.format_table(["recipe", "of", *size["ends"]], table) + (
        "\n\nLoss less that of the best plain mean of points, at each horizon; negative: better. The window N is the "
        f"best on the part `select` (power: all snapshots). All cells are tested together, equal within {margin:g} "
        "nats and different, each with at most 5% false findings (Benjamini and Hochberg)."
    )


def format_best(size: Mapping[str, Any], margin: float) -> str:
    """Compare the best fixed weights at each horizon with the best plain mean of the same kind of snapshot."""
    lines = []
    for horizon, end in size["ends"].items():
        text = best_fixed(size, horizon)
        kind = next(kind for _, kind in rows(size) if text in merges_of_kind(size, horizon, kind))
        mean = size["chosen"][horizon][series(BASELINE, kind)]
        tokens_D = size["merges"][str(end)]["document_tokens"]
        estimate = difference_over_documents(nats(size, horizon, text), nats(size, horizon, mean), tokens_D)
        lines.append(f"- {horizon}, {text} against {mean}: {pages.describe_difference(estimate, margin)}.")
    return (
        "The best of all fixed weights on the part `select`, against the best plain mean of the same kind of "
        "snapshot:\n\n" + "\n".join(lines)
    )


def merges_of_kind(size: Mapping[str, Any], horizon: str, kind: str) -> list[str]:
    """Return the chosen merges of a kind of snapshot at a horizon."""
    return [text for recipe in (*RECIPES, *POWER) if (text := size["chosen"][horizon].get(series(recipe, kind)))]


def learned_difference(size: Mapping[str, Any], fit: Mapping[str, Any], text: str) -> MeanEstimate:
    """Estimate the loss of learned weights less that of a merge, at the end."""
    last = list(size["ends"])[-1]
    tokens_D = size["merges"][str(size["ends"][last])]["document_tokens"]
    return difference_over_documents(fit["nats"], nats(size, last, text), tokens_D)


def format_learned(size: Mapping[str, Any], margin: float) -> str:
    """Say how learned weights compare with the best fixed ones, and what they gain on the text of the fit."""
    last = list(size["ends"])[-1]
    best, lines = best_fixed(size, last), []
    for fit in size["learned"]:
        mean = Cell("sma", fit["window"], kind=fit["kind"]).text
        against_best = pages.describe_difference(learned_difference(size, fit, best), margin)
        on_fit = [start - end for start, end in fit["fit_losses"]]
        judged = pages.describe_difference(learned_difference(size, fit, mean), margin)
        title = SNAPSHOT_KINDS[fit["kind"]].title
        lines.append(
            f"- {fit['window']} weights of {title}: against the best fixed weights ({best}), {against_best}. Against "
            f"the plain mean of the same snapshots, {judged}; on the text that they were learned on, lower by "
            f"{pages.format_mean(on_fit)}."
        )
    return (
        "Weights that were learned on other documents, one fit per seed, at the end (the fit on the part `fit` begins "
        "at the plain mean):\n\n" + "\n".join(lines)
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the best fixed weights of each size at the end, and how many recipes are clearly better."""
    margin, found, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        last = list(size["ends"])[-1]
        best, estimates = best_fixed(size, last), differences(size)
        verdicts = dict(zip(estimates, judge(list(estimates.values()), margin), strict=True))
        counts = []
        for horizon in size["ends"]:
            said = [verdict for (_, _, at), verdict in verdicts.items() if at == horizon]
            of_each = [f"{said.count(key)} {WORDS[key]}" for key in ("lower", "equal", "higher", "not shown")]
            counts.append(f"{horizon}: {', '.join(of_each)}")
        found.append(f"{name}, recipes against the best plain mean of points, at {'; at '.join(counts)}")
        effects.append(f"{name}: {best} {pages.format_interval(difference(size, last, best).interval())} nats")
    return IndexRow(
        3,
        "Which weights?",
        "PMA, Fig. 4: WMA best early, no difference later; WSM: 1 − sqrt and mean best, EMA worst",
        "; ".join(found),
        f"loss of the best fixed weights less that of the best plain mean of points, at the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the loss on the part `select` against the window, for points and block means, and the learned weights."""
    panels = []
    for name, size in results["sizes"].items():
        last = list(size["ends"])[-1]
        means = size["select"][last]
        reference = means[chosen(size)[series(BASELINE, "point")]]
        for kind in KINDS:
            lines = []
            for recipe in RECIPES:
                of_recipe = {
                    int(text.rpartition(":")[2]): loss - reference
                    for text, loss in means.items()
                    if text.rpartition(":")[0] == series(recipe, kind)
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
