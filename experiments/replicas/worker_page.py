"""The generated section of the page, from results.json alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_estimates import (
    MODELS,
    combine,
    gain_across,
    gain_in_time,
    interaction,
    is_known,
    less_than_half_is_left,
    seed_losses,
)
from worker_search import edge_keys
from worker_settings import (
    BOTH,
    DILOCO,
    NOLOCO,
    ONE,
    PERIODIC,
    PLAIN,
    SPARTA,
    STREAMING,
    WORKERS,
    Ground,
    outer_name,
    periodic_name,
    small_batch_name,
)

from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, find_clear, mean_interval


def shown(estimate: MeanEstimate) -> str:
    """Format an estimate with its interval."""
    return pages.format_interval(estimate.interval())


def setting_cells(results: dict[str, Any], name: str, models: Sequence[str]) -> list[str]:
    """Return the first cells of a row: the name, the tuned rate, and the losses of models."""
    measured = results["settings"][name]
    tuned = ", ".join(f"`{float(text.partition('=')[2]):g}`" for text in measured["tuned"])
    if not is_known(results, name):
        return [f"`{name}`", tuned, f"diverged with {len(measured['diverged'])} seeds"]
    losses = []
    for model in models:
        window = measured["windows"].get(model.removeprefix("merged "), measured["windows"]["mean"])
        text = pages.format_mean(seed_losses(results, (name, model)))
        losses.append(f"{text} (N = {window})" if model.startswith("merged") else text)
    return [f"`{name}`", tuned, *losses]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table; rows of settings that diverged are filled up."""
    return pages.format_table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows])


# --- The experiments --------------------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    """Format the answer, a section per experiment, and how the rates were chosen."""
    return "\n\n".join(
        [
            format_answer(results),
            format_first(results),
            format_second(results),
            format_third(results),
            format_fourth(results),
            format_fifth(results),
            format_sixth(results),
            format_searches(results),
        ]
    )


def ground_of(results: dict[str, Any]) -> Ground:
    """Return the ground that the settings were made from."""
    return Ground(**results["ground"])


def base_name(results: dict[str, Any]) -> str:
    """Return the setting around which experiment 1 varies one factor at a time."""
    return periodic_name(WORKERS, ground_of(results).unit_steps)


def names_with_workers(results: dict[str, Any]) -> list[str]:
    """Return the settings of experiment 1 whose workers differ at a snapshot."""
    return [
        name
        for name in results["experiments"]["1"]
        if is_known(results, name) and "worker" in results["settings"][name]["nats"]
    ]


def describe_remaining(results: dict[str, Any], name: str) -> str:
    """Say what averaging over workers gains, and how much of it is left once snapshots are merged in time."""
    gain = gain_across(results, name).interval()
    if gain.high < 0:
        return f"averaging over workers loses {pages.format_size(gain)} nats"
    if gain.low <= 0:
        return "averaging over workers does not clearly gain"
    left = gain_across(results, name, merged=True)
    text = (
        f"averaging over workers gains {pages.format_interval(gain)} nats, and {shown(left)} once snapshots are merged "
        "in time"
    )
    conclusions = {
        True: "less than half is left: the averages over workers and over time largely overlap",
        False: "more than half is left: most of it is what merging in time does not give",
        None: "whether less than half is left is not decided",
    }
    return f"{text}; {conclusions[less_than_half_is_left(results, name)]}"


def answer(results: dict[str, Any]) -> str:
    """Answer the question in a clause: what is left at the base setting, and the best of both against one worker."""
    base = base_name(results)
    if not (is_known(results, base) and is_known(results, ONE)):
        return f"{base} diverged"
    against = combine(results, [(base, "merged mean")], [(ONE, "merged mean")])
    verdict = pages.describe_difference(against, results["made"]["margin"])
    return (
        f"{describe_remaining(results, base)}; their mean, merged in time, against data-parallel training, merged in "
        f"time, at equal tokens: {verdict}"
    )


