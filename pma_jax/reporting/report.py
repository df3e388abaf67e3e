"""A report's numbers: one run at a constant rate and the runs forked from it -> a dict -> report.json, PNG and HTML.

Losses are held-out nats a token, all of the same text; positions are tokens seen since the start. The share that a
merge recovers is (raw - merged) / (raw - annealed): 0 is the raw model at the horizon, 1 the annealed one.
"""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from pma_jax import config as configuration
from pma_jax.config import SNAPSHOT_KINDS
from pma_jax.model.decoder import abstract_params, parameter_count
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting import figures, html, spikes
from pma_jax.reporting.commands import reproduction
from pma_jax.runs.directory import Run
from pma_jax.runtime.mesh import AXES
from pma_jax.storage import atomic
from pma_jax.storage.paths import absolute_path

Report = dict[str, Any]
Curve = list[list[float]]  # [tokens, loss] pairs, by tokens
PAPERS_MERGE = {"interval": 1, "kind": "point"}  # what a row is that does not say
SAME_LOSS = 1e-3  # nats: more than another device's rounding makes


def build_report(run: Run, forks: Sequence[Run]) -> Report:
    """The numbers of `run` at its horizon, against its annealed forks where there are any.

    The horizon is the run's last evaluation. Where several forks were annealed, the lowest loss is the reference: the
    shares are then the smallest. What was left out, and why, is in `notes`.

    Raises ValueError when the run has no evaluations, has diverged, or a fork cannot be compared with it.
    """
    raw = _curve(run, "evaluation")
    if not raw:
        raise ValueError(f"{run.path} has no held-out evaluations: train it to its first snapshot, then report again")
    tokens, raw_loss = int(raw[-1][0]), raw[-1][1]
    if not math.isfinite(raw_loss):
        raise ValueError(f"{run.path} diverged: its held-out loss at {tokens:,} tokens is {raw_loss}")
    _refuse_incomparable(run, forks)
    notes: list[str] = []
    annealed = _annealed(forks, tokens, notes)
    best = annealed[0] if annealed else None
    annealed_loss = best["loss"] if best else None
    if annealed_loss is not None and annealed_loss >= raw_loss:
        notes.append("annealing did not lower the loss, so there is no gain to recover and no share is given")
    merges = _merges(run, tokens, raw_loss, annealed_loss, notes)
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
        "best_sma": _brief(best_sma),
        "best_merge": _brief(min(merges, key=_loss, default=None)),
        "best_block_merge": _brief(best_block),
        "block_points_gained": _more_recovered(best_block, best_sma),
        "recovered_shares": {m["text"]: m["recovered_share"] for m in merges},
        "fork_tokens": best["fork_tokens"] if best else None,
        "annealing": best["annealing"] if best else None,
        **_preview_counts(previews, raw),
    }
    report["finding"] = _finding(report)
    return report | {
        "notes": notes,
        "spikes": spikes.rows(run),
        "merges": merges,
        "annealed_runs": [{k: v for k, v in a.items() if k != "curve"} for a in annealed],
        "parameters": _parameters(run),
        "tokenizer": run.config.data.tokenizer,
        "snapshot_interval_tokens": run.config.checkpoint.interval_tokens,
        "corpus_digest": run.metadata.get("corpus"),
        "evaluation_digest": run.metadata.get("evaluation"),
        "config_digest": configuration.digest(run.config),
        "versions": dict(sorted(run.metadata.get("versions", {}).items())),
        "commands": reproduction(run, forks, merges),
        "curves": {"raw": _finite(raw), "annealed": best["curve"] if best else [], "previews": previews},
    }


