"""The report's tables as plain data, their sections, and the main table as text.

Pure: from `Summary` and `Study` to strings. The templates render the same sections as HTML and
Markdown.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layershuffle.results import MODES
from layershuffle.stats import Estimate, compare
from layershuffle.study.paper import REFERENCE, SETTING
from layershuffle.study.summary import Column, ScoreCell, Summary, label, printable, shown_arm
from layershuffle.study.tasks import RunResult, Study
from layershuffle.text import counted_as, shortened, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 100
NOT_DONE = "not done yet"
NONE = "-"
_COLUMNS_ACROSS = 5  # of the terminal's table, to fit `WIDTH`
_NAMES_SHOWN = 8  # most arms that are named if their settings differ
_CHOICES = {
    "": "all",
    "random": "drawn at random",
    "spaced": "evenly spaced",
    "first": "the first ones",
    "last": "the last ones",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    A `folded` table is closed at first in HTML, and Markdown shows only its name. `numbers`: the
    cells are aligned as numbers.
    """

    title: str = ""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    folded: bool = False
    numbers: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure: its file below the study's directory, and a caption.

    `figure` is drawn into that file; it is `None` if the file exists already.
    """

    file: str
    caption: str
    figure: Figure | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with sentences, a command to type, pictures and tables."""

    title: str
    sentences: tuple[str, ...] = ()
    command: str = ""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


# --- words ---------------------------------------------------------------------------------------


def interval_text(score: Estimate) -> str:
    """ "73.4-75.6", or "-" without an interval."""
    return NONE if score.low is None or score.high is None else f"{score.low:.1f}-{score.high:.1f}"


def number_text(value: float | None, *, decimals: int = 2) -> str:
    """The value with this number of decimals, or "-" for `None`."""
    return NONE if value is None else f"{value:.{decimals}f}"


def choice_text(choose: str) -> str:
    """A way to choose the kept blocks as a phrase."""
    return _CHOICES[choose]


def duration(seconds: float) -> str:
    """The time in its two largest units, as "2 min 30 s"."""
    # Rounded first: 59.6 s are "1 min 00 s", not "60 s".
    whole = round(seconds)
    minutes, remainder = divmod(whole, 60)
    if whole < 60:
        return f"{whole} s"
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def describe_data(study: Study) -> str:
    """The study's data and model in a few words, from the finished runs or else the recipe."""
    # The data of the runs, because the recipe may have changed since.
    specs = sorted({result.data.spec for result in study.results})
    data = " and ".join(specs) or study.settings.data
    shown = data.replace("digit-pairs", "digit pairs", 1)
    return printable(f"{shown} with {study.settings.model}")


def table_notes(summary: Summary) -> list[str]:
    """Sentences below the main table that explain its spreads, intervals and paper numbers."""
    shown = [summary.cell(arm, column) for arm in summary.arms for column in summary.columns]
    cells = [cell for cell in shown if cell is not None]
    intervals = []
    # The interval covers the widest measured source of spread, so cells may differ.
    for kind, text in (
        ("models", "t over the means of {} models"),
        ("orders", "t over {} draws of one model"),
        ("images", "Wilson over {} images (one model in one order, or equal scores)"),
    ):
        counts = sorted({getattr(cell.top1, kind) for cell in cells if cell.top1.kind == kind})
        if counts:
            spans = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
            intervals.append(text.format(spans))
            if kind == "images":
                # Includes the scores of the tables further down.
                scores = (cell.top1 for cell in summary.cells)
                independent = counted_as(s.effective for s in scores if s.kind == kind)
                intervals[-1] += f", {independent}"
    per_batch = any(cell.draw == "batch" for cell in cells)
    drawn = "a new order for every batch" if per_batch else "one order per pass over the test data"
    notes = [f"Orders: {drawn}. 95 % intervals: {'; '.join(intervals)}."]
    if summary.choose:
        notes.append(f"Which blocks are kept: {choice_text(summary.choose)}.")
    notes.append(
        f"The paper's numbers ({REFERENCE}) are {SETTING}; ours are "
        f"{describe_data(summary.study)}: compare the pattern, and not the level. "
        '"~" marks what its text only describes.'
    )
    return notes


