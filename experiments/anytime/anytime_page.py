"""The page of the experiment: the contenders against the target and each other, the row of the index, the figure."""

from collections.abc import Sequence
from typing import Any

from contenders import BATCH, CONSTANT, MODEL, PARTIAL, RATE
from search_page import describe_searched, format_checks

from pma_jax.evaluation.sweep import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, find_not_worse, judge

Cell = tuple[str, str, str]  # a contender, a group of its models, and a horizon
NOT_SHOWN = "not shown"  # the verdict where neither a difference nor equality is


def report(results: dict[str, Any]) -> str:
    """Format, for each size, the target, the difference of every contender's models from it, and the settings."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", describe_targets(size), format_differences(size, margin), format_gains(size)]
        parts.append(format_ensembles(size))
        if "checks" in size:
            parts += [format_checks(size), format_with_b2(size)]
        parts.append(describe_searched(size))
    return "\n\n".join(parts)


# --- Estimates --------------------------------------------------------------------------------------------------------


def nats(size: dict[str, Any], rival: str, group: str, horizon: str) -> list[list[float]]:
    """Return the summed losses of a contender's chosen model, of each seed on each document."""
    of = size["rivals"][rival][horizon]
    return of["nats"][of["chosen"][group]][str(size["ends"][horizon])]


def target_nats(size: dict[str, Any], horizon: str) -> list[list[float]]:
    """Return the summed losses of the target, of each seed on each document."""
    target = size["target"][horizon]
    return target["nats"][RAW.text][str(target["end"])]


