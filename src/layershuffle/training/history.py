"""What a run has logged, by step: `history.csv`, and `index.html` with its curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layershuffle.ground.extras import missing
from layershuffle.ground.files import write_text
from layershuffle.ground.plotting import (
    INK,
    METHOD_STYLES,
    RULE,
    draw_legend,
    figure_bytes,
    html_page,
    html_table,
    new_figure,
    style_axes,
)

HISTORY = "history.csv"
PAGE = "index.html"
SCORES = (
    "eval_sequential_cross_entropy",
    "eval_sequential_top1",
    "eval_arbitrary_cross_entropy",
    "eval_arbitrary_top1",
)
COLUMNS = ("step", "loss", "accuracy", "learning_rate", "grad_norm", *SCORES)


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of a history, without a last line that a killed process has not ended."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows: list[dict[str, float]] = []
    for cells in csv.DictReader(io.StringIO(whole)):
        row: dict[str, float] = {}
        for name, value in cells.items():
            if value:
                row[name] = float(value)
        rows.append(row)
    return rows


def begin_history(path: Path, *, step: int) -> None:
    """Remove the rows after `step`, that of the last checkpoint: the run takes them again."""
    text = ",".join(COLUMNS) + "\n"
    for row in read_history(path):
        if row["step"] <= step:
            text += _line(row)
    write_text(path, text)


def add_row(path: Path, row: Mapping[str, float]) -> None:
    """Append a row as soon as it is there; columns that it does not have stay empty."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def _line(row: Mapping[str, float]) -> str:
    cells = [str(int(row["step"]))]
    for name in COLUMNS[1:]:
        cells.append(str(row.get(name, "")))
    return ",".join(cells) + "\n"


def write_page(out: Path, *, method: str, facts: Mapping[str, object]) -> None:
    """Write `out/index.html`: `facts`, and the curves of the history if matplotlib is there."""
    parts = {"Result": html_table((), facts.items())}
    if not missing("study", "matplotlib"):
        svg = figure_bytes(_curves(read_history(out / HISTORY), method), "svg").decode("utf-8")
        parts["Curves"] = svg[svg.index("<svg") :]
    write_text(out / PAGE, html_page(f"Training: {method}", parts))


def _curves(rows: Sequence[Mapping[str, float]], method: str) -> Any:
    """Losses and top-1 by step: of the training, and of held-out images in both order modes."""
    figure = new_figure(10.0, 3.8)
    colour, _, _ = METHOD_STYLES[method]
    scored = [row for row in rows if SCORES[0] in row]
    scored_steps = [row["step"] for row in scored]
    steps = [row["step"] for row in rows]
    entries = []
    panels = ("loss", "cross_entropy", "loss"), ("accuracy", "top1", "top-1 accuracy (%)")
    for axes, (training, score, label) in zip(figure.subplots(1, 2), panels, strict=True):
        style_axes(axes)
        axes.set(xlabel="optimiser steps", ylabel=label)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.locator_params(axis="x", integer=True)
        (line,) = axes.plot(steps, [row[training] for row in rows], color=INK, linewidth=0.9)
        entries = [(line, "training batches")]
        for mode, dash in (("sequential", "-"), ("arbitrary", "--")):
            values = [row[f"eval_{mode}_{score}"] for row in scored]
            (line,) = axes.plot(
                scored_steps,
                values,
                color=colour,
                linestyle=dash,
                marker="o",
                markersize=3,
            )
            entries.append((line, f"held out, {mode} order"))
    draw_legend(figure, entries)
    return figure
