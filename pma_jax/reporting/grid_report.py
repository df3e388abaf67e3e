"""The report of a grid of runs: losses over what was varied, and how soon merges rank the runs as the end does.

Before an annealing, raw losses mix how good a point the weights fluctuate around with how much they fluctuate; a merge
shows the former. So merged previews may rank hyper-parameters early as annealed models do (PMA, arXiv 2505.12082).
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jinja2
from etils import epath
from scipy import stats

from pma_jax.reporting.drawing import PAGE_DPI, to_png
from pma_jax.reporting.grid_rows import open_grid, results_of, runs_below, value_of, varied_keys
from pma_jax.reporting.html import embedded_plots, make_environment
from pma_jax.reporting.interactive import plots_of_panels
from pma_jax.reporting.panels import Line, LinePanel, draw_lines
from pma_jax.runs.directory import Run
from pma_jax.runtime.formatting import align_columns, format_estimate
from pma_jax.storage import atomic
from pma_jax.storage.paths import absolute_path

RAW, MERGED, ANNEALED = "raw", "merged", "annealed"
MINIMUM_RANKED = 3  # fewer runs have no meaningful rank correlation
SEED_KEY = "training.seed"  # repeats a run: its values have no order, and are averaged over
_LOG_RATIO = 8  # values that span more than this factor are drawn on a logarithmic axis


class Loss(TypedDict):
    """A held-out loss in nats per token."""

    loss: float
    standard_error: float | None  # over documents


class Row(TypedDict):
    """One run of the grid, at its newest mark."""

    run: str
    values: dict[str, Any]  # of the varied keys
    tokens: int
    total_tokens: int
    losses: dict[str, Loss]  # by `RAW`, `MERGED` (the merge with the lowest loss) and `ANNEALED`, as far as there are
    merged: str | None  # that merge
    annealed: str | None  # the directory of the fork with the lowest loss


class Agreement(TypedDict):
    """How the losses of the runs at some tokens rank them, compared with their final losses (Spearman's rho)."""

    tokens: int
    raw: float | None
    merged: float | None


class GridReport(TypedDict):
    """Contents of ROOT/report.json of a grid."""

    root: str
    keys: list[str]
    runs: list[Row]  # the best first
    final: str  # what the runs are ranked by: `ANNEALED`, if all have such a fork, else `RAW`
    preview: str | None  # the merge whose previews rank the runs, as `sma:10`
    agreement: list[Agreement]
    notes: list[str]


def build_grid_report(root: epath.PathLike) -> GridReport:
    """Compare the runs in a directory, from what they have recorded; nothing is evaluated.

    Raises:
        UserError: There is no run in `root`, or a file of one is corrupt.
    """
    opened = open_grid(root)
    runs = [run for run in opened if not run.metadata.get("forked_from")]
    keys = varied_keys([run.config for run in runs]) if runs else []
    forks = [fork for run in runs for fork in runs_below(run.path)]
    forks += [run for run in opened if run.metadata.get("forked_from")]
    rows = [_row(run, keys, forks) for run in runs]
    notes, ranked = _ranked_runs(runs, rows)
    final = ANNEALED if ranked and all(ANNEALED in rows[i]["losses"] for i in ranked) else RAW
    preview, agreement = _agreement([runs[i] for i in ranked], [rows[i] for i in ranked], final)
    rows.sort(key=lambda row: (_loss(row, final), row["run"]))
    return {
        "root": absolute_path(root).name,
        "keys": keys,
        "runs": rows,
        "final": final,
        "preview": preview,
        "agreement": agreement,
        "notes": notes,
    }


def write_grid_report(report: GridReport, folder: epath.PathLike) -> list[epath.Path]:
    """Write report.png, report.html and report.json of a grid, each atomically, and return their paths."""
    target = absolute_path(folder)
    target.mkdir(parents=True, exist_ok=True)
    panels = grid_panels(report)
    plots = embedded_plots(losses=plots_of_panels(panels))
    page = _TEMPLATE.render(r=report, table=format_rows(report), **plots)
    atomic.write_bytes(target / "report.png", to_png(draw_lines(panels), PAGE_DPI))
    atomic.write_bytes(target / "report.html", page.encode())
    atomic.write_bytes(target / "report.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return [target / f"report.{kind}" for kind in ("json", "png", "html")]


def format_grid_report(report: GridReport) -> str:
    """Format a report as a table of the runs, and of how early previews rank them as at the end."""
    lines = [align_columns(format_rows(report))]
    if report["agreement"]:
        preview = report["preview"] or "no merge"
        rows = [["tokens", f"raw, rho with {report['final']}", f"{preview}, rho with {report['final']}"]]
        rows += [[f"{a['tokens']:,}", _rho(a["raw"]), _rho(a["merged"])] for a in report["agreement"]]
        lines += ["", align_columns(rows)]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def format_rows(report: GridReport) -> list[list[str]]:
    """Return the cells of the table of the runs, with ranks by the final and by the merged losses."""
    header = ["rank", "by merged", *report["keys"], "tokens", "raw", "merged", "", "annealed"]
    merged = sorted(_loss(row, MERGED) for row in report["runs"])
    cells = [header]
    for number, row in enumerate(report["runs"], start=1):
        losses = [
            format_estimate(_loss(row, kind), row["losses"][kind]["standard_error"]) if kind in row["losses"] else "-"
            for kind in (RAW, MERGED, ANNEALED)
        ]
        cells.append(
            [
                str(number) if report["final"] in row["losses"] else "-",
                str(1 + merged.index(_loss(row, MERGED))) if MERGED in row["losses"] else "-",
                *(_value(row["values"][key]) for key in report["keys"]),
                f"{row['tokens']:,} of {row['total_tokens']:,}",
                losses[0],
                losses[1],
                row["merged"] or "",
                losses[2],
            ]
        )
    return cells


def grid_panels(report: GridReport) -> list[LinePanel]:
    """Return panels of the losses over each varied key (means and ranges over the others) and of the correlations."""
    keys = [key for key in report["keys"] if key != SEED_KEY] or report["keys"]
    panels = [_panel_of_key(report["runs"], key) for key in keys]
    if report["agreement"]:
        tokens = [a["tokens"] / 1e6 for a in report["agreement"]]
        raw, merged = ([a[kind] for a in report["agreement"]] for kind in ("raw", "merged"))
        lines = [
            Line(kind, tokens, [math.nan if rho is None else rho for rho in rhos])
            for kind, rhos in ((RAW, raw), (MERGED, merged))
        ]
        title = f"rank correlation with {report['final']}"
        panels.append(LinePanel(title, "million tokens", lines, zero_line=True, y_limits=(-1.05, 1.05)))
    if not panels:  # a grid of one run
        panels = [LinePanel("held-out loss", "", _lines_over(report["runs"], lambda row: 0.0), tick_labels=("",))]
    return panels


def _row(run: Run, keys: Sequence[str], forks: Sequence[Run]) -> Row:
    results, text = results_of(run), _text_of(run)
    losses = {
        kind: Loss(loss=results[f"{kind}_loss"], standard_error=results.get(f"{kind}_standard_error"))
        for kind in (RAW, MERGED)
        if f"{kind}_loss" in results
    }
    ended = [(fork, mark) for fork in forks if (mark := _annealed(fork, run, text)) is not None]
    fork, mark = min(ended, key=lambda item: item[1]["loss"], default=(None, None))
    if mark is not None:
        losses[ANNEALED] = Loss(loss=mark["loss"], standard_error=mark.get("standard_error"))
    return Row(
        run=run.path.name,
        values={key: value_of(run.config, key) for key in keys},
        tokens=results["tokens"],
        total_tokens=results["total_tokens"],
        losses=losses,
        merged=results.get("merged"),
        annealed=None if fork is None else fork.path.name,
    )


def _loss(row: Row, kind: str) -> float:
    """Return a loss of a row, infinite if there is none."""
    return row["losses"][kind]["loss"] if kind in row["losses"] else math.inf


def _annealed(fork: Run, run: Run, text: str | None) -> Mapping[str, Any] | None:
    """Return the last evaluation of an annealed fork of a run that has ended, on the same text; None if it is none."""
    origin = fork.metadata.get("forked_from")
    if origin is None or absolute_path(origin["path"]) != run.path or not fork.config.schedule.is_annealed:
        return None
    marks = [r for r in fork.metrics if r["kind"] == "evaluation" and r.get("text") == text]
    has_ended = bool(marks) and marks[-1]["tokens"] >= fork.config.training.total_tokens
    return marks[-1] if has_ended else None


def _text_of(run: Run) -> str | None:
    """Return the digest of the text of a run's newest evaluation."""
    return next((r.get("text") for r in reversed(run.metrics) if r["kind"] == "evaluation"), None)


def _ranked_runs(runs: Sequence[Run], rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """Return notes, and the indices of the runs that can be ranked: those that ended, at equal tokens, on one text."""
    notes, ended = (
        [],
        [i for i, row in enumerate(rows) if RAW in row["losses"] and row["tokens"] >= row["total_tokens"]],
    )
    if len(ended) < len(runs):
        notes.append(f"{len(runs) - len(ended)} of {len(runs)} runs have not ended: they are not ranked")
    if len({rows[i]["total_tokens"] for i in ended}) > 1:
        return [*notes, "the runs have different horizons: they are not ranked"], []
    if len({_text_of(runs[i]) for i in ended}) > 1:
        return [*notes, "the runs were evaluated on different text, so their losses are not comparable"], []
    return notes, ended


def _agreement(runs: Sequence[Run], rows: Sequence[Row], final: str) -> tuple[str | None, list[Agreement]]:
    """Return the merge whose previews all runs have, and the rank correlations of its losses and of raw ones."""
    if len(runs) < MINIMUM_RANKED:
        return None, []
    finals = [_loss(row, final) for row in rows]
    raw = [_losses(run, "evaluation") for run in runs]
    labels = [{r["recipe"] for r in run.metrics if r["kind"] == "preview"} for run in runs]
    common = sorted(set.intersection(*labels), key=lambda text: int(text.rpartition(":")[2].partition("@")[0] or 0))
    preview = common[-1] if common else None  # the largest window
    merged = [_losses(run, "preview", preview) for run in runs]
    marks = sorted(set.intersection(*map(set, raw)))
    agreement = [
        Agreement(tokens=t, raw=_spearman([losses[t] for losses in raw], finals), merged=_merged_rho(merged, t, finals))
        for t in marks
    ]
    return preview, [a for a in agreement if a["raw"] is not None or a["merged"] is not None]


def _merged_rho(merged: Sequence[Mapping[int, float]], tokens: int, finals: Sequence[float]) -> float | None:
    return _spearman([m[tokens] for m in merged], finals) if all(tokens in m for m in merged) else None


def _losses(run: Run, kind: str, recipe: str | None = None) -> dict[int, float]:
    """Return the held-out losses of a run's marks by tokens, on the text of its newest one."""
    text = _text_of(run)
    return {
        r["tokens"]: r["loss"]
        for r in run.metrics
        if r["kind"] == kind and r.get("text") == text and (kind != "preview" or r["recipe"] == recipe)
    }


def _spearman(values: Sequence[float], finals: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if all values or all finals are equal."""
    if len(set(values)) == 1 or len(set(finals)) == 1:
        return None
    return float(stats.spearmanr(values, finals).statistic)


def _panel_of_key(rows: Sequence[Row], key: str) -> LinePanel:
    values = sorted({_value(row["values"][key]) for row in rows})
    numbers = {row["values"][key] for row in rows}
    if all(type(value) in (int, float) for value in numbers):
        is_log = min(numbers) > 0 and max(numbers) > _LOG_RATIO * min(numbers)
        return LinePanel(key, "", _lines_over(rows, lambda row: float(row["values"][key])), log_x=is_log)
    lines = _lines_over(rows, lambda row: float(values.index(_value(row["values"][key]))))
    return LinePanel(key, "", lines, tick_labels=tuple(values))


def _lines_over(rows: Sequence[Row], x_of: Any) -> list[Line]:
    """Return a line per kind of loss: the mean of the rows with equal x, and their range."""
    lines = []
    for kind in (RAW, MERGED, ANNEALED):
        points = sorted((x_of(row), _loss(row, kind)) for row in rows if kind in row["losses"])
        groups = {x: [loss for _, loss in group] for x, group in itertools.groupby(points, key=lambda p: p[0])}
        if groups:
            means = [sum(losses) / len(losses) for losses in groups.values()]
            lines.append(
                Line(kind, list(groups), means, list(map(min, groups.values())), list(map(max, groups.values())))
            )
    return lines


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rho(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


_TEMPLATE: jinja2.Template = make_environment().get_template("grid_page.html")
