"""Results of an analysis: tidy tables, numbers, and the files they are kept in."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle.errors import UsageError

SUMMARY = "summary.json"
SCHEMA = 1
Value = int | float | str
Facts = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Tidy rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def column(self, name: str) -> list[Any]:
        """One column's values."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def where(self, **fields: Value) -> Table:
        """The rows that have these values."""
        places = {self.columns.index(name): value for name, value in fields.items()}
        rows = (row for row in self.rows if all(row[at] == v for at, v in places.items()))
        return Table(self.columns, tuple(rows))


Tables = Mapping[str, Table]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement found: tables by file name without suffix, and numbers in words."""

    tables: Tables
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Result:
    """An analysis as its directory holds it."""

    name: str
    title: str
    paragraph: str
    files: tuple[str, ...]
    settings: dict[str, Any]
    facts: Facts
    tables: Tables


def table_text(table: Table) -> str:
    """The table as CSV; floats with six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(
        # + 0.0 makes a zero of a negative one.
        [format(v + 0.0, ".6g") if isinstance(v, float) else v for v in row]
        for row in table.rows
    )
    return text.getvalue()


def table_from(text: str) -> Table:
    """The table that `table_text` wrote; numbers are numbers again."""
    header, *rows = csv.reader(io.StringIO(text))
    return Table(tuple(header), tuple(tuple(map(_value, row)) for row in rows))


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_analysis(out: Path) -> Result:
    """The analysis in that directory. Raises `UsageError` if there is none."""
    summary = read_summary(out)
    if summary is None:
        raise UsageError(
            "There is no analysis here", place=out, hint="layershuffle analyze NAME MODEL --out DIR"
        )
    tables = {
        Path(name).stem: table_from((out / name).read_text(encoding="utf-8"))
        for name in summary["files"]
        if name.endswith(".csv")
    }
    return Result(
        name=summary["name"],
        title=summary["title"],
        paragraph=summary["paragraph"],
        files=tuple(summary["files"]),
        settings=summary["settings"],
        facts=summary["facts"],
        tables=tables,
    )


def read_summary(out: Path) -> dict[str, Any] | None:
    """The content of summary.json, `None` where there is no analysis."""
    path = out / SUMMARY
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    ours = isinstance(summary, dict) and summary.get("schema") == SCHEMA and "facts" in summary
    return summary if ours else None


def check_replaceable(out: Path) -> None:
    """Raises `UsageError` if `out` holds anything but an older analysis: writing replaces it."""
    if not out.exists():
        return
    known = {SUMMARY, *((read_summary(out) or {}).get("files", ()))}
    if not out.is_dir() or {one.name for one in out.iterdir()} - known:
        raise UsageError(
            "Something else than an analysis is here, which writing would delete",
            place=out,
            hint="name a new directory with --out",
        )


def spread(values: Sequence[float]) -> str:
    """ "3.10 to 4.20": the range of some numbers, for a sentence."""
    return f"{min(values):.2f} to {max(values):.2f}"
