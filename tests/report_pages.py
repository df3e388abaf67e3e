"""Read the plots back from a page of a report, by Bokeh's own reader."""

import json
import re

from bokeh.document import Document


def embedded_plots(page):
    """Return the figures of a page by the identifiers of their places."""
    (text,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', page, re.S)
    return {place: Document.from_json(item["doc"]).roots[0] for place, item in json.loads(text).items()}


def curves(plot):
    """Return the points of each entry of the legend of a plot that has any."""
    sources = {item.label.value: item.renderers[0].data_source.data for item in plot.legend[0].items}
    return {
        name: list(zip(data["x"], data["y"], strict=True))
        for name, data in sources.items()
        if "x" in data and "y" in data
    }
