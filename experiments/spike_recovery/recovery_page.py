"""The verdicts and the page of the experiment: odds of recovery, the effect of each factor, and the figure."""

import functools
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

import scipy.stats

from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import CONFIDENCE, MeanInterval, mean_interval, paired_difference

NOTHING, CLEAN = "nothing", "clean"
PASSING_NATS = 0.1  # above the loss before the spike
CLEAR_NATS = 0.2  # above that loss, the untreated run at its end
PASS_OVER = "restart, pass over data"
OPTIMIZERS, WARM_UPS, WINDOWS = ("restored", "reset"), ("none", "25 steps"), ("1", "3", "5")


def arm_name(n: str, optimizer: str, warm_up: str) -> str:
    """Return the name of an arm that goes back to the mean of n snapshots."""
    return f"N={n}, optimizer {optimizer}, warm-up {warm_up}"


RESTART = arm_name("1", "restored", "none")  # from the last snapshot, on the same data


def judge(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add to each arm of a seed whether it passed the spike and recovered.

    The reference is the median of the last three held-out losses before the spike. An arm passes if it did not give
    up, no spike was declared after its last rollback, and its last loss is at most `PASSING_NATS` above the reference.
    It has recovered (`back`) if its last loss is also not above the reference.
    """
    onset = arms[NOTHING]["onset_tokens"]
    before = statistics.median([loss for tokens, loss in arms[NOTHING]["evaluations"] if tokens < onset])
    for record in arms.values():
        spikes_again = len(record["declared_tokens"]) > len(record["went_back_to_tokens"])
        completed = not record["gave_up"] and not spikes_again
        record["before_loss"] = before
        record["passes"] = completed and record["final_loss"] <= before + PASSING_NATS
        record["back"] = completed and record["final_loss"] <= before
    return arms


def verdicts(results: Mapping[str, Any], arm: str, key: str) -> list[float]:
    """Return 1 for each seed whose arm passes (`passes`) or has recovered (`back`), else 0."""
    return [float(arms[arm][key]) for arms in results["seeds"].values()]


def above_before(results: Mapping[str, Any], arm: str) -> list[float]:
    """Return the last loss of an arm less that before the spike, in nats per token, for each seed."""
    return [arms[arm]["final_loss"] - arms[arm]["before_loss"] for arms in results["seeds"].values()]


def format_odds(values: list[float]) -> str:
    """Format a share of seeds with its 95% interval (Clopper and Pearson)."""
    interval = scipy.stats.binomtest(int(sum(values)), len(values)).proportion_ci(CONFIDENCE)
    return f"{sum(values):.0f} of {len(values)} [{interval.low:.0%}, {interval.high:.0%}]"


def clear_collapses(results: Mapping[str, Any]) -> list[str]:
    """List the seeds whose untreated run ends at least `CLEAR_NATS` above the loss before the spike."""
    return [
        seed
        for seed, above in zip(results["seeds"], above_before(results, NOTHING), strict=True)
        if above >= CLEAR_NATS
    ]


def last_losses(results: Mapping[str, Any], arm: str) -> list[float]:
    """Return the last loss less that before the spike, where a run that gave up has that of the untreated run."""
    return [
        arms[NOTHING if arms[arm]["gave_up"] else arm]["final_loss"] - arms[arm]["before_loss"]
        for arms in results["seeds"].values()
    ]


def mcnemar(results: Mapping[str, Any], arm: str, other: str) -> float:
    """Return the p-value of the exact McNemar test of an arm's passes against those of another."""
    pairs = list(zip(verdicts(results, arm, "passes"), verdicts(results, other, "passes"), strict=True))
    better, worse = (sum(one - of_other == sign for one, of_other in pairs) for sign in (1, -1))
    return float(scipy.stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def against_restart(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the p-value of each treated arm against the restart, corrected for all arms (Benjamini and Hochberg)."""
    arms = [arm for arm in next(iter(results["seeds"].values())) if arm not in (NOTHING, CLEAN, RESTART)]
    adjusted = scipy.stats.false_discovery_control([mcnemar(results, arm, RESTART) for arm in arms])
    return dict(zip(arms, adjusted.tolist(), strict=True))


def report(results: dict[str, Any]) -> str:
    """Format the odds of each arm, and the effect of each factor of the arms that go back."""
    if not results["seeds"]:
        return f"No run collapsed, of seeds {', '.join(map(str, results['never_collapsed']))}."
    arms, clear = list(next(iter(results["seeds"].values()))), clear_collapses(results)
    adjusted, rows = against_restart(results), []
    for arm in arms:
        p = f"`{adjusted[arm]:.3f}`" if arm in adjusted else ""
        odds = [format_odds(verdicts(results, arm, key)) for key in ("passes", "back")]
        of_clear = sum(results["seeds"][seed][arm]["passes"] for seed in clear)
        loss = pages.format_interval(mean_interval(above_before(results, arm)))
        rows.append([arm, odds[0], f"{of_clear} of {len(clear)}", odds[1], loss, p])
    header = [
        "arm",
        "passes the spike",
        "of clear collapses",
        "back at the loss before it",
        "last loss less that before",
        "p against restart",
    ]
    return "\n\n".join(
        [
            pages.format_table(header, rows),
            "Shares of seeds with 95% intervals (Clopper and Pearson); losses in nats per token, with those over "
            f"seeds. A clear collapse is a seed whose untreated run ends `{CLEAR_NATS}` nats or more above the loss "
            f"before its spike ({', '.join(clear) or 'none'}). The restart is the arm `{RESTART}`; the last column is "
            "the exact McNemar test of passing, corrected for all arms (Benjamini and Hochberg).",
            format_rollbacks(results),
            format_factors(results),
            f"{len(results['seeds'])} collapsed seeds ({', '.join(results['seeds'])}); did not collapse: "
            f"{', '.join(map(str, results['never_collapsed'])) or 'none'}.",
        ]
    )


def format_rollbacks(results: Mapping[str, Any]) -> str:
    """Say how often the arms that go back did, which gave up, and how N = 3 compares with passing over the data."""
    lines, levels = [], [arm_name(*cell) for cell in itertools.product(WINDOWS, OPTIMIZERS, WARM_UPS)]
    runs = [arms[arm] for arms in results["seeds"].values() for arm in levels]
    passing = [run for run in runs if run["passes"]]
    several = sum(len(run["went_back_to_tokens"]) > 1 for run in passing)
    lines.append(
        f"- Of {len(runs)} runs that go back, {len(passing)} pass, {several} of them after more than one rollback."
    )
    for optimizer in OPTIMIZERS:
        of = [arms[arm_name(n, optimizer, w)] for arms in results["seeds"].values() for n in WINDOWS for w in WARM_UPS]
        lines.append(f"- Optimizer {optimizer}: {sum(bool(run['gave_up']) for run in of)} of {len(of)} give up.")
    for optimizer in OPTIMIZERS:
        arm = arm_name("3", optimizer, "none")
        p = mcnemar(results, arm, PASS_OVER)
        lines.append(f"- {arm} against passing over the data, exact McNemar test: p = `{p:.2f}`.")
    last = {arm: [arms[arm]["final_loss"] for arms in results["seeds"].values()] for arm in (CLEAN, NOTHING)}
    difference = paired_difference(last[CLEAN], last[NOTHING])
    lines.append(f"- The last loss of `{CLEAN}` less that of `{NOTHING}`: {pages.format_interval(difference)} nats.")
    return "\n".join(lines)


def factor_effects(results: Mapping[str, Any]) -> dict[str, list[MeanInterval]]:
    """Estimate the effect of each factor, the mean over the levels of the others.

    Returns:
        {name of the factor: the difference of the share of arms that pass, of the last loss in nats per token, and of
        the last loss where a run that gave up has that of the untreated run}.
    """
    levels = {
        "optimizer reset, against restored": [
            ((n, "reset", w), (n, "restored", w)) for n, w in itertools.product(WINDOWS, WARM_UPS)
        ],
        "warm-up of 25 steps, against none": [
            ((n, o, "25 steps"), (n, o, "none")) for n, o in itertools.product(WINDOWS, OPTIMIZERS)
        ],
    }
    for n in WINDOWS[1:]:
        levels[f"N = {n}, against 1"] = [((n, o, w), ("1", o, w)) for o, w in itertools.product(OPTIMIZERS, WARM_UPS)]
    readings = (functools.partial(verdicts, key="passes"), above_before, last_losses)
    found = {}
    for name, pairs in levels.items():
        first, second = ([arm_name(*pair[side]) for pair in pairs] for side in (0, 1))
        found[name] = [
            paired_difference(
                mean_over([read(results, arm) for arm in first]), mean_over([read(results, arm) for arm in second])
            )
            for read in readings
        ]
    return found


def format_factors(results: Mapping[str, Any]) -> str:
    """Format the effect of each factor."""
    rows = [
        [name, pages.format_interval(share, 3), *map(pages.format_interval, losses)]
        for name, (share, *losses) in factor_effects(results).items()
    ]
    header = ["factor", "share of arms that pass", "last loss", "last loss, given up: that of the untreated run"]
    return (
        "The effect of each factor, the mean over the levels of the others, with intervals over seeds that are not "
        "corrected for the number of effects; losses in nats per token:\n\n" + pages.format_table(header, rows)
    )


def mean_over(rows: list[list[float]]) -> list[float]:
    """Return the mean of several lists, element by element."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the odds of the restart and of the mean of 3 snapshots, and the effect of each factor."""
    question = "Does a collapsed run recover from the mean of earlier snapshots?"
    claim = "PMA, Section 4.5 and Fig. 7: it does, and follows the original trajectory"
    if not results["seeds"]:
        return IndexRow(9, question, claim, "no run collapsed", "none")
    arms = list(next(iter(results["seeds"].values())))
    others = [arm for arm in arms if arm not in (NOTHING, CLEAN)]
    best = max(others, key=lambda arm: sum(verdicts(results, arm, "passes")))
    shown = {
        "restarting from the last snapshot": RESTART,
        "passing over the data too": PASS_OVER,
        "restarting from the mean of 3": arm_name("3", "restored", "none"),
        f"the most of {len(others)} arms, {best}": best,
    }
    found = [f"{name}, {format_odds(verdicts(results, arm, 'passes'))}" for name, arm in shown.items()]
    if best != RESTART:
        found[-1] += f" (against the restart, corrected for all arms, p = {against_restart(results)[best]:.2g})"
    effects = [f"{name} {pages.format_interval(share, 3)}" for name, (share, *_) in factor_effects(results).items()]
    return IndexRow(
        9,
        question,
        claim,
        f"seeds that pass the spike: {'; '.join(found)}",
        f"share of arms that pass: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the training loss of the first collapsed seeds from shortly before the spike on: restart and N = 3."""
    if not results["seeds"]:
        return {}
    panels = []
    shown = {
        NOTHING: NOTHING,
        RESTART: "restart",
        "skip updates": "skip updates",
        arm_name("3", "restored", "none"): "N=3, restored",
        arm_name("3", "reset", "25 steps"): "N=3, reset, warm-up",
    }
    for seed, arms in list(results["seeds"].items())[:4]:
        onset = arms[NOTHING]["onset_tokens"]
        lines = []
        for arm, label in shown.items():
            points = [point for point in arms[arm]["curve"] if point[0] >= 0.75 * onset]
            lines.append(Line(label, [point[0] / 1e6 for point in points], [point[1] for point in points]))
        panels.append(LinePanel(f"seed {seed}: training loss (spike at {onset / 1e6:.2f}M)", "tokens, millions", lines))
    return {"figure.png": to_png(draw_lines(panels, columns=2))}
