"""Is the merged model better than the raw one throughout the constant phase? (PMA, Figures 1 and 9)

Command:   python experiments/stable_phase/script.py --runs runs/science --jobs 2
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import LinePanel, draw_lines, interval_line
from pma_jax.runtime.formatting import format_text
from pma_jax.studies import pages
from pma_jax.studies.experiment import run_experiment
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Plan, PlannedEvaluation, PlannedRun
from pma_jax.studies.statistics import (
    MeanEstimate,
    choose_leaving_one_out,
    difference_over_documents,
    estimate_over_documents,
    find_clear,
    independent_difference,
    paired_estimate,
    ratio_of_means,
    smallest_difference,
)
from pma_jax.studies.study import Study

DEFAULTS = {"sizes": ("science_small", "science_long"), "seeds": tuple(range(8))}
WINDOWS = (3, 6, 10, 15)  # PMA's, Figure 5
DEFAULT_WINDOW = 10  # PMA's
MERGES = [Cell("sma", window) for window in WINDOWS]
DEFAULT, NARROW = Cell("sma", DEFAULT_WINDOW), Cell("sma", 6)
EIGHTHS = range(1, 9)  # positions along a trunk
# What each change of the ground made, for the first size: changes of its configuration, by name. The settings before
# tuning were chosen by hand for models of this size.
UNTUNED = ("training.batch_size_sequences=16", "schedule.peak_rate=0.004", "optimizer.weight_decay=0.1")
OLD_TEXT = ("data.package=",)  # Python's standard library with its tests
OLD_ROW, NEW_ROW = "old text, untuned", "new text, untuned"
VARIANTS = {OLD_ROW: (*OLD_TEXT, *UNTUNED), NEW_ROW: UNTUNED}
TUNED, RAW_TUNED = "new text, tuned", "new text, tuned for raw"


def plan(study: Study) -> Plan:
    """List the trunks of all sizes with their positions, and the variants of the first with their ends."""
    cells = (RAW, *MERGES)
    along = PlannedEvaluation(cells, tuple(positions(study)), REPORT)
    end = PlannedEvaluation(cells, (study.units,), REPORT)
    runs = [PlannedRun(size, seed, (), None, (along,)) for size in study.sizes for seed in study.seeds]
    first = study.sizes[0]
    trunk = study.trunk_config(first, study.seeds[0])
    for changes in variants(study).values():
        if study.trunk_config(first, study.seeds[0], changes) != trunk:
            runs += [PlannedRun(first, seed, changes, None, (end,)) for seed in study.seeds]
    return runs


def positions(study: Study) -> list[int]:
    """Return the positions along a trunk, in units."""
    return [study.units * eighth // 8 for eighth in EIGHTHS]


def variants(study: Study) -> dict[str, tuple[str, ...]]:
    """Return the changes of the first size's configuration for each variant; none for the size as it is."""
    return {**VARIANTS, TUNED: (), RAW_TUNED: study.tuned_setting(study.sizes[0], "raw")}


def measure(study: Study) -> dict[str, Any]:
    """Return the losses of the raw and the merged models at every eighth of every trunk, and of the variants."""
    sizes, cells, first = {}, [RAW, *MERGES], study.sizes[0]
    for size in study.sizes:
        get_trunk = functools.partial(study.trunk, size)
        losses = study.document_losses_over_seeds(get_trunk, cells, positions(study), REPORT)
        sizes[size] = study.describe_size(size) | losses
    compared = {}
    for name, changes in variants(study).items():
        config = study.trunk_config(first, study.seeds[0], changes)
        on_text = dataclasses.replace(study, overrides=(*study.overrides, *changes)) if changes else study
        compared[name] = {
            "batch": config.training.batch_size_sequences,
            "rate": config.schedule.peak_rate,
            "weight_decay": config.optimizer.weight_decay,
            "text": on_text.describe_text(),
            **study.document_losses_over_seeds(
                lambda seed, changes=changes: study.trunk(first, seed, changes), cells, [study.units], REPORT
            ),
        }
    return {"ends": positions(study), "sizes": sizes, "variants": compared}


def difference(measured: dict[str, Any], first: str, second: str, end: int) -> MeanEstimate | None:
    """Estimate the loss of one merge less that of another, over seeds and documents; None without snapshots."""
    a, b = (measured["nats"].get(text, {}).get(str(end)) for text in (first, second))
    if a is None or b is None:
        return None
    return difference_over_documents(a, b, measured["document_tokens"])


