"""The losses of a report on the part `report` of the held-out text, which no choice was made on.

Training, previews and sweeps evaluate on the part `select`, and the best merge and annealed branch are chosen by those
losses ("recorded" below). Here the stored snapshots are evaluated again, so that the choice does not flatter what was
chosen. If the recorded losses are on several texts, as those of earlier versions may be, the part `select` is evaluated
again too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.config.errors import UserError, error_line
from pma_jax.data.sampling import REPORT, SELECT, HeldOutLoss, Sample
from pma_jax.evaluation.held_out import read_sample_of_run
from pma_jax.evaluation.sweep import RAW, Cell, read_sweep
from pma_jax.evaluation.trajectory import evaluate_pairs
from pma_jax.reporting.recorded import (
    Curve,
    by_select_loss,
    drop_nonfinite,
    preview_row,
    recorded_losses,
    text_of_marks,
    text_of_sweep,
)
from pma_jax.runs.directory import Run
from pma_jax.runtime.formatting import format_text

Pair = tuple[Cell, int]  # a merge and the tokens of its newest snapshot
_FORK_END = "fork"  # key of the loss of a fork at the horizon: (_FORK_END, its path)


@dataclasses.dataclass(frozen=True)
class _Judged:
    """Losses on the part `report`, and those by which to choose if the recorded ones are not all on one text."""

    sample: Sample
    chosen_on: Sample
    raw: dict[int, HeldOutLoss]  # tokens -> loss of the point snapshot there
    workers: dict[str, dict[int, HeldOutLoss]]  # kind of a worker's snapshots -> tokens -> loss
    merges: dict[Pair, HeldOutLoss]
    forks: dict[str, dict[int, HeldOutLoss]]  # path of the fork -> tokens -> loss
    select_losses: dict[Pair | tuple[str, str], float] | None  # of merges and forks; None to choose by recorded losses


def judge(run: Run, forks: Sequence[Run], notes: list[str]) -> dict[str, Any]:
    """Return what `recorded_losses` does, with the losses on the part `report` instead of the recorded ones.

    If that is not possible, because snapshots or the text are missing, all recorded losses are kept. The result has
    more keys: `judged`, a sentence on the text of the losses; and `held_out`, how it was sampled, or None.

    Raises:
        UserError: The run has no evaluations or diverged, or a fork cannot be compared with it.
    """
    notes_on_merges: list[str] = []
    recorded = recorded_losses(run, forks, notes_on_merges, with_other_text=True)
    tokens, path_of = recorded["tokens"], {str(fork.path): fork for fork in forks}
    at_end = [(_merge_cell(row), tokens) for row in recorded["merges"]]
    previews = {
        text: [(_merge_cell(preview_row(text)), int(t)) for t, _ in curve]
        for text, curve in recorded["previews"].items()
    }
    pairs = [pair for of_text in previews.values() for pair in of_text]
    judged, reason = _evaluate_again(run, [path_of[a["path"]] for a in recorded["annealed"]], tokens, at_end, pairs)
    sentence = _describe_choice(judged, reason)
    if judged is None:
        return recorded_losses(run, forks, notes) | {"judged": sentence, "held_out": None}
    notes += notes_on_merges
    chosen_by = judged.select_losses or {}
    rows = []
    for row, pair in zip(recorded["merges"], at_end, strict=True):
        if pair in judged.merges:
            select_loss = chosen_by.get(pair, row["select_loss"])
            rows.append(row | dataclasses.asdict(judged.merges[pair]) | {"select_loss": select_loss})
        else:
            notes.append(f"{row['text']} is left out: its snapshots are no longer there to evaluate")
    annealed = []
    for fork in recorded["annealed"]:
        losses = judged.forks[fork["path"]]
        judged_values = dataclasses.asdict(losses[tokens]) | {"curve": _as_curve(losses, after=fork["fork_tokens"])}
        select_loss = chosen_by.get((_FORK_END, fork["path"]), fork["select_loss"])
        annealed.append(fork | judged_values | {"select_loss": select_loss})
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
        "annealed": sorted(annealed, key=by_select_loss),
        "merges": rows,
        "previews": {text: curve for text, curve in curves.items() if curve},
        "workers": {kind: _as_curve(losses) for kind, losses in judged.workers.items()},
        "spikes": list(map(_without_losses, recorded["spikes"])),
    }


def _without_losses(spike: dict[str, Any]) -> dict[str, Any]:
    """Remove the losses that a rollback discarded: they are on other text than the curves."""
    went_back = spike["went_back"]
    return spike | {"went_back": went_back and went_back | {"set_aside": []}}


def _evaluate_again(
    run: Run, forks: Sequence[Run], tokens: int, at_end: Sequence[Pair], previews: Sequence[Pair]
) -> tuple[_Judged | None, str]:
    """Evaluate a run, its forks and its merges on the part `report`.

    Args:
        run: The run.
        forks: Its annealed forks.
        tokens: The horizon: the run and each fork are to have a point snapshot there.
        at_end: The merges at the horizon, of which the best is chosen. Those whose snapshots are gone are left out.
        previews: Merges at other tokens.

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
        chosen_on = read_sample_of_run(run, SELECT, evaluation)
    except UserError as error:
        return None, error_line(error)
    for fork, other in zip(forks, others, strict=True):
        if other.digest != sample.digest:
            raise UserError(
                f"{fork.path} and {run.path} cannot be compared: their held-out text differs ({other.digest} and "
                f"{sample.digest})"
            )
    stored = {kind: {s.tokens for s in run.of_kind(kind)} for kind in SNAPSHOT_KINDS}
    there = [(cell, end) for cell, end in [*at_end, *previews] if end in stored[cell.kind]]
    raw = [(RAW, t) for t in points[str(run.path)]]
    evaluated = evaluate_pairs(run, sorted({*raw, *there}, key=lambda pair: pair[1]), REPORT, evaluation)
    of_workers = {}
    for kind in run.worker_kinds:
        pairs = [(dataclasses.replace(RAW, kind=kind), s.tokens) for s in run.of_kind(kind)]
        of_workers[kind] = {t: x for (_, t), x in evaluate_pairs(run, pairs, REPORT, evaluation).items()}
    of_forks = {}
    for fork in forks:
        pairs = [(RAW, t) for t in points[str(fork.path)]]
        of_forks[str(fork.path)] = {t: x for (_, t), x in evaluate_pairs(fork, pairs, REPORT, evaluation).items()}
    return _Judged(
        sample,
        chosen_on,
        {t: evaluated[RAW, t] for _, t in raw},
        of_workers,
        {pair: evaluated[pair] for pair in there if pair in evaluated},
        of_forks,
        _select_losses(run, forks, [pair for pair in at_end if pair in evaluated], tokens, chosen_on.digest),
    ), ""


