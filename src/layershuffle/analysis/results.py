"""Results of an analysis: tidy tables, numbers, and the files that hold them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layershuffle.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame

    Tables = Mapping[str, DataFrame]

SUMMARY = "summary.json"
SCHEMA = 1
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a measurement: tables by file name without suffix, and single numbers."""

    tables: Tables
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Result:
    """An analysis, read from its directory."""

    name: str
    title: str
    paragraph: str
    files: tuple[str, ...]
    settings: dict[str, Any]
    facts: Facts
    tables: Tables


def table_text(table: DataFrame) -> str:
    """The table as CSV; floats with six digits."""
    floats = table.select_dtypes("float")
    # Adding 0.0 turns a negative zero into zero, or it would be written as "-0".
    text: str = table.assign(**(floats + 0.0)).to_csv(
        index=False, float_format="%.6g", na_rep="nan", lineterminator="\n"
    )
    return text


def table_from(text: str) -> DataFrame:
    """The table in the text of `table_text`."""
    from pandas import read_csv

    return read_csv(io.StringIO(text))


def read_analysis(out: Path) -> Result:
    """The analysis in the directory `out`. Raises `UsageError` if there is none."""
    summary = read_summary(out)
    if summary is None:
        raise UsageError(
            "This directory holds no analysis",
            place=out,
            hint="layershuffle analyze NAME MODEL --out DIR",
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
    """The content of summary.json, `None` if there is no analysis."""
    path = out / SUMMARY
    if not path.is_file():
        return None
    # Another program's file of that name is no analysis, and must not be replaced.
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    ours = isinstance(summary, dict) and summary.get("schema") == SCHEMA and "facts" in summary
    return summary if ours else None


def check_replaceable(out: Path) -> None:
    """Raises `UsageError` if `out`, which will be replaced, holds other files than an analysis."""
    if not out.exists():
        return
    ours = {SUMMARY, *((read_summary(out) or {}).get("files", ()))}
    if not out.is_dir() or {path.name for path in out.iterdir()} - ours:
        raise UsageError(
            "This directory holds files other than an analysis, which writing would delete",
            place=out,
            hint="name a new directory with --out",
        )