def report(results: dict[str, Any]) -> str:
    """Format the gain of each window along each trunk, the comparison of windows, and what each change made."""
    return "\n\n".join(
        [format_gains(results), format_verdicts(results), format_windows(results), format_variants(results)]
    )


def gains(results: dict[str, Any], name: str) -> dict[tuple[str, int], MeanEstimate]:
    """Return the raw less the merged loss of each window at each position where there are enough snapshots."""
    size = results["sizes"][name]
    pairs = [(cell.text, end) for end in results["ends"] for cell in MERGES]
    measured = {(text, end): difference(size, RAW.text, text, end) for text, end in pairs}
    return {pair: estimate for pair, estimate in measured.items() if estimate}


def format_gains(results: dict[str, Any]) -> str:
    """Format the gain of each window at each position of each size."""
    rows = []
    for name, size in results["sizes"].items():
        measured = gains(results, name)
        for end in results["ends"]:
            shown = [measured.get((cell.text, end)) for cell in MERGES]
            cells = [pages.format_interval(gain.interval()) if gain else "too few snapshots" for gain in shown]
            tokens = f"{end * size['unit_tokens'] / 1e6:.2f}M"
            rows.append([name, tokens, pages.format_mean(pages.seed_losses(size, RAW.text, end)), *cells])
    header = ["size", "tokens", "raw loss", *(f"raw − SMA of {w}" for w in WINDOWS)]
    note = (
        "Losses in nats per token. Positive: merging is better. Each gain is the mean over the seeds with its 95% "
        "interval over seeds and documents; the interval of the raw loss is over seeds. A snapshot is saved at every "
        f"{results['ends'][-1]}th of the horizon."
    )
    return f"{pages.format_table(header, rows)}\n\n{note}"


def format_verdicts(results: dict[str, Any]) -> str:
    """Count the positions at which merging is clearly better and worse than raw, in one sentence per window."""
    lines = []
    for name in results["sizes"]:
        measured = gains(results, name)
        clear = dict(zip(measured, find_clear(list(measured.values())), strict=True))
        for cell in MERGES:
            known = [pair for pair in measured if pair[0] == cell.text]
            better = sum(clear[pair] and measured[pair].mean > 0 for pair in known)
            worse = sum(clear[pair] and measured[pair].mean < 0 for pair in known)
            lines.append(
                f"- {name}, SMA of {cell.window}: better than raw at {better} of {len(known)} positions, worse at "
                f"{worse}, no difference shown at {len(known) - better - worse}."
            )
    head = "Among all positions and windows of a size, at a false discovery rate of 5% (Benjamini and Hochberg):"
    return "\n".join([head, "", *lines])


def format_windows(results: dict[str, Any]) -> str:
    """Compare the windows with PMA's default at the end, and say how small a gain the seeds can show."""
    margin, end, lines = results["made"]["margin"], results["ends"][-1], []
    for name, size in results["sizes"].items():
        for cell in MERGES:
            estimate = cell != DEFAULT and difference(size, cell.text, DEFAULT.text, end)
            if estimate:
                verdict = pages.describe_difference(estimate, margin)
                lines.append(f"- {name}, SMA of {cell.window} at the end, against that of {DEFAULT_WINDOW}: {verdict}.")
        raw, merged = (pages.seed_losses(size, text, end) for text in (RAW.text, DEFAULT.text))
        on_documents = difference(size, RAW.text, DEFAULT.text, end)
        chosen, losses = choose_leaving_one_out({cell.text: pages.seed_losses(size, cell.text, end) for cell in MERGES})
        gain = pages.format_interval(paired_estimate(raw, losses).interval())
        lines.append(
            f"- {name}: the window that is best on the other seeds ({', '.join(dict.fromkeys(chosen))}) gains {gain} "
            "nats over raw at the end, over seeds, on the documents on which the windows were compared."
        )
        deviations = [pages.format_deviation(losses) for losses in (raw, merged)]
        lines.append(
            f"- {name}: the standard deviation over seeds at the end is {deviations[0]} for raw and {deviations[1]} "
            f"for SMA of {DEFAULT_WINDOW}, on the same seeds."
        )
        if on_documents:
            lines.append(
                f"- {name}: an interval over seeds and documents finds a true gain of "
                f"`{smallest_difference(on_documents):.2g}` nats with a probability of 80%."
            )
        lines += [f"- {name}, {line}" for line in describe_last_change(results, size)]
        lines.append(
            f"- {name}, SMA of {NARROW.window} less that of {DEFAULT_WINDOW}: {describe_narrow(results, size)}."
        )
    return "\n".join(lines)


