"""Settings and helpers of all figures. They avoid pyplot, which keeps global state."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pma_jax.config import snapshot_kind

PAGE_DPI, PANELS_DPI = 200, 130  # PAGE_DPI: for figures that a page shows at half their size in pixels
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 11, 9.5, 8.5
CHARACTER_INCHES = 0.082  # mean width of a character of TEXT_POINTS
DASHES, DOTS = (0, (4, 1.8)), (0, (1, 1))
MARKERS = "osD^vPX*<>"
SERIES_COLORS = matplotlib.color_sequences["tab10"]
LOSS_COLORMAP = "YlGnBu_r"  # low losses are dark; lightness is monotonic, so it is readable in grey too


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of figures on one background, based on the palette of Okabe and Ito for colour-blind readers."""

    paper: str
    ink: str
    muted: str  # axes, notes, and the raw run
    grid: str
    preview: str  # merges during training
    annealed: str
    merges: tuple[str, ...]  # one per line, in the order of the sweep; when used up, repeated with other markers


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
    """Set the title, axis labels and tick style of one panel, in the colours of `LIGHT`: not for dark figures."""
    axes.set_title(title, loc="left", fontsize=TEXT_POINTS, color=LIGHT.ink)
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
    axes.set_ylabel(y_label, fontsize=SMALL_POINTS, color=LIGHT.muted)
    axes.tick_params(labelsize=SMALL_POINTS, colors=LIGHT.muted)


def series_name(merge: dict[str, Any]) -> str:
    """Return the name of a merge without its window, such as `sma`, `block/wma` or `sma@2`."""
    interval = f"@{merge['interval']}" if merge["interval"] > 1 else ""
    return f"{snapshot_kind(merge['kind']).label_prefix}{merge['recipe']}{interval}"


def group_by_series_and_window(merges: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Group merges by series name, then by window, in the order of the sweep."""
    series: dict[str, dict[int, dict[str, Any]]] = {}
    for merge in merges:
        series.setdefault(series_name(merge), {})[merge["window"]] = merge
    return series


def display_name(text: str) -> str:
    """Format the text of a recipe or a merge for figures: `ema:alpha=0.2:10` becomes `ema α=0.2:10`."""
    return text.replace(":alpha=", " α=").replace(":lag=", " lag=")
