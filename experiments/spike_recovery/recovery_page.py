"""The verdicts and the page of the experiment: odds of recovery, the effect of each factor, and the figure."""

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


def against_restart(results: Mapping[str, Any], arm: str) -> float:
    """Return the p-value of the exact McNemar test of an arm's passes against those of the restart."""
    pairs = list(zip(verdicts(results, arm, "passes"), verdicts(results, RESTART, "passes"), strict=True))
    better, worse = (sum(one - other == sign for one, other in pairs) for sign in (1, -1))
    return float(scipy.stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def report(results: dict[str, Any]) -> str:
    """Format the odds of each arm, and the effect of each factor of the arms that go back."""
    arms = list(next(iter(results["seeds"].values())))
    tested = [arm for arm in arms if arm not in (NOTHING, CLEAN, RESTART)]
    raw = [against_restart(results, arm) for arm in tested]
    adjusted = dict(zip(tested, scipy.stats.false_discovery_control(raw), strict=True))
    rows = []
    for arm in arms:
        p = f"`{adjusted[arm]:.3f}`" if arm in adjusted else ""
        odds = [format_odds(verdicts(results, arm, key)) for key in ("passes", "back")]
        rows.append([arm, *odds, pages.format_interval(mean_interval(above_before(results, arm))), p])
    header = [
        "arm",
        "passes the spike",
        "back at the loss before it",
        "last loss less that before",
        "p against restart",
    ]
    return "\n\n".join(
        [
            pages.format_table(header, rows),
            "Shares of seeds with 95% intervals (Clopper and Pearson); losses in nats per token, with those over "
            f"seeds. The restart is the arm `{RESTART}`; the last column is the exact McNemar test of passing, "
            "corrected for all arms (Benjamini and Hochberg).",
            format_factors(results),
            f"{len(results['seeds'])} collapsed seeds ({', '.join(results['seeds'])}); did not collapse: "
            f"{', '.join(map(str, results['never_collapsed'])) or 'none'}.",
        ]
    )


def factor_effects(results: Mapping[str, Any]) -> dict[str, tuple[MeanInterval, MeanInterval]]:
    """Estimate the effect of each factor, the mean over the levels of the others.

    Returns:
        {name of the factor: (the difference of the share of arms that pass, and of the last loss in nats per token)}.
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
    found = {}
    for name, pairs in levels.items():
        first, second = ([arm_name(*pair[side]) for pair in pairs] for side in (0, 1))
        passes = [mean_over([verdicts(results, arm, "passes") for arm in arms]) for arms in (first, second)]
        above = [mean_over([above_before(results, arm) for arm in arms]) for arms in (first, second)]
        found[name] = paired_difference(passes[0], passes[1]), paired_difference(above[0], above[1])
    return found


def format_factors(results: Mapping[str, Any]) -> str:
    """Format the effect of each factor."""
    rows = [
        [name, pages.format_interval(share, 2), pages.format_interval(loss)]
        for name, (share, loss) in factor_effects(results).items()
    ]
    return "The effect of each factor, the mean over the levels of the others, over seeds:\n\n" + pages.format_table(
        ["factor", "share of arms that pass", "last loss, nats per token"], rows
    )


def mean_over(rows: list[list[float]]) -> list[float]:
    """Return the mean of several lists, element by element."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize the odds of the restart and of the mean of 3 snapshots, and the effect of each factor."""
    arms = list(next(iter(results["seeds"].values())))
    others = [arm for arm in arms if arm not in (NOTHING, CLEAN)]
    best = max(others, key=lambda arm: sum(verdicts(results, arm, "passes")))
    shown = {
        "restarting from the last snapshot": RESTART,
        "from the mean of 3, everything else equal": arm_name("3", "restored", "none"),
        f"the most of {len(others)} arms, {best}": best,
    }
    found = [f"{name}, {format_odds(verdicts(results, arm, 'passes'))}" for name, arm in shown.items()]
    effects = [f"{name} {pages.format_interval(share, 2)}" for name, (share, _) in factor_effects(results).items()]
    return IndexRow(
        9,
        "Does a collapsed run recover from the mean of earlier snapshots?",
        "PMA, Section 4.5 and Fig. 7: it does, and follows the original trajectory",
        f"seeds that pass the spike: {'; '.join(found)}",
        f"share of arms that pass: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the training loss of the first collapsed seeds from shortly before the spike on: restart and N = 3."""
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
