"""Which weights? The gains of fixed and learned weights, and of short anneals that start from a merge (PMA, Figure 4).

Command:   python experiments/weights/script.py --runs runs/science

At the end of each trunk: every recipe over every window, of points and of block means, compared with linear annealing
over the last quarter of the tokens; weights learned on other held-out documents; and short anneals that start from a
merge.
"""

import dataclasses
import itertools
from typing import Any

import jax
from learned_weights import learn_weights

from pma_jax.analysis.workbench import text_loss
from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.data.sampling import FIT, REPORT, SELECT
from pma_jax.evaluation.held_out import make_evaluator
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.model.decoder import abstract_params
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Branch, OtherWork, Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import paired_difference
from pma_jax.studies.study import Study

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
WINDOWS = (4, 8, 12, 16, 24, 32)
FOLLOWED = (
    ("sma", "point"),
    ("sma", "block_mean"),
    ("wma", "block_mean"),
)  # compared over lengths of training and rates
FOLLOWED += (("lagfree:lag=0.5", "block_mean"), ("lagfree", "block_mean"), ("lagfree", "point"))
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the size's own rate; a higher rate has more noise
POWER = ("power:sigma_rel=0.05", "power:sigma_rel=0.1", "power:sigma_rel=0.15")  # over all snapshots from token 0 on
LEARNED = (("point", 4), ("block_mean", 4))  # kind, and divisor: the newest units / divisor snapshots are merged
LEARNED_WIDE = ("block_mean", 2)  # additionally, for the first size
FIT_TOKENS, FIT_STEPS = 16_384, 20  # held-out tokens for learning weights, and steps of L-BFGS
BASELINE = "sma"
SHORT_DIVISORS = (32, 16)  # a short anneal takes 1/32 or 1/16 of the tokens
SHORT_WINDOW = 8  # of the merge that it starts from
SHORT_RATES = (1.0, 0.3, 0.1)  # its initial rate, as a share of the trunk's
SHORT_SIZES = 2  # number of sizes with short anneals


