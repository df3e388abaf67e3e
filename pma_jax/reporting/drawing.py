"""What all figures share: themes, sizes of text, and figures drawn without pyplot, so that no global state changes."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pma_jax.config import SNAPSHOT_KINDS

PAGE_DPI, PANELS_DPI = 200, 130  # PAGE_DPI: twice the size at which a page shows the figure
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 11, 9.5, 8.5
CHARACTER_INCHES = 0.082  # mean width of a character of TEXT_POINTS
DASHES, DOTS = (0, (4, 1.8)), (0, (1, 1))
MARKERS = "osD^vPX*<>"
SERIES_COLORS = matplotlib.color_sequences["tab10"]
LOSS_COLORMAP = "YlGnBu_r"  # dark is low; even in lightness, and readable in grey


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours on one background. Series colours follow Okabe and Ito: distinct with any colour vision."""

    paper: str
    ink: str
    muted: str  # axes, notes, and the raw run
    grid: str
    preview: str  # all previews
    annealed: str
    merges: tuple[str, ...]  # one per recipe, in the order of the sweep; markers tell repeated colours apart


LIGHT = Theme(
    "#ffffff", "#1d2127", "#767d87", "#e7e9ec", "#0072b2", "#c84b00", ("#0072b2", "#009e73", "#b5579a", "#b07d00")
)
DARK = Theme(
    "#15181d", "#e8eaed", "#9aa1ab", "#2a2f37", "#56b4e9", "#ff8a3d", ("#56b4e9", "#2fc79b", "#e08fc4", "#e8b93a")
)


def new_figure(width: float, height: float, theme: Theme = LIGHT, **options: Any) -> Figure:
    """Return an empty figure of a size in inches, with its own Agg canvas; `options` go to `Figure`."""
    figure = Figure(figsize=(width, height), facecolor=theme.paper, **options)
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure, dpi: int = PANELS_DPI) -> bytes:
    """Encode a figure as PNG without matplotlib's name and version, so that equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def label_panel(axes: Axes, title: str, x_label: str, y_label: str = "") -> None:
    """Set the title, the labels and the look of the ticks of one panel of several."""
    axes.set_title(title, loc="left", fontsize=TEXT_POINTS, color=LIGHT.ink)
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
    axes.set_ylabel(y_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
    axes.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)


def series_name(merge: dict[str, Any]) -> str:
    """Name the merges that differ only by their window: `sma`, `block/wma`, `sma@2`."""
    every = f"@{merge['interval']}" if merge["interval"] > 1 else ""
    return f"{SNAPSHOT_KINDS[merge['kind']].label_prefix}{merge['recipe']}{every}"


def group_by_series_and_window(merges: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return series -> window -> merge, in the order of the sweep."""
    series: dict[str, dict[int, dict[str, Any]]] = {}
    for merge in merges:
        series.setdefault(series_name(merge), {})[merge["window"]] = merge
    return series


def display_name(text: str) -> str:
    """Return a recipe or a merge as figures show it: `ema:alpha=0.2:10` as `ema α=0.2:10`."""
    return text.replace(":alpha=", " α=").replace(":lag=", " lag=")