def write_report(report: Report, run: Run, folder: epath.PathLike | None = None) -> list[epath.Path]:
    """Write report.png, report.html and report.json, each whole or not at all; the paths, JSON first.

    Args:
      report: what `build_report` returned.
      run: the run it is about; its configuration is printed on the page.
      folder: where to write; the run's own directory by default. It is made if it does not exist.
    """
    target = absolute_path(folder) if folder is not None else run.path
    target.mkdir(parents=True, exist_ok=True)
    light, dark = figures.png(report), figures.png(report, dark=True)
    page = html.page(report, configuration.to_json(run.config), light, dark)
    # The JSON comes last: where it stands, the report is complete.
    atomic.write_bytes(target / "report.png", light)
    atomic.write_bytes(target / "report.html", page.encode())
    atomic.write_bytes(target / "report.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return [target / f"report.{kind}" for kind in ("json", "png", "html")]


def print_table(report: Report) -> str:
    """The report for a terminal: the finding, a row a model with its loss and share, and the notes."""
    bytes_only = report["tokenizer"] == "bytes"
    rows = [["model", "loss", "perplexity", *(["bits/byte"] if bytes_only else []), "recovered"]]
    models = [
        ("raw", report["raw_loss"], 0.0),
        *((m["text"], m["loss"], m["recovered_share"]) for m in report["merges"]),
    ]
    if report["annealed_loss"] is not None:
        models.append((f"annealed ({report['annealing']['shape']})", report["annealed_loss"], 1.0))
    known = report["annealed_loss"] is not None and report["annealed_loss"] < report["raw_loss"]
    best = (report["best_merge"] or {}).get("text")
    for name, loss, share in models:
        bits = [f"{bits_per_byte(loss, 1):.4f}"] if bytes_only else []
        shown = f"{share:.1%}" if known else "-"
        rows.append([name + (" *" if name == best else ""), f"{loss:.4f}", f"{perplexity(loss):.4f}", *bits, shown])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))]) for r in rows
    ]
    lines[1:1] = ["-" * len(lines[0])]
    if best:
        lines.append("* the best merge")
    if report["previews_total"]:
        lines.append(f"previews below the raw loss: {report['previews_below_raw']} of {report['previews_total']}")
    return "\n".join([report["finding"], "", *lines, *(f"note: {note}" for note in report["notes"])])


def _curve(run: Run, kind: str) -> Curve:
    # A dict, so that a record written twice counts once, as it was written last.
    losses = {r["tokens"]: r["loss"] for r in run.metrics if r["kind"] == kind}
    return [[tokens, losses[tokens]] for tokens in sorted(losses)]


def _finite(curve: Curve) -> Curve:
    return [[tokens, loss] for tokens, loss in curve if math.isfinite(loss)]


def _preview_curves(run: Run) -> dict[str, Curve]:
    losses: dict[str, dict[int, float]] = {}
    for record in run.metrics:
        if record["kind"] == "preview":
            losses.setdefault(record["recipe"], {})[record["tokens"]] = record["loss"]
    curves = {recipe: _finite([[t, at[t]] for t in sorted(at)]) for recipe, at in losses.items()}
    return {recipe: curves[recipe] for recipe in sorted(curves, key=_recipe_and_window) if curves[recipe]}


def _recipe_and_window(text: str) -> tuple[str, int]:
    recipe, _, window = text.rpartition(":")
    return (recipe, int(window)) if window.isdigit() else (text, 0)


def _refuse_incomparable(run: Run, forks: Sequence[Run]) -> None:
    if forks and run.config.schedule.decay != "none":
        raise ValueError(
            f"{run.path} decays its own rate ({run.config.schedule.decay}): give the constant-rate run first, "
            "then the runs forked from it"
        )
    for fork in forks:
        if fork.metadata.get("forked_from") is None:
            raise ValueError(f"{fork.path} was not forked: give runs made by `pma fork {run.path}`, after the run")
        for fact, what in (("corpus", "corpus"), ("evaluation", "held-out tokens")):
            here, there = run.metadata.get(fact), fork.metadata.get(fact)
            if here != there:
                raise ValueError(
                    f"{fork.path} and {run.path} cannot be compared: their {what} differ ({there} and {here})"
                )


def _annealed(forks: Sequence[Run], tokens: int, notes: list[str]) -> list[dict[str, Any]]:
    """The annealed forks that end at `tokens`, lowest loss first; the others get a note."""
    found = []
    for fork in forks:
        schedule, origin = fork.config.schedule, fork.metadata["forked_from"]
        curve = _finite([point for point in _curve(fork, "evaluation") if point[0] > origin["tokens"]])
        if schedule.decay == "none":
            notes.append(f"{fork.path.name} is left out: its rate does not decay")
        elif not curve or curve[-1][0] != tokens:
            last = f"{int(curve[-1][0]):,}" if curve else "no"
            notes.append(f"{fork.path.name} is left out: it was evaluated to {last} tokens, the run to {tokens:,}")
        else:
            annealing = {
                "shape": schedule.decay,
                "start_tokens": schedule.decay_start_tokens,
                "peak_rate": schedule.peak_rate,
                "final_rate": schedule.final_rate,
            }
            found.append(
                {
                    "run": fork.path.name,
                    "loss": curve[-1][1],
                    "fork_tokens": origin["tokens"],
                    "annealing": annealing,
                    "config_digest": configuration.digest(fork.config),
                    "curve": curve,
                }
            )
    return sorted(found, key=_loss)


