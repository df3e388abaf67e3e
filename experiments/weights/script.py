"""Which weights? What merges of a constant-rate run gain, what the best could, what closes the rest. (PMA, Figure 4)

Command:   python experiments/weights/script.py --runs runs/science

At the end of each trunk: every recipe over every window, of points and of block means, beside linear annealing over the
last quarter of the tokens; weights that were learned on other held-out text; and short anneals that begin with a merge.
"""

import dataclasses
from typing import Any

import jax

from pma_jax.analysis.comparison import paired_difference
from pma_jax.analysis.learned import learn_weights
from pma_jax.analysis.workbench import text_loss
from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.data import shards
from pma_jax.evaluation.held_out import held_out_batches
from pma_jax.evaluation.merges import evaluate_merges
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.model.decoder import abstract_params, graph_definition
from pma_jax.reporting.drawing import display_name, to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import restore_params
from pma_jax.runtime.mesh import make_mesh
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.study import Study, run_experiment

KINDS = tuple(SNAPSHOT_KINDS)
# `decay:shape=linear` is the plain mean, so `sma` stands for both. EMA in both forms: recursive, and closed.
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
FOLLOWED = (("sma", "point"), ("sma", "block_mean"), ("wma", "block_mean"))  # through the length of training
FOLLOWED += (("lagfree:lag=0.5", "block_mean"), ("lagfree", "block_mean"), ("lagfree", "point"))
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the size's own: the higher, the more noise
POWER = ("power:sigma_rel=0.05", "power:sigma_rel=0.1", "power:sigma_rel=0.15")  # over all snapshots: from token 0
LEARNED = (("point", 4), ("block_mean", 4))  # kind, and the share of the units that is merged
LEARNED_WIDE = ("block_mean", 2)  # also, for the first size
FITTED_TOKENS, FITTED_STEPS = 16_384, 20  # of the text that weights are learned on, after the one they are judged by
BASELINE = "sma"
SHORT_SHARES = (32, 16)  # a short anneal takes one over so many of the tokens
SHORT_WINDOW = 8  # of the merge that it starts from
SHORT_RATES = (1.0, 0.3, 0.1)  # where it begins, as a share of the trunk's rate
SHORT_SIZES = 2  # of the sizes


