"""One look for every figure: its colours, and files whose bytes depend on the data alone.

Figures are drawn with matplotlib's object interface: no global state is changed for good, and no
display is needed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE, GROUND = "#1c2126", "#d3d9df", "#fefefe"
_HASH_SALT = "layershuffle"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: it keeps every figure alive, and chooses a back end by the display.
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, title: str = "") -> None:
    """Ink for the words, no frame, the title at the left."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_facecolor("none")
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def figure_bytes(figure: Figure, kind: Literal["svg", "png"], *, dpi: int = 150) -> bytes:
    """The figure as an SVG with real text, or as a PNG of `dpi` dots per inch; no dates inside."""
    import matplotlib

    # Dates and versions would make another file of the same picture, and so would element ids
    # without a fixed salt.
    nothing = ("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": _HASH_SALT}):
        figure.savefig(file, format=kind, dpi=dpi, metadata=dict.fromkeys(nothing))
    return file.getvalue()
