"""Hooks of the documentation build (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from layershuffle.cli import APP, SWARM_COMMANDS
from layershuffle.ground.text import markdown_table
from layershuffle.study.paper.report import write_report
from layershuffle.study.tasks import FIGURES

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CSS_REQUEST = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
# Attributes of any element whose addresses a browser fetches.
_FETCHED = ("src", "srcset", "poster", "data")
# A <link> is fetched, except with these values of `rel`.
_LINKS_UNFETCHED = {"canonical", "alternate", "author", "license", "next", "prev"}


# What people search for, and the page that is about it.
SEARCHES = {
    "any order": "methods",
    "fine-tune": "own-images",
    "dropout of layers": "methods",
    "early exit": "missing-blocks",
    "stochastic depth": "methods",
    "shuffled": "glossary",
    "Hugging Face": "specs",
    "Trainer": "own-loop",
    "Lightning": "own-loop",
    "timm": "own-loop",
    "mixup": "own-loop",
    "install": "getting-started",
    "Windows": "stability",
    "GPU": "distributed",
    "resume": "own-images",
    "checkpoint": "commands",
    "learning rate": "troubleshooting",
    "out of memory": "troubleshooting",
    "ONNX": "onnx",
    "export": "onnx",
    "int8": "onnx",
    "browser": "phone",
    "Raspberry Pi": "pis",
    "Home Assistant": "cameras",
    "Kubernetes": "deploy",
    "merge": "merging",
    "soup": "merging",
    "ensemble": "merging",
    "truncate": "python",
    "cite": "index",
}


@cache
def report_of(study: Path) -> tuple[str, Path]:
    """The report of a study that the repository keeps, and the directory of its figures."""
    place = study.parents[2] / "build" / "reports" / study.name
    shutil.copytree(study, place, dirs_exist_ok=True)
    write_report(place)
    headline, _, rest = (place / "report.md").read_text(encoding="utf-8").partition("\n")
    return f"\n## The report\n\n**{headline.removeprefix('# ')}**\n{rest}", place / FIGURES


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the figures of the reports."""
    docs = Path(config.docs_dir)
    for page in docs.glob("results/*/README.md"):
        _, figures = report_of(page.parent)
        for figure in sorted(figures.iterdir()):
            uri = (page.parent / FIGURES / figure.name).relative_to(docs).as_posix()
            if uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with what is made from code and results, without links into the repository."""
    del files
    docs = Path(config.docs_dir)
    path = docs / page.file.src_uri
    if path.with_name("plan.json").is_file():
        markdown += report_of(path.parent)[0]
    if page.file.src_uri == "commands.md":
        markdown = with_options(markdown)
    return inside(markdown, page=path, docs=docs)


def with_options(markdown: str) -> str:
    """The page of commands with a table of all options at the end of every section."""
    first, *sections = re.split(r"(?m)^(?=## )", markdown)
    for place, section in enumerate(sections):
        name = section.partition("\n")[0].removeprefix("## ")
        of_swarm = [f"swarm {part}" for part in SWARM_COMMANDS] if name == "swarm" else []
        for command in of_swarm or [name]:
            sections[place] += f'??? note "Options of `{command}`"\n\n{options_of(command)}\n\n'
    return first + "".join(sections)


def options_of(command: str) -> str:
    """The options of a command as an indented table, from its help."""
    app = APP
    for word in command.split():
        app = app[word]
    arguments = app.assemble_argument_collection(
        default_parameter=APP.default_parameter, parse_docstring=True
    )
    rows = [
        (
            " ".join(f"`{name}`" for name in argument.names),
            " ".join(argument.parameter.help.split()),
        )
        for argument in arguments
        if argument.show and argument.parameter.help
    ]
    return textwrap.indent(markdown_table(["option", "what it does"], rows), "    ")


def on_post_build(config: MkDocsConfig) -> None:
    """Raises `PluginError` for a site that would send requests to other origins.

    And for one whose search does not find a page for each of `SEARCHES`.
    """
    site = Path(config.site_dir)
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    lost = not_found(index["docs"])
    if lost:
        raise PluginError(f"A search finds nothing on the page that is about it: {lost}")
    foreign = {}
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            requests = foreign_requests(text, css=path.suffix == ".css")
            if requests:
                foreign[path.relative_to(site).as_posix()] = requests
    if foreign:
        raise PluginError(f"The site would send requests to other origins: {foreign}")


def not_found(sections: list[dict[str, str]]) -> dict[str, str]:
    """Of `SEARCHES` those that no section of their page holds, in title or text.

    `sections` are those of the index of the site: `location`, `title` and `text` of each.
    """
    texts: dict[str, str] = {}
    for section in sections:
        page = section["location"].partition("#")[0].removesuffix(".html") or "index"
        # Terms are found within one section alone.
        words = " ".join(f"{section['title']} {section['text']}".lower().split())
        texts[page] = f"{texts.get(page, '')}\n{words}"
    return {
        words: page for words, page in SEARCHES.items() if words.lower() not in texts.get(page, "")
    }


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
