"""Two sides timed in turn, so that a busy machine slows both alike; rows that say what came out.

On a CPU the clock is the processor time of this process, which waiting does not touch; on a GPU it
is the GPU's own, by events. A *pair* holds one number per side, each the mean of several turns;
who goes first changes from turn to turn.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Callable[[], float]
"""Does its work once; seconds it took."""

_PAIR_SECONDS = 1.0
_MOST_TURNS = 200
_NOISE_CAP = 1.05


@dataclass(frozen=True)
class Bound:
    """What a row promises.

    `not_above`: no more than `value` within noise, that is: the 95 % interval of the median reaches
    down to `value`, and the median is at most 5 % above it, however wide the interval is.
    """

    kind: Literal["at_most", "at_least", "equal", "not_above"]
    value: float

    def holds(self, values: Sequence[float]) -> bool:
        """Whether the median of `values` keeps the promise."""
        middle = statistics.median(values)
        if self.kind == "at_most":
            return middle <= self.value
        if self.kind == "at_least":
            return middle >= self.value
        if self.kind == "equal":
            return all(value == self.value for value in values)
        return middle <= _NOISE_CAP * self.value and interval_of_median(values)[0] <= self.value


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured: `values` in `unit`, or ratios (`unit` is "") of `pairs`.

    `what`: in words, "naive / trie" for a ratio. `bound` is `None` for what is only reported.
    `settings`: model, batch, dtype and the like. `facts`: what else was seen, such as counts.
    """

    name: str
    what: str
    values: tuple[float, ...]
    unit: str = ""
    bound: Bound | None = None
    pairs: tuple[tuple[float, float], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The number that is judged."""
        return statistics.median(self.values)

    @property
    def holds(self) -> bool | None:
        """Whether the bound does, `None` without one."""
        return None if self.bound is None else self.bound.holds(self.values)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured: `pairs` of at least `seconds` each, after `warm_up` runs of a side."""

    pairs: int = 9
    seconds: float = _PAIR_SECONDS
    warm_up: int = 2


SMOKE = Effort(pairs=1, seconds=0.0, warm_up=1)


def cpu_timed(work: Callable[[], object]) -> Side:
    """`work` on the clock of this process: processor time of all its threads, in seconds."""

    def side() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return side


def gpu_timed(work: Callable[[], object]) -> Side:
    """`work` on the current GPU's clock, from its first kernel to its last, in seconds."""
    import torch

    from layershuffle.bench.marks import gpu_event

    def side() -> float:
        first, last = gpu_event(), gpu_event()
        torch.cuda.synchronize()
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return side


def paired(
    name: str,
    what: str,
    *,
    a: Side,
    b: Side,
    effort: Effort,
    bound: Bound | None = None,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Row:
    """The row of A against B: its values are seconds of A over seconds of B, pair by pair.

    Both sides run before, twice unless it is a smoke: what is built once is not measured.
    """
    if effort is not SMOKE:
        gc.collect()  # as long as a smoke, in a large process
    with _quiet():
        once = sum(min(side() for _ in range(effort.warm_up)) for side in (a, b))
        turns = min(_MOST_TURNS, math.ceil(effort.seconds / max(once, 1e-6))) or 1
        pairs = tuple(_pair(a, b, turns=turns, first=n % 2) for n in range(effort.pairs))
    return Row(
        name=name,
        what=what,
        values=tuple(one / other for one, other in pairs),
        bound=bound,
        pairs=pairs,
        settings={**(settings or {}), "turns_per_pair": turns},
        facts=facts or {},
    )


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval for the median that assumes no distribution: two of the sorted values.

    Fewer than six values cannot give one: then their whole range.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0, 2 * 0.5**count  # chance that all lie on one side of the median
    while outside + 2 * math.comb(count, below + 1) * 0.5**count <= 0.05:
        below += 1
        outside += 2 * math.comb(count, below) * 0.5**count
    return ordered[below], ordered[count - 1 - below]


def _pair(a: Side, b: Side, *, turns: int, first: int) -> tuple[float, float]:
    gc.collect(0)  # what the pair before left; a whole collection takes long in a large process
    total_a = total_b = 0.0
    for turn in range(first, first + turns):
        if turn % 2:
            total_b += b()
            total_a += a()
        else:
            total_a += a()
            total_b += b()
    return total_a / turns, total_b / turns


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection while the clock runs; it would hit one side by chance."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
