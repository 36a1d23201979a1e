"""Results of an analysis: tidy tables, single numbers, and the files that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame

SUMMARY = "summary.json"
Tables = Mapping[str, DataFrame]
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a measurement: tables by file name without suffix, and single numbers.

    `facts` may hold facts of parts, such as those of a branch; "intervals" has the bounds `low` and
    `high` of numbers beside it, or `None` for too few images.
    """

    tables: Tables
    facts: Facts


def with_interval(facts: Facts, name: str, *, form: str, scale: float = 1.0) -> str:
    """The number `name` of `facts` times `scale` in a format such as ".2f", with its interval where
    it has one: "0.16 (0.15 to 0.17)"."""
    text = format(scale * facts[name], form)
    bounds = facts.get("intervals", {}).get(name)
    if not bounds:
        return text
    low = format(scale * bounds["low"], form)
    high = format(scale * bounds["high"], form)
    return f"{text} ({low} to {high})"


def numbers_of(facts: Facts, *, prefix: str = "") -> Iterator[dict[str, Any]]:
    """A row per number: name, value, and the bounds low and high; NaN for what is undefined."""
    undefined = {"low": math.nan, "high": math.nan}
    for name, value in facts.items():
        if name == "intervals":
            continue
        if isinstance(value, dict):
            # The name of a group of parts would say nothing, as in "branches: attention: ratio".
            is_group = all(isinstance(part, dict) for part in value.values())
            yield from numbers_of(value, prefix=prefix if is_group else f"{prefix}{name}: ")
            continue
        bounds = facts.get("intervals", {}).get(name) or undefined
        number = math.nan if value is None else float(value)
        yield {"name": prefix + name.replace("_", " "), "value": number, **bounds}


def table_text(table: DataFrame) -> str:
    """The table as CSV; floats with six digits."""
    floats = table.select_dtypes("float")
    # Adding 0.0 turns a negative zero into zero, or it would be written as "-0".
    text: str = table.assign(**(floats + 0.0)).to_csv(
        index=False, float_format="%.6g", na_rep="nan", lineterminator="\n"
    )
    return text