def compared_methods() -> list[str]:
    """Return the tuned methods that are compared with data-parallel training and with periodic averaging."""
    return [f"{DILOCO}, K={WORKERS}", f"{SPARTA}, p=0.005", f"{BOTH}, p=0.005", f"{NOLOCO}, K={WORKERS}", STREAMING]


def compare(results: dict[str, Any], name: str, others: Sequence[str]) -> list[str]:
    """Compare a setting with others at equal tokens, as it is and merged in time; leave out what diverged."""
    lines = []
    for other in others:
        if is_known(results, name) and is_known(results, other):
            for model, words in (("mean", "without merging"), ("merged mean", "both merged in time")):
                difference = combine(results, [(name, model)], [(other, model)])
                verdict = pages.describe_difference(difference, results["made"]["margin"])
                lines.append(f"- `{name}` against `{other}`, {words}, equal tokens: {verdict}.")
    return lines


def format_answer(results: dict[str, Any]) -> str:
    """Format the answer: what is left of averaging over workers once merged in time, and against one worker."""
    base, small = base_name(results), small_batch_name(ground_of(results))
    with_workers = names_with_workers(results)
    lines = [f"- `{name}`: {describe_remaining(results, name)}." for name in with_workers]
    lines += compare(results, base, (ONE, small))
    for name in compared_methods():
        lines += compare(results, name, (ONE, PERIODIC))
    lines += compare(results, f"{BOTH}, p=0.005", (f"{DILOCO}, K={WORKERS}",))
    lines += compare(results, f"{SPARTA}, p=0.05", (PERIODIC,))
    lines += compare(results, small, (ONE,))
    return "\n".join(["**Does averaging over workers gain what merging in time gains?**", "", *lines])


def format_first(results: dict[str, Any]) -> str:
    """Format experiment 1: the four losses of each setting, the gains of both averages and their interaction."""
    rows, estimates = [], {}
    for name in results["experiments"]["1"]:
        row = setting_cells(results, name, MODELS)
        if is_known(results, name):
            has_workers = name in names_with_workers(results)
            across = shown(gain_across(results, name)) if has_workers else ""
            if has_workers:
                estimates[name] = interaction(results, name)
            row += [across, shown(gain_in_time(results, name)), shown(estimates[name]) if has_workers else ""]
        rows.append(row)
    clear = dict(zip(estimates, find_clear(list(estimates.values())), strict=True))
    found = [
        f"`{name}`"
        for name, is_clear in clear.items()
        if is_clear and estimates[name].mean > 0 and gain_across(results, name).interval().low > 0
    ]
    header = ["setting", "rate", "a worker", "mean of the workers", "a worker, merged", "mean, merged"]
    header += ["worker − mean", "mean − merged", "interaction"]
    note = (
        "Losses in nats per token with intervals over seeds; gains with intervals over seeds and documents. The "
        "interaction is what averaging over workers gains, less what it gains once snapshots are merged in time: `0` "
        "if the gains add up, all of the first if time gives the same. It is clearly above `0` (false discovery rate "
        f"of 5%), and averaging over workers gains, for {', '.join(found) or 'no setting'}. K workers average every H "
        f"steps; a worker is read just before an average. `{ONE}` is data-parallel training with the same batch. N is "
        "chosen on the part select."
    )
    return f"### 1. Does merging in time add to averaging over workers?\n\n{table(header, rows)}\n\n{note}"