def difference(
    size: dict[str, Any], horizon: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> MeanEstimate:
    """Estimate the loss of one model less that of another, over seeds and documents."""
    return difference_over_documents(first, second, size["target"][horizon]["document_tokens"])


def less_target(size: dict[str, Any], rival: str, group: str, horizon: str) -> MeanEstimate:
    """Estimate the loss of a contender's model less that of the target."""
    return difference(size, horizon, nats(size, rival, group, horizon), target_nats(size, horizon))


def cells(size: dict[str, Any]) -> list[Cell]:
    """List the contenders of a size with each group of their models and each horizon."""
    first = next(iter(size["ends"]))
    groups = [(rival, group) for rival, of in size["rivals"].items() for group in of[first]["chosen"]]
    return [(rival, group, horizon) for rival, group in groups for horizon in size["ends"]]


def judge_all(size: dict[str, Any], margin: float) -> dict[Cell, str]:
    """Judge the difference of every contender's models from the target, all cells together; see `statistics.judge`."""
    every = cells(size)
    return dict(zip(every, judge([less_target(size, *cell) for cell in every], margin), strict=True))


def not_worse_cells(size: dict[str, Any], margin: float) -> list[Cell]:
    """List the models that are not higher than the target by the margin, all cells together; `find_not_worse`."""
    every = cells(size)
    found = find_not_worse([less_target(size, *cell) for cell in every], margin)
    return [cell for cell, is_not_worse in zip(every, found, strict=True) if is_not_worse]


def describe_not_worse(size: dict[str, Any], margin: float) -> str:
    """Name the contenders without a horizon that have a model that is not worse than the target at all horizons."""
    passed, horizons = not_worse_cells(size, margin), list(size["ends"])
    models = dict.fromkeys((rival, group) for rival, group, _ in cells(size) if rival != PARTIAL)
    found = [f"{rival} ({group})" for rival, group in models if all((rival, group, h) in passed for h in horizons)]
    return f"Not worse at all horizons, of those without one: {', '.join(found) or 'none'}."


def best_group(size: dict[str, Any], rival: str, horizon: str, without: tuple[str, ...] = ()) -> str:
    """Return the group of a contender's models with the lowest loss on the part `select`, on the tuning seeds."""
    losses = size["rivals"][rival][horizon]["select"]
    return min((group for group in losses if group not in without), key=losses.__getitem__)


def by_select(size: dict[str, Any]) -> list[str]:
    """Return the contenders without a horizon in the order of their mean loss on `select`, on the tuning seeds."""
    rivals = {rival: of for rival, of in size["rivals"].items() if rival != PARTIAL}
    return sorted(rivals, key=lambda rival: sum(min(at["select"].values()) for at in rivals[rival].values()))


# --- Tables -----------------------------------------------------------------------------------------------------------


def title(rival: str) -> str:
    """Return the name of a contender with what a reader has to know of it."""
    return f"{rival} (needs the horizon)" if rival == PARTIAL else rival


def describe_targets(size: dict[str, Any]) -> str:
    """Describe the best annealing of each horizon."""
    lines, totals = [], []
    for horizon, target in size["target"].items():
        keys = dict(text.split("=", 1) for text in target["setting"])
        total, start = int(keys["training.total_tokens"]), int(keys["schedule.decay_start_tokens"])
        loss = pages.format_mean(pages.seed_losses(target, RAW.text, target["end"]))
        totals.append(total)
        setting = f"`{keys['schedule.decay']}` decay over the last {1 - start / total:.0%}"
        setting += "".join(f", {name} `{keys[key]}`" for name, key in (("rate", RATE), ("batch", BATCH)) if key in keys)
        lines.append(f"- {horizon}, {total / 1e6:.2f}M tokens: {loss} ({setting})")
    return (
        f"{size['parameters'] / 1e6:.2f}M parameters. The target, the best annealing of AdamW that ends at each "
        "horizon (nats per token, mean over seeds):\n\n" + "\n".join(lines) + "\n\n"
        f"The models at all horizons take {max(totals) / 1e6:.2f}M tokens with a contender that needs no horizon, and "
        f"{sum(totals) / 1e6:.2f}M with the target and the reference. Their steps differ with the batch."
    )


def format_differences(size: dict[str, Any], margin: float) -> str:
    """Format the difference of every contender's models from the target at each horizon, and what it shows."""
    verdicts, not_worse = judge_all(size, margin), not_worse_cells(size, margin)
    rows: dict[tuple[str, str], list[str]] = {}
    for (rival, group, horizon), verdict in verdicts.items():
        if verdict == NOT_SHOWN and (rival, group, horizon) in not_worse:
            verdict = "not worse"
        chosen = "" if group == MODEL else f" ({size['rivals'][rival][horizon]['chosen'][group]})"
        interval = pages.format_interval(less_target(size, rival, group, horizon).interval())
        row = rows.setdefault((rival, group), [title(rival), group])
        row.append(f"{interval} {verdict}{chosen}")
    for (rival, _), row in rows.items():
        row += format_cost(size["costs"][rival])
    header = ["contender", "model", *(f"less the target at {horizon}" for horizon in size["ends"])]
    header += ["state, in parameters", "step, ms (quartiles)"]
    intervals = [less_target(size, *cell).interval(0.9) for cell in verdicts]
    wide = sum(interval.high - interval.mean > margin for interval in intervals)
    return (
        pages.format_table(header, rows.values())
        + "\n\nNats per token, with 95% intervals over seeds and documents; negative: lower than the annealing. All "
        "cells are tested together, once for a difference and once for equality "
        f"within {margin:g} nats, each with at most 5% false findings (Benjamini and Hochberg); a cell that passes "
        "both tests is called equal, and one that passes neither, but is shown not to be higher by the margin, not "
        f"worse. {describe_not_worse(size, margin)} In {wide} of {len(verdicts)} cells the 90% "
        f"interval is wider than ±`{margin:g}`, so that equality cannot be shown. The state is what training holds "
        "in memory: 3 times the parameters with AdamW, and the block mean with the two contenders that keep one; a "
        "merge of N snapshots reads N models from the disk, after training. Steps are timed in turn, all at the batch "
        "of the configuration. A batch of one sequence takes four times as many steps as one of four: losses are "
        "compared at equal tokens, not at equal time."
    )


def format_cost(cost: dict[str, Any]) -> list[str]:
    """Format what a contender costs in training: memory of its state, and time of a step."""
    middle, low, high = cost["step_ms"]
    return [f"{cost['state_bytes'] / cost['parameter_bytes']:.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]


def format_gains(size: dict[str, Any]) -> str:
    """Format what merging adds to each contender's own model, and what each contender adds to merging."""
    rows = []
    for rival in size["rivals"]:
        row, more = [title(rival)], []
        for horizon in size["ends"]:
            merge = nats(size, rival, best_group(size, rival, horizon, (MODEL,)), horizon)
            gain = difference(size, horizon, merge, nats(size, rival, MODEL, horizon))
            row.append(pages.format_interval(gain.interval()))
            best = nats(size, rival, best_group(size, rival, horizon), horizon)
            constant = nats(size, CONSTANT, best_group(size, CONSTANT, horizon), horizon)
            less = difference(size, horizon, best, constant).interval()
            more.append(pages.format_interval(less) if rival != CONSTANT else "")
        rows.append([*row, *more])
    header = ["contender"]
    header += [f"its merge less its model, {horizon}" for horizon in size["ends"]]
    header += [f"less the constant rate, {horizon}" for horizon in size["ends"]]
    first, second = by_select(size)[:2]
    each = []
    for horizon in size["ends"]:
        ours, theirs = (nats(size, rival, best_group(size, rival, horizon), horizon) for rival in (first, second))
        each.append(f"{pages.format_interval(difference(size, horizon, ours, theirs).interval())} at {horizon}")
    return pages.format_table(header, rows) + (
        "\n\nWhat merging adds to each method (its best merge less its own model, of the same runs), and what each "
        "method adds to merging (its best model less that of the constant rate). The best group is chosen on the "
        "tuning seeds and the part `select`. Intervals over seeds and documents, without correction for their number. "
        f"The two that are the lowest there, {first} less {second}: {', '.join(each)}."
    )


def format_ensembles(size: dict[str, Any]) -> str:
    """Compare the ensemble of the newest points at a constant rate with their mean and with the target."""
    rows = []
    for horizon, of in size["rivals"][CONSTANT].items():
        ensemble = of["ensemble"]
        mean = of["nats"][ensemble["mean"]][str(size["ends"][horizon])]
        row = [f"{horizon}, {ensemble['points']} points"]
        for second in (mean, target_nats(size, horizon)):
            row.append(pages.format_interval(difference(size, horizon, ensemble["nats"], second).interval()))
        rows.append(row)
    header = ["constant rate", "ensemble less the mean of the same points", "ensemble less the target"]
    return pages.format_table(header, rows)


def format_with_b2(size: dict[str, Any]) -> str:
    """Format the order at all horizons with another decay rate of Adam, on the seeds and the part of the results."""
    rows = []
    for name, of in size["with_b2"].items():
        changes, row = [], [name]
        for horizon, after in of.items():
            end = str(size["ends"][horizon])
            is_target = name == "target"
            before = (
                target_nats(size, horizon) if is_target else size["rivals"][name][horizon]["nats"][after["model"]][end]
            )
            changes.append(pages.format_interval(difference(size, horizon, after["nats"], before).interval()))
            less = less_target_with_b2(size, name, horizon)
            row.append("" if is_target else f"{pages.format_interval(less.interval())} ({after['model']})")
        rows.append([*row, *changes])
    header = ["", *(f"less the target, both with it, at {horizon}" for horizon in size["ends"])]
    header += [f"what the change adds at {horizon}" for horizon in size["ends"]]
    return (
        f"With `{size['checks']['b2']['change']}` at all horizons, on the seeds and documents of the results: the "
        "contender that is the lowest without it, the constant rate, and the target. Neither the settings nor the "
        "merges are chosen again; intervals over seeds and documents, without correction for their number.\n\n"
        + pages.format_table(header, rows)
    )


def less_target_with_b2(size: dict[str, Any], name: str, horizon: str) -> MeanEstimate:
    """Estimate the loss of a contender less that of the target, both with another decay rate of Adam."""
    first, second = (size["with_b2"][of][horizon]["nats"] for of in (name, "target"))
    return difference(size, horizon, first, second)


# --- The index and the figure -----------------------------------------------------------------------------------------


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the contender with the lowest loss on the text and seeds of the choice, and the constant rate."""
    margin, found, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        verdicts, not_worse = judge_all(size, margin), not_worse_cells(size, margin)
        firsts = [by_select(of)[0] for of in results["sizes"].values()]
        for rival in dict.fromkeys([*firsts, CONSTANT]):
            groups = {horizon: best_group(size, rival, horizon) for horizon in size["ends"]}
            model = f"{rival} ({', then '.join(dict.fromkeys(groups.values()))})"
            at = [f"{verdicts[rival, group, h]} at {'the end' if h == 'all' else h}" for h, group in groups.items()]
            passes = all((rival, group, horizon) in not_worse for horizon, group in groups.items())
            found.append(f"{name}: {model}: {', '.join(at)}{'; not worse at all three' if passes else ''}")
            each = [pages.format_interval(less_target(size, rival, group, h).interval()) for h, group in groups.items()]
            effect = f"{name}: {model}: {', '.join(each)} nats"
            if after := size.get("with_b2", {}).get(rival):
                less = pages.format_interval(less_target_with_b2(size, rival, list(after)[-1]).interval())
                effect += f" (with {size['checks']['b2']['change']} on both sides, at the end: {less})"
            effects.append(effect)
    return IndexRow(
        13,
        "Without a fixed horizon, is there at any time a model as good as one that was annealed for that time?",
        "PMA, Fig. 3: merged is comparable to annealed; schedule-free, 2602.03702: no horizon is needed",
        "the best contender of each size (chosen on other seeds and text) and the constant rate, against the best "
        f"annealing of AdamW that was searched (equal: within {margin:g} nats; not worse: not higher by that): "
        f"{'; '.join(found)}",
        f"its loss less the annealed, at a quarter, half and the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the difference of each contender's best model from the target against the horizon."""
    panels = []
    for name, size in results["sizes"].items():
        lines = []
        for rival in size["rivals"]:
            tokens = [end * size["unit_tokens"] / 1e6 for end in size["ends"].values()]
            intervals = [less_target(size, rival, best_group(size, rival, h), h).interval() for h in size["ends"]]
            lines.append(interval_line(title(rival), tokens, intervals))
        panel_title = f"{name}: nats per token above the best annealing"
        panels.append(LinePanel(panel_title, "million tokens", lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
