"""The losses of a report on the part `report` of the held-out text, which no choice was made on.

Training, previews and sweeps evaluate on the part `select`, and the best merge and annealed branch are chosen by those
losses ("recorded" below). Here the stored snapshots are evaluated again, so that the choice does not flatter what was
chosen.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.config.errors import UserError, error_line
from pma_jax.data.sampling import REPORT, HeldOutLoss, Sample
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.trajectory import evaluate_pairs
from pma_jax.reporting.recorded import Curve, drop_nonfinite, merge_rows, preview_row
from pma_jax.runs.directory import Run
from pma_jax.runtime.formatting import format_text


@dataclasses.dataclass(frozen=True)
class _Judged:
    """Losses on the part `report`."""

    sample: Sample
    raw: dict[int, HeldOutLoss]  # tokens -> loss of the point snapshot there
    merges: dict[tuple[Cell, int], HeldOutLoss]  # (merge, tokens of its newest snapshot) -> loss
    forks: dict[str, dict[int, HeldOutLoss]]  # path of the fork -> tokens -> loss


def judge(run: Run, forks: Sequence[Run], recorded: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Replace the losses that `recorded_losses` returns by those on the part `report`.

    If that is not possible, because snapshots or the text are missing, all recorded losses are kept. The result has
    more keys: `merges`, a row for each merge at the horizon; `judged`, a sentence on the text of the losses; and
    `held_out`, how it was sampled, or None.
    """
    tokens, path_of = recorded["tokens"], {str(fork.path): fork for fork in forks}
    notes_on_merges: list[str] = []
    merges = merge_rows(run, tokens, recorded["raw_loss"], notes_on_merges, with_other_text=True)
    at_end = [(_merge_cell(row), tokens) for row in merges]
    previews = {
        text: [(_merge_cell(preview_row(text)), int(t)) for t, _ in curve]
        for text, curve in recorded["previews"].items()
    }
    pairs = [*at_end, *(pair for of_text in previews.values() for pair in of_text)]
    judged, reason = _evaluate_again(run, [path_of[a["path"]] for a in recorded["annealed"]], tokens, pairs)
    sentence = _describe_choice(judged.sample if judged else None, run.metadata.get("held_out"), reason)
    if judged is None:
        merges = merge_rows(run, tokens, recorded["raw_loss"], notes)
        return recorded | {"merges": merges, "judged": sentence, "held_out": None}
    notes += notes_on_merges
    rows = []
    for row, pair in zip(merges, at_end, strict=True):
        if pair in judged.merges:
            rows.append(row | dataclasses.asdict(judged.merges[pair]))
        else:
            notes.append(f"{row['text']} is left out: its snapshots are no longer there to evaluate")
    annealed = []
    for fork in recorded["annealed"]:
        losses = judged.forks[fork["path"]]
        annealed.append(
            fork | dataclasses.asdict(losses[tokens]) | {"curve": _as_curve(losses, after=fork["fork_tokens"])}
        )
    curves = {
        text: _as_curve({t: judged.merges[c, t] for c, t in of_text if (c, t) in judged.merges})
        for text, of_text in previews.items()
    }
    marks = [len(recorded["raw"]), *map(len, previews.values())]
    missing = sum(marks) - len(judged.raw) - sum(map(len, curves.values()))
    if missing > 0:
        notes.append(f"{missing} of {sum(marks)} marks are not in the curves: their snapshots are no longer there")
    return {
        "tokens": tokens,
        "judged": sentence,
        "held_out": judged.sample.describe(),
        "raw": _as_curve(judged.raw),
        "raw_loss": judged.raw[tokens].loss,
        "raw_standard_error": judged.raw[tokens].standard_error,
        "annealed": annealed,
        "merges": rows,
        "previews": {text: curve for text, curve in curves.items() if curve},
        "spikes": list(map(_without_losses, recorded["spikes"])),
    }


def _without_losses(spike: dict[str, Any]) -> dict[str, Any]:
    """Remove the losses that a rollback discarded: they are on other text than the curves."""
    went_back = spike["went_back"]
    return spike | {"went_back": went_back and went_back | {"set_aside": []}}


def _evaluate_again(
    run: Run, forks: Sequence[Run], tokens: int, merges: Sequence[tuple[Cell, int]]
) -> tuple[_Judged | None, str]:
    """Evaluate a run, its forks and its merges on the part `report`.

    Args:
        run: The run.
        forks: Its annealed forks.
        tokens: The horizon: the run and each fork are to have a point snapshot there.
        merges: Merges and the tokens of their newest snapshots. Those whose snapshots are gone are left out.

    Returns:
        The losses and an empty text; or None, and why the runs cannot be evaluated again.

    Raises:
        UserError: The held-out text of a fork is not that of the run.
    """
    points = {str(x.path): [s.tokens for s in x.of_kind("point")] for x in (run, *forks)}
    for x in (run, *forks):
        if tokens not in points[str(x.path)]:
            return None, f"{x.path.name} has no point snapshot at {tokens:,} tokens to evaluate again"
    evaluation = run.config.evaluation
    try:
        sample, *others = [read_sample_of_run(x, REPORT, evaluation) for x in (run, *forks)]
    except UserError as error:
        return None, error_line(error)
    for fork, other in zip(forks, others, strict=True):
        if other.digest != sample.digest:
            raise UserError(
                f"{fork.path} and {run.path} cannot be compared: their held-out text differs ({other.digest} and "
                f"{sample.digest})"
            )
    stored = {kind: {s.tokens for s in run.of_kind(kind)} for kind in SNAPSHOT_KINDS}
    there = [(cell, end) for cell, end in merges if end in stored[cell.kind]]
    raw = [(RAW, t) for t in points[str(run.path)]]
    evaluated = evaluate_pairs(run, sorted({*raw, *there}, key=lambda pair: pair[1]), REPORT, evaluation)
    of_forks = {}
    for fork in forks:
        pairs = [(RAW, t) for t in points[str(fork.path)]]
        of_forks[str(fork.path)] = {t: x for (_, t), x in evaluate_pairs(fork, pairs, REPORT, evaluation).items()}
    return _Judged(
        sample,
        {t: evaluated[RAW, t] for _, t in raw},
        {pair: evaluated[pair] for pair in there if pair in evaluated},
        of_forks,
    ), ""


def _describe_choice(sample: Sample | None, chosen_on: dict[str, Any] | None, reason: str) -> str:
    """Say on which text the report's losses are, and on which text its best merge and annealed branch were chosen.

    Args:
        sample: The text that judges, or None if losses are those that were recorded.
        chosen_on: How the text of the recorded losses was sampled, or None for runs of earlier versions.
        reason: Why `sample` is None.
    """
    if sample is None:
        return (
            "losses are those that training and sweeps recorded, and the best were chosen on the text that judges "
            f"them: {reason}"
        )
    judged = f"losses are on {format_text(sample.describe())}, with standard errors over documents"
    if chosen_on is None:
        return (
            f"{judged}; the best were chosen on the first held-out tokens in the order of names, as earlier versions "
            "evaluated, and documents of these may be among those that judge"
        )
    return f"{judged}; the best were chosen on {format_text(chosen_on)}"


def _merge_cell(row: dict[str, Any]) -> Cell:
    """Return the cell of a row of sweep.json."""
    return Cell(row["recipe"], row["window"], row["interval"], row["kind"])


def _as_curve(losses: dict[int, HeldOutLoss], after: int = -1) -> Curve:
    """Return the losses after a token count as a curve."""
    return drop_nonfinite([[tokens, losses[tokens].loss] for tokens in sorted(losses) if tokens > after])
