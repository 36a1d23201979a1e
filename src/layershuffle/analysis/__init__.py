"""Analyses of what the blocks learnt: a module per question, with tables, numbers and figures.

Each module has `measure(subject) -> Measurement` and `figures(tables) -> {file: Figure}`; figures
depend only on the tables.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.ground.errors import UsageError
from layershuffle.ground.machine import Device
from layershuffle.ground.text import Progress, did_you_mean, unheard

__all__ = ["ANALYSES", "AnalysisSettings", "find_analysis", "run_analysis"]

ANALYSES = {
    "umap": "Do a block's outputs show the position it ran at? UMAP (Figure 4)",
    "norms": "Does a block switch itself off where it is out of place? Norms of what it adds",
    "attention": "How far, and how evenly, do blocks look at each position? Attention maps",
    "attribution": "What does each block add to the logit of the right answer, by position?",
    "leave-one-out": "Which block is missed, and at which position? Loss without one block",
    "position": "Can the position be read from a block's output, and from its input? Probes",
}
"""The question that each analysis asks. Its module has its name, with underscores."""


_MEANINGS = {
    "images": "number of test images",
    "orders": "number of orders in which the images ran",
    "drawn blocks": "number of blocks that are drawn: all but those that keep their place",
    "image": "number of the image",
    "block": "number of the block in the model",
    "position": "place in the order at which the block ran, from 0",
}
"""What the numbers and columns of every analysis are; a module has those of its own."""


def find_analysis(name: str) -> str:
    """The question of the analysis. Raises `UsageError` with the most similar name."""
    if name not in ANALYSES:
        hint = did_you_mean(name, ANALYSES, otherwise=f"one of {', '.join(ANALYSES)}")
        raise UsageError(f"There is no analysis {name!r}", hint=hint)
    return ANALYSES[name]


def _module(name: str) -> Any:
    # Imported late, because `analyze --help` must not wait for torch and UMAP.
    return import_module(f"layershuffle.analysis.{name.replace('-', '_')}")


def run_analysis(
    name: str,
    model_spec: str,
    *,
    data_spec: str,
    settings: AnalysisSettings,
    out: Path,
    device: Device = "auto",
    progress: Progress = unheard,
) -> dict[str, Any]:
    """Run one analysis of one model and write it to the directory `out` atomically.

    Written: CSV tables, with the single numbers in numbers.csv; figures as SVG and PNG; index.html,
    which answers the question and shows the numbers and figures; and summary.json, which is
    returned (schema, name, title, answer, files, settings, facts). `progress` is called with the
    images done, and with later steps. Raises `DoesNotApply` (a `UsageError`) for a model to which
    the question does not apply, and as `load` and `open_data` do.
    """
    from pandas import DataFrame

    from layershuffle.analysis.results import SUMMARY, numbers_of, table_text
    from layershuffle.analysis.subject import open_subject
    from layershuffle.ground.files import listed_files, refuse_others, staged_directory, write_text
    from layershuffle.ground.plotting import figure_bytes

    title = find_analysis(name)
    refuse_others(out, ours=listed_files(out / SUMMARY), kind="analysis")
    subject = open_subject(
        model_spec, data_spec, settings=settings, device=device, progress=progress
    )
    # Everything is computed before anything is written, so an older result survives a failure.
    measured = _module(name).measure(subject)
    numbers = DataFrame(numbers_of(measured.facts))
    texts = {}
    for stem, table in measured.tables.items():
        texts[f"{stem}.csv"] = table_text(table)
    pictures = {}
    for stem, figure in _module(name).figures(measured.tables).items():
        for kind in ("svg", "png"):
            pictures[f"{stem}.{kind}"] = figure_bytes(figure, kind)
    texts["numbers.csv"] = numbers.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    answer = _module(name).answer(measured)
    meanings = {**_MEANINGS, **_module(name).MEANINGS}
    lead = f"{answer} ({model_spec} on {data_spec})"
    texts["index.html"] = _page(title, lead, texts, figures=pictures, meanings=meanings)
    summary = {
        "schema": 1,
        "name": name,
        "title": title,
        "answer": answer,
        "files": sorted([*texts, *pictures]),
        "settings": settings.model_dump(mode="json"),
        "facts": measured.facts,
    }
    texts[SUMMARY] = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    with staged_directory(out) as stage:
        for file, picture in pictures.items():
            (stage / file).write_bytes(picture)
        for file, text in texts.items():
            write_text(stage / file, text)
    return summary


def _page(
    title: str,
    lead: str,
    texts: Mapping[str, str],
    *,
    figures: Collection[str],
    meanings: Mapping[str, str],
) -> str:
    """The page: the answer (`lead`), numbers, figures, and the tables with their columns."""
    from layershuffle.ground.plotting import html_page, html_table

    head, *rows = csv.reader(io.StringIO(texts["numbers.csv"]))
    explained = []
    for name, *values in rows:
        explained.append((name, *map(_rounded, values), _meaning(name, meanings)))
    tables = []
    for file, text in texts.items():
        if file.endswith(".csv") and file != "numbers.csv":
            columns, *_ = csv.reader(io.StringIO(text))
            cells = [(column, _meaning(column, meanings)) for column in columns]
            tables.append(f'<p><a href="{file}">{file}</a></p>')
            tables.append(html_table(("column", "meaning"), cells))
    pictures = []
    for name in figures:
        if name.endswith(".svg"):
            pictures.append(f'<img src="{name}" alt="{name}">')
    parts = {
        "Numbers": html_table((*head, "meaning"), explained),
        "Figures": "".join(pictures),
        "Tables": "".join(tables),
    }
    return html_page(title, parts, lead=f"<p>{escape(lead)}</p>")


def _rounded(value: str) -> str:
    """A number of a table with three digits, whole ones as they are; nothing for none."""
    if not value or "." not in value:
        return value
    return f"{float(value):.3g}"


def _meaning(name: str, meanings: Mapping[str, str]) -> str:
    """What a number or a column is; `ratio_half` is half the interval of `ratio`."""
    own = name.rpartition(": ")[2].replace("_", " ")
    if own.endswith(" half"):
        return f"half of the 95 % interval of {own.removesuffix(' half')}"
    return meanings[own]
