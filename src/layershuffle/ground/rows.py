"""Scores as tidy rows, one per model and order, and the CSV files that hold them.

Plain data: torch is not imported.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from layershuffle.ground.errors import DataError
from layershuffle.ground.files import write_text
from layershuffle.ground.stats import Estimate, estimate

MODES = ("sequential", "arbitrary")
CHOICES = ("", "random", "spaced", "first", "last")
DRAWS = ("pass", "batch")

RowKind = Literal["donor", "merge", "soup", "ensemble"]
Percent = Annotated[float, Field(ge=0, le=100)]  # NaN fails both comparisons
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Of a hundred and more, a part of an image moves no interval by a digit that a report shows.
Independent = Annotated[
    Annotated[
        float,
        Field(ge=1, allow_inf_nan=False),
        AfterValidator(lambda images: round(images, 1) if images < 100 else round(images)),
    ]
    | None,
    BeforeValidator(lambda value: None if value == "" else value),
]
"""As how many independent images the images of a score count; `None`: as many as they are."""


class Row(BaseModel):
    """A score. Columns that this version does not know are kept as text."""

    model_config = ConfigDict(frozen=True, extra="allow")
    names_one: ClassVar[tuple[str, ...]] = ()
    """The columns in which no two rows of a file agree, if there are such columns."""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The columns that every file of these rows has."""
        return tuple(name for name, field in cls.model_fields.items() if field.is_required())


AnyRow = TypeVar("AnyRow", bound=Row)


class ScoreRow(Row):
    """One score: a method (an arm of a study) with a seed, run along one order.

    `top1` and `top5` in percent over `n` images, `cross_entropy` in nats. `choose`: how the kept
    blocks were chosen, empty where all run. `top1_n`: as how many independent images the `n` count
    for an interval of `top1` (`stats.independent_images`). `order_seed` numbers the draws of a
    mode. `order` is text as `core.orders` writes it, "3,0,2"; it is empty where `draw`
    is "batch": every batch had another order. The `kept` blocks ran `passes` times, in rounds of
    `parallel` side by side.
    """

    names_one = (
        "method", "seed", "mode", "kept", "choose", "draw", "order_seed", "parallel", "passes",
    )  # fmt: skip

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
    top1_n: Independent = None
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


class MergingRow(Row):
    """The score of a donor, a merge, a soup or an ensemble under one drawn order.

    `index` numbers the models of a kind. `name`: the donor's spec; "uniform" or "greedy" for a
    soup; combination and orders of an ensemble, as "logits-independent"; "random slots" for merges
    with them. `ends`: the source of stem and head of a merge. `donors`: for a merge the donor of
    each block (with random slots DONOR:BLOCK), else all members. `order`: empty if drawn per batch;
    the orders of members, separated by ";", if they differ. `main`: 1 for the first variant in the
    settings, 0 for the alternatives. `arm`: the arm, in a study's file of several arms. The rest as
    in `ScoreRow`.
    """

    kind: RowKind
    index: int
    donors: str
    mode: str
    order: str
    n: Count
    top1: Percent
    top5: Percent
    cross_entropy: Finite
    name: str = ""
    ends: str = ""
    main: int = 1
    arm: str = ""
    top1_n: Independent = None


def group_rows(rows: Iterable[MergingRow]) -> dict[tuple[RowKind, str, str], list[MergingRow]]:
    """Rows by (kind, name, ends); all donors are one group."""
    groups: dict[tuple[RowKind, str, str], list[MergingRow]] = {}
    for row in rows:
        # Donors have different names, while names of other kinds are variants.
        name = "" if row.kind == "donor" else row.name
        groups.setdefault((row.kind, name, row.ends), []).append(row)
    return groups


def by_model(rows: Iterable[MergingRow], metric: str = "top1") -> dict[int, list[float]]:
    """The scores of every model of one group, one per order."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row.index, []).append(getattr(row, metric))
    return scores


def score_of(rows: Sequence[MergingRow], metric: str = "top1") -> Estimate:
    """The mean over models (donors, merges), each the mean over its orders, with its spreads.

    `metric`: top1 or top5 in percent, or cross_entropy in nats. An interval over images has top1
    alone, for which its rows say as how many independent ones the images count.
    """
    # The fewest images give the widest interval.
    fewest = min(row.top1_n or row.n for row in rows)
    return estimate(
        by_model(rows, metric),
        images=fewest if metric == "top1" else None,
        percent=metric != "cross_entropy",
    )


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows of one kind as CSV, whole or not at all.

    A column that holds its default in every row is left out: a reader fills it in. A number has as
    few digits as it takes to read the same number back.
    """
    rows = list(rows)
    kind = type(rows[0]) if rows else ScoreRow
    names = list(kind.columns())
    for name, column in kind.model_fields.items():
        if column.is_required():
            continue
        if any(getattr(row, name) != column.default for row in rows):
            names.append(name)
    unknown: set[str] = set()
    for row in rows:
        unknown.update(row.model_extra or ())
    names += sorted(unknown)
    text = io.StringIO(newline="")
    # csv's own line end is that of Windows; results are compared byte for byte.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = []
        for name in names:
            value = getattr(row, name, None)
            values.append("" if value is None else value)
        writer.writerow(values)
    write_text(path, text.getvalue())


def read_rows(path: Path, kind: type[AnyRow], *, hint: str | None = None) -> tuple[AnyRow, ...]:
    """The rows of this `kind` that `write_rows` wrote; further columns are allowed.

    Raises `DataError` with the line for a file that is missing, cut off or holds an impossible or
    a repeated row. `hint` says what to do about it.
    """

    def refuse(cause: str, line: int | None = None) -> DataError:
        place = path if line is None else f"{path}, line {line}"
        return DataError(cause, place=place, hint=hint)

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no {path.name}", place=path.parent, hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"The file cannot be read ({error})") from error
    # A file that was cut off inside a number would otherwise read as another number.
    if not text.endswith("\n"):
        raise refuse("The last line is cut off")
    rows: list[AnyRow] = []
    # `strict`: a quote that is never closed would otherwise swallow all lines after it.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        # A line that is too long or too short has a field without a name or a value.
        rows.extend(kind.model_validate(line) for line in reader)
    except csv.Error as error:
        raise refuse(f"This is not a CSV file ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the row"
        value = f" {first['input']!r}" if isinstance(first["input"], str) else ""
        raise refuse(
            f"The row is impossible: {name}{value}: {first['msg']}", reader.line_num
        ) from error
    if not rows:
        raise refuse("The results file has no rows")
    if kind.names_one:
        scores = set()
        for row in rows:
            scores.add(tuple(getattr(row, name) for name in kind.names_one))
        if len(scores) < len(rows):
            raise refuse("The results file has a score twice")
    return tuple(rows)
