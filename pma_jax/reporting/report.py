"""Report on a run at a constant learning rate and the runs forked from it: report.json, report.png and report.html.

The raw model has the parameters of the run at its horizon, which is its last evaluation. An annealed model is the end
of a fork whose learning rate decays. Losses are nats per token on the same held-out text for all models, and positions
are tokens seen since the start of training. The share that a merge recovers is (raw - merged) / (raw - annealed): 0 for
the raw model, 1 for the annealed one.
"""

import json
import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from pma_jax import config as configuration
from pma_jax.analysis.comparison import recovered_share
from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.config.errors import UserError
from pma_jax.evaluation.sweep import read_sweep
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting import html
from pma_jax.reporting.commands import reproduction_commands
from pma_jax.reporting.drawing import DARK, LIGHT, PAGE_DPI, to_png
from pma_jax.reporting.report_figure import draw_report
from pma_jax.runs.directory import Run, read_metric_records
from pma_jax.runtime.formatting import align_columns
from pma_jax.runtime.mesh import AXES
from pma_jax.storage import atomic
from pma_jax.storage.paths import absolute_path
from pma_jax.training import rollback

_loss = operator.itemgetter("loss")

Report = dict[str, Any]
Curve = list[list[float]]  # [tokens, loss] pairs, in order of tokens
SWEEP_ROW_DEFAULTS = {"interval": 1, "kind": "point"}  # for rows of sweep.json without these keys
LOSS_TOLERANCE_NATS = 1e-3  # the raw losses of sweep and run may differ by this: devices round differently
SPIKE_KEYS = ("onset_tokens", "tokens", "verdict", "loss", "peak_loss", "median_loss", "spread_nats")


def build_report(run: Run, forks: Sequence[Run]) -> Report:
    """Compare a run and its merges at its horizon with its annealed forks.

    If there are several annealed forks, the recovered shares refer to the one with the lowest loss, which gives the
    smallest shares. `notes` in the result states which forks and merges were omitted, and why.

    Raises:
        UserError: The run has no evaluations or diverged, or a fork cannot be compared with it.
    """
    raw = _curve(run, "evaluation")
    if not raw:
        raise UserError(f"{run.path} has no held-out evaluations: train it to its first snapshot, then report again")
    tokens, raw_loss = int(raw[-1][0]), raw[-1][1]
    if not math.isfinite(raw_loss):
        raise UserError(f"{run.path} diverged: its held-out loss at {tokens:,} tokens is {raw_loss}")
    _check_comparable(run, forks)
    notes: list[str] = []
    annealed = _describe_annealed_forks(forks, tokens, notes)
    best = annealed[0] if annealed else None
    annealed_loss = best["loss"] if best else None
    if annealed_loss is not None and annealed_loss >= raw_loss:
        notes.append("annealing did not lower the loss, so there is no gain to recover and there are no shares")
    merges = _merge_rows(run, tokens, raw_loss, annealed_loss, notes)
    plain = [m for m in merges if m["kind"] == "point" and m["interval"] == 1]
    best_sma = min((m for m in plain if m["recipe"] == "sma"), key=_loss, default=None)
    best_block = min((m for m in merges if m["kind"] == "block_mean"), key=_loss, default=None)
    previews = _preview_curves(run)
    report: Report = {
        "run": run.path.name,
        "tokens": tokens,
        "raw_loss": raw_loss,
        "annealed_loss": annealed_loss,
        "merged_loss": {m["text"]: m["loss"] for m in merges},
        "recovered_share": best_sma["recovered_share"] if best_sma else None,
        "tokens_saved": tokens - best["fork_tokens"] if best else None,
        "best_sma": _select_fields(best_sma),
        "best_merge": _select_fields(min(merges, key=_loss, default=None)),
        "best_block_merge": _select_fields(best_block),
        "block_points_gained": _share_difference(best_block, best_sma),  # a fraction; may be negative
        "recovered_shares": {m["text"]: m["recovered_share"] for m in merges},
        "fork_tokens": best["fork_tokens"] if best else None,
        "annealing": best["annealing"] if best else None,
        **_summarize_previews(previews, raw),
    }
    report["finding"] = _format_finding(report)
    return report | {
        "notes": notes,
        "spikes": spike_rows(run),
        "merges": merges,
        "annealed_runs": [{k: v for k, v in a.items() if k != "curve"} for a in annealed],
        "parameters": _parameter_count(run),
        "tokenizer": run.config.data.tokenizer,
        "snapshot_interval_tokens": run.config.checkpoint.interval_tokens,
        "corpus_digest": run.metadata.get("corpus"),
        "evaluation_digest": run.metadata.get("evaluation"),
        "config_digest": configuration.digest(run.config),
        "versions": dict(sorted(run.metadata.get("versions", {}).items())),
        "commands": reproduction_commands(run, forks, merges),
        "curves": {"raw": _drop_nonfinite(raw), "annealed": best["curve"] if best else [], "previews": previews},
    }


