"""Scores as tidy rows, one per (model, mode, order), the CSV files that hold them, and the names
that methods had when they were written.

`layershuffle reproduce` and the report share this one row type. Plain data, no torch.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from layershuffle.errors import DataError
from layershuffle.files import write_text

MODES = ("sequential", "arbitrary")
CHOICES = ("", "random", "spaced", "first", "last")
DRAWS = ("pass", "batch")

Row = TypeVar("Row")
Percent = Annotated[float, Field(ge=0, le=100)]  # NaN fails both comparisons
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Files from before these columns, and data without groups of images, say nothing. Of a hundred and
# more, a part of an image moves no interval by a digit that a report shows.
Effective = Annotated[
    Annotated[
        float,
        Field(ge=1, allow_inf_nan=False),
        AfterValidator(lambda images: images if images < 100 else round(images)),
    ]
    | None,
    BeforeValidator(lambda value: None if value == "" else value),
]


_FORMER_METHODS: dict[str, dict[str, object]] = {
    "layershuffle-depth": {"min_kept": 3},
    "layershuffle-parallel": {"max_parallel": 4},
    "layershuffle-mixed": {"sequential_every": 4},
    "layershuffle-exit": {"exit_weight": 0.3},
    "layershuffle-tied": {"distinct": 1},
}


def current_method(method: str, options: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """A method and its options, as results of earlier versions name them, in today's words.

    Five methods were names for `layershuffle` with one option, and `min_kept` was `min_blocks`.
    """
    former = _FORMER_METHODS.get(method, {})
    renamed = {"min_kept" if key == "min_blocks" else key: options[key] for key in options}
    chosen = {
        key: value for key, value in renamed.items() if value is not None or key not in former
    }
    return "layershuffle" if former else method, {**former, **chosen}


class ScoreRow(BaseModel):
    """One score: a method (an arm of a study) with a seed, run along one order.

    `top1` and `top5` in percent over `n` images, `cross_entropy` in nats. `choose`: how the kept
    blocks were chosen, empty where all run. `top1_n`, `top5_n`: how many independent images the `n`
    images count as (`stats.ImageGroups`), whole from 100 on. `order_seed` numbers the draws of a
    mode. `order` is text as `core.orders` writes it, "3,0,2"; it is empty where `draw`
    is "batch": every batch had another order. The `kept` blocks ran `passes` times, in rounds of
    `parallel` side by side.
    Columns that this version does not know are kept as text.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    method: str
    seed: int
    mode: Literal["sequential", "arbitrary"]
    kept: Count
    choose: Literal["", "random", "spaced", "first", "last"]
    order_seed: int
    order: Annotated[str, Field(pattern=r"^(\d+(@\d+)?([,+]\d+(@\d+)?)*)?$")]
    n: Count
    top1: Percent
    top5: Percent
    cross_entropy: Finite
    draw: Literal["pass", "batch"] = "pass"
    top1_n: Effective = None
    top5_n: Effective = None
    parallel: Count = 1
    passes: Count = 1

    @model_validator(mode="after")
    def _check(self) -> ScoreRow:
        steps = len(re.findall("[,+]", self.order)) + 1
        if self.order and steps != self.kept * self.passes:
            raise ValueError(
                f"order has {steps} steps but kept is {self.kept} and passes is {self.passes}"
            )
        if not self.order and self.draw == "pass":
            raise ValueError("order is empty but it was drawn once per pass")
        if self.top1 > self.top5:
            raise ValueError(f"top1 {self.top1} is above top5 {self.top5}")
        return self


COLUMNS = tuple(name for name, field in ScoreRow.model_fields.items() if field.is_required())
"""Columns that every results file has."""
OPTIONAL = {n: f.default for n, f in ScoreRow.model_fields.items() if not f.is_required()}
"""Columns that are there where some row has another value than this one."""
EFFECTIVE: dict[str, object] = {"top1_n": None, "top5_n": None}
"""Those of them that tables of merged models have, too."""


