"""The page of the experiment: tables, the row of the index, and the figure."""

from typing import Any

from contenders import CEILING, MODEL

from pma_jax.evaluation.sweep import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, judge


def difference(size: dict[str, Any], rival: str, horizon: str, group: str) -> MeanEstimate:
    """Estimate the loss of a contender's model less that of the target, over seeds and documents."""
    of, target = size["rivals"][rival][horizon], size["target"][horizon]
    ours = of["nats"][of["chosen"][group]][str(size["ends"][horizon])]
    theirs = target["nats"][RAW.text][str(target["end"])]
    return difference_over_documents(ours, theirs, of["document_tokens"])


def cells(size: dict[str, Any]) -> list[tuple[str, str]]:
    """List the contenders of a size with each group of their models."""
    first = next(iter(size["ends"]))
    return [(rival, group) for rival, of in size["rivals"].items() for group in of[first]["chosen"]]


def report(results: dict[str, Any]) -> str:
    """Format, for each size, the target, the difference of every contender's models from it, and the settings."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", describe_targets(size), format_differences(size, margin)]
        parts += [format_settings(size), format_tried(size), format_costs(size)]
    return "\n\n".join(parts)


def describe_targets(size: dict[str, Any]) -> str:
    """Describe the best annealing of each horizon."""
    lines = []
    for horizon, target in size["target"].items():
        setting = ", ".join(f"`{key}`" for key in target["setting"])
        lines.append(
            f"- {horizon}: {pages.format_mean(pages.seed_losses(target, RAW.text, target['end']))} ({setting})"
        )
    return (
        "The target, the best annealing that ends at each horizon (nats per token, mean over seeds):\n\n"
        + "\n".join(lines)
    )


def format_differences(size: dict[str, Any], margin: float) -> str:
    """Format the difference of every contender's models from the target at each horizon."""
    rows = []
    for rival, group in cells(size):
        row = [rival, group]
        for horizon in size["ends"]:
            of = size["rivals"][rival][horizon]
            chosen = "" if group == MODEL else f" ({of['chosen'][group]})"
            row.append(pages.format_interval(difference(size, rival, horizon, group).interval()) + chosen)
        rows.append(row)
    header = ["contender", "model", *(f"less the target at {horizon}" for horizon in size["ends"])]
    found = [
        f"{rival}, {group}, at {horizon}: {pages.describe_difference(estimate, margin)}"
        for (rival, group, horizon), estimate in reached(size, margin).items()
    ]
    return (
        pages.format_table(header, rows)
        + "\n\nNats per token, with 95% intervals over seeds and documents; positive: the annealing is better. The "
        "best model of a group was chosen on the part `select`. "
        + f"Equal to the target within {margin:g} nats (two one-sided tests), or below it, with at most 5% false ones "
        f"among them (Benjamini and Hochberg): {'; '.join(found) or 'none'}."
    )


def reached(size: dict[str, Any], margin: float) -> dict[tuple[str, str, str], MeanEstimate]:
    """Return the contenders, groups and horizons whose loss is equal to that of the target or below it.

    All cells of the table are tested together, except those of the ensemble.
    """
    estimates = {
        (rival, group, horizon): difference(size, rival, horizon, group)
        for rival, group in cells(size)
        if group != CEILING
        for horizon in size["ends"]
    }
    verdicts = judge(list(estimates.values()), margin)
    return {
        cell: estimate
        for (cell, estimate), verdict in zip(estimates.items(), verdicts, strict=True)
        if verdict in ("equal", "lower")
    }


