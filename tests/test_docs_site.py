"""The documentation as a site: its pages, and that it sends no requests to other origins.

`scripts/check` builds it, strictly, beside the tests.
"""

import re

import pytest
from docs_hooks import foreign_requests, inside, with_options

import layershuffle as ls
from layershuffle.cli import SWARM_COMMANDS

OWN = """<link rel="stylesheet" href="assets/main.css"><link rel="canonical" href="https://a.example/x">
<script src="../bundle.js"></script><a href="https://a.example">follow me</a>
<img src="data:image/png;base64,AA"><style>p { background: url("own.png") }</style>"""


def test_a_page_of_its_own_asks_nobody_else():
    assert foreign_requests(OWN) == []
    assert foreign_requests("@font-face { src: url(own.woff2) }", css=True) == []


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://a.example/x"></script>',
        '<link rel="preconnect" href="https://a.example/x">',
        '<img src="//a.example/x">',
        '<img srcset="own.png 1x, https://a.example/x 2x">',
        "<style>@import 'https://a.example/x';</style>",
        '<p style="background: url(https://a.example/x)"></p>',
    ],
)
def test_a_request_to_another_origin_is_seen(element):
    (address,) = foreign_requests(OWN + element)
    assert address.endswith("//a.example/x")


def test_style_sheets_and_drawings_are_searched_too():
    assert foreign_requests("p { src: url('https://a.example/x') }", css=True) == [
        "https://a.example/x"
    ]
    assert foreign_requests('<pre class="mermaid">graph</pre>') == ["mermaid"]


def test_links_that_leave_the_pages_become_paths(repository):
    docs = repository / "docs"
    text = "[a](../log.md) [b](../../Makefile) [c](https://a.example) [`deploy/x`](../../deploy/x)"
    assert inside(text, page=docs / "results" / "x.md", docs=docs) == (
        "[a](../log.md) b (`Makefile`) [c](https://a.example) `deploy/x`"
    )


def test_the_reference_has_every_public_name(repository):
    page = (repository / "docs" / "python.md").read_text()
    names = [name.rpartition(".")[2] for name in re.findall(r"^::: (.+)$", page, re.MULTILINE)]
    assert len(names) == len(set(names))
    assert set(ls.__all__) - {"__version__"} <= set(names)


def test_the_page_of_commands_gets_the_options_of_each_command():
    page = with_options("# title\n\n## doctor\n\nwords\n\n## report\n\nmore\n\n## swarm\n")
    assert page.startswith('# title\n\n## doctor\n\nwords\n\n??? note "Options of `doctor`"\n')
    report, swarm = page.split("## report")[1].split("## swarm")
    assert re.findall("^    \\| `([^`]+)`", report, re.MULTILINE) == ["--directory"]
    assert swarm.count("??? note") == len(SWARM_COMMANDS)
    assert "    | `--hosts` | " in swarm
