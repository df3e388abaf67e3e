"""The report's page: one HTML file that needs nothing else, neither a network nor scripts, in light and in dark."""

import base64
from typing import Any

import jinja2

from pma_jax.model.loss import bits_per_byte, perplexity
from pma_jax.reporting.figures import series


def page(report: dict[str, Any], config_json: str, light_png: bytes, dark_png: bytes) -> str:
    """The page of a report, with the run's configuration and the figure for each colour scheme."""
    return _TEMPLATE.render(
        r=report,
        style=_STYLE,
        config=config_json,
        light=base64.b64encode(light_png).decode(),
        dark=base64.b64encode(dark_png).decode(),
        models=_models(report),
        bytes_only=report["tokenizer"] == "bytes",
        grid=_grid(report["merges"]),
        windows=sorted({m["window"] for m in report["merges"]}),
        best=(report["best_merge"] or {}).get("text"),
        alt=f"Held-out loss against tokens. {report['finding']}",
    )


def _models(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a model: raw, the best merges, annealed; a share is None where there is nothing to recover."""
    annealed = report["annealed_loss"]
    gains = annealed is not None and annealed < report["raw_loss"]
    rows = [("raw", report["raw_loss"], 0.0 if gains else None)]
    named = [("best SMA", report["best_sma"]), ("best merge", report["best_merge"])]
    if report["best_sma"] == report["best_merge"]:
        named = [("best merge", report["best_merge"])]
    if report["best_block_merge"] and report["best_block_merge"] != report["best_merge"]:
        named.append(("best of block means", report["best_block_merge"]))
    rows += [(f"{what}, {m['text']}", m["loss"], m["recovered_share"]) for what, m in named if m]
    for i, run in enumerate(report["annealed_runs"]):
        share = (report["raw_loss"] - run["loss"]) / (report["raw_loss"] - annealed) if gains else None
        name = f"annealed, {run['annealing']['shape']}"
        rows.append((name if i == 0 else f"{name} ({run['run']})", run["loss"], share))
    return [
        {"name": n, "loss": x, "share": s, "perplexity": perplexity(x), "bits": bits_per_byte(x, 1)} for n, x, s in rows
    ]


def _grid(merges: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Recipe, of points or of block means -> window -> merge, in the order of the sweep."""
    grid: dict[str, dict[int, dict[str, Any]]] = {}
    for merge in merges:
        grid.setdefault(series(merge), {})[merge["window"]] = merge
    return grid


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}".replace("-", "−")


def _millions(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:.2f}M"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2127; --muted: #646b75; --line: #e1e4e8;
  --soft: #f5f6f8; --accent: #0072b2; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #15181d; --ink: #e8eaed; --muted: #9aa1ab;
  --line: #2f353e; --soft: #1d2127; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2.6rem 0 .5rem; }
.facts, caption, .note, figcaption { color: var(--muted); font-size: .9rem; }
.facts { margin: 0 0 1.4rem; }
.finding { font-size: 1.15rem; max-width: 46rem; margin: 0 0 1.2rem; padding-left: .9rem;
  border-left: 3px solid var(--accent); }
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 30rem; }
caption { text-align: left; padding-bottom: .4rem; max-width: 46rem; }
th, td { padding: .38rem 1.1rem .38rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; }
thead th { color: var(--muted); font-size: .85rem; }
th:first-child { text-align: left; }
td small { color: var(--muted); margin-left: .35rem; }
td strong { color: var(--accent); }
pre { background: var(--soft); padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.5;
  border-radius: 6px; }
details > summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .9rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
"""

_BODY = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ r.run }}: merged against annealed</title>
<style>{{ style|safe }}</style>
</head>
<body>
<main>
<h1>{{ r.run }}: merged against annealed</h1>
<p class="facts">{{ "{:,}".format(r.parameters) }} parameters · {{ r.tokens|millions }} tokens ·
a snapshot every {{ "{:,}".format(r.snapshot_interval_tokens) }} tokens · {{ r.tokenizer }} tokenizer</p>
<p class="finding">{{ r.finding }}</p>
{% for note in r.notes %}<p class="note">Note: {{ note }}.</p>
{% endfor -%}
<figure>
<picture>
<source media="screen and (prefers-color-scheme: dark)" srcset="data:image/png;base64,{{ dark }}">
<img src="data:image/png;base64,{{ light }}" alt="{{ alt }}">
</picture>
<figcaption>{% if r.merges %}Left: loss{% else %}Loss{% endif %} on the same held-out text against tokens seen; grey is
the raw run{% if r.previews %}, blue its merged previews{% endif %}{% if r.annealing %}, dashed the branch annealed from
{{ r.fork_tokens|millions }} tokens{% endif %}. The early part of training is outside the figure.
{%- if r.merges %} Right: the merges at the horizon, by how many of the newest snapshots they average
{%- if r.best_merge.text not in r.previews %}; the best one is the diamond on the left{% endif %}.{% endif %}
</figcaption>
</figure>

<h2>At {{ r.tokens|millions }} tokens</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">model</th><th scope="col">loss, nats</th><th scope="col">perplexity</th>
{%- if bytes_only %}<th scope="col">bits a byte</th>{% endif %}<th scope="col">recovered</th></tr></thead>
<tbody>
{% for m in models %}<tr><th scope="row">{{ m.name }}</th><td>{{ m.loss|loss }}</td><td>{{ m.perplexity|loss }}</td>
{%- if bytes_only %}<td>{{ m.bits|loss }}</td>{% endif %}<td>{{ m.share|percent }}</td></tr>
{% endfor %}</tbody>
</table></div>
{% if r.annealing %}<p class="note">Recovered is (raw − merged) / (raw − annealed). The annealed branch left the run at
{{ r.fork_tokens|millions }} tokens, decayed its rate ({{ r.annealing.shape }}) from
{{ r.annealing.start_tokens|millions }} tokens on to {{ "%g"|format(r.annealing.final_rate) }}, and trained
{{ r.tokens_saved|millions }} tokens. Merging trains none.</p>
{% endif %}
{%- if grid %}
<h2>Every merge</h2>
<div class="scroll"><table>
<caption>Held-out loss, nats a token{% if r.recovered_share is not none %}, and recovered share{% endif %}; the best is
bold. It was chosen on this same held-out text.
{%- if r.best_block_merge %} Rows that begin with block/ merge means of the weights between two snapshots instead of
the weights at them
{%- if r.block_points_gained is not none %}: the best of them recovers {{ r.best_block_merge.recovered_share|percent }},
the best SMA of points {{ r.recovered_share|percent }}{% endif %}.{% endif %}</caption>
<thead><tr><th scope="col">recipe</th>{% for n in windows %}<th scope="col">N = {{ n }}</th>{% endfor %}</tr></thead>
<tbody>
{% for recipe, row in grid.items() %}<tr><th scope="row">{{ recipe }}</th>
{%- for n in windows %}<td>{% if n in row %}{% set m = row[n] %}
{%- if m.text == best %}<strong>{{ m.loss|loss }}</strong>{% else %}{{ m.loss|loss }}{% endif %}
{%- if m.recovered_share is not none %}<small>{{ m.recovered_share|percent }}</small>{% endif %}
{%- else %}–{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endif %}
{%- if r.previews %}
<h2>Previews while training</h2>
<div class="scroll"><table>
<caption>{{ r.previews_below_raw }} of {{ r.previews_total }} previews are below the raw loss at the same tokens. Gain
is the raw loss less the preview's, in nats a token.</caption>
<thead><tr><th scope="col">preview</th><th scope="col">below raw</th><th scope="col">first at</th>
<th scope="col">always below from</th><th scope="col">median gain</th><th scope="col">last gain</th></tr></thead>
<tbody>
{% for text, p in r.previews.items() %}<tr><th scope="row">{{ text }}</th><td>{{ p.below_raw }} of {{ p.count }}</td>
<td>{{ p.first_tokens|millions }}</td><td>{{ p.below_raw_since_tokens|millions }}</td>
<td>{{ p.median_gain|signed }}</td><td>{{ p.last_gain|signed }}</td></tr>
{% endfor %}</tbody>
</table></div>
{% endif %}
{%- if r.spikes %}
<h2>Loss spikes</h2>
<div class="scroll"><table>
<caption>Where the training loss left the median of the steps before it, in nats a token; tokens at which it was back,
or was given up. What came after the point to which the run went back lies in spikes/ and is part of no merge.</caption>
<thead><tr><th scope="col">began at</th><th scope="col">until</th><th scope="col">median before</th>
<th scope="col">highest</th><th scope="col">what became of it</th></tr></thead>
<tbody>
{% for s in r.spikes %}<tr><th scope="row">{{ s.onset_tokens|millions }}</th><td>{{ s.tokens|millions }}</td>
<td>{{ s.median_loss|loss }}</td>
<td>{% if s.peak_loss is none %}not finite{% else %}{{ s.peak_loss|loss }}{% endif %}</td>
<td>{{ s.verdict }}{% if s.went_back %}{% set b = s.went_back %}: back to {{ b.recipe }} of {{ b.snapshots }} snapshots
at {{ b.tokens|millions }}, optimizer {{ b.optimizer }}{% if b.passes_over_data %}, its data passed over{% endif %},
attempt {{ b.attempt }}{% endif %}</td></tr>
{% endfor %}</tbody>
</table></div>
{% endif %}
<h2>Made by</h2>
<pre>{{ r.commands|join("\n") }}</pre>
<dl>
<dt>corpus</dt><dd>{{ r.corpus_digest or "not recorded" }}</dd>
<dt>held-out tokens</dt><dd>{{ r.evaluation_digest or "not recorded" }}</dd>
<dt>configuration</dt><dd>{{ r.config_digest }}</dd>
{% for a in r.annealed_runs %}<dt>configuration, annealed</dt><dd>{{ a.config_digest }}</dd>
{% endfor -%}
<dt>versions</dt><dd>{% for name, version in r.versions.items() %}{{ name }} {{ version }}
{%- if not loop.last %}, {% endif %}{% else %}not recorded{% endfor %}</dd>
</dl>
<details><summary>The run's configuration</summary><pre>{{ config }}</pre></details>
</main>
</body>
</html>
"""


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"loss": _loss, "percent": _percent, "millions": _millions, "signed": _signed}
    return environment.from_string(_BODY)


_TEMPLATE = _template()