def cells(study: Study) -> list[Cell]:
    """Return every merge of the table, and the raw model."""
    windows = [w for w in WINDOWS if w <= study.units // 2]
    grid = [Cell(recipe, w, kind=kind) for kind in KINDS for recipe in RECIPES for w in windows]
    return [RAW, *grid, *(Cell(recipe, study.units, kind=kind) for kind in KINDS for recipe in POWER)]


def plan(study: Study) -> Plan:
    """List the trunks and the annealed branches; short anneals from merges and learned weights are estimated."""
    work: list[PlannedRun | OtherWork] = []
    parts, end = (REPORT, SELECT), study.units
    for i, size in enumerate(study.sizes):
        ends = (end // 4, end // 2, end) if i == 0 else (end,)
        unit = study.describe_size(size)["unit_tokens"]
        for seed in study.seeds:
            work.append(
                PlannedRun(size, seed, (), None, tuple(PlannedEvaluation(tuple(cells(study)), ends, p) for p in parts))
            )
            short = [end // divisor for divisor in SHORT_DIVISORS if i < SHORT_SIZES and end // divisor]
            branches = [Branch(at - at // 4, at) for at in ends] + [Branch(end - n, end) for n in short]
            work += [PlannedRun(size, seed, (), b, (PlannedEvaluation((RAW,), (b.end,), REPORT),)) for b in branches]
            trained, read = sum(short) * unit * len(SHORT_RATES), len(short) * len(SHORT_RATES)
            fits = len(LEARNED) + (i == 0)  # 20 steps of L-BFGS, each of one or two gradients and evaluations
            trained += fits * 2 * FIT_STEPS * fit_tokens(study)
            work.append(OtherWork("merges", size, seed, trained, read * study.evaluation_tokens))
    for factor, seed in itertools.product(RATES, study.seeds):
        units, changes = study.half_length_changes(study.sizes[0], factor)
        evaluations = tuple(PlannedEvaluation(tuple(followed_cells(end // 2)), (end // 2,), part) for part in parts)
        branch, evaluation = Branch(end // 2 - end // 8, end // 2), PlannedEvaluation((RAW,), (end // 2,), REPORT)
        work.append(PlannedRun(study.sizes[0], seed, changes, None, evaluations, units))
        work.append(PlannedRun(study.sizes[0], seed, changes, branch, (evaluation,), units))
    return work


def followed_cells(units: int) -> list[Cell]:
    """Return the raw model and the merges of the `FOLLOWED` recipes of a run of half the tokens."""
    windows = [w for w in WINDOWS if w <= units * 3 // 4]
    return [RAW, *(Cell(recipe, w, kind=kind) for recipe, kind in FOLLOWED for w in windows)]


def measure(study: Study) -> dict[str, Any]:
    """Return losses of merges, annealed branches, learned weights and short anneals at the end of each trunk."""
    end, sizes = study.units, {}
    for i, size in enumerate(study.sizes):
        trunks = {seed: study.trunk(size, seed) for seed in study.seeds}
        ends = [end // 4, end // 2, end] if i == 0 else [end]
        by_end = {}
        losses, select_losses = (
            study.losses_over_seeds(trunks.__getitem__, cells(study), ends, part) for part in (REPORT, SELECT)
        )
        for at in ends:
            by_end[at] = {
                "annealed": [study.loss(study.anneal(t, at - at // 4, at)) for t in trunks.values()],
                "losses": losses_at(losses, at),
                "select_losses": losses_at(select_losses, at),
            }
        last = by_end.pop(end)
        sizes[size] = study.describe_size(size) | {
            **last,
            "earlier": {str(at): measured for at, measured in by_end.items()},
            "learned": [
                fit_weights(study, list(trunks.values()), kind, end // divisor)
                for kind, divisor in (*LEARNED, *([LEARNED_WIDE] if i == 0 else []))
            ],
            "short": [short for divisor in SHORT_DIVISORS for short in measure_short_anneals(study, trunks, divisor)]
            if i < SHORT_SIZES
            else [],
        }
    return {"units": end, "sizes": sizes, "rates": measure_rates(study)}


def losses_at(losses: dict[str, dict[str, list[float]]], end: int) -> dict[str, list[float]]:
    """Return the losses of each merge that can be made at `end` (in units)."""
    return {text: over_ends[str(end)] for text, over_ends in losses.items() if str(end) in over_ends}


def measure_rates(study: Study) -> dict[str, Any]:
    """Return the losses of the `FOLLOWED` recipes at each rate, over half of the first size's tokens."""
    size, rates = study.sizes[0], {}
    for factor in RATES:
        half, trunks = study.half_length_trunks(size, factor)
        grid = followed_cells(half.units)
        losses, select_losses = (
            half.losses_over_seeds(trunks.__getitem__, grid, [half.units], part) for part in (REPORT, SELECT)
        )
        rates[str(factor * study.describe_size(size)["peak_rate"])] = {
            "annealed": [half.loss(half.anneal(t, half.units - half.units // 4, half.units)) for t in trunks.values()],
            "losses": losses_at(losses, half.units),
            "select_losses": losses_at(select_losses, half.units),
        }
    return rates


def fit_weights(study: Study, trunks: list[Run], kind: str, window: int) -> dict[str, Any]:
    """Fit the weights of the newest `window` snapshots to the part `fit`, and evaluate them on `report`, per seed."""
    rows, losses, select_losses, fit_losses = [], [], [], []
    for trunk in trunks:
        config = dataclasses.replace(trunk.config, evaluation=study.evaluation_config(trunk))
        shorter = dataclasses.replace(config.evaluation, tokens=fit_tokens(study))
        mesh, snapshots = make_mesh(config.mesh), trunk.of_kind(kind)[-window:]
        abstract = abstract_params(config.model, mesh)
        with jax.set_mesh(mesh):
            text = make_evaluator(dataclasses.replace(config, evaluation=shorter), mesh, FIT)
            objective = text_loss(text.graph, text.batches)
            fit = learn_weights(objective, [restore_params(s, abstract) for s in snapshots], iterations=FIT_STEPS)
        rows.append(fit.weights.tolist())
        for of_part, part in ((losses, REPORT), (select_losses, SELECT)):
            of_part += [x.loss for x in evaluate_merges(config, snapshots, [fit.weights], part).losses]
        fit_losses.append([fit.start_loss, fit.loss])
    return {
        "kind": kind,
        "window": window,
        "losses": losses,
        "select_losses": select_losses,
        "weights": rows,
        "fitted_from_to": fit_losses,
    }


def fit_tokens(study: Study) -> int:
    """Return the held-out tokens that weights are fitted to: at most half of those that they are evaluated on."""
    return min(FIT_TOKENS, study.evaluation_tokens // 2)


def measure_short_anneals(study: Study, trunks: dict[int, Run], divisor: int) -> list[dict[str, Any]]:
    """Return losses of linear anneals over the last 1/divisor of the tokens, from the raw model and from a merge."""
    end = study.units
    length = end // divisor
    if not length:
        return []
    anneals = [
        {
            "length": length,
            "from": "raw",
            "rate": 1.0,
            "losses": [study.loss(study.anneal(t, end - length, end)) for t in trunks.values()],
        }
    ]
    for rate in SHORT_RATES:
        losses = []
        for trunk in trunks.values():
            merged = study.merge(trunk, Cell("sma", min(SHORT_WINDOW, end // 2)), end - length)
            keys = [
                f"schedule.peak_rate={rate * trunk.config.schedule.peak_rate}",
                "schedule.decay=linear",
                f"schedule.decay_start_tokens={(end - length) * study.unit_tokens(trunk)}",
            ]
            losses.append(study.loss(study.fork(trunk, end - length, end, keys, merged)))
        anneals.append({"length": length, "from": f"SMA of {SHORT_WINDOW}", "rate": rate, "losses": losses})
    return anneals


def gain_shares(size: dict[str, Any], losses: list[float]) -> list[float]:
    """Return the share of annealing's gain over raw that a model reaches, for each seed."""
    raws = size["losses"][RAW.text]
    return [(raw - x) / (raw - end) for raw, x, end in zip(raws, losses, size["annealed"], strict=True)]


def best_merge(size: dict[str, Any], recipe: str, kind: str) -> str | None:
    """Return the text of a recipe's merge with the lowest mean loss over seeds, on the part `select`."""
    losses = pages.to_choose_by(size)
    return min(merges_of(size, recipe, kind), key=lambda text: sum(losses[text]), default=None)


def merges_of(size: dict[str, Any], recipe: str, kind: str) -> list[str]:
    """Return the texts of a recipe's merges of one kind of snapshot."""
    series = SNAPSHOT_KINDS[kind].label_prefix + recipe
    return [t for t in size["losses"] if t.rpartition(":")[0] == series and t != RAW.text]


def report(results: dict[str, Any]) -> str:
    """Format tables of recipes and learned weights, of lengths of training, of rates, and of short anneals."""
    parts = []
    for name, size in results["sizes"].items():
        gain = pages.format_difference(size["losses"][RAW.text], size["annealed"])
        tokens = f"{size['parameters'] / 1e6:.2f}M parameters, {size['tokens'] / 1e6:.2f}M tokens"
        parts.append(f"**{name}** ({tokens}; raw − annealed: {gain} nats)")
        header = ["recipe", "of", "window", "share of annealing's gain", "better than the best SMA of points by"]
        parts.append(pages.format_table(header, recipe_rows(size)))
    parts.append(
        "Shares are relative to the gain of linear annealing over the last quarter of the tokens: mean over seeds and "
        "95% interval. Last column: nats; positive: better. A recipe's window is the best of "
        f"{', '.join(map(str, WINDOWS))} on {pages.describe_choice(size)} (power: all snapshots). Learned weights "
        "are K numbers that sum to 1, fitted to other held-out documents."
    )
    parts += [lengths_table(results), short_table(results)]
    return "\n\n".join(part for part in parts if part)


def share_at_best(at: dict[str, Any], recipe: str, kind: str) -> str:
    """Format a recipe's share of annealing's gain at its best window; a dash if snapshots are too few."""
    text = best_merge(at, recipe, kind)
    if not text:
        return "–"
    return f"{pages.format_mean_percent(gain_shares(at, at['losses'][text]))} at {text.rpartition(':')[2]}"


def followed_table(first: str, rows: dict[str, dict[str, Any]]) -> str:
    """Format annealing's gain, and each recipe's share of it at its best window: one table row per item of `rows`."""
    table = []
    for name, at in rows.items():
        shares = [share_at_best(at, recipe, kind) for recipe, kind in FOLLOWED]
        table.append(
            [name, pages.format_difference(at["losses"][RAW.text], at["annealed"]), *shares, gain_of_lagfree(at)]
        )
    header = [f"{display_name(recipe)} of {SNAPSHOT_KINDS[kind].title}" for recipe, kind in FOLLOWED]
    return pages.format_table(
        [first, "raw − annealed", *header, "lagfree of block means, better than sma of points by"], table
    )


def gain_of_lagfree(at: dict[str, Any]) -> str:
    """Format the loss of the best plain mean of points minus that of the best lag-free merge of block means."""
    plain, other = best_merge(at, BASELINE, "point"), best_merge(at, "lagfree", "block_mean")
    return pages.format_difference(at["losses"][plain], at["losses"][other]) if plain and other else "–"


def lengths_table(results: dict[str, Any]) -> str:
    """Format the best windows and their shares of the gain by length of training and by rate."""
    name, size = next(iter(results["sizes"].items()))
    ends = {f"{int(end) * size['unit_tokens'] / 1e6:.2f}M": at for end, at in size["earlier"].items()}
    ends[f"{results['units'] * size['unit_tokens'] / 1e6:.2f}M"] = size
    rates = {f"{float(rate):g}": at for rate, at in results["rates"].items()}
    share = "share of the gain of annealing over the last quarter, at the best window"
    return (
        f"**Earlier in training** ({name}): {share}.\n\n{followed_table('tokens', ends)}\n\n"
        f"**At other rates** ({name}, half of the tokens): {share}.\n\n{followed_table('rate', rates)}"
    )


def short_table(results: dict[str, Any]) -> str:
    """Format the share of the gain and the loss of short anneals, from the raw model and from a merge."""
    rows = []
    for name, size in results["sizes"].items():
        for short in size["short"]:
            share, above = (
                pages.format_mean_percent(gain_shares(size, short["losses"])),
                pages.format_difference(short["losses"], size["annealed"]),
            )
            length = f"1/{results['units'] // short['length']}"
            rows.append([name, short["from"], f"{short['rate']:g}", length, share, above])
    gains = ["share of the long anneal's gain", "loss above the long anneal's"]
    table = pages.format_table(["size", "starts from", "share of the rate", "share of the tokens", *gains], rows)
    return f"**A short anneal, from the raw model or from a merge**, over the last tokens:\n\n{table}"


def recipe_rows(size: dict[str, Any]) -> list[list[Any]]:
    """Return table rows: every recipe at its best window, of points and of block means, and the learned weights."""
    rows = []
    for recipe in (*RECIPES, *POWER):
        for kind in KINDS:
            text = best_merge(size, recipe, kind)
            if text:
                window = text.rpartition(":")[2]
                rows.append(
                    [
                        display_name(recipe),
                        SNAPSHOT_KINDS[kind].title,
                        window,
                        *comparison_cells(size, size["losses"][text]),
                    ]
                )
    return rows + [
        ["learned", SNAPSHOT_KINDS[f["kind"]].title, f["window"], *comparison_cells(size, f["losses"])]
        for f in size["learned"]
    ]


def comparison_cells(size: dict[str, Any], losses: list[float]) -> list[str]:
    """Format the share of annealing's gain, and the difference from the best plain mean of points."""
    baseline = best_merge(size, BASELINE, "point")
    assert baseline is not None
    return [
        pages.format_mean_percent(gain_shares(size, losses)),
        pages.format_difference(size["losses"][baseline], losses),
    ]


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize SMA of points, the best fixed recipe, and the best learned weights of each size."""
    effects, winners, clear = [], [], 0
    for name, size in results["sizes"].items():
        plain = best_merge(size, BASELINE, "point")
        texts = [t for t in (best_merge(size, r, k) for r in (*RECIPES, *POWER) for k in KINDS) if t]
        best = min(texts, key=lambda text: sum(pages.to_choose_by(size)[text]))
        assert plain is not None
        clear += paired_difference(size["losses"][plain], size["losses"][best]).low > 0
        best_learned = min(size["learned"], key=lambda fit: sum(pages.to_choose_by(fit)))["losses"]
        models = [(plain, size["losses"][plain]), (best, size["losses"][best]), ("learned", best_learned)]
        texts = [f"{text} {pages.format_mean_percent(gain_shares(size, losses))}" for text, losses in models]
        effects.append(f"{name}: {', '.join(texts)}")
        winners.append(f"{name}: {best}")
    return IndexRow(
        3,
        "Which weights?",
        "PMA, Fig. 4: WMA best early, no difference later; WSM: 1 − sqrt and mean best, EMA worst",
        f"best fixed weights: {'; '.join(winners)}; clearly better than the best SMA of points at {clear} of "
        f"{len(results['sizes'])} sizes",
        f"share of linear annealing's gain: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the share of the gain against the window, for points and block means, and the learned weights."""
    panels = []
    for name, size in results["sizes"].items():
        for kind in KINDS:
            lines = []
            for recipe in RECIPES:
                texts = {int(t.rpartition(":")[2]): t for t in merges_of(size, recipe, kind)}
                windows = sorted(texts)
                y = [mean_share(size, size["losses"][texts[w]]) for w in windows]
                lines.append(Line(display_name(recipe), windows, y, dashed=recipe.startswith("lagfree")))
            fits = sorted((f for f in size["learned"] if f["kind"] == kind), key=lambda f: f["window"])
            if fits:
                y = [mean_share(size, f["losses"]) for f in fits]
                lines.append(Line("learned", [f["window"] for f in fits], y, dashed=True))
            panels.append(
                LinePanel(
                    f"{name}, {SNAPSHOT_KINDS[kind].title}: share of annealing's gain",
                    "snapshots merged",
                    lines,
                    percent=True,
                    y_limits=(0.3, 1.1),
                )
            )
    panels += [learned_panel(name, size) for name, size in results["sizes"].items() if size["learned"]]
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


def mean_share(size: dict[str, Any], losses: list[float]) -> float:
    """Return the mean over seeds of `gain_shares`."""
    shares = gain_shares(size, losses)
    return sum(shares) / len(shares)


def learned_panel(name: str, size: dict[str, Any]) -> LinePanel:
    """Make the panel of the learned weights (mean over seeds) against the distance from the newest snapshot."""
    lines = []
    for fit in size["learned"]:
        mean = [sum(column) / len(column) for column in zip(*fit["weights"], strict=True)]
        lines.append(
            Line(f"learned, {SNAPSHOT_KINDS[fit['kind']].title}, {fit['window']}", range(1 - len(mean), 1), mean)
        )
    return LinePanel(f"{name}: learned weights", "snapshots before the newest", lines, zero_line=True)


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan)
