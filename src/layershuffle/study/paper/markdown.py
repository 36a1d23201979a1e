"""Markdown as literal text, tables and sections, and the HTML page that is made of it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, unquote

from layershuffle.text import markdown_table

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
    tokens, headings = parser.parse(text), list[str]()
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            headings.append(tokens[number + 1].content)
            token.attrSet("id", f"section-{len(headings)}")
        for child in token.children or ():
            if child.type == "image":
                path = place / unquote(str(child.attrs["src"]))
                data = b64encode(path.read_bytes()).decode("ascii")
                child.attrSet("src", f"data:image/{_KINDS[path.suffix]};base64,{data}")
    links = "".join(
        f'<li><a href="#section-{number}">{parser.renderInline(heading)}</a></li>'
        for number, heading in enumerate(headings, start=1)
    )
    frame = (files("layershuffle.study.paper") / "page.html").read_text(encoding="utf-8")
    title = parser.renderInline(text.partition("\n")[0].removeprefix("# "))
    parts = {
        "TITLE": re.sub("<[^>]*>", "", title),
        "CONTENTS": links,
        "BODY": parser.renderer.render(tokens, parser.options, {}),
    }
    # One pass, so a part that holds the name of another stays as it is.
    return re.sub("{(TITLE|CONTENTS|BODY)}", lambda match: parts[match[1]], frame)
