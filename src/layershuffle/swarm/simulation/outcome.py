"""The results of a simulation, as numbers and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from layershuffle.stats import quantile
from layershuffle.swarm.drill import Ended
from layershuffle.swarm.messages import WHOLE, Route
from layershuffle.swarm.rounds import Cell, cell_of
from layershuffle.text import table

ENDED: tuple[Ended, ...] = ("answered", "degraded", "late", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReply:
    """The result of one request, which ended at `ended_at` seconds of virtual time.

    `false`: a host that answers wrongly took part. `late`: it ended after its deadline. `enough`:
    at least `min_blocks` blocks ran.
    """

    route: Route
    ended_at: float
    false: bool
    late: bool
    enough: bool

    @property
    def ended(self) -> Ended:
        """How the request ended."""
        if self.route.ending == "lost" or not self.enough:
            return "failed"
        if self.late:
            return "late"
        return "answered" if self.route.ending in WHOLE else "degraded"


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """The results of all requests.

    `ended`: answered (all blocks ran, in time), degraded (in time, blocks missing), late (after the
    deadline), failed (no answer). `blocks`: number of answers by the number of their blocks. `ms`:
    durations of all requests in milliseconds, ascending. `accuracy`: percent to expect of the
    answers; `right`: percent to expect of all requests, those without an answer counted as wrong;
    both `None` without a calibration. `false`: answers in which a host that answers wrongly took
    part, counted as wrong. `hops`: visits per request, including failed ones. `visited`: visits for
    requests that each host answered. `seconds`: virtual time; `per_second`: requests that ended per
    second, over the middle half of them. `visits`: all visits sent, including canaries and audits.
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
    visited: Mapping[str, int] = field(repr=False)
    seconds: float
    per_second: float
    visits: int

    def share(self, *ended: Ended) -> float:
        """Share of the requests that ended in one of these ways, in percent."""
        return 100 * sum(self.ended[end] for end in ended) / self.requests

    def quantile(self, q: float) -> float:
        """Milliseconds below which a share `q` of all requests ended (nearest rank)."""
        return quantile(self.ms, q)

    @property
    def mean_blocks(self) -> float:
        """Mean number of blocks of an answer; NaN without answers."""
        answers = sum(self.blocks.values())
        return sum(k * n for k, n in self.blocks.items()) / answers if answers else math.nan


def outcome_of(
    replies: Sequence[SimulatedReply],
    *,
    routing: str,
    accuracy: Mapping[Cell, float] | None,
    depth: int,
    visits: int,
) -> SimulationOutcome:
    """The outcome of all replies, which are sorted by the time of their end."""
    ended = Counter(reply.ended for reply in replies)
    answers = [reply for reply in replies if reply.ended != "failed"]
    hops = [hop for reply in replies for hop in reply.route.hops]
    right = None
    if accuracy:
        queue = {cell.kept: top1 for cell, top1 in accuracy.items() if cell == Cell(cell.kept)}
        # Uncalibrated numbers of blocks lie between calibrated ones.
        measured = sorted(queue)
        percent = np.interp(range(depth + 1), measured, [queue[kept] for kept in measured])
        ran = [cell_of(r.route.steps) if r.route.order else Cell(0) for r in answers if not r.false]
        right = float(sum(accuracy.get(cell, percent[cell.kept]) for cell in ran))
    # A swarm fills up at first and empties at the end, so its rate is measured in the middle half.
    quarter = len(replies) // 4
    first, last = replies[quarter].ended_at, replies[-1 - quarter].ended_at
    return SimulationOutcome(
        routing=routing,
        requests=len(replies),
        ended={end: ended[end] for end in ENDED},
        blocks=dict(sorted(Counter(reply.route.kept for reply in answers).items())),
        ms=tuple(sorted(reply.route.ms for reply in replies)),
        accuracy=None if right is None or not answers else right / len(answers),
        right=None if right is None else right / len(replies),
        false=sum(reply.false for reply in answers),
        hops=len(hops) / len(replies),
        visited=Counter(hop.host for hop in hops if hop.outcome == "answered"),
        seconds=replies[-1].ended_at,
        # n ends have n - 1 intervals between them.
        per_second=(len(replies) - 2 * quarter - 1) / (last - first) if last > first else math.nan,
        visits=visits,
    )


def outcome_report(outcomes: Mapping[str, SimulationOutcome]) -> str:
    """Tables with a column per outcome, headed by its key."""
    columns = list(outcomes.values())
    rows = [
        ("requests", *(f"{outcome.requests}" for outcome in columns)),
        ("simulated seconds", *(f"{outcome.seconds:.1f}" for outcome in columns)),
        *((f"% {end}", *(f"{outcome.share(end):.2f}" for outcome in columns)) for end in ENDED),
        ("ms, median", *(f"{outcome.quantile(0.5):.1f}" for outcome in columns)),
        ("ms, 95 %", *(f"{outcome.quantile(0.95):.1f}" for outcome in columns)),
        ("ms, 99 %", *(f"{outcome.quantile(0.99):.1f}" for outcome in columns)),
        ("ms, longest", *(f"{outcome.ms[-1]:.1f}" for outcome in columns)),
        ("blocks of an answer, mean", *(_cell(o.mean_blocks, ".2f") for o in columns)),
        ("% right of the answers", *(_cell(outcome.accuracy, ".1f") for outcome in columns)),
        ("% right of all requests", *(_cell(outcome.right, ".1f") for outcome in columns)),
        ("answers with a false block", *(f"{outcome.false}" for outcome in columns)),
        ("visits per request", *(f"{outcome.hops:.2f}" for outcome in columns)),
    ]
    used = sorted({k for outcome in columns for k in outcome.blocks}, reverse=True)
    # Where nothing was answered every share is 0.
    pairs = [(outcome, max(1, sum(outcome.blocks.values()))) for outcome in columns]
    shares = [(f"{k}", *(f"{100 * o.blocks.get(k, 0) / n:.2f}" for o, n in pairs)) for k in used]
    used_blocks = table(("blocks used, % of the answers", *outcomes), shares)
    return f"{table(('', *outcomes), rows)}\n\n{used_blocks}"


def outcome_json(outcome: SimulationOutcome) -> dict[str, object]:
    """The figures of the report for `json.dumps`; shares in percent, times in milliseconds.

    Figures that need answers or a calibration are `None` without them, as JSON has no NaN.
    """
    return {
        "routing": outcome.routing,
        "requests": outcome.requests,
        "seconds": outcome.seconds,
        "percent": {end: outcome.share(end) for end in ENDED},
        "ms": {
            "median": outcome.quantile(0.5),
            "p95": outcome.quantile(0.95),
            "p99": outcome.quantile(0.99),
            "longest": outcome.ms[-1],
        },
        "mean_blocks": None if math.isnan(outcome.mean_blocks) else outcome.mean_blocks,
        "answers_by_blocks": {str(kept): count for kept, count in outcome.blocks.items()},
        "right_of_answers": outcome.accuracy,
        "right_of_requests": outcome.right,
        "false_answers": outcome.false,
        "visits_per_request": outcome.hops,
    }


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