def _merges(
    run: Run, tokens: int, raw_loss: float, annealed_loss: float | None, notes: list[str]
) -> list[dict[str, Any]]:
    """Merges at the horizon: the sweep's rows, or the last previews where no sweep is of this horizon."""
    path, rows = run.path / "sweep.json", None
    if path.exists():
        sweep = json.loads(path.read_text())
        if sweep["tokens"] != tokens:
            notes.append(f"sweep.json is of {sweep['tokens']:,} tokens, the run has {tokens:,}: run `pma sweep` again")
        elif sweep["raw_loss"] is not None and abs(sweep["raw_loss"] - raw_loss) > SAME_LOSS:
            notes.append(
                f"sweep.json is left out: it has {sweep['raw_loss']:.4f} for the raw model, the run {raw_loss:.4f}"
            )
        else:
            rows = [PAPERS_MERGE | row for row in sweep["rows"]]
    if rows is None:
        rows = _last_previews(run, tokens)
    kept = [row for row in rows if math.isfinite(row["loss"])]
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} merges are left out: their loss is not finite")
    return [
        {key: row[key] for key in ("text", "recipe", "window", "interval", "kind", "loss")}
        | {"recovered_share": _share(raw_loss, annealed_loss, row["loss"])}
        for row in kept
    ]


def _last_previews(run: Run, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for text, curve in _preview_curves(run).items():
        if curve[-1][0] == tokens:
            prefix = SNAPSHOT_KINDS["block_mean"].prefix
            kind = "block_mean" if text.startswith(prefix) else "point"
            recipe, window = _recipe_and_window(text.removeprefix(prefix))
            row = {"text": text, "recipe": recipe, "window": window, "kind": kind, "loss": curve[-1][1]}
            rows.append(PAPERS_MERGE | row)
    return rows


def _share(raw_loss: float, annealed_loss: float | None, loss: float) -> float | None:
    if annealed_loss is None or annealed_loss >= raw_loss:
        return None
    return (raw_loss - loss) / (raw_loss - annealed_loss)


def _preview_counts(previews: dict[str, Curve], raw: Curve) -> dict[str, Any]:
    """Totals, and a summary of each preview's gain: raw loss less its own, in nats, at the same tokens."""
    raw_at = {int(tokens): loss for tokens, loss in _finite(raw)}
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


def _finding(report: Report) -> str:
    raw, annealed, best = report["raw_loss"], report["annealed_loss"], report["best_sma"] or report["best_merge"]
    at = f"At {report['tokens'] / 1e6:.2f}M tokens"
    if best is None and annealed is None:
        return f"{at} the raw model's held-out loss is {raw:.4f} nats a token; nothing has been merged or annealed yet."
    if best is None:
        return f"{at} annealing takes the held-out loss from {raw:.4f} to {annealed:.4f}; nothing has been merged yet."
    merged = f"{at} merging ({best['text']}) takes the held-out loss from {raw:.4f} to {best['loss']:.4f}"
    if annealed is None:
        return f"{merged} nats a token, without further training; no annealed run is here to compare it with."
    cost = f"the {report['tokens_saved'] / 1e6:.2f}M tokens that the annealing branch trained"
    if best["recovered_share"] is None:
        return f"{merged}; annealing, for {cost}, ends at {annealed:.4f}."
    return f"{merged}: {best['recovered_share']:.0%} of what annealing gains ({annealed:.4f}), without {cost}."


def _brief(merge: dict[str, Any] | None) -> dict[str, Any] | None:
    return {key: merge[key] for key in ("text", "loss", "recovered_share")} if merge else None


def _more_recovered(merge: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """How much larger the share is that `merge` recovers."""
    if not merge or not other or merge["recovered_share"] is None:
        return None
    return merge["recovered_share"] - other["recovered_share"]


def _loss(entry: dict[str, Any]) -> float:
    return entry["loss"]


def _parameters(run: Run) -> int:
    # Shapes only: one device is enough, wherever the run's own mesh was.
    mesh = jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])
    return parameter_count(abstract_params(run.config.model, mesh))