def describe_narrow(results: dict[str, Any], size: dict[str, Any]) -> str:
    """Compare a narrower window with PMA's default at every eighth that has enough snapshots."""
    shown = []
    for eighth, end in zip(EIGHTHS, results["ends"], strict=True):
        estimate = difference(size, NARROW.text, DEFAULT.text, end)
        if estimate:
            shown.append(f"{pages.format_interval(estimate.interval())} at {eighth} of 8")
    return ", ".join(shown) or "too few snapshots"


def describe_last_change(results: dict[str, Any], size: dict[str, Any]) -> list[str]:
    """Say how the gain of each window changes to the end, from the eighth before it and from the one before that."""
    *_, sixth, seventh, end = results["ends"]
    lines = []
    for earlier, word in ((seventh, "seventh"), (sixth, "sixth")):
        each = []
        for cell in MERGES:
            if has_snapshots(size, cell.text, earlier):
                last, before = (nats_of_gain(size, cell.text, at) for at in (end, earlier))
                change = difference_over_documents(last, before, size["document_tokens"])
                each.append(f"SMA of {cell.window} {pages.format_interval(change.interval())}")
        lines.append(f"the gain at the end less that at the {word} eighth: {', '.join(each)}.")
    return lines


def has_snapshots(measured: dict[str, Any], text: str, end: int) -> bool:
    """Return whether there are enough snapshots for a merge at a position."""
    return str(end) in measured["nats"].get(text, {})


def nats_of_gain(measured: dict[str, Any], text: str, end: int) -> np.ndarray:
    """Return the raw less the merged loss at a position, of each seed on each document [S, D]."""
    return np.subtract(*(measured["nats"][of][str(end)] for of in (RAW.text, text)))


def format_variants(results: dict[str, Any]) -> str:
    """Format what each change of the ground made of the gain at the end, and the raw model at its own best setting."""
    end, rows = results["ends"][-1], []
    for name, variant in results["variants"].items():
        if name == RAW_TUNED and has_one_setting(results):
            continue
        estimate = difference(variant, RAW.text, DEFAULT.text, end)
        raw, merged = (pages.seed_losses(variant, text, end) for text in (RAW.text, DEFAULT.text))
        over_seeds = pages.format_interval(paired_estimate(raw, merged).interval())
        rows.append(
            [
                name,
                f"`{variant['batch']}`",
                f"`{variant['rate']:g}`",
                f"`{variant['weight_decay']:g}`",
                pages.format_mean(raw),
                pages.format_mean(merged),
                over_seeds,
                pages.format_interval(estimate.interval()) if estimate else "too few snapshots",
            ]
        )
    header = ["ground", "batch", "rate", "weight decay", "raw loss", f"SMA of {DEFAULT_WINDOW}"]
    header += ["raw − merged, over seeds", "raw − merged, over seeds and documents"]
    return (
        f"How the gain changes with the text and the settings ({next(iter(results['sizes']))}, at the end):\n\n"
        + "\n\n".join([pages.format_table(header, rows), format_own_best(results), format_changes(results)])
    )


def format_changes(results: dict[str, Any]) -> str:
    """Format what tuning changed, in pairs, and what the text did, whose losses are of different documents."""
    measured, end = results["variants"], results["ends"][-1]
    old, untuned, tuned = (measured[name] for name in (OLD_ROW, NEW_ROW, TUNED))
    if not all(has_snapshots(of, DEFAULT.text, end) for of in (old, untuned, tuned)):
        return "Too few snapshots to compare the variants."
    tokens = tuned["document_tokens"]
    losses = [[of["nats"][text][str(end)] for of in (tuned, untuned)] for text in (RAW.text, DEFAULT.text)]
    losses.append([nats_of_gain(of, DEFAULT.text, end) for of in (tuned, untuned)])
    changes = [difference_over_documents(after, before, tokens) for after, before in losses]
    shown = [pages.format_interval(one.interval()) for one in changes]
    each = [
        estimate_over_documents(
            nats_of_gain(of, DEFAULT.text, end) / np.array(of["document_tokens"]), of["document_tokens"]
        )
        for of in (untuned, old)
    ]
    text = independent_difference(*each)
    judged = f"{format_text(old['text']['parts'][REPORT])} of {old['text']['corpus']}"
    return (
        f"Tuning, less `{NEW_ROW}`: raw {shown[0]}, merged {shown[1]}, and the gain {shown[2]} nats, paired over seeds "
        f"and documents. The gain of `{NEW_ROW}` less that of `{OLD_ROW}`, which has other text in training and in "
        f"judging, without pairs: {pages.format_interval(text.interval())} nats. `{OLD_ROW}` is judged on {judged}, "
        "the other rows on the text that is named below."
    )


