"""Analyses of what the blocks learnt: a module per question, with tables, figures and a finding.

`ANALYSES` lists them. Each module has `measure(subject) -> Measurement`, `finding(facts) -> str`
and `figures(tables) -> {file: Figure}`; figures depend only on the tables, the finding only on the
facts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from layershuffle.analysis.results import (
    SCHEMA,
    SUMMARY,
    check_replaceable,
    read_analysis,
    table_from,
    table_text,
)
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.errors import UsageError
from layershuffle.machine import Device
from layershuffle.text import Progress, did_you_mean, unheard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from layershuffle.analysis.results import Facts, Measurement, Tables
    from layershuffle.analysis.subject import Subject

__all__ = ["ANALYSES", "AnalysisSettings", "draw", "find_analysis", "read_analysis", "run_analysis"]


class _Module(Protocol):
    def measure(self, subject: Subject) -> Measurement: ...

    def finding(self, facts: Facts) -> str: ...

    def figures(self, tables: Tables) -> dict[str, Figure]: ...


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """One question, and the name of the module that answers it."""

    title: str
    question: str
    module: str

    def load(self) -> _Module:
        """Import the module."""
        # Imported late, because `analyze --help` must not wait for torch and UMAP.
        return cast(_Module, import_module(f"layershuffle.analysis.{self.module}"))


ANALYSES = {
    "umap": Analysis(
        title="UMAP of block outputs by position (Figure 4)",
        question="Do a block's outputs show the position it ran at?",
        module="umap",
    ),
    "norms": Analysis(
        title="Norms of what blocks add to the stream",
        question="Does a block switch itself off where it is out of place?",
        module="norms",
    ),
    "attention": Analysis(
        title="Attention distance and entropy",
        question="How far, and how evenly, do blocks look at each position?",
        module="attention",
    ),
    "attribution": Analysis(
        title="Contribution of blocks to the right logit",
        question="What does each block add to the right answer, by position?",
        module="attribution",
    ),
    "leave-one-out": Analysis(
        title="Loss when one block is left out",
        question="Which block is missed, and at which position?",
        module="leave_one_out",
    ),
    "cka": Analysis(
        title="Similarity of a block's outputs across positions (CKA)",
        question="Does a block compute the same at every position?",
        module="cka",
    ),
    "position": Analysis(
        title="Guessing the position",
        question="Can the position be read from a block's output, and from its input?",
        module="position",
    ),
}


def find_analysis(name: str) -> Analysis:
    """The analysis with this name. Raises `UsageError` with the most similar name."""
    if name not in ANALYSES:
        hint = did_you_mean(name, ANALYSES, otherwise=f"one of {', '.join(ANALYSES)}")
        raise UsageError(f"There is no analysis {name!r}", hint=hint)
    return ANALYSES[name]


def run_analysis(
    name: str,
    model_spec: str,
    *,
    data_spec: str,
    settings: AnalysisSettings,
    out: Path,
    device: Device = "auto",
    progress: Progress = unheard,
) -> None:
    """Run one analysis of one model, and write it to the directory `out` atomically.

    Written: CSV tables, SVG figures, and summary.json (schema, name, title, paragraph, files,
    settings, facts). `progress` is called with the images done, and with later steps. Raises
    `DoesNotApply` (a `UsageError`) for a model to which the question does not apply, and as `load`
    and `open_data` do.
    """
    from layershuffle.analysis.subject import open_subject
    from layershuffle.files import staged_directory

    analysis = find_analysis(name)
    check_replaceable(out)
    subject = open_subject(
        model_spec, data_spec, settings=settings, device=device, progress=progress
    )
    module = analysis.load()
    # Everything is computed before anything is written, so an older result survives a failure.
    measured = module.measure(subject)
    texts = {f"{stem}.csv": table_text(table) for stem, table in measured.tables.items()}
    # Drawn from the written text, so a redrawn figure is the same file.
    pictures = draw(name, {file[:-4]: table_from(text) for file, text in texts.items()})
    summary = {
        "schema": SCHEMA,
        "name": name,
        "title": analysis.title,
        "paragraph": module.finding(measured.facts),  # the key of older files
        "files": sorted([*texts, *pictures]),
        "settings": settings.model_dump(mode="json"),
        "facts": measured.facts,
    }
    with staged_directory(out) as stage:
        for file, text in texts.items():
            (stage / file).write_text(text, encoding="utf-8")
        for file, picture in pictures.items():
            (stage / file).write_bytes(picture)
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        (stage / SUMMARY).write_text(text, encoding="utf-8")


def draw(name: str, tables: Tables) -> dict[str, bytes]:
    """The figures of an analysis, drawn only from its tables: file name -> SVG."""
    from layershuffle.plotting import figure_bytes

    figures = find_analysis(name).load().figures(tables)
    return {f"{stem}.svg": figure_bytes(figure, "svg") for stem, figure in figures.items()}
