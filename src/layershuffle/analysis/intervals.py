"""95 % intervals of the numbers of an analysis, and their texts in a finding.

An interval covers the choice of images and, where the images of a batch share their orders, that of
orders. It is computed from the influence of each image on the number (`ImageGroups.half_width`),
which may be correlated within a batch or a group of the data. With fewer than `FEWEST_CLUSTERS`
batches or groups there is none: the finding then reports too few images, and compares nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Interval = dict[str, float] | None
"""Bounds `low` and `high`, or `None` for too few images."""
TOO_FEW = "too few images for intervals: raise --max-images or lower --batch-size"


def interval(
    value: float, half: float | None, *, limits: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """The interval `value` +- `half`, clipped to the limits; `None` without `half`."""
    if half is None:
        return None
    return {"low": max(limits[0], value - half), "high": min(limits[1], value + half)}


def apart(bounds: Interval, point: float = 0.0) -> bool:
    """Whether the interval excludes `point`; never without an interval."""
    return bounds is not None and not bounds["low"] <= point <= bounds["high"]


def with_bounds(value: float, bounds: Interval, *, form: str = ".2f", unit: str = "") -> str:
    """The number with its interval, if any, as "0.18 (0.17 to 0.19)"; `form` is the format."""
    text = f"{value:{form}}{unit}"
    if bounds is None:
        return text
    return f"{text} ({bounds['low']:{form}} to {bounds['high']:{form}})"


def finding_text(sentence: str, intervals: Mapping[str, Interval]) -> str:
    """`sentence` with a full stop, and with the remark `TOO_FEW` if an interval is missing."""
    return f"{sentence}; {TOO_FEW}." if None in intervals.values() else f"{sentence}."
