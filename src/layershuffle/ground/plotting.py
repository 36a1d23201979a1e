"""One look for every figure: its colours, files whose bytes depend on the data alone, a page.

Figures are drawn with matplotlib's object interface: no global state is changed for good, and no
display is needed.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from layershuffle.ground.bundled import asset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK = "#1c2126"
RULE = "#d3d9df"
GROUND = "#fefefe"
Style = tuple[str, str, Literal["-", "--", "-.", ":"]]
# Colour, marker and dash differ together, so no reader depends on colour. Mostly Okabe and Ito's
# colours, without the pale ones.
STYLES: tuple[Style, ...] = (
    ("#5d6975", "o", "--"),
    ("#0072b2", "s", "-"),
    ("#d55e00", "^", "-."),
    ("#00875f", "D", "-"),
    ("#a0397e", "v", ":"),
    ("#8a6d00", "P", "--"),
    ("#007f99", "X", "-."),
    ("#6a4fb3", "*", "-"),
    ("#b3400f", "<", ":"),
    ("#3d6b1f", ">", "--"),
)
METHOD_STYLES = {
    "baseline": STYLES[0],
    "layershuffle": STYLES[1],
    "layerdrop": STYLES[2],
    "anyorder": STYLES[3],
    "layershuffle-position": STYLES[4],
    "layershuffle-predict": STYLES[5],
    "truncated": STYLES[6],
}
"""The style of every method, the same in all figures."""
# On a dark page: what these three become; the colours of STYLES are mixed with white.
_DARK = {INK: "#e6eaee", RULE: "#3a434c", GROUND: "#14181c"}
_WHITE_SHARE = 0.45
_HASH_SALT = "layershuffle"
_LEGEND_COLUMNS = 5  # at most
_LEGEND_LETTERS = 40  # at most; a longer name takes several lines


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


def draw_legend(figure: Figure | SubFigure, entries: Sequence[tuple[Any, str]]) -> None:
    """A legend of (handle, name) under the panels, in as many columns as the width has room for."""
    canvas: Any = figure.figure.canvas  # of `new_figure`: it has a renderer
    handles = []
    names = []
    for handle, name in entries:
        handles.append(handle)
        names.append("\n".join(textwrap.wrap(name, _LEGEND_LETTERS)))
    for columns in range(min(_LEGEND_COLUMNS, len(names)), 0, -1):
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        for text in legend.get_texts():
            # matplotlib would read a "$" in a name as mathematics.
            text.set(color=INK, parse_math=False)
        if columns == 1:
            return
        # Only what was drawn has a width: it depends on the font.
        if legend.get_window_extent(canvas.get_renderer()).width < figure.bbox.width:
            return
        legend.remove()


def figure_bytes(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """The figure as an SVG with real text, or as a PNG of 150 dots per inch; no dates inside.

    The SVG follows the dark mode of the page that shows it; colours outside of this module's, as
    those of a map and of the text in its cells, stay.
    """
    import matplotlib

    # Dates and versions would make another file of the same picture, and so would element ids
    # without a fixed salt.
    nothing = ("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": _HASH_SALT}):
        figure.savefig(file, format=kind, dpi=150, metadata=dict.fromkeys(nothing))
    if kind == "png":
        return file.getvalue()
    return file.getvalue().replace(b" <defs>", f" {_dark_style()}\n <defs>".encode(), 1)


def dark_colours() -> dict[str, str]:
    """What each colour of a figure becomes on a dark page, both as #rrggbb."""
    colours = dict(_DARK)
    for light, _, _ in STYLES:
        channels = []
        for place in (1, 3, 5):
            value = int(light[place : place + 2], 16)
            channels.append(round(value + _WHITE_SHARE * (255 - value)))
        colours[light] = "#" + "".join(f"{channel:02x}" for channel in channels)
    return colours


def _dark_style() -> str:
    """The style of an SVG that replaces its colours on a dark page.

    matplotlib writes the colour of every element in its style attribute, which a rule has to match
    and to override.
    """
    rules = []
    for light, dark in dark_colours().items():
        for what in ("fill", "stroke"):
            rules.append(f'[style*="{what}: {light}"]{{{what}:{dark}!important}}')
    return f"<style>@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table: `head` names the columns (it may be empty), and each of `rows` is a row."""
    lines = [_html_row(head, "th")]
    for row in rows:
        lines.append(_html_row(row, "td"))
    return f"<table>{''.join(lines)}</table>"


def _html_row(cells: Sequence[object], tag: Literal["th", "td"]) -> str:
    """One row of a table as HTML, nothing for no cells."""
    if not cells:
        return ""
    texts = [f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells]
    return f"<tr>{''.join(texts)}</tr>"


def html_page(title: str, parts: Mapping[str, str], *, lead: str = "") -> str:
    """A page without scripts: `lead`, then a section under every heading; all are HTML."""
    links = []
    sections = []
    for number, (head, part) in enumerate(parts.items(), start=1):
        links.append(f'<li><a href="#section-{number}">{head}</a></li>')
        sections.append(f'<h2 id="section-{number}">{head}</h2>\n{part}\n')
    words = {
        "TITLE": re.sub("<[^>]*>", "", title),
        "CONTENTS": "".join(links),
        "BODY": "".join([f"<h1>{title}</h1>\n{lead}", *sections]),
    }
    frame = asset("report.html").read_text(encoding="utf-8")
    # One pass, so a part that holds the name of another stays as it is.
    return re.sub("{(TITLE|CONTENTS|BODY)}", lambda match: words[match[1]], frame)
