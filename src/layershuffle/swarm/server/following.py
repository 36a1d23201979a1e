"""The request that the page shows live, with its visits while they run.

A visitor can follow no more than one request. It is shown until shortly after its end; then the
newest request replaces it. Nothing is recorded of requests between the two.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable
from dataclasses import dataclass, field

from layershuffle.swarm.messages import Answer, Route, Visited
from layershuffle.swarm.walk import PendingVisit, Walk

REST = 0.7  # seconds that a request stays in sight after its end
MOST_VISITS = 256  # of one request; further ones are not recorded
_MILLI = 1000.0


@dataclass
class _FollowedVisit:
    """A visit. Times in milliseconds since its request began; `ended` is `None` while it runs."""

    host: str
    blocks: tuple[int, ...]
    begun: float
    ended: float | None = None
    outcome: str = ""
    late: bool = False
    why: str = ""


@dataclass
class _FollowedRequest:
    """What is recorded of a request. `walk` is dropped at its end, to free the states it holds."""

    walk: Walk | None
    number: int
    started: float
    visits: list[_FollowedVisit] = field(default_factory=list)
    # By the id of the call, because a call holds states; a reused id overwrites its entry.
    calls: dict[int, _FollowedVisit] = field(default_factory=dict)
    route: Route | None = None
    over: float | None = None  # seconds of the router's clock


class Following:
    """A `Watcher` of the router with this clock. `version` grows with every event."""

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
        request = self._request_of(walk)
        if request is None or len(request.visits) >= MOST_VISITS:
            return
        begun = (self._clock() - request.started) * _MILLI
        visit = _FollowedVisit(call.visit.host, call.visit.blocks, begun)
        request.visits.append(visit)
        request.calls[id(call)] = visit

        def ended(task: Task[Answer]) -> None:
            if visit.ended is None:
                visit.ended = (self._clock() - request.started) * _MILLI
            if task.cancelled() and not visit.outcome:
                visit.outcome = "dropped"
            self.version += 1

        call.task.add_done_callback(ended)
        self.version += 1

    def noted(self, call: PendingVisit, hop: Visited) -> None:
        """A visit has an outcome. A late visit still runs, and may bring an answer."""
        for request in self._requests():
            visit = request.calls.get(id(call))
            if visit is not None:
                visit.outcome, visit.why = hop.outcome, hop.why
                visit.late |= hop.outcome == "late"
                if visit.ended is None and call.task.done():
                    visit.ended = (self._clock() - request.started) * _MILLI
                self.version += 1

    def over(self, walk: Walk, route: Route | None) -> None:
        """A request ends."""
        request = self._request_of(walk)
        if request is not None:
            request.walk, request.route, request.over = None, route, self._clock()
            request.calls.clear()
            self.version += 1

    def forget(self) -> None:
        """Drop all records: the last viewer has left, and the ends of requests are not reported."""
        self._shown = self._newest = None
        self.version += 1

    def moving(self, now: float) -> bool:
        """Whether the request in sight is still running at `now`."""
        self._advance(now)
        return self._shown is not None and self._shown.over is None

    def described(self, now: float) -> dict[str, object] | None:
        """The request in sight at `now`, if any, as JSON; times in milliseconds since it began."""
        self._advance(now)
        request = self._shown
        if request is None:
            return None
        route, done = request.route, () if request.walk is None else request.walk.progress.done
        skipped = {} if route is None else route.skipped
        return {
            "number": request.number,
            "depth": self._depth,
            "ms": ((now if request.over is None else request.over) - request.started) * _MILLI,
            "over": request.over is not None,
            "answered": route is not None,
            "blocks": len(set(done)) if route is None else route.kept,
            "skipped": [{"block": block, "why": why} for block, why in sorted(skipped.items())],
            "visits": [dict(vars(visit)) for visit in request.visits],
        }

    def _advance(self, now: float) -> None:
        shown = self._shown
        if self._newest is shown or (shown and (shown.over is None or now - shown.over < REST)):
            return
        self._shown = self._newest
        self.version += 1

    def _requests(self) -> list[_FollowedRequest]:
        requests = [request for request in (self._shown, self._newest) if request is not None]
        return requests[:1] if self._shown is self._newest else requests

    def _request_of(self, walk: Walk) -> _FollowedRequest | None:
        return next((request for request in self._requests() if request.walk is walk), None)
