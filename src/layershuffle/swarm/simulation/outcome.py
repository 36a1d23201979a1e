"""What came of a simulation, as numbers and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from layershuffle.swarm.drill import Ended

ENDED: tuple[Ended, ...] = ("answered", "degraded", "late", "failed")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the requests ended; every request once.

    `ended`: answered (all blocks ran, in time), degraded (in time, blocks missing), late (after the
    deadline), failed (no answer). `blocks`: answers by the number of their blocks. `ms`: times to
    the end of all requests, ascending. `accuracy`: percent to expect of the answers; `right`: of
    all requests, those without an answer counted as wrong; `None` without a calibration. `false`:
    answers in which a host that answers wrongly took part, counted as wrong. `hops`: visits per
    request, failed ones too. `served`: blocks that each host ran. `seconds`: simulated time;
    `events`: that the simulation took.
    """

    routing: str
    requests: int
    ended: Mapping[Ended, int]
    blocks: Mapping[int, int]
    ms: tuple[float, ...] = field(repr=False)
    accuracy: float | None
    right: float | None
    false: int
    hops: float
    served: Mapping[str, int] = field(repr=False)
    seconds: float
    events: int

    def share(self, *ended: Ended) -> float:
        """Share of the requests that ended in one of these ways, in percent."""
        return 100 * sum(self.ended[one] for one in ended) / self.requests

    def quantile(self, q: float) -> float:
        """Milliseconds below which a share `q` of all requests ended (nearest rank)."""
        return self.ms[max(0, math.ceil(q * len(self.ms)) - 1)]

    @property
    def mean_blocks(self) -> float:
        """Blocks of an answer; NaN without answers."""
        answers = sum(self.blocks.values())
        return sum(k * n for k, n in self.blocks.items()) / answers if answers else math.nan


def counted(ended: list[Ended]) -> dict[Ended, int]:
    """How often each end occurs, in a fixed order."""
    found = Counter(ended)
    return {one: found[one] for one in ENDED}


def outcome_report(outcomes: Mapping[str, Outcome]) -> str:
    """A table with a column per outcome, under its name (as its routing)."""
    columns = list(outcomes.values())
    lines = ["".join([f"{'':<34}", *(f"{name:>24}" for name in outcomes)])]
    rows = [
        ("requests", [f"{one.requests}" for one in columns]),
        *((f"% {end}", [f"{one.share(end):.2f}" for one in columns]) for end in ENDED),
        ("ms, median", [f"{one.quantile(0.5):.1f}" for one in columns]),
        ("ms, 95 %", [f"{one.quantile(0.95):.1f}" for one in columns]),
        ("ms, 99 %", [f"{one.quantile(0.99):.1f}" for one in columns]),
        ("ms, longest", [f"{one.ms[-1]:.1f}" for one in columns]),
        ("blocks of an answer, mean", [_number(one.mean_blocks, ".2f") for one in columns]),
        ("% right of the answers", [_number(one.accuracy, ".1f") for one in columns]),
        ("% right of all requests", [_number(one.right, ".1f") for one in columns]),
        ("answers with a false block", [f"{one.false}" for one in columns]),
        ("visits per request", [f"{one.hops:.2f}" for one in columns]),
    ]
    lines += ["".join([f"{label:<34}", *(f"{c:>24}" for c in cells)]) for label, cells in rows]
    return "\n".join([*lines, "", "Blocks used, % of the answers:", *_histogram(outcomes)])


def _histogram(outcomes: Mapping[str, Outcome]) -> list[str]:
    used = sorted({blocks for one in outcomes.values() for blocks in one.blocks}, reverse=True)
    lines = []
    for blocks in used:
        shares = [
            100 * one.blocks.get(blocks, 0) / max(1, sum(one.blocks.values()))
            for one in outcomes.values()
        ]
        lines.append("".join([f"{blocks:>4}{'':<30}", *(f"{share:>24.2f}" for share in shares)]))
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
