"""The report's page: one self-contained HTML file without scripts, for light and dark, from the template page.html."""

import base64
from typing import Any

import jinja2

from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting.drawing import series_name


def render_page(report: dict[str, Any], config_json: str, light_png: bytes, dark_png: bytes) -> str:
    """Render a report as a page, with the run's configuration and the figure in both colour schemes."""
    return _TEMPLATE.render(
        r=report,
        config=config_json,
        light=base64.b64encode(light_png).decode(),
        dark=base64.b64encode(dark_png).decode(),
        models=_models(report),
        bytes_only=report["tokenizer"] == "bytes",
        grid=_merge_grid(report["merges"]),
        windows=sorted({m["window"] for m in report["merges"]}),
        best=(report["best_merge"] or {}).get("text"),
        alt=f"Held-out loss against tokens. {report['finding']}",
    )


def _models(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per model: raw, the best merges, annealed. A share is None if annealing gained nothing."""
    annealed = report["annealed_loss"]
    gains = annealed is not None and annealed < report["raw_loss"]
    rows = [("raw", report["raw_loss"], 0.0 if gains else None)]
    named = [("best SMA", report["best_sma"]), ("best merge", report["best_merge"])]
    if report["best_sma"] == report["best_merge"]:
        named = [("best merge", report["best_merge"])]
    if report["best_block_merge"] and report["best_block_merge"] != report["best_merge"]:
        named.append(("best of block means", report["best_block_merge"]))
    rows += [(f"{name}, {m['text']}", m["loss"], m["recovered_share"]) for name, m in named if m]
    for i, run in enumerate(report["annealed_runs"]):
        share = (report["raw_loss"] - run["loss"]) / (report["raw_loss"] - annealed) if gains else None
        name = f"annealed, {run['annealing']['shape']}"
        rows.append((name if i == 0 else f"{name} ({run['run']})", run["loss"], share))
    return [
        {"name": n, "loss": x, "share": s, "perplexity": perplexity(x), "bits": bits_per_byte(x, 1)} for n, x, s in rows
    ]


def _merge_grid(merges: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return series -> window -> merge, in the order of the sweep."""
    grid: dict[str, dict[int, dict[str, Any]]] = {}
    for merge in merges:
        grid.setdefault(series_name(merge), {})[merge["window"]] = merge
    return grid


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}".replace("-", "−")


def _millions(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:.2f}M"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pma_jax.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"loss": _loss, "percent": _percent, "millions": _millions, "signed": _signed}
    return environment.get_template("page.html")


_TEMPLATE = _load_template()
