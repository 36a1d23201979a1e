"""Checks shared by the tests of generated pages."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

DECIMAL = r"\d+\.\d+"
INTERVAL = r"[-+]\d+\.\d+ to [-+]\d+\.\d+"


def misplaced_numbers(page: Path, allowed: Collection[str] = ()) -> set[tuple[str, str]]:
    """Numbers in the words of a page that the tables beside them lack, each with its paragraph.

    Beside a paragraph are the tables under its heading and those of sections that it links to. An
    interval has to stand there as it is, another decimal outside of intervals, and whole percent or
    points as a rounded number.
    """
    wrong = set()
    for section in _sections(page.read_text(encoding="utf-8")).values():
        own, _, _ = section.removeprefix("#").partition("\n#")
        for paragraph in re.split(r"\n(?:- |\n)", re.sub(r"```.*?```", "", own, flags=re.DOTALL)):
            if paragraph.startswith(("|", "<!--")):
                continue
            links = re.findall(r"\]\(([\w./-]*\.md|)(#[\w-]+)?\)", paragraph)
            tables = _tables(own) + "".join(
                _tables(_sections((page.parent / path if path else page).read_text())[anchor])
                for path, anchor in links
            )
            words = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())))
            means = re.findall(DECIMAL, re.sub(r"\([^)]*\)", "", tables))
            shown = {*re.findall(INTERVAL, tables), *means, *(f"{float(m):.0f}" for m in means)}
            shown |= set(re.findall(r"(\d+) %", tables))
            numbers = re.findall(INTERVAL, words)
            rest = re.sub(INTERVAL, "", words).replace("95 % interval", "")
            numbers += re.findall(DECIMAL, rest)
            numbers += re.findall(r"(?<![\d.,])(\d+) (?:%|points?\b)", rest)
            wrong |= {(n, words[:40]) for n in numbers if n not in shown and n not in allowed}
    return wrong


def _sections(text: str) -> dict[str, str]:
    """The sections of a page with those below them, by the anchor that leads there; "": all."""
    titles = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    sections = {"": text}
    for index, title in enumerate(titles):
        ends = [t.start() for t in titles[index + 1 :] if len(t[1]) <= len(title[1])]
        anchor = re.sub(r"[^\w -]", "", title[2].lower()).replace(" ", "-")
        sections[f"#{anchor}"] = text[title.start() : ends[0] if ends else len(text)]
    return sections


def _tables(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))
