"""Render the tables and numbers of README.md and of the pages in docs/ from CSV files.

python scripts/tables.py

A table stands between two comments. The first one names, in YAML, the file (from the page's
directory) and, for each column, a format string over the columns of the file:

    <!-- table
    csv: results/tables/price.csv
    columns: {steps: "{steps:,.0f}", cost: "{gap:+.1f} ({low:+.1f} to {high:+.1f})"}
    where: {study: [digits-paper, digits-quick]}
    source: how the file was made, for readers of the page's text
    -->

    <!-- end of table -->

`where` and `source` may be left out, and `columns` where the file has claims of benchmarks. A
value with a format is a number, without the interval that may follow it; others are shown as they
are. A cell of the table is empty if a
value that it needs is empty. Columns of numbers are aligned to the right. Lines that are equal are
shown once.

A number in a sentence stands before a comment, which names the file, the row and the format:

    any order costs 25.3<!-- from results/tables/price.csv, steps=500: {cost:.1f} --> points

`, column=value` comes as often as it takes to choose exactly one row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.files import write_text
from layershuffle.ground.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- table\n"
END = "<!-- end of table -->"
NUMBER = "<!-- from "
_OF_CLAIMS = {
    "what": "{name}", "ratio or number": "{what}", "median": "{median}", "range": "{range}",
    "promised": "{promised}", "result": "{verdict}",
}  # fmt: skip
_NUMBER = re.compile(r"$|[-+$]?\d")
_TABLE = re.compile(rf"({BEGIN}(.*?)-->\n).*?{END}", re.DOTALL)
_IN_A_SENTENCE = re.compile(rf"[-+\d.,]+({NUMBER}([^>]*): (\{{[^}}]*\}})\s-->)")


def pages() -> Iterator[Path]:
    """The pages that have tables or numbers to render."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if BEGIN in text or NUMBER in text:
            yield page


def render(text: str, *, page: Path) -> str:
    """`text`, which is that of `page`, with tables and numbers as their files have them now.

    Raises `LayerShuffleError` for a mark without an end, for a file or column that is not there,
    and for a number of no row or of several.
    """

    def table(match: re.Match[str]) -> str:
        begin, mark = match.groups()
        with _named(mark, page):
            text = table_of(yaml.safe_load(mark), directory=page.parent)
        return f"{begin}\n{text}\n\n{END}"

    def number(match: re.Match[str]) -> str:
        mark, row, form = match.groups()
        with _named(mark, page):
            return number_of(row, form, directory=page.parent) + mark

    if text.count(BEGIN) != text.count(END):
        raise LayerShuffleError(f"Not every table has its {END}", place=page)
    if text.count(NUMBER) != len(_IN_A_SENTENCE.findall(text)):
        raise LayerShuffleError(f"Not every mark {NUMBER}... is well formed", place=page)
    return _IN_A_SENTENCE.sub(number, _TABLE.sub(table, text))


@contextmanager
def _named(mark: str, page: Path) -> Iterator[None]:
    """What goes wrong inside becomes a `LayerShuffleError` that names the mark and its page."""
    try:
        yield
    except (OSError, KeyError, ValueError) as error:
        raise LayerShuffleError(
            f"A mark cannot be rendered ({error!r}): {' '.join(mark.split())[:60]} ...",
            place=page,
            hint="name a CSV file from the directory of the page, its columns, and rows in it",
        ) from error


def table_of(mark: Mapping[str, Any], *, directory: Path) -> str:
    """The table that `mark` describes, of a file that it names from `directory`."""
    columns: Mapping[str, str] = mark.get("columns", _OF_CLAIMS)
    rows = _rows(directory / mark["csv"], mark.get("where", {}))
    lines = dict.fromkeys(tuple(_cell(form, row) for form in columns.values()) for row in rows)
    if not lines:
        raise ValueError(f"no rows of {mark['csv']}")
    columns_of_cells = zip(*lines, strict=True)
    align = "".join("r" if all(map(_NUMBER.match, cells)) else "l" for cells in columns_of_cells)
    return markdown_table(list(columns), lines, align=align)


def number_of(row: str, form: str, *, directory: Path) -> str:
    """`form` with the values of one row: "file.csv, column=value" names it from `directory`."""
    file, *conditions = [word.strip() for word in row.split(",")]
    where = dict(condition.split("=") for condition in conditions)
    rows = _rows(directory / file, where)
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows in place of one")
    return _cell(form, rows[0])


def _rows(path: Path, where: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a CSV file that `where` chooses, in their order."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if _is_chosen(row, where)]


def _is_chosen(row: Mapping[str, str], where: Mapping[str, Any]) -> bool:
    return all(
        row[column] in map(str, wanted if isinstance(wanted, list) else [wanted])
        for column, wanted in where.items()
    )


def _cell(form: str, row: Mapping[str, str]) -> str:
    """`form` with the values of `row`, as numbers where it says how to format them."""
    specs = {name: spec for _, name, spec, _ in Formatter().parse(form) if name}
    if not all(row[name] for name in specs):
        return ""
    values: dict[str, float | str] = {}
    for name, spec in specs.items():
        values[name] = float(row[name].partition(" ")[0]) if spec else row[name]
    return form.format_map(values)


if __name__ == "__main__":
    for path in pages():
        shown = path.read_text(encoding="utf-8")
        write_text(path, render(shown, page=path))
        print(f"Written: {path}")
