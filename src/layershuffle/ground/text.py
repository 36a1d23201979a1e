"""Text for users: the nearest spelling, shortened lists, one-line errors, tables, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from io import StringIO

from layershuffle.ground.errors import UsageError

TABLE_WIDTH = 100
"""Columns of a table that no terminal bounds: pipes and files get the same text everywhere."""
Progress = Callable[[str, float, float], object]
"""What is told of long work: the unit (such as "images"), how many are done, and the total.

A new unit begins a new stage, which is counted from its first number.
"""


def unheard(*stage: object) -> None:
    """A `Progress` that ignores all calls."""
    del stage


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most probably misspells, `None` if none is close."""
    # difflib's own cut-off of 0.6: two swapped letters pass, another word does not.
    matches = get_close_matches(word, list(choices), n=1)
    if not matches:
        return None
    return matches[0]


def settings_of_query(query: str, *, example: str) -> dict[str, str]:
    """The settings behind the "?" of a spec, "key=value&key=value", as they are written.

    Raises `UsageError`, which shows the `example`, unless each has a value and is there once.
    """
    settings: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, _, text = pair.partition("=")
        if not key or not text or key in settings:
            hint = f"write each once and with its value, as in {example}"
            raise UsageError(f"{pair!r} in ?{query} is not one setting", hint=hint)
        settings[key] = text
    return settings


def did_you_mean(word: str, choices: Iterable[str], *, otherwise: str = "") -> str:
    """A hint for a misspelt word: "did you mean 'x'?", or `otherwise` if nothing is close."""
    match = nearest(word, choices)
    return f"did you mean {match!r}?" if match else otherwise


def shortened(names: Iterable[str], *, limit: int = 3) -> str:
    """The first `limit` names and how many more there are: "a, b, c and 4 more"."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    more = len(listed) - limit
    if more <= 0:
        return shown
    return f"{shown} and {more} more"


def counted(number: int, noun: str) -> str:
    """A number and its noun, which takes a plain plural: "1 host", "1,200 images"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"."""
    return str(timedelta(seconds=round(seconds)))


def one_line(error: object, *, limit: int = 300) -> str:
    """The message of an error on one line of at most `limit` characters.

    Libraries spread their messages over many lines; ours stand in the middle of a sentence. An
    error without a message is named by its type.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


def printable(text: str) -> str:
    """Text of others on one line that moves no cursor: what does not print is escaped.

    >>> printable("a\\nb")
    'a\\\\nb'
    """
    parts = []
    for character in text:
        prints = character.isprintable()
        parts.append(character if prints else character.encode("unicode_escape").decode())
    return "".join(parts)


def listing(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they mean, one pair per line, the meanings aligned to the left."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in rows)


def ranked(classes: Iterable[tuple[str, float]]) -> str:
    """Classes and their probabilities in [0, 1], as "cat 93.1 %, dog 4.0 %"."""
    return ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in classes)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, width: int = TABLE_WIDTH) -> str:
    """A plain-text table: the first column is aligned to the left, the others to the right.

    Cells that are too long for `width` columns are wrapped inside their column, never cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(header):
        grid.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))  # a plain string could hold markup
    # A console of its own: rich would otherwise ask the terminal for width and colours.
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(grid, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = ""
) -> str:
    """A table in Markdown.

    `align` has "l" or "r" for each column; columns beyond it are aligned as the reader likes.
    """
    sides = {"l": ":--", "r": "--:"}
    marks = [sides[side] for side in align]
    marks += ["---"] * (len(head) - len(marks))
    lines = [_markdown_row(head), f"|{'|'.join(marks)}|"]
    for row in rows:
        lines.append(_markdown_row(row))
    return "\n".join(lines)


def _markdown_row(cells: Sequence[object]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"
