"""What a report reads from run directories: the losses that training and `pma sweep` recorded, and loss spikes."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS, WORKER_PREFIX
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import read_sweep
from pma_jax.runs.directory import Run, read_metric_records
from pma_jax.training import rollback

Curve = list[list[float]]  # [tokens, loss] pairs, in order of tokens
LOSS_TOLERANCE_NATS = 1e-3  # the raw losses of sweep and run may differ by this: devices round differently
SPIKE_KEYS = ("onset_tokens", "tokens", "verdict", "loss", "peak_loss", "median_loss", "spread_nats")
by_select_loss: Callable[[Any], float] = operator.itemgetter("select_loss")  # of a merge or an annealed branch


def spike_rows(run: Run) -> list[dict[str, Any]]:
    """Return one row per loss spike, in order of onset: its measurements, and the rollback that it caused, or None.

    The key of the rollback is `went_back`. It describes the merge that the run restarted from (`recipe`, number of
    `snapshots`, `tokens`), how the `optimizer` state was set, whether data was skipped (`passes_over_data`), the number
    of the `attempt`, and the held-out losses that it discarded (`set_aside`).
    """
    rows = [{key: r[key] for key in SPIKE_KEYS} | {"went_back": None} for r in run.metrics if r["kind"] == "spike"]
    for event in rollback.events(run):
        records = read_metric_records(run.path / rollback.FOLDER / str(event["number"]) / "metrics.jsonl")
        went_back = {
            "tokens": event["tokens"],
            "recipe": event["recipe"],
            "snapshots": len(event["merged"]),
            "optimizer": event["optimizer"],
            "passes_over_data": event["position"] != event["position_there"],
            "attempt": event["attempt"],
            "set_aside": drop_nonfinite([[r["tokens"], r["loss"]] for r in records if r["kind"] == "evaluation"]),
        }
        rows.append({key: event["spike"][key] for key in SPIKE_KEYS} | {"went_back": went_back})
    return sorted(rows, key=lambda row: (row["onset_tokens"], row["tokens"]))


def _check_comparable(run: Run, forks: Sequence[Run]) -> None:
    """Check that `forks` are forks, of a run that is not annealed, on the same corpus.

    Raises:
        UserError: They are not.
    """
    if forks and run.config.schedule.is_annealed:
        raise UserError(
            f"the learning rate of {run.path} is annealed ({run.config.schedule.decay}): give the constant-rate "
            "run first, then the runs forked from it"
        )
    for fork in forks:
        if fork.metadata.get("forked_from") is None:
            raise UserError(f"{fork.path} is not a fork: after the run, give runs made by `pma fork {run.path}`")
        expected, actual = run.metadata.get("corpus"), fork.metadata.get("corpus")
        if expected != actual:
            raise UserError(
                f"{fork.path} and {run.path} cannot be compared: their corpus differs ({actual} and {expected})"
            )


def recorded_losses(run: Run, forks: Sequence[Run], notes: list[str], with_other_text: bool = False) -> dict[str, Any]:
    """Return the losses that training and `pma sweep` recorded.

    Args:
        run: The run.
        forks: Its forks.
        notes: Says afterwards which forks, marks and merges are left out, and why.
        with_other_text: Whether to include losses on other held-out text than that of the newest mark of the run. They
            say which snapshots and merges to evaluate again, but are not comparable.

    Returns:
        `tokens` of the raw model, its `raw_loss` and `raw_standard_error`; the curves `raw`, `previews` and `workers`;
        a row for each merge at the horizon (`merges`), annealed fork (`annealed`, the lowest loss first) and loss
        spike (`spikes`).

    Raises:
        UserError: The run has no evaluations or diverged, or a fork cannot be compared with it; the message has both
            digests if its text differs.
    """
    raw = _curve(run, "evaluation", with_other_text)
    if not raw:
        raise UserError(f"{run.path} has no held-out evaluations: train it to its first snapshot, then report again")
    tokens, raw_loss = int(raw[-1][0]), raw[-1][1]
    if not math.isfinite(raw_loss):
        raise UserError(f"{run.path} diverged: its held-out loss at {tokens:,} tokens is {raw_loss}")
    _check_comparable(run, forks)
    if not with_other_text:
        _check_text_of_forks(run, forks)
        notes += _describe_other_text(run)
    return {
        "tokens": tokens,
        "raw": drop_nonfinite(raw),
        "raw_loss": raw_loss,
        "raw_standard_error": None,
        "annealed": _describe_annealed_forks(forks, tokens, notes, with_other_text),
        "previews": _preview_curves(run, with_other_text),
        "workers": _worker_curves(run, with_other_text),
        "merges": _merge_rows(run, tokens, raw_loss, notes, with_other_text),
        "spikes": spike_rows(run),
    }


def text_of_marks(run: Run) -> str | None:
    """Return the digest of the held-out text of the run's newest evaluation.

    Early versions recorded it for the run, and not for each evaluation.
    """
    text = next((r.get("text") for r in run.metrics[::-1] if r["kind"] == "evaluation"), None)
    return text or run.metadata.get("evaluation")


def text_of_sweep(run: Run) -> str | None:
    """Return the digest of the held-out text of sweep.json; None if there is no file, or an early version wrote it."""
    return ((read_sweep(run) or {}).get("held_out") or {}).get("digest")


def _check_text_of_forks(run: Run, forks: Sequence[Run]) -> None:
    expected = text_of_marks(run)
    for fork in forks:
        if (actual := text_of_marks(fork)) != expected:
            raise UserError(
                f"{fork.path} and {run.path} cannot be compared: their held-out text differs ({actual} and {expected})"
            )


def _is_on_text(run: Run, record: dict[str, Any], text: str | None) -> bool:
    return record.get("text", run.metadata.get("evaluation")) == text


def _describe_other_text(run: Run) -> list[str]:
    """Return a note if marks are left out because their held-out text is not that of the newest mark."""
    text = text_of_marks(run)
    marks = [r for r in run.metrics if r["kind"] in ("evaluation", "preview")]
    others = [r for r in marks if not _is_on_text(run, r, text)]
    digests = dict.fromkeys(str(r.get("text", run.metadata.get("evaluation"))) for r in others)
    return [
        f"{len(others)} of {len(marks)} marks are left out: their held-out text is {', '.join(digests)}, that of the "
        f"newest is {text}"
    ] * bool(others)


def _curve(run: Run, kind: str, with_other_text: bool) -> Curve:
    # If several records have the same tokens, the last one is used.
    text = text_of_marks(run)
    records = [r for r in run.metrics if r["kind"] == kind and (with_other_text or _is_on_text(run, r, text))]
    losses = {r["tokens"]: r["loss"] for r in records}
    return [[tokens, losses[tokens]] for tokens in sorted(losses)]


def _worker_curves(run: Run, with_other_text: bool) -> dict[str, Curve]:
    """Return the curve of each worker of `replicas` whose snapshots the run evaluates, by kind of snapshot."""
    text = text_of_marks(run)
    curves: dict[str, dict[int, float]] = {}
    for record in run.metrics:
        if record["kind"] == "worker" and (with_other_text or _is_on_text(run, record, text)):
            curves.setdefault(f"{WORKER_PREFIX}{record['worker']}", {})[record["tokens"]] = record["loss"]
    return {kind: drop_nonfinite([[t, losses[t]] for t in sorted(losses)]) for kind, losses in curves.items()}


def drop_nonfinite(curve: Curve) -> Curve:
    """Leave out the points whose loss is not finite."""
    return [[tokens, loss] for tokens, loss in curve if math.isfinite(loss)]


def _preview_curves(run: Run, with_other_text: bool) -> dict[str, Curve]:
    losses: dict[str, dict[int, float]] = {}
    text = text_of_marks(run)
    for record in run.metrics:
        if record["kind"] == "preview" and (with_other_text or _is_on_text(run, record, text)):
            losses.setdefault(record["recipe"], {})[record["tokens"]] = record["loss"]
    curves = {recipe: drop_nonfinite([[t, at[t]] for t in sorted(at)]) for recipe, at in losses.items()}
    return {recipe: curves[recipe] for recipe in sorted(curves, key=_parse_recipe_and_window) if curves[recipe]}


def _parse_recipe_and_window(text: str) -> tuple[str, int]:
    recipe, _, window = text.rpartition(":")
    return (recipe, int(window)) if window.isdigit() else (text, 0)


def _describe_annealed_forks(
    forks: Sequence[Run], tokens: int, notes: list[str], with_other_text: bool
) -> list[dict[str, Any]]:
    """Describe the annealed forks evaluated at `tokens`, lowest loss first; append a note for each other fork."""
    annealed = []
    for fork in forks:
        schedule, origin = fork.config.schedule, fork.metadata["forked_from"]
        points = _curve(fork, "evaluation", with_other_text)
        curve = drop_nonfinite([point for point in points if point[0] > origin["tokens"]])
        if not schedule.is_annealed:
            notes.append(f"{fork.path.name} is left out: its learning rate is not annealed")
        elif not curve or curve[-1][0] != tokens:
            last = f"{int(curve[-1][0]):,}" if curve else "no"
            notes.append(f"{fork.path.name} is left out: it was evaluated to {last} tokens, the run to {tokens:,}")
        else:
            annealed.append(
                {
                    "run": fork.path.name,
                    "path": str(fork.path),
                    "loss": curve[-1][1],
                    "standard_error": None,
                    "select_loss": curve[-1][1],
                    "fork_tokens": origin["tokens"],
                    "annealing": {
                        "shape": schedule.decay,
                        "start_tokens": schedule.decay_start_tokens,
                        "peak_rate": schedule.peak_rate,
                        "final_rate": schedule.final_rate,
                    },
                    "config_digest": configuration.digest(fork.config),
                    "curve": curve,
                }
            )
    return sorted(annealed, key=by_select_loss)


def _merge_rows(
    run: Run, tokens: int, raw_loss: float, notes: list[str], with_other_text: bool
) -> list[dict[str, Any]]:
    """Return one row per merge at the horizon: from sweep.json, or from the last previews if it cannot be used."""
    sweep, rows = read_sweep(run), None
    if sweep is not None:
        sweep_text, text = text_of_sweep(run) or _early_text_of_sweep(run, sweep), text_of_marks(run)
        is_other_text = sweep_text != text
        if is_other_text and not with_other_text:
            notes.append(
                f"sweep.json is left out: its held-out text is {sweep_text or 'not recorded'}, that of the run's marks "
                f"{text}"
            )
        elif sweep["tokens"] != tokens:
            notes.append(
                f"sweep.json is from {sweep['tokens']:,} tokens, the run has {tokens:,}: run `pma sweep` again"
            )
        elif (
            not is_other_text
            and sweep["raw_loss"] is not None
            and abs(sweep["raw_loss"] - raw_loss) > LOSS_TOLERANCE_NATS
        ):
            notes.append(
                f"sweep.json is left out: its raw loss is {sweep['raw_loss']:.4f}, that of the run {raw_loss:.4f}"
            )
        else:
            rows = sweep["rows"]
    if rows is None:
        rows = _last_preview_rows(run, tokens, with_other_text)
    kept = [row for row in rows if math.isfinite(row["loss"])]
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} merges are left out: their loss is not finite")
    return [
        {key: row[key] for key in ("text", "recipe", "window", "interval", "kind", "loss")}
        | {"standard_error": row.get("standard_error"), "select_loss": row["loss"]}
        for row in kept
    ]


def _early_text_of_sweep(run: Run, sweep: dict[str, Any]) -> str | None:
    """Return the text of a sweep.json without digest: early versions evaluated it on the text that run.json records."""
    is_early = "held_out" not in sweep and "held_out" not in run.metadata
    return run.metadata.get("evaluation") if is_early else None


def _last_preview_rows(run: Run, tokens: int, with_other_text: bool) -> list[dict[str, Any]]:
    curves = _preview_curves(run, with_other_text)
    return [preview_row(text) | {"loss": curve[-1][1]} for text, curve in curves.items() if curve[-1][0] == tokens]


def preview_row(text: str) -> dict[str, Any]:
    """Return the keys of a row of sweep.json that describe the merge of a preview."""
    prefix = SNAPSHOT_KINDS["block_mean"].label_prefix
    kind = "block_mean" if text.startswith(prefix) else "point"
    recipe, window = _parse_recipe_and_window(text.removeprefix(prefix))
    return {"text": text, "recipe": recipe, "window": window, "interval": 1, "kind": kind}
