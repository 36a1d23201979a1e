"""Markdown as literal text, tables and sections, and the HTML page that is made of it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from layershuffle.plotting import html_page
from layershuffle.text import markdown_table

if TYPE_CHECKING:
    from markdown_it.token import Token

_KINDS = {".png": "png", ".svg": "svg+xml"}


def printable(text: str) -> str:
    """`text` on one line without control characters (they could drive the reader's terminal)."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def literal(text: str) -> str:
    """`text` as literal text inside a Markdown table or paragraph."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # "$" and "~" too, which GitHub interprets as mathematics and deleted text.
    return re.sub(r"([\\`*_\[\]|$~!#])", r"\\\1", safe)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "") -> str:
    """A table of literal text; "" without rows."""
    cells = [[*map(literal, row)] for row in rows]
    return markdown_table([*map(literal, head)], cells, align=align) if cells else ""


def section(title: str, *blocks: str) -> str:
    """A heading with the blocks that say something below it; "" if none does."""
    shown = [block for block in blocks if block]
    return "\n\n".join([f"## {literal(title)}", *shown]) if shown else ""


def picture(file: str, caption: str) -> str:
    """A figure with its caption."""
    return f"![{literal(caption)}]({quote(file)})"


def page(text: str, *, place: Path) -> str:
    """The Markdown page as one HTML page with the figures inside, for a mail or a browser.

    `place`: the directory of the page, from which its figures are named. No script, nothing that a
    browser would fetch.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    groups: list[list[Token]] = [[]]
    for token in parser.parse(text):
        if token.type == "heading_open" and token.tag == "h2":
            groups.append([])
        groups[-1].append(token)
        for child in token.children or ():
            if child.type == "image":
                path = place / unquote(str(child.attrs["src"]))
                data = b64encode(path.read_bytes()).decode("ascii")
                child.attrSet("src", f"data:image/{_KINDS[path.suffix]};base64,{data}")
    # A heading is three tokens: its begin, its text and its end.
    titles = [parser.renderInline(tokens[1].content) for tokens in groups]
    bodies = [parser.renderer.render(tokens[3:], parser.options, {}) for tokens in groups]
    return html_page(titles[0], dict(zip(titles[1:], bodies[1:], strict=True)), lead=bodies[0])
