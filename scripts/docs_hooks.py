"""Hooks of the documentation build (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CSS_REQUEST = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
# Sections of the navigation and the directories whose pages they list.
_DIRECTORIES = {"Commands": "commands", "Decisions": "decisions"}
# Attributes of any element whose addresses a browser fetches.
_FETCHED = ("src", "srcset", "poster", "data")
# A <link> is fetched, except with these values of `rel`.
_LINKS_UNFETCHED = {"canonical", "alternate", "author", "license", "next", "prev"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections of the navigation that have a page for every file of a directory."""
    docs = Path(config.docs_dir)
    for section in (entry for entry in config.nav or [] if isinstance(entry, dict)):
        for title in _DIRECTORIES.keys() & section:
            pages = (docs / _DIRECTORIES[title]).glob("*.md")
            ordered = sorted(pages, key=lambda path: (path.stem != "index", path.stem))
            section[title] = [path.relative_to(docs).as_posix() for path in ordered]
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page without links that only work in the repository."""
    del files
    docs = Path(config.docs_dir)
    return inside(markdown, page=docs / page.file.src_uri, docs=docs)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises `PluginError` for a site that would send requests to other origins."""
    site = Path(config.site_dir)
    foreign = {}
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            requests = foreign_requests(text, css=path.suffix == ".css")
            if requests:
                foreign[path.relative_to(site).as_posix()] = requests
    if foreign:
        raise PluginError(f"The site would send requests to other origins: {foreign}")


def inside(markdown: str, *, page: Path, docs: Path) -> str:
    """`markdown` of `page` with every link out of `docs` replaced by the path of its file."""

    def plain(match: re.Match[str]) -> str:
        text, address = match.groups()
        target = (page.parent / address.partition("#")[0]).resolve()
        if "://" in address or target.is_relative_to(docs.resolve()):
            return match.group()
        path = target.relative_to(docs.resolve().parent).as_posix()
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(plain, markdown)


def foreign_requests(text: str, *, css: bool = False) -> list[str]:
    """Addresses of other origins that a browser fetches for this page or style sheet.

    Links for readers are not included.
    """
    if css:
        return _CSS_REQUEST.findall(text)
    parser = _Requests()
    parser.feed(text)
    return parser.addresses


class _Requests(HTMLParser):
    """Collects the addresses that the elements of a page fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        fetched = [values[name] for name in _FETCHED if name in values]
        if tag == "link" and values.get("rel", "").lower() not in _LINKS_UNFETCHED:
            fetched.append(values.get("href", ""))
        # A srcset holds several addresses, each followed by a width.
        for address in " ".join(fetched).replace(",", " ").split():
            if address.lower().startswith(("http://", "https://", "//")):
                self.addresses.append(address)
        self.addresses += _CSS_REQUEST.findall(values.get("style", ""))
        # For such an element the theme loads a drawing library from another host.
        if "mermaid" in values.get("class", "").split():
            self.addresses.append("mermaid")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.addresses += _CSS_REQUEST.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"
