"""The page of the experiment: tables, the row of the index, and the figure.

All differences are of the loss of a merge of the trunk less that of an annealed model, so that a positive one says that
the annealing is better.
"""

from collections.abc import Mapping
from typing import Any

from pma_jax.evaluation.sweep import RAW
from pma_jax.reporting.drawing import to_png
from pma_jax.reporting.panels import Line, LinePanel, draw_lines, interval_line
from pma_jax.studies import pages
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.statistics import MeanEstimate, difference_over_documents, judge

TARGETS, COSINES = "targets", "cosines"  # keys of the results: runs that were planned for each horizon
POINTS, BLOCKS, BEST = "all points", "all block means", "the best merge"  # since the fork; keys of the results
OF_RUN = "the best merge of the run"  # of the snapshots since any fork: older ones than those of a short branch too
DECAYS = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1 - sqrt"}
WORDS = {"equal": "equal", "higher": "annealing is better", "lower": "merging is better", "not shown": "not shown"}


def of_branch(size: Mapping[str, Any], branch: Mapping[str, Any], model: str) -> MeanEstimate:
    """Estimate the loss of a model of the trunk (raw, or a merge since the fork) less that of a branch at its end."""
    end = str(branch["end"])
    text = {RAW.text: RAW.text, OF_RUN: best_of_run(size, branch["end"])} | branch["compared"]
    trunk = size["trunk"][end]
    ours = trunk["nats"][text[model]][end]
    return difference_over_documents(ours, branch["nats"][RAW.text][end], trunk["document_tokens"])


def best_of_run(size: Mapping[str, Any], end: int) -> str:
    """Return the best merge since any fork at a unit, chosen on `select`: the longest branch has all snapshots."""
    return max((b for b in size["branches"].values() if b["end"] == end), key=lambda b: b["length"])["compared"][BEST]


def of_target(size: Mapping[str, Any], horizon: str, which: str = TARGETS) -> tuple[str, MeanEstimate]:
    """Return the best merge of the run at a horizon, and its loss less that of the target, or of the cosine."""
    end, target = size["ends"][horizon], size[which][horizon]
    trunk, text = size["trunk"][str(end)], best_of_run(size, end)
    annealed = target["nats"][RAW.text][str(target["end"])]
    return text, difference_over_documents(trunk["nats"][text][str(end)], annealed, trunk["document_tokens"])


def branch_less_target(size: Mapping[str, Any], horizon: str) -> MeanEstimate | None:
    """Estimate the loss of a linear decay of the run over a quarter less that of the target; None without a branch."""
    end, target = size["ends"][horizon], size["targets"][horizon]
    branch = linear_branches(size).get((end, 4))
    if branch is None:
        return None
    ours, theirs = branch["nats"][RAW.text][str(end)], target["nats"][RAW.text][str(target["end"])]
    return difference_over_documents(ours, theirs, branch["document_tokens"])


def cosine_less_target(size: Mapping[str, Any], horizon: str) -> MeanEstimate:
    """Estimate the loss of the best cosine of a horizon less that of the best annealing."""
    cosine, target = (size[which][horizon] for which in (COSINES, TARGETS))
    ours, theirs = (of["nats"][RAW.text][str(of["end"])] for of in (cosine, target))
    return difference_over_documents(ours, theirs, target["document_tokens"])