def cells(study: Study) -> list[Cell]:
    """Every merge of the table, and the raw model."""
    windows = [w for w in WINDOWS if w <= study.units // 2]
    grid = [Cell(recipe, w, kind=kind) for kind in KINDS for recipe in RECIPES for w in windows]
    return [RAW, *grid, *(Cell(recipe, study.units, kind=kind) for kind in KINDS for recipe in POWER)]


def measure(study: Study) -> dict[str, Any]:
    """Losses at the end of each trunk, of its annealed branch, and of what goes beyond fixed weights."""
    end, found = study.units, {}
    for i, size in enumerate(study.sizes):
        trunks = {seed: study.trunk(size, seed) for seed in study.seeds}
        ends = [end // 4, end // 2, end] if i == 0 else [end]
        at = {}
        losses = study.losses_over_seeds(trunks.__getitem__, cells(study), ends)
        for one in ends:
            at[one] = {
                "annealed": [study.loss(study.anneal(t, one - one // 4, one)) for t in trunks.values()],
                "losses": {text: there[str(one)] for text, there in losses.items() if str(one) in there},
            }
        last = at.pop(end)
        found[size] = study.describe_size(size) | {
            **last,
            "earlier": {str(one): there for one, there in at.items()},
            "learned": [
                learned(study, list(trunks.values()), kind, end // share)
                for kind, share in (*LEARNED, *([LEARNED_WIDE] if i == 0 else []))
            ],
            "short": [short for share in SHORT_SHARES for short in shorts(study, trunks, share)]
            if i < SHORT_SIZES
            else [],
        }
    return {"units": end, "sizes": found, "rates": by_rate(study)}


def by_rate(study: Study) -> dict[str, Any]:
    """The recipes that are followed, over half of the first size's tokens, at rates of more and of less noise."""
    size, found = study.sizes[0], {}
    for factor in RATES:
        half, trunks = study.trunks_at_rate(size, factor)
        windows = [w for w in WINDOWS if w <= half.units * 3 // 4]
        grid = [RAW, *(Cell(recipe, w, kind=kind) for recipe, kind in FOLLOWED for w in windows)]
        losses = half.losses_over_seeds(trunks.__getitem__, grid, [half.units])
        found[str(factor * study.describe_size(size)["peak_rate"])] = {
            "annealed": [half.loss(half.anneal(t, half.units - half.units // 4, half.units)) for t in trunks.values()],
            "losses": {text: there[str(half.units)] for text, there in losses.items()},
        }
    return found


def learned(study: Study, trunks: list[Run], kind: str, window: int) -> dict[str, Any]:
    """Weights of the newest `window` snapshots fitted to held-out text, and their loss on the study's own, per seed."""
    rows, losses, starts = [], [], []
    for trunk in trunks:
        config = dataclasses.replace(trunk.config, evaluation=study.evaluation_config(trunk))
        # What is judged by comes first; the batch that holds its last token is left out too.
        batch_tokens = config.evaluation.batch_size_sequences * config.training.sequence_length_tokens
        judging = -(-study.evaluation_tokens // batch_tokens)
        longer = dataclasses.replace(config.evaluation, tokens=judging * batch_tokens + fitted_tokens(study))
        mesh, snapshots = make_mesh(config.mesh), trunk.of_kind(kind)[-window:]
        abstract = abstract_params(config.model, mesh)
        with jax.set_mesh(mesh):
            text = shards.prepare_tokens(config.data, progress=False)
            batches = held_out_batches(text, dataclasses.replace(config, evaluation=longer), mesh)
            fitting = batches[judging:]
            params = [restore_params(s, abstract) for s in snapshots]
            fit = learn_weights(text_loss(graph_definition(config.model), fitting), params, steps=FITTED_STEPS)
        rows.append(fit.weights.tolist())
        losses += evaluate_merges(config, snapshots, [fit.weights]).losses
        starts.append([fit.start_loss, fit.loss])
    return {"kind": kind, "window": window, "losses": losses, "weights": rows, "fitted_from_to": starts}


def fitted_tokens(study: Study) -> int:
    """Tokens that weights are learned on: not more than half of what they are judged by."""
    return min(FITTED_TOKENS, study.evaluation_tokens // 2)


def shorts(study: Study, trunks: dict[int, Run], share: int) -> list[dict[str, Any]]:
    """Short linear anneals over the last 1/share of the tokens: from the raw model, and from a merge at lower rates."""
    end = study.units
    length = end // share
    if not length:
        return []
    found = [
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
        found.append({"length": length, "from": f"SMA of {SHORT_WINDOW}", "rate": rate, "losses": losses})
    return found


def shares(size: dict[str, Any], losses: list[float]) -> list[float]:
    """Of the annealing's gain over raw, what a model has, of each seed."""
    raws = size["losses"][RAW.text]
    return [(raw - x) / (raw - end) for raw, x, end in zip(raws, losses, size["annealed"], strict=True)]


def best(size: dict[str, Any], recipe: str, kind: str) -> str | None:
    """The recipe's window of lowest mean loss over seeds, as text; it is reported on the text that it was chosen on."""
    return min(of_recipe(size, recipe, kind), key=lambda text: sum(size["losses"][text]), default=None)


def of_recipe(size: dict[str, Any], recipe: str, kind: str) -> list[str]:
    """The texts of a recipe's merges of one kind."""
    return [t for t in size["losses"] if t.rpartition(":")[0] == SNAPSHOT_KINDS[kind].prefix + recipe and t != RAW.text]


def report(results: dict[str, Any]) -> str:
    """A table of recipes and learned weights for each size, and one of short anneals."""
    parts = []
    for name, size in results["sizes"].items():
        gain = pages.format_difference(size["losses"][RAW.text], size["annealed"])
        tokens = f"{size['parameters'] / 1e6:.2f}M parameters, {size['tokens'] / 1e6:.2f}M tokens"
        parts.append(f"**{name}** ({tokens}; raw − annealed: {gain} nats)")
        header = ["recipe", "of", "window", "share of annealing's gain", "better than the best SMA of points by"]
        parts.append(pages.format_table(header, recipe_rows(size)))
    parts.append(
        "Shares are of what linear annealing over the last quarter of the tokens takes off the raw loss: mean over "
        "seeds and 95% interval. The last column is in nats, above 0 better. A recipe's window is the best of "
        f"{', '.join(map(str, WINDOWS))} on the text that it is reported on (power: all snapshots). Learned weights "
        "were fitted to other held-out text, the K numbers alone, and sum to 1."
    )
    parts += [lengths_table(results), short_table(results)]
    return "\n\n".join(part for part in parts if part)


def share_at_best(at: dict[str, Any], recipe: str, kind: str) -> str:
    """A recipe's share of annealing's gain, and the window at which it is best; a dash where it cannot be made."""
    text = best(at, recipe, kind)
    return f"{pages.format_mean_share(shares(at, at['losses'][text]))} at {text.rpartition(':')[2]}" if text else "–"


def followed_table(first: str, rows: dict[str, dict[str, Any]]) -> str:
    """The gain of annealing, and each recipe's share of it at its best window: a row for each of `rows`, by name."""
    table = []
    for name, at in rows.items():
        found = [share_at_best(at, recipe, kind) for recipe, kind in FOLLOWED]
        table.append(
            [name, pages.format_difference(at["losses"][RAW.text], at["annealed"]), *found, gain_of_lagfree(at)]
        )
    header = [f"{display_name(recipe)} of {SNAPSHOT_KINDS[kind].title}" for recipe, kind in FOLLOWED]
    return pages.format_table(
        [first, "raw − annealed", *header, "lagfree of block means, better than sma of points by"], table
    )


def gain_of_lagfree(at: dict[str, Any]) -> str:
    """Loss of the best plain mean of points less that of the best lag-free merge of block means."""
    plain, other = best(at, BASELINE, "point"), best(at, "lagfree", "block_mean")
    return pages.format_difference(at["losses"][plain], at["losses"][other]) if plain and other else "–"


def lengths_table(results: dict[str, Any]) -> str:
    """How the best window and its share of the gain move with the length of training, and with the rate."""
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
    """What short anneals reach, from the raw model and from a merge."""
    rows = []
    for name, size in results["sizes"].items():
        for short in size["short"]:
            share, above = (
                pages.format_mean_share(shares(size, short["losses"])),
                pages.format_difference(short["losses"], size["annealed"]),
            )
            length = f"1/{results['units'] // short['length']}"
            rows.append([name, short["from"], f"{short['rate']:g}", length, share, above])
    gains = ["share of the long anneal's gain", "loss above the long anneal's"]
    table = pages.format_table(["size", "starts from", "share of the rate", "share of the tokens", *gains], rows)
    return f"**A short anneal, from the raw model or from a merge**, over the last tokens:\n\n{table}"


def recipe_rows(size: dict[str, Any]) -> list[list[Any]]:
    """Every recipe at its best window, of points and of block means, and the learned weights."""
    rows = []
    for recipe in (*RECIPES, *POWER):
        for kind in KINDS:
            text = best(size, recipe, kind)
            if text:
                window = text.rpartition(":")[2]
                rows.append(
                    [display_name(recipe), SNAPSHOT_KINDS[kind].title, window, *against(size, size["losses"][text])]
                )
    return rows + [
        ["learned", SNAPSHOT_KINDS[f["kind"]].title, f["window"], *against(size, f["losses"])] for f in size["learned"]
    ]


def against(size: dict[str, Any], losses: list[float]) -> list[str]:
    """The share of annealing's gain, and the difference from the best plain mean of points."""
    baseline = best(size, BASELINE, "point")
    assert baseline is not None
    return [pages.format_mean_share(shares(size, losses)), pages.format_difference(size["losses"][baseline], losses)]


def summarize(results: dict[str, Any]) -> IndexRow:
    """SMA of points, the best fixed recipe, and the best learned weights of each size."""
    effects, winners, clear = [], [], 0
    for name, size in results["sizes"].items():
        plain = best(size, BASELINE, "point")
        texts = [t for t in (best(size, r, k) for r in (*RECIPES, *POWER) for k in KINDS) if t]
        top = min(texts, key=lambda text: sum(size["losses"][text]))
        assert plain is not None
        clear += paired_difference(size["losses"][plain], size["losses"][top]).low > 0
        best_learned = min((fit["losses"] for fit in size["learned"]), key=sum)
        models = [(plain, size["losses"][plain]), (top, size["losses"][top]), ("learned", best_learned)]
        texts = [f"{text} {pages.format_mean_share(shares(size, losses))}" for text, losses in models]
        effects.append(f"{name}: {', '.join(texts)}")
        winners.append(f"{name}: {top}")
    return IndexRow(
        3,
        "Which weights?",
        "PMA, Fig. 4: WMA best early, no difference later; WSM: 1 − sqrt and mean best, EMA worst",
        f"best fixed weights: {'; '.join(winners)}; clearly better than the best SMA of points at {clear} of "
        f"{len(results['sizes'])} sizes",
        f"share of linear annealing's gain: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Share of the gain by window, points and block means; and the learned weights."""
    panels = []
    for name, size in results["sizes"].items():
        for kind in KINDS:
            lines = []
            for recipe in RECIPES:
                texts = {int(t.rpartition(":")[2]): t for t in of_recipe(size, recipe, kind)}
                at = sorted(texts)
                y = [sum(s := shares(size, size["losses"][texts[w]])) / len(s) for w in at]
                lines.append(Line(display_name(recipe), at, y, dashed=recipe.startswith("lagfree")))
            fits = [f for f in size["learned"] if f["kind"] == kind]
            if fits:
                at = [f["window"] for f in sorted(fits, key=lambda f: f["window"])]
                y = [sum(s := shares(size, f["losses"])) / len(s) for f in sorted(fits, key=lambda f: f["window"])]
                lines.append(Line("learned", at, y, dashed=True))
            panels.append(
                LinePanel(
                    f"{name}, {SNAPSHOT_KINDS[kind].title}: share of annealing's gain",
                    "snapshots merged",
                    lines,
                    percent=True,
                    limits=(0.3, 1.1),
                )
            )
    panels += [learned_panel(name, size) for name, size in results["sizes"].items() if size["learned"]]
    return {"figure.png": to_png(draw_lines(panels, columns=2))}


def learned_panel(name: str, size: dict[str, Any]) -> LinePanel:
    """The learned weights, mean over seeds, against how far each snapshot is behind."""
    lines = []
    for fit in size["learned"]:
        mean = [sum(column) / len(column) for column in zip(*fit["weights"], strict=True)]
        lines.append(
            Line(f"learned, {SNAPSHOT_KINDS[fit['kind']].title}, {fit['window']}", range(1 - len(mean), 1), mean)
        )
    return LinePanel(f"{name}: learned weights", "snapshots before the newest", lines, zero=True)


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw)
