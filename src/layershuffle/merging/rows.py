"""Scores of mergings as tidy rows, and as CSV. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from layershuffle.errors import DataError
from layershuffle.results import (
    EFFECTIVE,
    Count,
    Effective,
    Finite,
    Percent,
    format_rows,
    parse_rows,
    with_optional,
)
from layershuffle.stats import Estimate, estimate

RowKind = Literal["donor", "merge", "soup", "ensemble"]


@dataclass(frozen=True, kw_only=True)
class MergingRow:
    """The score of one model under one drawn order; accuracies in percent over `n` images.

    `index` numbers the models of a kind. `name`: the donor's spec; "uniform" or "greedy" for a
    soup; combination and orders of an ensemble, as "logits-independent"; "random slots" for merges
    with them. `ends`: the source of stem and head of a merge. `donors`: for a merge the donor of
    each block (with random slots DONOR:BLOCK), else all members. `order`: empty if drawn per batch;
    the orders of members, separated by ";", if they differ. `main`: 1 for the first variant in the
    settings, 0 for the alternatives. `top1_n`, `top5_n` as in `ScoreRow`. `arm`: the arm, in a
    study's file of several arms.
    """

    arm: str = ""
    kind: RowKind
    index: int
    name: str = ""
    ends: str = ""
    donors: str
    mode: str
    order: str
    n: Count
    top1: Percent
    top5: Percent
    cross_entropy: Finite
    main: int = 1
    top1_n: Effective = None
    top5_n: Effective = None


COLUMNS = tuple(f.name for f in fields(MergingRow) if f.name not in ("arm", *EFFECTIVE))


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

    `metric`: top1 or top5 in percent, or cross_entropy in nats, which has no effective images.
    """
    return estimate(
        by_model(rows, metric),
        images=rows[0].n,
        effective=getattr(rows[0], f"{metric}_n", None),
        percent=metric != "cross_entropy",
    )


def rows_csv(rows: Iterable[MergingRow], columns: Sequence[str] = COLUMNS) -> str:
    """The rows under `columns`, with a cross-entropy of six decimals as in every results file.

    `rows_from_csv` reads them back.
    """
    rows = list(rows)
    names = with_optional(columns, EFFECTIVE, rows=rows)
    return format_rows(rows, names, decimals={"cross_entropy": ".6f"})


def rows_from_csv(text: str, columns: Sequence[str] = COLUMNS) -> list[MergingRow]:
    """The rows in the text of `rows_csv`. Raises `DataError` for other text."""

    def refuse(cause: str, line: int | None) -> DataError:
        return DataError(
            f"These are not the scores of a merging: {cause}",
            place=None if line is None else f"line {line}",
        )

    # The caller's error names the file, so the line is enough here.
    return parse_rows(text, MergingRow, columns=columns, refuse=refuse)