def linear_branches(size: Mapping[str, Any]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the branches with a linear decay by their end, in units, and which part of it they take (4: a quarter)."""
    linear = [branch for branch in size["branches"].values() if branch["shape"] == "linear"]
    return {(branch["end"], branch["end"] // branch["length"]): branch for branch in linear}


def report(results: dict[str, Any]) -> str:
    """Format, for each size, merging against every branch, against the best annealing, and inside the annealing."""
    margin, parts = results["made"]["margin"], []
    for name, size in results["sizes"].items():
        parts += [f"### {name}", format_branches(size, margin), format_targets(size, margin)]
        parts += [format_paid(size), format_inside(size)]
    return "\n\n".join(parts)


def format_branches(size: Mapping[str, Any], margin: float) -> str:
    """Format the differences of every branch from its trunk, and what is shown of the best merge."""
    branches = list(size["branches"].values())
    models = (RAW.text, POINTS, BLOCKS, BEST, OF_RUN)
    found = {model: [of_branch(size, branch, model) for branch in branches] for model in models}
    verdicts = {model: judge(found[model], margin) for model in models}
    rows = []
    for i, branch in enumerate(branches):
        share = branch["length"] / branch["end"]
        merged = branch["compared"][BEST]
        rows.append(
            [
                pages.format_tokens(size, branch["end"]),
                f"{DECAYS[branch['shape']]}, {pages.format_tokens(size, branch['length'])} ({share:.0%})",
                *(pages.format_interval(found[model][i].interval()) for model in (RAW.text, POINTS, BLOCKS)),
                f"{pages.format_interval(found[BEST][i].interval())} ({merged})",
                WORDS[verdicts[BEST][i]],
                f"{pages.format_interval(found[OF_RUN][i].interval())} ({best_of_run(size, branch['end'])})",
                WORDS[verdicts[OF_RUN][i]],
            ]
        )
    header = ["end", "decay", "raw", POINTS, BLOCKS, f"{BEST} since the fork"]
    header += ["it against the branch", OF_RUN, "it against the branch"]
    return pages.format_table(header, rows) + (
        "\n\nLoss of the trunk's model less that of the branch, nats per token, with 95% intervals over seeds and "
        "documents; positive: annealing is better. Merges are of the trunk's snapshots over the tokens of the decay; "
        "the best merge of the run may have older ones too, of half of its tokens, which cost nothing more. Both were "
        "chosen on the part `select`, on the same seeds. Each of the two columns of words is tested over all rows, "
        f"equal within {margin:g} nats and different, each with at most 5% false findings (Benjamini and Hochberg)."
    )


def format_targets(size: Mapping[str, Any], margin: float) -> str:
    """Format the difference of the best merge of half of the tokens from the best annealing that ends there."""
    estimates: dict[tuple[str, str], MeanEstimate] = {}
    for horizon in size["ends"]:
        estimates[horizon, "merge"] = of_target(size, horizon)[1]
        estimates[horizon, "than cosine"] = of_target(size, horizon, COSINES)[1]
        estimates[horizon, "cosine"] = cosine_less_target(size, horizon)
        if own := branch_less_target(size, horizon):
            estimates[horizon, "branch"] = own
    said = dict(zip(estimates, pages.describe_differences(list(estimates.values()), margin), strict=True))
    lines = []
    for horizon in size["ends"]:
        own = said.get((horizon, "branch"))
        branch = f" The run's own branch, a decay over a quarter: {own}." if own else ""
        lines.append(
            f"- {horizon} of the tokens, {of_target(size, horizon)[0]}: {said[horizon, 'merge']}.{branch} The merge, "
            f"against the cosine: {said[horizon, 'than cosine']}. The cosine, against the best annealing: "
            f"{said[horizon, 'cosine']}."
        )
    return (
        "The best merge of the second half of the snapshots, against the best annealing that ends at the same tokens, "
        "with its own rate, batch, length and shape, and against the best cosine over all of the tokens, with its own "
        "rate and batch ([annealing](../annealing/README.md)). These differences are tested together, with at most 5% "
        "false findings:\n\n" + "\n".join(lines)
    )


def paid(size: Mapping[str, Any]) -> dict[str, list[tuple[int, list[float]]]]:
    """Return what a model at each horizon costs in several ways: units trained until then, and the loss of each seed.

    All branches and runs count that were trained for the earlier horizons too.
    """
    ends = list(size["ends"].values())
    by_shape = linear_branches(size)
    trunk = {end: size["trunk"][str(end)] for end in ends}
    merged = [
        (end, pages.seed_losses(trunk[end], of_target(size, horizon)[0], end)) for horizon, end in size["ends"].items()
    ]
    ways = {"merging": merged}
    for divisor in (8, 4, 2):
        if all((end, divisor) in by_shape for end in ends):
            branches = [by_shape[end, divisor] for end in ends]
            losses = [pages.seed_losses(branch, RAW.text, branch["end"]) for branch in branches]
            earlier = [sum(branch["length"] for branch in branches[:i]) for i in range(len(branches))]
            ways[f"decays over 1/{divisor}"] = [
                (end + more, loss) for end, more, loss in zip(ends, earlier, losses, strict=True)
            ]
    for divisor in (4, 2):
        if (ends[-1], divisor) in by_shape:
            last = pages.seed_losses(by_shape[ends[-1], divisor], RAW.text, ends[-1])
            ways[f"merging, last decay over 1/{divisor}"] = [*merged[:-1], (ends[-1], last)]
    for way, planned in (("the best annealing, runs for each", TARGETS), ("cosine runs of each length", COSINES)):
        losses = [pages.seed_losses(of, RAW.text, of["end"]) for of in size[planned].values()]
        ways[way] = [(sum(ends[: i + 1]), of) for i, of in enumerate(losses)]
    return ways


def format_paid(size: Mapping[str, Any]) -> str:
    """Format the tokens and the losses of several ways to have a model at each horizon."""
    rows = [
        [way, *(f"{pages.format_tokens(size, units)}: {pages.format_mean(losses)}" for units, losses in points)]
        for way, points in paid(size).items()
    ]
    return (
        "Tokens that were trained to have a model at each horizon, those of all runs and branches until then, and its "
        "loss (± over seeds):\n\n" + pages.format_table(["way", *size["ends"]], rows)
    )


def inside(size: Mapping[str, Any], branch: Mapping[str, Any]) -> dict[int, dict[str, MeanEstimate]]:
    """Estimate the loss of each merge of a branch's own snapshots less that of its end: {unit: {merge: estimate}}."""
    final = branch["nats"][RAW.text][str(branch["end"])]
    found: dict[int, dict[str, MeanEstimate]] = {}
    for text, at in branch["nats"].items():
        for end, nats_SD in at.items():
            estimate = difference_over_documents(nats_SD, final, branch["document_tokens"])
            found.setdefault(int(end), {})[text] = estimate
    return found


def format_inside(size: Mapping[str, Any]) -> str:
    """Format the merges of the snapshots of the branches over the last quarter, at each quarter of the decay."""
    rows, texts = [], []
    for branch in size["branches"].values():
        found = inside(size, branch)
        if len(found) < 2:
            continue
        texts = list(branch["nats"])
        for end, of_end in sorted(found.items()):
            done = 1 - (branch["end"] - end) / branch["length"]
            cells = [pages.format_interval(of_end[t].interval()) if t in of_end else "" for t in texts]
            if end == branch["end"]:
                cells[texts.index(RAW.text)] = "0"
            rows.append([DECAYS[branch["shape"]], f"{done:.0%}", *cells])
    return (
        "Merging inside the annealing, over the last quarter of the tokens: loss of each model of the branch less that "
        "at its end.\n\n" + pages.format_table(["decay", "of it done", *texts], rows)
    )


def summarize(results: dict[str, Any]) -> IndexRow:
    """Summarize against which lengths merging is as good as annealing at the end of each size."""
    margin, verdicts, effects = results["made"]["margin"], [], []
    for name, size in results["sizes"].items():
        branches = list(size["branches"].values())
        said = judge([of_branch(size, branch, OF_RUN) for branch in branches], margin)
        at_end = [
            (branch, verdict)
            for branch, verdict in zip(branches, said, strict=True)
            if branch["end"] == size["ends"]["all"] and branch["shape"] == "linear"
        ]
        groups: dict[str, list[str]] = {}
        for branch, verdict in sorted(at_end, key=lambda pair: pair[0]["length"]):
            groups.setdefault(WORDS[verdict], []).append(f"1/{branch['end'] // branch['length']}")
        found = "; ".join(f"{words} for {', '.join(shares)}" for words, shares in groups.items())
        verdicts.append(f"{name}: {found}")
        effects.append(f"{name}: {pages.format_interval(of_target(size, 'all')[1].interval())} nats")
    return IndexRow(
        2,
        "Does merging replace annealing?",
        "PMA, Fig. 3, and WSM: it does; Ajroldi et al. and Nemotron: over short horizons only",
        "at the end, the best merge of half of the tokens against linear decays of the same run over their last part: "
        + ". ".join(verdicts),
        f"best merge − best annealing (a run of its own, tuned), at the end: {'; '.join(effects)}",
    )


def draw(results: dict[str, Any]) -> dict[str, bytes]:
    """Draw the differences of merges from branches against the length of the branch."""
    panels, pareto = [], []
    for name, size in results["sizes"].items():
        lines = [
            Line(way, [units * size["unit_tokens"] / 1e6 for units, _ in points], [sum(x) / len(x) for _, x in points])
            for way, points in paid(size).items()
        ]
        pareto.append(LinePanel(f"{name}: held-out loss", "tokens trained, millions", lines, log_x=True))
        for horizon, end in size["ends"].items():
            group = [b for b in size["branches"].values() if b["end"] == end and b["shape"] == "linear"]
            group.sort(key=lambda branch: branch["length"])
            shares = [branch["length"] / end for branch in group]
            lines = [
                interval_line(model, shares, [of_branch(size, branch, model).interval() for branch in group])
                for model in (POINTS, BLOCKS, BEST, OF_RUN)
            ]
            title = f"{name}, {horizon}: merged − annealed, nats"
            x = "length of the decay, share of the tokens"
            panels.append(LinePanel(title, x, lines, zero_line=True, log_x=True))
    return {"figure.png": to_png(draw_lines(panels)), "tokens.png": to_png(draw_lines(pareto, columns=1))}
