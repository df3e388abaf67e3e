"""The page of a report: a self-contained HTML file that needs no network, from the Jinja template page.html."""

from collections.abc import Sequence
from typing import Any

import jinja2

from pma_jax.analysis.comparison import recovered_share
from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting.drawing import group_by_series_and_window
from pma_jax.reporting.interactive import DARK_COLORS, Plot, bokeh_script, plots_of_panels, to_json
from pma_jax.reporting.report_plots import points_per_drawn, report_plots
from pma_jax.reporting.task_curves import task_panels


def render_page(report: dict[str, Any], config_json: str) -> str:
    """Render a report as a page that follows the reader's light or dark colour scheme.

    Args:
        report: The result of `report.build_report`.
        config_json: The run's configuration.
    """
    curves = report["curves"]
    return _TEMPLATE.render(
        r=report,
        config=config_json,
        **embedded_plots(losses=report_plots(report), tasks=plots_of_panels(task_panels(report["tasks"]))),
        thinning=points_per_drawn(max(map(len, (curves["raw"], curves["annealed"], *curves["previews"].values())))),
        models=_model_rows(report),
        bytes_only=report["tokenizer"] == "bytes",
        grid=group_by_series_and_window(report["merges"]),
        windows=sorted({m["window"] for m in report["merges"]}),
        best=(report["best_merge"] or {}).get("text"),
    )


def _model_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per model: raw, best merges, annealed. Shares are None without a lower annealed loss."""
    best = report["best_merge"]
    named = [
        ("best SMA", report["best_sma"]),
        ("best merge", best),
        ("best of block means", report["best_block_merge"]),
    ]
    errors = {m["text"]: m["standard_error"] for m in report["merges"]}
    rows = [("raw", report["raw_loss"], report["raw_standard_error"])]
    rows += [
        (f"{name}, {m['text']}", m["loss"], errors[m["text"]])
        for name, m in named
        if m and (m != best or name == "best merge")
    ]
    for i, run in enumerate(report["annealed_runs"]):
        name = f"annealed, {run['annealing']['shape']}"
        rows.append((name if i == 0 else f"{name} ({run['run']})", run["loss"], run["standard_error"]))
    return [
        {
            "name": name,
            "loss": loss,
            "error": error,
            "share": recovered_share(report["raw_loss"], report["annealed_loss"], loss),
            "perplexity": perplexity(loss),
            "bits": bits_per_byte(loss, 1),
        }
        for name, loss, error in rows
    ]


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}".replace("-", "−")


def _millions(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:.2f}M"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def embedded_plots(**figures: Sequence[Plot]) -> dict[str, Any]:
    """Return what plots.html takes: the plots of each figure, whose places have the identifiers `<figure>-<number>`."""
    plots = {f"{name}-{i}": to_json(plot) for name, plots in figures.items() for i, plot in enumerate(plots, start=1)}
    return {"plots": plots, "dark_colors": DARK_COLORS, "bokeh": bokeh_script()}


def make_environment() -> jinja2.Environment:
    """Return the environment of the templates of pages."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pma_jax.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # Bokeh reads each model where it first occurs, so sorted keys would break references to it.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {
        "loss": _loss,
        "percent": _percent,
        "millions": _millions,
        "signed": _signed,
        "capitalize_first": _capitalize_first,
    }
    return environment


_TEMPLATE = make_environment().get_template("page.html")