def write_report(report: Report, run: Run, folder: epath.PathLike | None = None) -> list[epath.Path]:
    """Write report.png, report.html and report.json, each atomically.

    Args:
        report: The result of `build_report`.
        run: The run of the report; the page shows its configuration.
        folder: Directory to write to, created if missing; the run's own if None.

    Returns:
        The paths written: JSON, PNG, HTML.
    """
    target = absolute_path(folder) if folder is not None else run.path
    target.mkdir(parents=True, exist_ok=True)
    light, dark = (to_png(draw_report(report, theme), PAGE_DPI) for theme in (LIGHT, DARK))
    page = html.render_page(report, configuration.to_json(run.config), light, dark)
    # JSON last: if report.json exists, the report is complete.
    atomic.write_bytes(target / "report.png", light)
    atomic.write_bytes(target / "report.html", page.encode())
    atomic.write_bytes(target / "report.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return [target / f"report.{kind}" for kind in ("json", "png", "html")]


def format_report(report: Report) -> str:
    """Format a report for a terminal: its main finding, a table with one row per model, and the notes."""
    bytes_only = report["tokenizer"] == "bytes"
    rows = [["model", "loss", "perplexity", *(["bits/byte"] if bytes_only else []), "recovered"]]
    raw_loss, annealed_loss = report["raw_loss"], report["annealed_loss"]
    models = [
        ("raw", raw_loss),
        *((m["text"], m["loss"]) for m in report["merges"]),
        *((f"annealed ({fork['annealing']['shape']})", fork["loss"]) for fork in report["annealed_runs"]),
    ]
    best = (report["best_merge"] or {}).get("text")
    for name, loss in models:
        share = recovered_share(raw_loss, annealed_loss, loss)
        bits = [f"{bits_per_byte(loss, 1):.4f}"] if bytes_only else []
        recovered = "-" if share is None else f"{share:.1%}"
        rows.append([name + (" *" if name == best else ""), f"{loss:.4f}", f"{perplexity(loss):.4f}", *bits, recovered])
    lines = align_columns(rows).splitlines()
    lines[1:1] = ["-" * len(lines[0])]
    if best:
        lines.append("* the best merge")
    if report["previews_total"]:
        lines.append(f"previews below the raw loss: {report['previews_below_raw']} of {report['previews_total']}")
    return "\n".join([report["finding"], "", *lines, *(f"note: {note}" for note in report["notes"])])


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
            "set_aside": _drop_nonfinite([[r["tokens"], r["loss"]] for r in records if r["kind"] == "evaluation"]),
        }
        rows.append({key: event["spike"][key] for key in SPIKE_KEYS} | {"went_back": went_back})
    return sorted(rows, key=lambda row: (row["onset_tokens"], row["tokens"]))


def _curve(run: Run, kind: str) -> Curve:
    # If several records have the same tokens, the last one is used.
    losses = {r["tokens"]: r["loss"] for r in run.metrics if r["kind"] == kind}
    return [[tokens, losses[tokens]] for tokens in sorted(losses)]


def _drop_nonfinite(curve: Curve) -> Curve:
    return [[tokens, loss] for tokens, loss in curve if math.isfinite(loss)]


def _preview_curves(run: Run) -> dict[str, Curve]:
    losses: dict[str, dict[int, float]] = {}
    for record in run.metrics:
        if record["kind"] == "preview":
            losses.setdefault(record["recipe"], {})[record["tokens"]] = record["loss"]
    curves = {recipe: _drop_nonfinite([[t, at[t]] for t in sorted(at)]) for recipe, at in losses.items()}
    return {recipe: curves[recipe] for recipe in sorted(curves, key=_parse_recipe_and_window) if curves[recipe]}


def _parse_recipe_and_window(text: str) -> tuple[str, int]:
    recipe, _, window = text.rpartition(":")
    return (recipe, int(window)) if window.isdigit() else (text, 0)


def _check_comparable(run: Run, forks: Sequence[Run]) -> None:
    if forks and run.config.schedule.decay != "none":
        raise UserError(
            f"the learning rate of {run.path} decays ({run.config.schedule.decay}): give the constant-rate run first, "
            "then the runs forked from it"
        )
    for fork in forks:
        if fork.metadata.get("forked_from") is None:
            raise UserError(f"{fork.path} is not a fork: after the run, give runs made by `pma fork {run.path}`")
        for key, name in (("corpus", "corpus"), ("evaluation", "held-out tokens")):
            expected, actual = run.metadata.get(key), fork.metadata.get(key)
            if expected != actual:
                raise UserError(
                    f"{fork.path} and {run.path} cannot be compared: their {name} differ ({actual} and {expected})"
                )