def _select_losses(
    run: Run, forks: Sequence[Run], merges: Sequence[Pair], tokens: int, text: str
) -> dict[Pair | tuple[str, str], float] | None:
    """Evaluate merges and forks at the horizon on the part `select`, unless all recorded losses are on it already."""
    texts = {text_of_marks(x) for x in (run, *forks)} | ({text_of_sweep(run)} if read_sweep(run) else set())
    if texts == {text}:
        return None
    evaluation = run.config.evaluation
    of_merges = evaluate_pairs(run, merges, SELECT, evaluation)
    of_forks = {
        (_FORK_END, str(fork.path)): evaluate_pairs(fork, [(RAW, tokens)], SELECT, evaluation)[RAW, tokens]
        for fork in forks
    }
    return {key: evaluated.loss for key, evaluated in (of_merges | of_forks).items()}


def _describe_choice(judged: _Judged | None, reason: str) -> str:
    """Say on which text the report's losses are, and on which text its best merge and annealed branch were chosen.

    Args:
        judged: The losses on the text that judges, or None if losses are those that were recorded.
        reason: Why `judged` is None.
    """
    if judged is None:
        return (
            "losses are those that training and sweeps recorded, and the best were chosen on the text that judges "
            f"them: {reason}"
        )
    return (
        f"losses are on {format_text(judged.sample.describe())}, with standard errors over documents; the best were "
        f"chosen on {format_text(judged.chosen_on.describe())}"
    )


def _merge_cell(row: dict[str, Any]) -> Cell:
    """Return the cell of a row of sweep.json."""
    return Cell(row["recipe"], row["window"], row["interval"], row["kind"])


def _as_curve(losses: dict[int, HeldOutLoss], after: int = -1) -> Curve:
    """Return the losses after a token count as a curve."""
    return drop_nonfinite([[tokens, losses[tokens].loss] for tokens in sorted(losses) if tokens > after])
