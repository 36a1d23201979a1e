"""Markdown as literal text, tables and sections, and the HTML page that is made of it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from layershuffle.ground.plotting import html_page
from layershuffle.ground.text import markdown_table, printable

_KINDS = {".png": "png", ".svg": "svg+xml"}


def literal(text: str) -> str:
    """`text` as literal text inside a Markdown table or paragraph."""
    line = " ".join(text.split())
    safe = printable(line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # "$" and "~" too, which GitHub interprets as mathematics and deleted text.
    return re.sub(r"([\\`*_\[\]|$~!#])", r"\\\1", safe)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of literal text; "" without rows."""
    cells = [list(map(literal, row)) for row in rows]
    return markdown_table(list(map(literal, head)), cells) if cells else ""


def section(title: str, *blocks: str) -> str:
    """A heading with the blocks that say something below it; "" if none does."""
    shown = [block for block in blocks if block]
    return "\n\n".join([f"## {literal(title)}", *shown]) if shown else ""


def picture(file: str, caption: str) -> str:
    """A figure with its caption."""
    return f"![{literal(caption)}]({quote(file)})"


def html_text(text: str, *, place: Path) -> str:
    """The Markdown page as one HTML page with the figures inside, for a mail or a browser.

    `place`: the directory of the page, from which its figures are named. No script, nothing that a
    browser would fetch.
    """
    from markdown_it import MarkdownIt

    def embed(match: re.Match[str]) -> str:
        path = place / unquote(match[1])
        data = b64encode(path.read_bytes()).decode("ascii")
        return f'<img src="data:image/{_KINDS[path.suffix]};base64,{data}"'

    # Without raw HTML: every image is a figure of the page.
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    head, *sections = re.sub(r'<img src="([^"]*)"', embed, html).split("<h2>")
    title, _, lead = head.removeprefix("<h1>").partition("</h1>\n")
    parts = {}
    for part in sections:
        heading, content = part.split("</h2>\n", 1)
        parts[heading] = content
    return html_page(title, parts, lead=lead)