# --- the main table ------------------------------------------------------------------------------


def table_text(summary: Summary, gaps: Sequence[tuple[str, str]] = ()) -> str:
    """The main table for a terminal with its legend; lines have at most 100 columns.

    `gaps`: (task, reason) of every unfinished task.
    """
    lines = ["No run has finished yet."]
    notes: list[str] = []
    if summary.cells:
        name = printable(summary.study.settings.name)
        lines = [*textwrap.wrap(f"{name}: top-1 accuracy in percent", WIDTH), ""]
        notes = table_notes(summary)
        for first in range(0, len(summary.columns), _COLUMNS_ACROSS):
            columns = summary.columns[first : first + _COLUMNS_ACROSS]
            names = (_column_name(column, summary.depth, separator="\n") for column in columns)
            rows = [row for arm in summary.arms for row in _arm_rows(summary, arm, columns)]
            lines += [table(["", *names], rows, width=WIDTH), ""]
    notes += [
        f"FAILED {task}: {printable(reason.removeprefix('failed: '))}"
        for task, reason in gaps
        if reason != NOT_DONE
    ]
    missing = [task for task, reason in gaps if reason == NOT_DONE]
    if missing:
        notes.append(f"Not done yet: {', '.join(missing)}. Run the same command again to go on.")
    return "\n".join([*lines, *(line for note in notes for line in textwrap.wrap(note, WIDTH))])


def _column_name(column: Column, depth: int, *, separator: str = ", ") -> str:
    """ "arbitrary" for the full stack, "arbitrary, 9 kept" for fewer blocks."""
    return column.mode if column.kept == depth else f"{column.mode}{separator}{column.kept} kept"


