"""One look for every figure: its colours, and files whose bytes depend on the data alone.

Figures are drawn with matplotlib's object interface: no global state is changed for good, and no
display is needed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK, RULE, GROUND = "#1c2126", "#d3d9df", "#fefefe"
_HASH_SALT = "layershuffle"
_LEGEND_COLUMNS, _LEGEND_LETTERS = 5, 40  # at most; a longer name takes several lines


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


def legend_below(figure: Figure | SubFigure, entries: Sequence[tuple[Any, str]]) -> None:
    """A legend of (handle, name) under the panels, in as many columns as the width has room for."""
    canvas: Any = figure.figure.canvas  # of `new_figure`: it has a renderer
    handles = [handle for handle, _ in entries]
    names = ["\n".join(textwrap.wrap(name, _LEGEND_LETTERS)) for _, name in entries]
    for columns in range(min(_LEGEND_COLUMNS, len(names)), 0, -1):
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        for text in legend.get_texts():
            # matplotlib would read a "$" in a name as mathematics.
            text.set(color=INK, parse_math=False)
        # Only what was drawn has a width: it depends on the font.
        if columns == 1 or legend.get_window_extent(canvas.get_renderer()).width < (
            figure.bbox.width
        ):
            return
        legend.remove()


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
