"""Report on a run at a constant learning rate and the runs forked from it: report.json, report.png and report.html.

The raw model has the parameters of the run at its horizon, which is its last evaluation. An annealed model is the end
of a fork whose learning rate decays. Losses are nats per token on the same held-out text for all models, and positions
are tokens seen since the start of training. The share that a merge recovers is (raw - merged) / (raw - annealed): 0 for
the raw model, 1 for the annealed one. The best merge and the best annealed branch are those with the lowest recorded
losses (`select_loss`); all are judged by their losses on other held-out text (reporting/judging.py).
"""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from pma_jax import config as configuration
from pma_jax.analysis.comparison import recovered_share
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting import html
from pma_jax.reporting.commands import reproduction_commands
from pma_jax.reporting.drawing import PAGE_DPI, to_png
from pma_jax.reporting.judging import judge
from pma_jax.reporting.recorded import Curve, by_select_loss, drop_nonfinite
from pma_jax.reporting.report_figure import draw_report
from pma_jax.reporting.task_curves import format_task_scores, task_curves
from pma_jax.runs.directory import Run
from pma_jax.runtime.formatting import align_columns, format_loss
from pma_jax.runtime.mesh import AXES
from pma_jax.storage import atomic
from pma_jax.storage.paths import absolute_path

Report = dict[str, Any]


def build_report(run: Run, forks: Sequence[Run]) -> Report:
    """Compare a run and its merges at its horizon with its annealed forks; evaluate all snapshots on the part `report`.

    If there are several annealed forks, the recovered shares refer to the one with the lowest recorded loss. `notes` in
    the result states which forks and merges were omitted, and why; `judged`, on which text the losses are.

    Raises:
        UserError: The run has no evaluations or diverged, or a fork cannot be compared with it.
    """
    notes: list[str] = []
    losses = judge(run, forks, notes)
    annealed, merges, previews = losses["annealed"], losses["merges"], losses["previews"]
    tokens, raw_loss = losses["tokens"], losses["raw_loss"]
    best = annealed[0] if annealed else None
    annealed_loss = best["loss"] if best else None
    if annealed_loss is not None and annealed_loss >= raw_loss:
        notes.append("annealing did not lower the loss, so there is no gain to recover and there are no shares")
    for merge in merges:
        merge["recovered_share"] = recovered_share(raw_loss, annealed_loss, merge["loss"])
    plain = [m for m in merges if m["kind"] == "point" and m["interval"] == 1]
    best_sma = min((m for m in plain if m["recipe"] == "sma"), key=by_select_loss, default=None)
    best_block = min((m for m in merges if m["kind"] == "block_mean"), key=by_select_loss, default=None)
    report: Report = {
        "run": run.path.name,
        "tokens": tokens,
        "judged": losses["judged"],
        "held_out": losses["held_out"],
        "raw_loss": raw_loss,
        "raw_standard_error": losses["raw_standard_error"],
        "annealed_loss": annealed_loss,
        "merged_loss": {m["text"]: m["loss"] for m in merges},
        "recovered_share": best_sma["recovered_share"] if best_sma else None,
        "tokens_saved": tokens - best["fork_tokens"] if best else None,
        "best_sma": _select_fields(best_sma),
        "best_merge": _select_fields(min(merges, key=by_select_loss, default=None)),
        "best_block_merge": _select_fields(best_block),
        "block_points_gained": _share_difference(best_block, best_sma),  # a fraction; may be negative
        "recovered_shares": {m["text"]: m["recovered_share"] for m in merges},
        "fork_tokens": best["fork_tokens"] if best else None,
        "annealing": best["annealing"] if best else None,
        **_summarize_previews(previews, losses["raw"]),
    }
    report["finding"] = _format_finding(report)
    return report | {
        "notes": notes,
        "spikes": losses["spikes"],
        "tasks": task_curves(run, forks),
        "merges": merges,
        "annealed_runs": [{k: v for k, v in a.items() if k not in ("curve", "path")} for a in annealed],
        "parameters": _parameter_count(run),
        "tokenizer": run.config.data.tokenizer,
        "snapshot_interval_tokens": run.config.checkpoint.interval_tokens,
        "corpus_digest": run.metadata.get("corpus"),
        "evaluation_digest": (losses["held_out"] or {}).get("digest", run.metadata.get("evaluation")),
        "config_digest": configuration.digest(run.config),
        "versions": dict(sorted(run.metadata.get("versions", {}).items())),
        "commands": reproduction_commands(run, forks, merges),
        "curves": {"annealed": best["curve"] if best else []}
        | {name: losses[name] for name in ("raw", "previews", "workers")},
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
    figure = to_png(draw_report(report), PAGE_DPI)
    page = html.render_page(report, configuration.to_json(run.config))
    # JSON last: if report.json exists, the report is complete.
    atomic.write_bytes(target / "report.png", figure)
    atomic.write_bytes(target / "report.html", page.encode())
    atomic.write_bytes(target / "report.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return [target / f"report.{kind}" for kind in ("json", "png", "html")]


def format_report(report: Report) -> str:
    """Format a report for a terminal: its main finding, a table with one row per model, and the notes."""
    bytes_only = report["tokenizer"] == "bytes"
    rows = [["model", "loss", "perplexity", *(["bits/byte"] if bytes_only else []), "recovered"]]
    raw_loss, annealed_loss = report["raw_loss"], report["annealed_loss"]
    models = [
        ("raw", {"loss": raw_loss, "standard_error": report["raw_standard_error"]}),
        *((m["text"], m) for m in report["merges"]),
        *((f"annealed ({fork['annealing']['shape']})", fork) for fork in report["annealed_runs"]),
    ]
    best = (report["best_merge"] or {}).get("text")
    for name, model in models:
        loss = model["loss"]
        share = recovered_share(raw_loss, annealed_loss, loss)
        bits = [f"{bits_per_byte(loss, 1):.4f}"] if bytes_only else []
        recovered = "-" if share is None else f"{share:.1%}"
        rows.append(
            [name + (" *" if name == best else ""), format_loss(model), f"{perplexity(loss):.4f}", *bits, recovered]
        )
    lines = align_columns(rows).splitlines()
    lines[1:1] = ["-" * len(lines[0])]
    if best:
        lines.append("* the best merge")
    lines.append(report["judged"])
    if report["previews_total"]:
        lines.append(f"previews below the raw loss: {report['previews_below_raw']} of {report['previews_total']}")
    tasks = format_task_scores(report["tasks"])
    lines += ["", *tasks] if tasks else []
    return "\n".join([report["finding"], "", *lines, *(f"note: {note}" for note in report["notes"])])


def _summarize_previews(previews: dict[str, Curve], raw: Curve) -> dict[str, Any]:
    """Summarise each preview's gain in nats, raw loss - preview loss at the same tokens, and count all previews."""
    raw_at = {int(tokens): loss for tokens, loss in drop_nonfinite(raw)}
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
    less = f"{best['loss'] - annealed:+.4f} nats from the annealed {annealed:.4f}"
    return f"{merged}, {less} ({best['recovered_share']:.0%} of its gain), without {cost}."


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
