"""What the merging and analysis tasks of a study left, read from its directory and checked.

OUT/merging/ARM/results.csv      one row per merge, soup, ensemble and donor (`merging.rows`)
OUT/analysis/NAME/files/         tables, figures and a paragraph (`analysis.results`)
.../result.json                  facts of the task; written last, so it marks a finished one
.../failure.txt                  why it failed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layershuffle.analysis.results import Result, read_analysis
from layershuffle.errors import DataError, UsageError
from layershuffle.merging.rows import MergingRow, rows_from_csv
from layershuffle.study.results import State, Study, StudyError

_AGAIN = "delete the task's directory and run the study again; finished tasks are not repeated"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A planned merging or analysis and what is there of it.

    `kind`: "merging" or the analysis' name. `place`: its directory below the study's.
    """

    name: str
    kind: str
    arm: str
    place: str
    state: State
    failure: str = ""
    facts: Mapping[str, Any] | None = None
    rows: tuple[MergingRow, ...] = ()
    result: Result | None = None


def read_pieces(out: Path, study: Study) -> tuple[Piece, ...]:
    """All merging and analysis tasks of the plan. Raises `StudyError` for what cannot be read."""
    return tuple(_read(out, planned) for planned in study.pieces)


def _read(out: Path, planned: Mapping[str, str]) -> Piece:
    place, kind = planned["directory"], planned["kind"]
    piece = Piece(name=planned["name"], kind=kind, arm=planned["arm"], place=place, state="missing")
    directory = out / place
    if not (directory / "result.json").exists():
        failure = directory / "failure.txt"
        if failure.exists():
            return replace(piece, state="failed", failure=failure.read_text("utf-8").strip())
        return piece
    try:
        facts = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        if kind == "merging":
            text = (directory / "results.csv").read_text(encoding="utf-8")
            return replace(piece, state="done", facts=facts, rows=tuple(rows_from_csv(text)))
        result = read_analysis(directory / "files")
        return replace(piece, state="done", facts=facts, result=result)
    except (OSError, ValueError, DataError, UsageError) as error:
        raise StudyError(
            f"What this task left cannot be read ({' '.join(str(error).split())})",
            place=directory,
            hint=_AGAIN,
        ) from error