def _arm_rows(summary: Summary, arm: str, columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Rows with the arm's means, and those of its spreads, intervals and paper numbers."""
    cells = [summary.cell(arm, column) for column in columns]

    def row(name: str, show: Callable[[Estimate], str]) -> tuple[str, ...]:
        return (name, *(NONE if cell is None else show(cell.top1) for cell in cells))

    numbers = [summary.paper(arm, column) for column in columns]
    below = [
        row("  sd over orders", lambda score: number_text(score.sd_orders, decimals=1)),
        row("  sd over models", lambda score: number_text(score.sd_models, decimals=1)),
        row("  95 % interval", interval_text),
        ("  the paper", *(str(number).split(" +-")[0] if number else NONE for number in numbers)),
    ]
    means = row(label(arm), lambda score: f"{score.mean:.1f}")
    # Rows without numbers are left out.
    return [means, *(cells for cells in below if set(cells[1:]) != {NONE})]


def main_table(summary: Summary) -> dict[str, Any]:
    """The main table for the templates: columns in groups, and per arm (cell, paper's number)."""
    groups: list[dict[str, Any]] = []
    for column in summary.columns:
        full = column.kept == summary.depth
        title = f"all {summary.depth} blocks" if full else f"{column.mode} order, blocks kept"
        if not groups or groups[-1]["title"] != title:
            groups.append({"title": title, "names": []})
        groups[-1]["names"].append(column.mode if full else str(column.kept))
    rows = [
        (label(arm), [(summary.cell(arm, c), summary.paper(arm, c)) for c in summary.columns])
        for arm in summary.arms
    ]
    names = [_column_name(column, summary.depth) for column in summary.columns]
    return {"groups": groups, "names": names, "rows": rows}


# --- Table 1 and Figures 1b, 1c ------------------------------------------------------------------


def table_1(summary: Summary) -> Section | None:
    """Every method in both order modes beside the paper; `None` without scores of all blocks."""
    cells = [
        cell
        for arm in summary.arms
        for mode in MODES
        if (cell := summary.cell(arm, Column(mode, summary.depth))) is not None
    ]
    if not cells:
        return None
    head = (
        "Method", "Order", "Models", "Orders", "sd models", "To sequential baseline", "The paper's",
    )  # fmt: skip
    paper_base = summary.paper("baseline", Column("sequential", summary.depth))
    rows = []
    for cell in cells:
        top1, number = cell.top1, summary.paper(cell.arm, Column(cell.mode, cell.kept))
        paper_difference = NONE
        if number is not None and paper_base is not None and number is not paper_base:
            paper_difference = f"{number.value - paper_base.value:+.2f}"
        rows.append(
            (
                label(cell.arm), cell.mode, str(top1.models), str(top1.orders),
                number_text(top1.sd_models), _to_baseline(summary, cell), paper_difference,
            )
        )  # fmt: skip
    return Section(
        title="Table 1: what arbitrary order costs",
        sentences=(
            "Points of top-1. Differences to the baseline run in sequential order are what "
            "compares across data sets; they are paired over the seeds that both have. The spread "
            "over models (seeds) is given here, that over the orders of a model with the means "
            "above: the paper prints one +- without saying which.",
        ),
        tables=(Table(head=head, rows=tuple(rows), numbers=True),),
    )


def _to_baseline(summary: Summary, cell: ScoreCell) -> str:
    """Difference to the sequential baseline refined from the same model, with its interval."""
    # Arms may start from different models (CIFAR-100 refines two), each with its own baseline.
    models = {
        shown_arm(run.task): (run.task.settings.model, run.task.settings.method)
        for run in summary.study.runs
        if run.result is not None and run.task.part == "main"
    }
    model = models.get(cell.arm, (None, ""))[0]
    baseline = next((arm for arm, pair in models.items() if pair == (model, "baseline")), "")
    base = summary.cell(baseline, Column("sequential", summary.depth))
    # The baseline is not compared with itself.
    if base is None or base is cell:
        return NONE
    gap = compare(cell.model_means, base.model_means)
    interval = f" ({gap.low:+.1f} to {gap.high:+.1f})" if math.isfinite(gap.low) else ""
    return f"{gap.points:+.2f}{interval}"


# --- facts ---------------------------------------------------------------------------------------


def runs_table(study: Study) -> Table:
    """Every planned run: its state, time and checkpoint."""
    head = (
        "Run", "Arm", "Seed", "State", "Steps", "Kept step", "Value", "Training", "Evaluation",
        "Images/s", "Finished", "Settings hash",
    )  # fmt: skip
    rows = []
    for run in study.runs:
        result = run.result
        facts = (NONE,) * 8
        if result is not None:
            facts = (
                f"{result.steps:,}",
                f"{result.selected.step:,}",
                f"{result.selected.value:.4f}",
                duration(result.train_seconds),
                duration(result.eval_seconds),
                f"{result.images_per_second:,.0f}",
                result.finished,
                result.settings_hash,
            )
        seed = str(run.task.settings.seed)
        rows.append((run.task.name, label(run.task.arm), seed, run.state, *facts))
    return Table(
        title="Every run",
        head=head,
        rows=tuple(rows),
        folded=True,
        numbers=True,
        note="Kept step and value: the checkpoint that was picked and its score on the "
        "picking split. Images/s while training.",
    )


def settings_tables(
    study: Study, of: Callable[[RunResult], Mapping[str, Any]], *, title: str = ""
) -> tuple[Table, Table]:
    """Settings of the runs: those that all share, and those that differ, with the arms."""
    settings = [(result.arm, flatten(of(result))) for result in study.results]
    shared, differing = [], []
    for key in unique(key for _, values in settings for key in values):
        arms_with: dict[str, list[str]] = {}
        for arm, values in settings:
            arms_with.setdefault(values.get(key, NONE), []).append(arm)
        # A setting that older runs lack differs, too.
        if len(arms_with) == 1:
            shared.append((key, *arms_with))
        else:
            differing += [
                (key, value, shortened(unique(arms), limit=_NAMES_SHOWN))
                for value, arms in arms_with.items()
            ]
    return (
        Table(title=title, head=("name", "all runs"), rows=tuple(shared)),
        Table(
            title=f"{title}, where runs differ".strip(", "),
            head=("name", "value", "arms"),
            rows=tuple(differing),
        ),
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `{"fit.steps": "1500"}`; lists of plain values as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name, inner = f"{prefix}{key}", value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            # Entry by entry, because JSON in a cell is hard to read.
            inner = {str(index): item for index, item in enumerate(value)}
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{name}.")
        elif value is None:
            flat[name] = "none"
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts, each once, in their order."""
    return tuple(dict.fromkeys(texts))
