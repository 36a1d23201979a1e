"""Server-sent events with the state of a running swarm, for the page.

Twice a second the state of all hosts and counters is sent, and five times a second the request in
sight while it runs. Every event is a complete state of a few kilobytes, so none has to be queued:
a viewer who reads slowly gets fewer of them, and one who does not read is disconnected like any
other client (`run.Server.cut_waiting`). They are made once for all viewers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import StreamingResponse

from layershuffle.swarm.messages import Answer, Route, Visited
from layershuffle.swarm.placement import Carrier
from layershuffle.swarm.router import PendingVisit, Router, Walk
from layershuffle.swarm.server import schemas
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.limits import client_of
from layershuffle.swarm.server.metrics import Metrics
from layershuffle.swarm.server.page import HEADERS

EVERY = 0.5  # seconds between events of the hosts ...
STEP = 0.2  # ... and of the request that walks
VIEWERS, CLIENT_VIEWERS = 64, 32
"""Most viewers at one time, in total and per client address."""
REST = 0.7  # seconds that a request stays in sight after its end
MOST_VISITS = 256  # of one request; further ones are not recorded
_MILLI = 1000.0
_ANSWERED = ("answered", "degraded")
_FAILED = ("unanswered", "failed")


class Live:
    """The events of one gateway. `ending` is set when its server ends, which ends the streams."""

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router, self._metrics = router, metrics
        self._viewers: Counter[str] = Counter()
        self._following = Following(router.clock, depth=router.depth)
        self._hosts, self._walk = b"", b""
        self._hosts_tick, self._walk_tick, self._version = -1, -1, 0
        self.ending = asyncio.Event()

    def events(self, now: float) -> tuple[bytes, bytes]:
        """The events of the hosts and of the request in sight, at `now` in seconds of the
        router's clock. The same objects until there is news."""
        tick = int(now / EVERY)
        if tick != self._hosts_tick:
            self._hosts_tick = tick
            self._hosts = _event(self._state(now))
        tick, following = int(now / STEP), self._following
        news = following.version != self._version or following.moving(now)
        if tick != self._walk_tick and news:
            self._walk_tick, self._version = tick, following.version
            self._walk = _event({"walk": following.described(now)})
        return self._hosts, self._walk

    async def stream(self, request: Request) -> StreamingResponse:
        """The events, until the client leaves. Raises `HTTPError` (429) for too many viewers."""
        client = client_of(request.client.host if request.client else "")
        if self._viewers.total() >= VIEWERS or self._viewers[client] >= CLIENT_VIEWERS:
            raise busy("Too many pages watch this swarm", wait=EVERY)
        events = self._events(client)
        return StreamingResponse(events, headers=HEADERS, media_type="text/event-stream")

    async def _events(self, client: str) -> AsyncIterator[bytes]:
        self._viewers[client] += 1
        self._router.watcher = self._following
        sent = (b"", b"")
        try:
            while not self.ending.is_set():
                events = self.events(self._router.clock())
                # A slow viewer gets the newest state, without those in between.
                fresh = [new for new, old in zip(events, sent, strict=True) if new is not old]
                if fresh:
                    sent = events
                    yield b"".join(fresh)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), STEP)
        finally:
            self._viewers[client] -= 1
            self._viewers += Counter()  # drops the zeros of addresses that have left
            if not self._viewers:
                self._router.watcher = None  # unwatched requests cost nothing here
                self._following.forget()

    def _state(self, now: float) -> dict[str, object]:
        metrics, carriers = self._metrics, dict[str, Carrier]()
        requests = metrics.requests
        hosts = []
        for host in schemas.hosts_of(self._router.swarm, carriers, now=now):
            fields = host.model_dump(include={"name", "condition", "why", "blocks", "compute_ms"})
            usable = self._router.swarm[host.name].usable
            visits = metrics.hops.get(host.name, Counter())
            hosts.append({**fields, "usable": usable, "visits": visits})
        return {
            "at": now,
            "hosts": hosts,
            "answered": sum(requests[outcome] for outcome in _ANSWERED),
            "failed": sum(requests[outcome] for outcome in _FAILED),
            "blocks": metrics.blocks_used,
        }


def _event(state: dict[str, object]) -> bytes:
    return f"data: {json.dumps(state)}\n\n".encode()


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
    """The request that the page shows, with its visits while they run: a `Watcher` of the router.

    A visitor can follow no more than one request. It is shown until shortly after its end; then
    the newest request replaces it. Nothing is recorded of requests between the two. `clock` is
    that of the router; `version` grows with every event.
    """

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
        visit = _FollowedVisit(call.visit.host, (call.visit.block,), begun)
        request.visits.append(visit)
        request.calls[id(call)] = visit

        def ended(task: asyncio.Task[Answer]) -> None:
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
