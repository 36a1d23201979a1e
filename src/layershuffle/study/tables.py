"""The main table as plain text for a terminal and as Markdown; the words that go with it.

Arms down, conditions across; under each arm its spreads, its interval and the paper's number.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from layershuffle.stats import Estimate
from layershuffle.study.paper import REFERENCE, SETTING, PaperNumber
from layershuffle.study.results import Study
from layershuffle.study.summary import Column, Summary, label, printable

WIDTH = 100
_LABEL_WIDTH = 24
_NOTHING = "-"
NOT_DONE = "not done yet"


def table_text(summary: Summary, gaps: Sequence[tuple[str, str]] = ()) -> str:
    """The main table with its legend: ASCII, no line above 100 columns.

    `gaps`: (task, what happened) of every task that is not done.
    """
    if not summary.cells:
        return "\n".join(["No run has finished yet.", *_wrapped(missing_words(gaps))])
    name = printable(summary.study.name)
    lines = [_clip(f"{name}: top-1 accuracy in percent", WIDTH), ""]
    for block in _blocks(summary):
        lines += [*block, ""]
    words = [*table_notes(summary), *missing_words(gaps)]
    return "\n".join([*lines, *_wrapped(words)])


def table_markdown(summary: Summary) -> str:
    """The main table in Markdown: a row per arm, the paper's numbers in italics below it."""
    if not summary.cells:
        return "No run has finished yet.\n"
    head = ["", *(column_name(column, summary.depth) for column in summary.columns)]
    lines = [f"| {' | '.join(head)} |", f"|:--{'|--:' * len(summary.columns)}|"]
    for arm in summary.arms:
        cells = [_mark_down(summary, arm, column) for column in summary.columns]
        lines.append(f"| {escape_markdown(label(arm))} | {' | '.join(cells)} |")
        numbers = [summary.paper(arm, column) for column in summary.columns]
        if any(numbers):
            shown = [
                f"*{number}*".replace("+-", "&plusmn;") if number else "" for number in numbers
            ]
            lines.append(f"| *the paper* | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def column_name(column: Column, depth: int) -> str:
    """ "arbitrary" for the full stack, "arbitrary, 9 kept" for fewer blocks."""
    return column.mode if column.kept == depth else f"{column.mode}, {column.kept} kept"


def table_notes(summary: Summary) -> list[str]:
    """Sentences under the table: what its spreads, intervals and paper numbers are."""
    notes = [interval_words(summary)]
    if summary.choose:
        notes.append(f"Which blocks are kept: {choice_words(summary.choose)}.")
    notes.append(paper_words(summary.study))
    return notes


def paper_words(study: Study) -> str:
    """Why the paper's level and ours are not to be compared."""
    ours = study_words(study)
    return (
        f"The paper's numbers ({REFERENCE}) are {SETTING}; ours are {ours}: the pattern compares, "
        'the level does not. "~" marks what its text only describes.'
    )


def study_words(study: Study) -> str:
    """Our own data and model in a few words, from the finished runs or else the recipe."""
    specs = sorted({str(run.facts.data["spec"]) for run in study.runs if run.facts})
    data = " and ".join(specs) or str(study.recipe.get("data", "the data of the recipe"))
    model = study.recipe.get("model")
    shown = data.replace("digit-pairs", "digit pairs", 1)
    return printable(f"{shown} with {model}" if isinstance(model, str) else shown)


def choice_words(choose: str) -> str:
    """A way to choose the kept blocks as a phrase."""
    return {
        "": "all",
        "random": "drawn at random",
        "spaced": "evenly spaced",
        "first": "the first ones",
        "last": "the last ones",
    }[choose]


def interval_words(summary: Summary) -> str:
    """What the 95 % intervals of the main table are over."""
    shown = [summary.cell(arm, column) for arm in summary.arms for column in summary.columns]
    cells = [cell for cell in shown if cell is not None]
    words = []
    for kind in ("models", "orders", "images"):
        ones = [cell.top1 for cell in cells if cell.top1.kind == kind]
        if ones:
            words.append(_kind_words(kind, ones))
    per_batch = any(cell.draw == "batch" for cell in cells)
    drawn = "a new order for every batch" if per_batch else "one order per pass over the test data"
    return f"Orders: {drawn}. 95 % intervals: {'; '.join(words)}."


def _kind_words(kind: str, ones: Sequence[Estimate]) -> str:
    if kind == "models":
        return f"t over the means of {_span(one.models for one in ones)} models"
    if kind == "orders":
        return f"t over {_span(one.orders for one in ones)} draws of one model"
    return f"Wilson over {_span(one.images for one in ones)} images (one model, one order)"


def _span(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def missing_words(gaps: Sequence[tuple[str, str]]) -> list[str]:
    """One sentence per task that failed, one for all that are not done; empty when all is there."""
    words = [
        f"FAILED {name}: {printable(what.removeprefix('failed: '))}"
        for name, what in gaps
        if what != NOT_DONE
    ]
    missing = [name for name, what in gaps if what == NOT_DONE]
    if missing:
        words.append(f"Not done yet: {', '.join(missing)}. Run the same command again to go on.")
    return words


def escape_markdown(text: str) -> str:
    """`text` as literal text inside a Markdown table or paragraph."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|$~!#])", r"\\\1", safe)


def interval_text(one: Estimate) -> str:
    """ "73.4-75.6", or "-" where there is no interval."""
    return _NOTHING if one.low is None or one.high is None else f"{one.low:.1f}-{one.high:.1f}"


def _mark_down(summary: Summary, arm: str, column: Column) -> str:
    cell = summary.cell(arm, column)
    if cell is None:
        return _NOTHING
    spread = "" if cell.top1.sd_orders is None else f" &plusmn;{cell.top1.sd_orders:.1f}"
    return f"**{cell.top1.mean:.1f}**{spread} ({interval_text(cell.top1)})"


_LINES: tuple[tuple[str, Callable[[Estimate], str]], ...] = (
    ("sd over orders", lambda one: _NOTHING if one.sd_orders is None else f"{one.sd_orders:.1f}"),
    ("sd over models", lambda one: _NOTHING if one.sd_models is None else f"{one.sd_models:.1f}"),
    ("95 % interval", interval_text),
)


def _blocks(summary: Summary) -> list[list[str]]:
    """The table cut into as few blocks of whole columns as fit the width."""
    blocks: list[list[str]] = []
    columns = list(summary.columns)
    while columns:
        take = len(columns)
        while take > 1 and max(map(len, _block(summary, columns[:take]))) > WIDTH:
            take -= 1
        blocks.append(_block(summary, columns[:take]))
        columns = columns[take:]
    return blocks


def _block(summary: Summary, columns: Sequence[Column]) -> list[str]:
    grid = [("", *(_short_name(column, summary.depth) for column in columns))]
    for arm in summary.arms:
        grid += _arm_rows(summary, arm, columns)
    widths = [max(map(len, texts)) for texts in zip(*grid, strict=True)]
    lines = [_group_line(columns, widths, summary.depth), *(_line(row, widths) for row in grid)]
    rule = "-" * max(map(len, lines))
    starts = {label_of_arm(arm) for arm in summary.arms}
    out = lines[:2]
    for row, line in zip(grid[1:], lines[2:], strict=True):
        out += [rule, line] if row[0] in starts else [line]
    return out


def _arm_rows(summary: Summary, arm: str, columns: Sequence[Column]) -> list[tuple[str, ...]]:
    cells = [summary.cell(arm, column) for column in columns]

    def row(name: str, shown: Callable[[Estimate], str]) -> tuple[str, ...]:
        return (name, *(_NOTHING if cell is None else shown(cell.top1) for cell in cells))

    rows = [row(label_of_arm(arm), lambda one: f"{one.mean:.1f}")]
    spreads = [row(f"  {name}", shown) for name, shown in _LINES]
    rows += [spread for spread in spreads if set(spread[1:]) != {_NOTHING}]
    numbers = [summary.paper(arm, column) for column in columns]
    if any(numbers):
        rows.append(("  the paper", *(_short_number(number) for number in numbers)))
    return rows


def label_of_arm(arm: str) -> str:
    """The arm's label, cut to the width of the terminal table's first column."""
    return _clip(label(arm), _LABEL_WIDTH)


def _short_name(column: Column, depth: int) -> str:
    return column.mode if column.kept == depth else f"{column.kept} kept"


def _short_number(number: PaperNumber | None) -> str:
    return "" if number is None else str(number).split(" +-")[0]


def _group_line(columns: Sequence[Column], widths: Sequence[int], depth: int) -> str:
    groups: dict[str, int] = {}
    for column, width in zip(columns, widths[1:], strict=True):
        full = column.kept == depth
        name = f"all {depth} blocks" if full else f"{column.mode} order"
        groups[name] = groups.get(name, -1) + 1 + width
    parts = [f" {name} ".center(width, "-")[:width] for name, width in groups.items()]
    return " ".join([" " * widths[0], *parts])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
    return " ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _wrapped(paragraphs: Sequence[str]) -> list[str]:
    return [line for text in paragraphs for line in textwrap.wrap(text, WIDTH)]
