"""The request that a page sees walking: its visits while they are under way, one request at a time.

A visitor can follow no more than one: it is shown to its end and for a moment after it, then the
newest one takes its place. Of requests between the two nothing is kept.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field

from layershuffle.swarm.messages import Answer, Route, Visited
from layershuffle.swarm.walk import PendingVisit, Walk

REST = 0.7  # seconds that a request stays in sight after its end
MOST_VISITS = 256  # of one request; further ones are walked unseen
_MILLI = 1000.0


@dataclass
class _FollowedVisit:
    """A visit, in milliseconds since its request began; `ended` is `None` while it is under way."""

    host: str
    blocks: tuple[int, ...]
    begun: float
    ended: float | None = None
    outcome: str = ""
    late: bool = False
    why: str = ""


@dataclass
class _FollowedRequest:
    """A request as far as it came. `walk` is let go at its end, with the states that it holds."""

    walk: Walk | None
    number: int
    started: float
    visits: list[_FollowedVisit] = field(default_factory=list)
    # By the call's id, or calls would keep their states; an id that comes again is overwritten.
    calls: dict[int, _FollowedVisit] = field(default_factory=dict)
    route: Route | None = None
    over: float | None = None  # seconds of the router's clock


class Following:
    """A `Watcher` of the router whose clock it has. `version` counts what it saw."""

    def __init__(self, clock: Callable[[], float], *, depth: int) -> None:
        self._clock, self._depth = clock, depth
        self._shown: _FollowedRequest | None = None
        self._newest: _FollowedRequest | None = None
        self._count = 0
        self.version = 0

    def begun(self, walk: Walk) -> None:
        """A request begins: it is the newest now."""
        self._count += 1
        now = self._clock()
        self._newest = _FollowedRequest(walk, self._count, now)
        self._advance(now)

    def sent(self, walk: Walk, call: PendingVisit) -> None:
        """A visit begins."""
        way = self._way_of(walk)
        if way is None or len(way.visits) >= MOST_VISITS:
            return
        begun = (self._clock() - way.started) * _MILLI
        visit = _FollowedVisit(call.visit.host, call.visit.blocks, begun)
        way.visits.append(visit)
        way.calls[id(call)] = visit

        def ended(task: Task[Answer]) -> None:
            if visit.ended is None:
                visit.ended = (self._clock() - way.started) * _MILLI
            if task.cancelled() and not visit.outcome:
                visit.outcome = "dropped"
            self.version += 1

        call.task.add_done_callback(ended)
        self.version += 1

    def noted(self, call: PendingVisit, hop: Visited) -> None:
        """A visit has an outcome. A late one is still under way, and may bring an answer."""
        for way in self._ways():
            visit = way.calls.get(id(call))
            if visit is not None:
                visit.outcome, visit.why = hop.outcome, hop.why
                visit.late |= hop.outcome == "late"
                if visit.ended is None and call.task.done():
                    visit.ended = (self._clock() - way.started) * _MILLI
                self.version += 1

    def over(self, walk: Walk, route: Route | None) -> None:
        """A request ends."""
        way = self._way_of(walk)
        if way is not None:
            way.walk, way.route, way.over = None, route, self._clock()
            way.calls.clear()
            self.version += 1

    def forget(self) -> None:
        """The last viewer has left: the ends of requests are no longer recorded."""
        self._shown = self._newest = None
        self.version += 1

    def moving(self, now: float) -> bool:
        """Whether there is something to see that changes by itself."""
        self._advance(now)
        return self._shown is not None and self._shown.over is None

    def described(self, now: float) -> dict[str, object] | None:
        """The request in sight at `now`, as JSON; times in milliseconds since it began."""
        self._advance(now)
        way = self._shown
        if way is None:
            return None
        route, done = way.route, () if way.walk is None else way.walk.progress.done
        skipped = {} if route is None else route.skipped
        return {
            "number": way.number,
            "depth": self._depth,
            "ms": ((now if way.over is None else way.over) - way.started) * _MILLI,
            "over": way.over is not None,
            "answered": route is not None,
            "blocks": len(set(done)) if route is None else route.kept,
            "skipped": [{"block": block, "why": why} for block, why in sorted(skipped.items())],
            "visits": [dict(vars(visit)) for visit in way.visits],
        }

    def _advance(self, now: float) -> None:
        shown = self._shown
        if self._newest is shown or (shown and (shown.over is None or now - shown.over < REST)):
            return
        self._shown = self._newest
        self.version += 1

    def _ways(self) -> list[_FollowedRequest]:
        ways = [way for way in (self._shown, self._newest) if way is not None]
        return ways[:1] if self._shown is self._newest else ways

    def _way_of(self, walk: Walk) -> _FollowedRequest | None:
        return next((way for way in self._ways() if way.walk is walk), None)
