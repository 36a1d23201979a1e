"""The results of a simulation, as numbers and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from layershuffle.stats import quantile
from layershuffle.swarm.messages import Route
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.rounds import Cell, cell_of
from layershuffle.text import table

Ended = Literal["answered", "degraded", "late", "failed"]
ENDED: tuple[Ended, ...] = get_args(Ended)


@dataclass(frozen=True, slots=True)
class SimulatedReply:
    """The result of one request, which ended at `ended_at` seconds of virtual time; `false`: a
    host that answers wrongly took part."""

    route: Route
    ended: Ended
    ended_at: float
    false: bool


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
    second, over the middle half of them, `None` if these ended at one moment. `visits`: all visits
    sent, including canaries and audits.
    """

    routing: Routing
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
    per_second: float | None
    visits: int

    def share(self, *ended: Ended) -> float:
        """Share of the requests that ended in one of these ways, in percent."""
        return 100 * sum(self.ended[end] for end in ended) / self.requests

    def quantile(self, q: float) -> float:
        """Milliseconds below which a share `q` of all requests ended (nearest rank)."""
        return quantile(self.ms, q)

    @property
    def mean_blocks(self) -> float | None:
        """Mean number of blocks of an answer; `None` without answers."""
        answers = sum(self.blocks.values())
        return sum(k * n for k, n in self.blocks.items()) / answers if answers else None


def outcome_of(
    replies: Sequence[SimulatedReply],
    *,
    routing: Routing,
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
        per_second=(len(replies) - 2 * quarter - 1) / (last - first) if last > first else None,
        visits=visits,
    )


# (figure, its name in the table, its format there, its value). What needs answers or a calibration
# is `None` without them.
_FIGURES: tuple[tuple[str, str, str, Callable[[SimulationOutcome], float | None]], ...] = (
    ("requests", "requests", ".0f", lambda o: o.requests),
    ("seconds", "simulated seconds", ".1f", lambda o: o.seconds),
    ("per_second", "requests/s", ".1f", lambda o: o.per_second),
    *((end, f"% {end}", ".2f", lambda o, end=end: o.share(end)) for end in ENDED),
    ("ms_median", "ms, median", ".1f", lambda o: o.quantile(0.5)),
    ("ms_p95", "ms, 95 %", ".1f", lambda o: o.quantile(0.95)),
    ("ms_p99", "ms, 99 %", ".1f", lambda o: o.quantile(0.99)),
    ("ms_longest", "ms, longest", ".1f", lambda o: o.ms[-1]),
    ("mean_blocks", "blocks of an answer, mean", ".2f", lambda o: o.mean_blocks),
    ("right_of_answers", "% right of the answers", ".1f", lambda o: o.accuracy),
    ("right_of_requests", "% right of all requests", ".1f", lambda o: o.right),
    ("false_answers", "answers with a false block", ".0f", lambda o: o.false),
    ("visits_per_request", "visits per request", ".2f", lambda o: o.hops),
)


def figures(outcome: SimulationOutcome) -> dict[str, float | None]:
    """The rows of the report, for `json.dumps`: shares in percent, times in milliseconds."""
    return {key: value(outcome) for key, _, _, value in _FIGURES}


def outcome_report(outcomes: Sequence[SimulationOutcome]) -> str:
    """Tables with a column for each outcome, headed by its routing."""
    heads = [outcome.routing for outcome in outcomes]
    rows = [
        (name, *("-" if (x := value(o)) is None else format(x, form) for o in outcomes))
        for _, name, form, value in _FIGURES
    ]
    used = sorted({k for outcome in outcomes for k in outcome.blocks}, reverse=True)
    # Where nothing was answered every share is 0.
    pairs = [(outcome, max(1, sum(outcome.blocks.values()))) for outcome in outcomes]
    shares = [(f"{k}", *(f"{100 * o.blocks.get(k, 0) / n:.2f}" for o, n in pairs)) for k in used]
    used_blocks = table(("blocks used, % of the answers", *heads), shares)
    return f"{table(('', *heads), rows)}\n\n{used_blocks}"