def format_second(results: dict[str, Any]) -> str:
    """Format experiment 2: what merging in time gains on DiLoCo's outer parameters."""
    rows, margin = [], results["made"]["margin"]
    for name in results["experiments"]["2"]:
        row = setting_cells(results, name, ("mean", "merged mean"))
        rows.append([*row, shown(gain_in_time(results, name))] if is_known(results, name) else row)
    header = ["setting", "rate", "outer parameters", "merged", "gain of merging"]
    with_momentum, lines = outer_name(0.7, 0.9), []
    for without in (outer_name(0.7, 0.0), base_name(results)):
        if not (is_known(results, with_momentum) and is_known(results, without)):
            continue
        change = combine(
            results,
            [(with_momentum, "mean"), (without, "merged mean")],
            [(with_momentum, "merged mean"), (without, "mean")],
        )
        lines.append(f"- The gain of merging in time, `{with_momentum}` less `{without}`: {shown(change)} nats.")
        for model in ("mean", "merged mean"):
            verdict = pages.describe_difference(combine(results, [(with_momentum, model)], [(without, model)]), margin)
            lines.append(f"- Loss of the {model}, `{with_momentum}` against `{without}`: {verdict}.")
    title = "### 2. Does an outer momentum take the gain of merging first?"
    return "\n\n".join([title, table(header, rows), "\n".join(lines)]).strip()


def format_against(
    results: dict[str, Any], number: str, others: Mapping[str, str], title: str, extra: Sequence[str] = ()
) -> str:
    """Format the settings of an experiment: loss, merged loss, the gain, and both against another setting.

    Args:
        results: The results.
        number: The experiment.
        others: Part of a name -> the setting that such rows are compared with; the last part that matches decides.
        title: Title of the section.
        extra: Further columns: `bytes`, `spread`.
    """
    rows, margin = [], results["made"]["margin"]
    for name in results["experiments"][number]:
        other = [compared for part, compared in others.items() if part in name][-1]
        row = setting_cells(results, name, ("mean", "merged mean"))
        if is_known(results, name):
            row.append(shown(gain_in_time(results, name)))
            for model in ("mean", "merged mean"):
                is_compared = name != other and is_known(results, other)
                against = combine(results, [(name, model)], [(other, model)]) if is_compared else None
                row.append(pages.describe_difference(against, margin) if against else "")
            if "bytes" in extra:
                row.append(f"`{results['settings'][name]['sent_bytes'] / 1e6:.2f}`")
            if "spread" in extra:
                row.append(format_spread(results, name, "distance"))
        rows.append(row)
    against_names = " or ".join(f"`{other}`" for other in others.values())
    header = ["setting", "tuned", "loss", "merged", "gain of merging", f"loss against {against_names}"]
    header += [f"merged against {against_names}"]
    header += ["MB sent"] * ("bytes" in extra) + ["distance of the workers"] * ("spread" in extra)
    return f"{title}\n\n{table(header, rows)}"


def format_spread(results: dict[str, Any], name: str, key: str) -> str:
    """Format how far the workers of a setting are apart, or how they move, if it was read."""
    spread = results["settings"][name].get("spread")
    return pages.format_interval(mean_interval(spread[key])) if spread else ""


def format_third(results: dict[str, Any]) -> str:
    """Format experiment 3: optimizers of one worker that average while training."""
    return format_against(results, "3", {"": PLAIN}, "### 3. From passive to active averaging, with one worker")


def format_fourth(results: dict[str, Any]) -> str:
    """Format experiment 4: SPARTA's workers, and the mean over them against the mean over time."""
    rows = []
    for name in results["experiments"]["4"]:
        row = setting_cells(results, name, MODELS)
        if is_known(results, name):
            has_workers = "worker" in results["settings"][name]["nats"]
            models = ((name, "mean"), (name, "merged worker"))
            row += [format_spread(results, name, key) for key in ("distance", "correlation")]
            row.append(shown(combine(results, [models[0]], [models[1]])) if has_workers else "")
            row.append(shown(gain_in_time(results, name)))
        rows.append(row)
    header = ["setting", "tuned", "a worker", "mean of the workers", "a worker, merged", "mean, merged", "distance"]
    header += ["correlation", "mean of workers − merged worker", "gain of merging"]
    note = (
        "Distance: of the workers from their mean, as a share of its norm. Correlation: the cosine between the "
        "movements of two workers over the last snapshots. With DiLoCo, all workers are equal when a snapshot is saved."
    )
    return f"### 4. SPARTA: a few parameters at every step\n\n{table(header, rows)}\n\n{note}"


