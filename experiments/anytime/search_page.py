"""The parts of the page on how the contenders were tuned, and on the two checks."""

from collections.abc import Sequence
from typing import Any

from contenders import BATCH

from pma_jax.studies import pages


def format_checks(size: dict[str, Any]) -> str:
    """Format what a decay adds to contenders without one, and the order with another decay rate of Adam."""
    decay, b2 = size["checks"]["decay"], size["checks"]["b2"]
    rows = []
    for rival, of in decay["with"].items():
        added = [pages.format_difference(of[horizon], decay["without"][rival][horizon]) for horizon in size["ends"]]
        less = [pages.format_difference(of[horizon], decay["target"][horizon]) for horizon in size["ends"]]
        rows.append([rival, *added, *less])
    header = ["contender", *(f"what a decay adds at {horizon}" for horizon in size["ends"])]
    header += [f"with it, less the target at {horizon}" for horizon in size["ends"]]
    parts = [
        "What a linear decay to 0 over the last half of the tokens adds, at the setting that is tuned without it. Here "
        "and in the next table: on the tuning seeds and the part `select` (half as many tokens as the results), the "
        "best of the contender's model and of merges of points for each seed, with intervals over three seeds; no "
        "block means. The target was chosen on these seeds and this part too.",
        pages.format_table(header, rows),
    ]
    rows = []
    for rival, before in b2["without"].items():
        after = b2["with"][rival]
        row = [rival, pages.format_difference(after, before)]
        for losses, side in ((before, "without"), (after, "with")):
            row.append(pages.format_difference(losses, b2[side]["target"]) if rival != "target" else "")
        rows.append(row)
    header = ["", "what the change adds", "less the target, without it", "less the target, both with it"]
    return "\n\n".join(
        [
            *parts,
            f"With `{b2['change']}`, at {next(iter(size['ends']))}; the rates are not tuned again:",
            pages.format_table(header, rows),
        ]
    )


def describe_searched(size: dict[str, Any]) -> str:
    """Format the finalists of each contender and their losses at each horizon, and all settings of the search."""
    rows = []
    for rival, finalists in size["finalists"].items():
        for number, one in enumerate(finalists):
            losses = one["losses"]
            each = [pages.format_mean(losses[horizon]) if losses else "diverged" for horizon in size["ends"]]
            notes = ["a neighbour was not tried"] if one["is_at_edge"] else []
            notes += ["no smaller batch exists"] if f"{BATCH}=1" in one["setting"] else []
            rows.append([rival if not number else "", _values(one["setting"]), *each, "; ".join(notes)])
    count = len(next(iter(size["tried"].values())))
    text = (
        f"The search measured {count} settings of each contender at {next(iter(size['ends']))}, on one seed. Its three "
        "best, with the loss of the best model of each at each horizon, on the tuning seeds and the part `select`; the "
        "first of each contender has the lowest mean and is the one that is judged:"
    )
    table = pages.format_table(["contender", "setting", *size["ends"], "in the search"], rows)
    return "\n\n".join([text, table, format_tried(size)])


def _values(setting: Sequence[str]) -> str:
    """Format a setting without the sections of its keys."""
    return ", ".join(f"`{text.split('.', 1)[1]}`" for text in setting)


def format_tried(size: dict[str, Any]) -> str:
    """List every setting of the search."""
    rows = []
    for rival, tried in size["tried"].items():
        keys = " / ".join(text.partition("=")[0].rpartition(".")[2] for text in tried[0]["setting"])
        lowest, each = tried[0]["loss"], []  # None: all settings diverged
        for one in tried:
            values = " / ".join(text.partition("=")[2] for text in one["setting"])
            loss = "diverged" if one["loss"] is None else f"{1e3 * (one['loss'] - lowest):.0f}"
            each.append(f"`{values}`: {loss}")
        rows.append([rival, f"`{keys}`", "" if lowest is None else f"`{lowest:.4f}`", "; ".join(each)])
    header = ["contender", "keys", "lowest loss", "settings, thousandths of a nat above it"]
    return f"<details><summary>All settings</summary>\n\n{pages.format_table(header, rows)}\n\n</details>"
