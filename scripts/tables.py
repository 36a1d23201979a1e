"""Render the tables of README.md and of the pages in docs/ from CSV files.

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
value with a format is a number, others are shown as they are. A cell of the table is empty if a
value that it needs is empty. Columns of numbers are aligned to the right. Lines that are equal are
shown once.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from layershuffle.errors import LayerShuffleError
from layershuffle.files import write_text
from layershuffle.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table\n", "<!-- end of table -->"
NO_ROWS = "*Not measured yet.*"
_OF_CLAIMS = {
    "what": "{name}", "ratio or number": "{what}", "median": "{median}", "range": "{range}",
    "promised": "{promised}", "result": "{verdict}",
}  # fmt: skip
_NUMBER = re.compile(r"$|[-+$]?\d")
_TABLE = re.compile(rf"({BEGIN}(.*?)-->\n).*?{END}", re.DOTALL)


def pages() -> Iterator[Path]:
    """The pages that have tables to render."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if BEGIN in page.read_text(encoding="utf-8"):
            yield page


def render(text: str, *, page: Path) -> str:
    """`text`, which is that of `page`, with the tables as their files have them now.

    Raises `LayerShuffleError` for a table without an end, and for a file or column that is not
    there.
    """

    def rendered(match: re.Match[str]) -> str:
        begin, mark = match.groups()
        try:
            table = table_of(yaml.safe_load(mark), directory=page.parent)
        except (OSError, KeyError, ValueError) as error:
            raise LayerShuffleError(
                f"A table cannot be rendered ({error!r}): {' '.join(mark.split())[:60]} ...",
                place=page,
                hint="name a CSV file from the directory of the page, and its columns",
            ) from error
        return f"{begin}\n{table}\n\n{END}"

    if text.count(BEGIN) != text.count(END):
        raise LayerShuffleError(f"Not every table has its {END}", place=page)
    return _TABLE.sub(rendered, text)


def table_of(mark: Mapping[str, Any], *, directory: Path) -> str:
    """The table that `mark` describes, of a file that it names from `directory`."""
    columns: Mapping[str, str] = mark.get("columns", _OF_CLAIMS)
    where: Mapping[str, Any] = mark.get("where", {})
    with (directory / mark["csv"]).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if _is_chosen(row, where)]
    lines = dict.fromkeys(tuple(_cell(form, row) for form in columns.values()) for row in rows)
    if not lines:
        return NO_ROWS
    columns_of_cells = zip(*lines, strict=True)
    align = "".join("r" if all(map(_NUMBER.match, cells)) else "l" for cells in columns_of_cells)
    return markdown_table(list(columns), lines, align=align)


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
    return form.format_map(
        {name: float(row[name]) if spec else row[name] for name, spec in specs.items()}
    )


if __name__ == "__main__":
    for path in pages():
        shown = path.read_text(encoding="utf-8")
        write_text(path, render(shown, page=path))
        print(f"Written: {path}")