def format_costs(size: dict[str, Any]) -> str:
    """Format what each contender costs in training: memory of its state, and time of a step."""
    rows = []
    for rival, cost in size["costs"].items():
        middle, low, high = cost["step_ms"]
        memory = cost["state_bytes"] / cost["parameter_bytes"]
        rows.append([rival, f"{memory:.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    return pages.format_table(["contender", "state, in parameters", "step, ms (quartiles)"], rows) + (
        "\n\nMedians in turn, at the batch of the configuration; AdamW keeps 3 times the parameters, and a block mean "
        "one more. A merge of N snapshots reads N models from the disk, and needs no memory while training."
    )


def format_settings(size: dict[str, Any]) -> str:
    """Format the best setting of each contender, and how many were tried."""
    rows = []
    for rival, tried in size["tried"].items():
        best = next(one for one in tried if one["setting"] == size["settings"][rival])
        loss = pages.format_mean(best["losses"])
        setting = ", ".join(f"`{key}`" for key in best["setting"])
        rows.append([rival, setting, str(len(tried)), loss, "yes" if best["is_at_edge"] else "no"])
    header = ["contender", "best setting", "settings tried", "loss", "a neighbour was not tried"]
    note = (
        "The loss of a setting is the mean over all horizons of that of the best model at each, on the part `select` "
        "and on tuning seeds; the others were judged at a quarter, on one seed."
    )
    return pages.format_table(header, rows) + "\n\n" + note


def format_tried(size: dict[str, Any]) -> str:
    """List every setting that was tried of each contender; all contenders have the same number."""
    rows = []
    for rival, tried in size["tried"].items():
        keys = " / ".join(text.partition("=")[0].rpartition(".")[2] for text in tried[0]["setting"])
        each = []
        for one in tried:
            values = " / ".join(text.partition("=")[2] for text in one["setting"])
            loss = f"{sum(one['losses']) / len(one['losses']):.2f}" if one["losses"] else "diverged"
            seeds = f", {len(one['losses'])} seeds" if one["losses"] and len(one["losses"]) > 1 else ""
            each.append(f"`{values}`: {loss}{seeds}")
        rows.append([rival, f"`{keys}`", "; ".join(each)])
    table = pages.format_table(["contender", "keys", "settings and losses"], rows)
    return f"<details><summary>All settings</summary>\n\n{table}\n\n</details>"


def best_cell(size: dict[str, Any]) -> tuple[str, str]:
    """Return the contender and the group with the lowest mean difference from the target over the horizons."""
    return min(
        (cell for cell in cells(size) if cell[1] != CEILING),
        key=lambda cell: sum(difference(size, cell[0], horizon, cell[1]).mean for horizon in size["ends"]),
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the contender that is the nearest to the target."""
    margin, found, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        rival, group = best_cell(size)
        estimates = {horizon: difference(size, rival, horizon, group) for horizon in size["ends"]}
        at = [horizon for horizon in estimates if (rival, group, horizon) in reached(size, margin)]
        equal = f"equal within {margin:g} nats, or below, at {', '.join(at) or 'no horizon'}"
        found.append(f"{name}: {rival} ({group}), {equal}")
        each = [f"{horizon} {pages.format_interval(one.interval())}" for horizon, one in estimates.items()]
        effects.append(f"{name}: {', '.join(each)} nats")
    return IndexRow(
        13,
        "Is there a model to serve at any time, as good as the best annealing that ends there?",
        "PMA, Fig. 3; schedule-free; GPA; SNOO; BEMA: no annealing is needed",
        f"the nearest to the best annealing: {'; '.join(found)}",
        f"its loss less the annealed: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the difference of each contender's best group from the target against the horizon."""
    panels = []
    for name, size in results["sizes"].items():
        lines = []
        for rival in size["rivals"]:
            group = min(
                (group for other, group in cells(size) if other == rival and group != CEILING),
                key=lambda group, rival=rival: sum(difference(size, rival, h, group).mean for h in size["ends"]),
            )
            tokens = [end * size["unit_tokens"] for end in size["ends"].values()]
            intervals = [difference(size, rival, horizon, group).interval() for horizon in size["ends"]]
            lines.append(interval_line(f"{rival}, {group}", tokens, intervals))
        title = f"{name}: nats per token above the best annealing"
        panels.append(LinePanel(title, "tokens", lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