def format_fifth(results: dict[str, Any]) -> str:
    """Format experiment 5: NoLoCo against DiLoCo and periodic averaging."""
    title = "### 5. NoLoCo: pairs of workers"
    others = {"": f"{DILOCO}, K={WORKERS}"}
    twice = f"K={2 * WORKERS}"
    if f"{DILOCO}, {twice}" in results["experiments"]["5"]:
        others[twice] = f"{DILOCO}, {twice}"
    units = ground_of(results).units
    note = (
        "Each row is compared with DiLoCo of as many workers. Periodic averages come one step after a snapshot: a run "
        f"has {units - 1} of them, not {units}."
    )
    return f"{format_against(results, '5', others, title, ('bytes', 'spread'))}\n\n{note}"


def format_sixth(results: dict[str, Any]) -> str:
    """Format experiment 6: Streaming DiLoCo, one key at a time."""
    title = "### 6. Streaming DiLoCo: loss for the bytes sent"
    note = (
        "MB: what a worker contributes to averages over the run. Each row differs from the first in what its name "
        "says; the first has two fragments (P), no delay (V, steps) and no mixing (alpha), in float32."
    )
    return f"{format_against(results, '6', {'': STREAMING}, title, ('bytes',))}\n\n{note}"


def format_searches(results: dict[str, Any]) -> str:
    """Say how many settings each contender was tuned over, and whether a best rate is at the edge."""
    lines = []
    for group, contenders in results["searched"].items():
        counts = sorted({len(one["tried"]) for one in contenders.values()})
        number = " or ".join(map(str, counts))
        names = ", ".join(f"`{name}`" for name in contenders)
        lines.append(f"- {group}: {number} settings for each of {len(contenders)} contenders: {names}.")
    edges = [
        f"`{name}` ({', '.join(f'`{key}`' for key in keys)})"
        for contenders in results["searched"].values()
        for name, one in contenders.items()
        if (keys := edge_keys(one))
    ]
    where = "at the edge of what was tried, once decided on all seeds, so that others may be better"
    lines.append(f"- {where}: {', '.join(edges) or 'none'}.")
    finalists, seeds = results["search"]["finalists"], results["search"]["seeds"]
    text = (
        "Rates are the best for the mean of the raw and the merged loss, on other seeds and the part select. Among the "
        "methods, an outer rate or a half-life is tuned with the rate; among the cells, the rate only. Settings are "
        f"tried on one seed until the best one is lower than its neighbours; the best {finalists} of each contender "
        f"are then measured on {seeds} seeds in all, and the lowest mean over these is taken."
    )
    return "\n".join(["### How the rates were chosen", "", text, "", *lines])


# --- The index --------------------------------------------------------------------------------------------------------


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the answer, and what merging in time adds to the best methods."""
    base = base_name(results)
    listed = {
        "data-parallel training": ONE,
        "periodic averaging": PERIODIC,
        DILOCO: f"{DILOCO}, K={WORKERS}",
        SPARTA: f"{SPARTA}, p=0.005",
    }
    listed |= {BOTH: f"{BOTH}, p=0.005", NOLOCO: f"{NOLOCO}, K={WORKERS}", STREAMING: STREAMING}
    gains = [
        f"{method}: {shown(gain_in_time(results, name))} nats"
        for method, name in listed.items()
        if is_known(results, name)
    ]
    return IndexRow(
        10,
        "Averaging between workers: does it gain what merging in time gains?",
        "DiLoCo, SPARTA: workers explore, and averages of them generalize better; local SGD: their noise cancels",
        f"at {base} (K workers, averaged every H steps), {answer(results)}",
        "what merging snapshots in time gains (raw − merged): " + "; ".join(gains),
    )
