"""The results of a simulation, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layershuffle.gateway.brain.policy import Cell, Route, cell_of
from layershuffle.gateway.brain.sureness import Stop
from layershuffle.gateway.client.judging import Ended, ends_and_times
from layershuffle.ground.stats import mean


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
    """The replies of a simulation, sorted by the time of their end, and what they come to.

    `figures`: shares, times and counts by name (`outcome_of`). `blocks`: number of answers by the
    number of their blocks. `visits`: all visits sent, including canaries and audits.
    """

    replies: Sequence[SimulatedReply] = field(repr=False)
    figures: Mapping[str, float | None]
    blocks: Mapping[int, int]
    visits: int


def outcome_of(
    replies: Sequence[SimulatedReply],
    *,
    top1: Mapping[Cell, float],
    sure: Stop | None = None,
    visits: int,
) -> SimulationOutcome:
    """The outcome of all replies; `top1`: percent right by how the blocks ran, if it is known;
    `sure`: of those that ended when they were sure.

    Figures are shares in percent, times in milliseconds, and `None` where answers or a calibration
    lack.
    """
    answers = [reply for reply in replies if reply.ended != "failed"]
    # Answers with a false block count as wrong, and requests without an answer, too.
    true = [reply.route for reply in answers if not reply.false]
    ended = [route for route in true if sure is None or route.ending != "sure"]
    right = _right(ended, top1)
    if sure is not None and sure.sure is not None:
        right += sure.sure.top1 * (len(true) - len(ended))
    # A swarm fills up at first and empties at the end, so its rate is measured in the middle half;
    # n ends have n - 1 intervals between them.
    quarter = len(replies) // 4
    span = replies[-1 - quarter].ended_at - replies[quarter].ended_at
    figures: dict[str, float | None] = {
        **ends_and_times([(reply.ended, reply.route.ms) for reply in replies]),
        "seconds": replies[-1].ended_at,
        "per_second": (len(replies) - 2 * quarter - 1) / span if span > 0 else None,
        "mean_blocks": mean([reply.route.kept for reply in answers]) if answers else None,
        "right_of_answers": right / len(answers) if top1 and answers else None,
        "right_of_requests": right / len(replies) if top1 else None,
        "false_answers": sum(reply.false for reply in answers),
        "visits_per_request": mean([len(reply.route.hops) for reply in replies]),
    }
    blocks = Counter(reply.route.kept for reply in answers)
    return SimulationOutcome(
        replies=replies,
        figures=figures,
        blocks=dict(sorted(blocks.items())),
        visits=visits,
    )


def _right(routes: Sequence[Route], top1: Mapping[Cell, float]) -> float:
    """The percents right to expect of these answers, added up."""
    ran = [cell_of(route.steps) for route in routes if route.order]
    # What was not measured counts as one block after the other.
    return sum(top1.get(cell, top1.get(Cell(cell.kept), 0.0)) for cell in ran)