def has_one_setting(results: dict[str, Any]) -> bool:
    """Return whether the size's tuned setting is the best for the raw model."""
    keys = ("batch", "rate", "weight_decay")
    tuned, for_raw = ([results["variants"][name][key] for key in keys] for name in (TUNED, RAW_TUNED))
    return tuned == for_raw


def own_best(results: dict[str, Any]) -> MeanEstimate:
    """Estimate the raw loss at the setting that is best for raw, less the merged loss at the size's setting."""
    end, measured = str(results["ends"][-1]), results["variants"]
    raw, merged = measured[RAW_TUNED]["nats"][RAW.text][end], measured[TUNED]["nats"][DEFAULT.text][end]
    return difference_over_documents(raw, merged, measured[TUNED]["document_tokens"])


def format_own_best(results: dict[str, Any]) -> str:
    """Say how the raw model at its own best setting compares with the merged one at the size's."""
    end, measured = results["ends"][-1], results["variants"]
    if has_one_setting(results):
        return (
            "Losses on different text are not comparable. The size's tuned setting is the raw model's own "
            "best ([tuning](../tuning/README.md))."
        )
    gain = pages.format_interval(own_best(results).interval())
    raw, merged = (pages.seed_losses(measured[TUNED], text, end) for text in (RAW.text, DEFAULT.text))
    saved = np.subtract(raw, pages.seed_losses(measured[RAW_TUNED], RAW.text, end))
    share = ratio_of_means(saved, np.subtract(raw, merged))
    shown = (
        f" Tuning the raw model separately recovers {pages.format_percent_interval(share)} of that of merging."
        if share
        else ""
    )
    return (
        "Losses on different text are not comparable. The raw model at its own best setting less the "
        f"merged one at the size's ([tuning](../tuning/README.md)): {gain} nats.{shown}"
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the gain of PMA's default window at the end of each trunk, and since when it is clear."""
    effects, verdicts = [], []
    for name, size in results["sizes"].items():
        measured = gains(results, name)
        clear = dict(zip(measured, find_clear(list(measured.values())), strict=True))
        of_default = {
            end: clear[text, end] and measured[text, end].mean > 0 for text, end in measured if text == DEFAULT.text
        }
        last = measured.get((DEFAULT.text, results["ends"][-1]))
        effects.append(
            f"{name}: {pages.format_interval(last.interval())} nats" if last else f"{name}: too few snapshots"
        )
        since = [end for end in of_default if all(is_clear for at, is_clear in of_default.items() if at >= end)]
        verdicts.append(
            f"{name}: from {pages.format_tokens(size, min(since))} of {size['tokens'] / 1e6:.2f}M tokens to the end"
            if since
            else f"{name}: not to the end"
        )
    return IndexRow(
        1,
        "Stable phase: is merged better than raw?",
        "PMA, Figs. 1 and 9: yes, on nearly all benchmarks, along the constant phase, dense and mixtures, all sizes",
        f"the mean of the last {DEFAULT_WINDOW} snapshots is better than the newest one: {'; '.join(verdicts)}",
        f"raw − merged at the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the gain of each window along each trunk."""
    panels = []
    for name, size in results["sizes"].items():
        measured, lines = gains(results, name), []
        for cell in MERGES:
            at = {end: measured[cell.text, end].interval() for end in results["ends"] if (cell.text, end) in measured}
            if at:
                x = [end * size["unit_tokens"] / 1e6 for end in at]
                lines.append(interval_line(f"SMA of {cell.window}", x, list(at.values())))
        panels.append(LinePanel(f"{name}: raw − merged, nats", "tokens, millions", lines, zero_line=True))
    return {"figure.png": to_png(draw_lines(panels))}


if __name__ == "__main__":
    run_experiment(__file__, measure, report, summarize, draw, plan, DEFAULTS)
