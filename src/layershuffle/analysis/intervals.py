"""95 % intervals of the numbers of an analysis, and what a finding may say of them.

An interval covers other images and, where the images of a batch share their orders, other orders.
It is made of how far each image moves the number (`ImageGroups.half_width`): images of one batch,
and images that the data call a group, may move it together. Fewer than `FEWEST_CLUSTERS` batches or
groups give none: the finding then says that there are too few images, and compares nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Interval = dict[str, float] | None
"""Bounds `low` and `high`, or `None` for too few images."""
TOO_FEW = "too few images for intervals: raise --images or lower --batch-size"


def interval(
    value: float, half: float | None, *, limits: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """The interval that reaches `half` to both sides, inside the limits of the quantity."""
    if half is None:
        return None
    return {"low": max(limits[0], value - half), "high": min(limits[1], value + half)}


def apart(bounds: Interval, point: float = 0.0) -> bool:
    """Whether the interval excludes `point`; never without an interval."""
    return bounds is not None and not bounds["low"] <= point <= bounds["high"]


def with_bounds(value: float, bounds: Interval, *, form: str = ".2f", unit: str = "") -> str:
    """ "0.18 (0.17 to 0.19)", the number alone without an interval; `form` of both."""
    text = f"{value:{form}}{unit}"
    if bounds is None:
        return text
    return f"{text} ({bounds['low']:{form}} to {bounds['high']:{form}})"


def said_with(sentence: str, intervals: Mapping[str, Interval]) -> str:
    """`sentence` with a full stop, and with a remark (`TOO_FEW`) if an interval is missing."""
    return f"{sentence}; {TOO_FEW}." if None in intervals.values() else f"{sentence}."
