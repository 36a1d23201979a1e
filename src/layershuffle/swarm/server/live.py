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
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import StreamingResponse

from layershuffle.swarm.placement import Carrier
from layershuffle.swarm.router import Router
from layershuffle.swarm.server import schemas
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.following import Following
from layershuffle.swarm.server.limits import client_of
from layershuffle.swarm.server.metrics import Metrics
from layershuffle.swarm.server.page import HEADERS

EVERY = 0.5  # seconds between events of the hosts ...
STEP = 0.2  # ... and of the request that walks
VIEWERS, CLIENT_VIEWERS = 64, 32
"""Most viewers at one time, in total and per client address."""
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