def _describe_annealed_forks(forks: Sequence[Run], tokens: int, notes: list[str]) -> list[dict[str, Any]]:
    """Describe the annealed forks evaluated at `tokens`, lowest loss first; append a note for each other fork."""
    annealed = []
    for fork in forks:
        schedule, origin = fork.config.schedule, fork.metadata["forked_from"]
        curve = _drop_nonfinite([point for point in _curve(fork, "evaluation") if point[0] > origin["tokens"]])
        if schedule.decay == "none":
            notes.append(f"{fork.path.name} is left out: its learning rate does not decay")
        elif not curve or curve[-1][0] != tokens:
            last = f"{int(curve[-1][0]):,}" if curve else "no"
            notes.append(f"{fork.path.name} is left out: it was evaluated to {last} tokens, the run to {tokens:,}")
        else:
            annealed.append(
                {
                    "run": fork.path.name,
                    "loss": curve[-1][1],
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
    return sorted(annealed, key=_loss)


def _merge_rows(
    run: Run, tokens: int, raw_loss: float, annealed_loss: float | None, notes: list[str]
) -> list[dict[str, Any]]:
    """Return one row per merge at the horizon: from sweep.json, or from the last previews if it cannot be used."""
    sweep, rows = read_sweep(run), None
    if sweep is not None:
        if sweep["tokens"] != tokens:
            notes.append(
                f"sweep.json is from {sweep['tokens']:,} tokens, the run has {tokens:,}: run `pma sweep` again"
            )
        elif sweep["raw_loss"] is not None and abs(sweep["raw_loss"] - raw_loss) > LOSS_TOLERANCE_NATS:
            notes.append(
                f"sweep.json is left out: its raw loss is {sweep['raw_loss']:.4f}, that of the run {raw_loss:.4f}"
            )
        else:
            rows = [SWEEP_ROW_DEFAULTS | row for row in sweep["rows"]]
    if rows is None:
        rows = _last_preview_rows(run, tokens)
    kept = [row for row in rows if math.isfinite(row["loss"])]
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} merges are left out: their loss is not finite")
    return [
        {key: row[key] for key in ("text", "recipe", "window", "interval", "kind", "loss")}
        | {"recovered_share": recovered_share(raw_loss, annealed_loss, row["loss"])}
        for row in kept
    ]


def _last_preview_rows(run: Run, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for text, curve in _preview_curves(run).items():
        if curve[-1][0] == tokens:
            prefix = SNAPSHOT_KINDS["block_mean"].label_prefix
            kind = "block_mean" if text.startswith(prefix) else "point"
            recipe, window = _parse_recipe_and_window(text.removeprefix(prefix))
            row = {"text": text, "recipe": recipe, "window": window, "kind": kind, "loss": curve[-1][1]}
            rows.append(SWEEP_ROW_DEFAULTS | row)
    return rows


def _summarize_previews(previews: dict[str, Curve], raw: Curve) -> dict[str, Any]:
    """Summarise each preview's gain in nats, raw loss - preview loss at the same tokens, and count all previews."""
    raw_at = {int(tokens): loss for tokens, loss in _drop_nonfinite(raw)}
    summaries: dict[str, dict[str, Any]] = {}
    for text, curve in previews.items():
        gains = {int(t): raw_at[int(t)] - loss for t, loss in curve if t in raw_at}
        if not gains:
            continue
        worse = [t for t, gain in gains.items() if gain <= 0]
        after = [t for t in gains if not worse or t > max(worse)]
        summaries[text] = {
            "count": len(gains),
            "below_raw": len(gains) - len(worse),
            "first_tokens": min(gains),
            "below_raw_since_tokens": min(after, default=None),
            "median_gain": statistics.median(gains.values()),
            "last_gain": gains[max(gains)],
            "last_loss": curve[-1][1],
        }
    return {
        "previews_total": sum(s["count"] for s in summaries.values()),
        "previews_below_raw": sum(s["below_raw"] for s in summaries.values()),
        "previews": summaries,
    }


def _format_finding(report: Report) -> str:
    raw, annealed, best = report["raw_loss"], report["annealed_loss"], report["best_sma"] or report["best_merge"]
    at = f"At {report['tokens'] / 1e6:.2f}M tokens"
    if best is None and annealed is None:
        return (
            f"{at} the raw model's held-out loss is {raw:.4f} nats per token; nothing has been merged or annealed yet."
        )
    if best is None:
        return f"{at} annealing takes the held-out loss from {raw:.4f} to {annealed:.4f}; nothing has been merged yet."
    merged = f"{at} merging ({best['text']}) takes the held-out loss from {raw:.4f} to {best['loss']:.4f}"
    if annealed is None:
        return f"{merged} nats per token, without further training; there is no annealed run to compare it with."
    cost = f"the {report['tokens_saved'] / 1e6:.2f}M tokens of the annealing branch"
    if best["recovered_share"] is None:
        return f"{merged}; annealing, with {cost}, ends at {annealed:.4f}."
    return f"{merged}: {best['recovered_share']:.0%} of what annealing gains ({annealed:.4f}), without {cost}."


def _select_fields(merge: dict[str, Any] | None) -> dict[str, Any] | None:
    return {key: merge[key] for key in ("text", "loss", "recovered_share")} if merge else None


def _share_difference(merge: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """Return the recovered share of `merge` minus that of `other`."""
    if not merge or not other or merge["recovered_share"] is None:
        return None
    return merge["recovered_share"] - other["recovered_share"]


def _parameter_count(run: Run) -> int:
    # Only shapes are needed, so a mesh of one device is sufficient for any run.
    mesh = jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])
    return parameter_count(abstract_params(run.config.model, mesh))