def write_rows(path: Path, rows: Iterable[ScoreRow]) -> None:
    """Write the rows under `COLUMNS` and those that they need, whole or not at all.

    A number has as few digits as it takes to read the same number back.
    """
    rows = list(rows)
    names = [*with_optional(COLUMNS, OPTIONAL, rows=rows)]
    names += sorted({name for row in rows for name in row.model_extra or ()})
    write_text(path, format_rows(rows, names))


def with_optional(
    columns: Sequence[str], optional: Mapping[str, object], *, rows: Sequence[object]
) -> tuple[str, ...]:
    """The columns, and behind them those of `optional` that say something.

    A column that holds its default in every row is left out: a reader fills it in.
    """
    differs = (
        name
        for name, default in optional.items()
        if any(getattr(row, name) != default for row in rows)
    )
    return (*columns, *differs)


def format_rows(
    rows: Iterable[object], names: Sequence[str], *, decimals: Mapping[str, str] | None = None
) -> str:
    """Rows of any type as CSV: the attributes `names` in this order, under a header.

    `decimals` gives formats by name; other numbers have as few digits as it takes to read the same
    number back, and `None` is an empty field.
    """
    formats = decimals or {}
    text = io.StringIO(newline="")
    # csv's own line end is that of Windows; results are compared byte for byte.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = (getattr(row, name, "") for name in names)
        writer.writerow(
            "" if value is None else format(value, formats.get(name, ""))
            for name, value in zip(names, values, strict=True)
        )
    return text.getvalue()


def read_rows(path: Path, *, hint: str | None = None) -> tuple[ScoreRow, ...]:
    """The rows that `write_rows` wrote; further columns are allowed.

    Raises `DataError` with the line for a file that is missing, cut off or holds an impossible or
    a repeated row. `hint` says what to do about it.
    """

    def refuse(cause: str, line: int | None = None) -> DataError:
        return DataError(cause, place=path if line is None else f"{path}, line {line}", hint=hint)

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no {path.name}", place=path.parent, hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"The file cannot be read ({error})") from error
    rows = parse_rows(text, ScoreRow, columns=COLUMNS, refuse=refuse)
    names = ("method", "seed", "mode", "kept", "choose", "draw", "order_seed", "parallel", "passes")
    scores = {tuple(getattr(row, name) for name in names) for row in rows}
    if len(scores) < len(rows):
        raise refuse("The results file has a score twice")
    return tuple(rows)


def parse_rows(
    text: str,
    row_type: type[Row],
    *,
    columns: Sequence[str],
    refuse: Callable[[str, int | None], DataError],
) -> list[Row]:
    """The rows that `format_rows` wrote, each checked by pydantic; at least one.

    `refuse(cause, line)` makes the error that is raised for text that is not such rows.
    """
    # A file that was cut off inside a number would otherwise read as another number.
    if not text.endswith("\n"):
        raise refuse("The last line is cut off", None)
    try:
        # `strict`: a quote that is never closed would otherwise swallow all lines after it.
        header, *lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    except csv.Error as error:
        raise refuse(f"This is not a CSV file ({error})", None) from error
    absent = [name for name in columns if name not in header]
    # Further columns are welcome (later versions may have them), absent ones are not.
    if absent:
        raise refuse(f"The results file has no column {', '.join(absent)}", None)
    if len(set(header)) < len(header):
        raise refuse("The results file names a column twice", None)
    rows, adapter = [], TypeAdapter(row_type)
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise refuse(f"The line has {len(line)} fields, the header {len(header)}", number)
        try:
            rows.append(adapter.validate_python(dict(zip(header, line, strict=True))))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "the row"
            value = "" if not first["loc"] else f" {first['input']!r}"
            raise refuse(f"The row is impossible: {name}{value}: {first['msg']}", number) from error
    if not rows:
        raise refuse("The results file has no rows", None)
    return rows
