"""Indexes of a value with 10,000 hosts: a change makes a new one and copies only what it touches.

Sorted tuples of names by block, and sorted arrays of times whose middle is their median.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable

Names = dict[int, tuple[str, ...]]


def by_block(hosts: Iterable[tuple[str, frozenset[int]]]) -> Names:
    """Names by block, in the order of `hosts`: each a name and the blocks it stands under."""
    names: dict[int, list[str]] = {}
    for name, blocks in hosts:
        for block in blocks:
            names.setdefault(block, []).append(name)
    return {block: tuple(holders) for block, holders in names.items()}


def moved(names: Names, name: str, *, was: frozenset[int], now: frozenset[int]) -> Names:
    """`names` with `name` under the blocks `now`, no longer under those it `was` under."""
    if was == now:
        return names
    return names | {block: toggled(names.get(block, ()), name) for block in was ^ now}


def toggled(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Sorted `names` without `name` if it is there, else with it."""
    place = bisect_left(names, name)
    if names[place : place + 1] == (name,):
        return names[:place] + names[place + 1 :]
    return (*names[:place], name, *names[place:])


def sorted_times(times: Iterable[float | None]) -> array[float]:
    """The times there are, ascending."""
    return array("d", sorted(one for one in times if one is not None))


def retimed(times: array[float], before: float | None, *, after: float | None) -> array[float]:
    """Sorted `times` with `after` in the place of `before`; `None` is no time."""
    if before == after:
        return times
    changed = times[:]
    if before is not None:
        del changed[bisect_left(changed, before)]
    if after is not None:
        insort(changed, after)
    return changed


def middle(times: array[float], *, otherwise: float) -> float:
    """Median of sorted `times`; `otherwise` if there are none."""
    half = len(times) // 2
    if not times:
        return otherwise
    return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2
