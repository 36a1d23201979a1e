"""What a page sees of a running swarm: server-sent events, one twice a second.

Each event is the whole state in a few kilobytes, so that none has to be kept for anybody: a viewer
who reads slowly gets fewer of them, and one who does not read is cut off as any other connection
(`run.Server.cut_waiting`). It is made once for all viewers.
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
from layershuffle.swarm.server.limits import client_of
from layershuffle.swarm.server.metrics import Metrics

EVERY = 0.5  # seconds between events
VIEWERS, CLIENT_VIEWERS = 64, 32
"""Most viewers at one time, in all and of one client address."""
_ANSWERED = ("answered", "degraded")
_FAILED = ("unanswered", "failed")


class Live:
    """The events of one gateway. `ending` is set when its server ends: no viewer holds that up."""

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router, self._metrics = router, metrics
        self._viewers: Counter[str] = Counter()
        self._event, self._tick = b"", -1
        self.ending = asyncio.Event()

    def event(self, now: float) -> bytes:
        """The event at `now`, in seconds of the router's clock; the same for half a second."""
        tick = int(now / EVERY)
        if tick != self._tick:
            self._tick = tick
            self._event = f"data: {json.dumps(self._state(now))}\n\n".encode()
        return self._event

    async def stream(self, request: Request) -> StreamingResponse:
        """The events, until the client leaves. Raises `HTTPError` (429) for too many viewers."""
        client = client_of(request.client.host if request.client else "")
        if self._viewers.total() >= VIEWERS or self._viewers[client] >= CLIENT_VIEWERS:
            raise busy("Too many pages watch this swarm", wait=EVERY)
        return StreamingResponse(self._events(client), media_type="text/event-stream")

    async def _events(self, client: str) -> AsyncIterator[bytes]:
        self._viewers[client] += 1
        try:
            while not self.ending.is_set():
                yield self.event(self._router.clock())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), EVERY)
        finally:
            self._viewers[client] -= 1
            self._viewers += Counter()  # it drops the zeros, of addresses that have left

    def _state(self, now: float) -> dict[str, object]:
        metrics, carriers = self._metrics, dict[str, Carrier]()
        requests, last = metrics.requests, metrics.last
        hosts = []
        for host in schemas.hosts_of(self._router.swarm, carriers, now=now):
            fields = host.model_dump(include={"name", "condition", "why", "blocks", "compute_ms"})
            usable = self._router.swarm[host.name].usable
            visits = metrics.hops.get(host.name, Counter())
            hosts.append({**fields, "usable": usable, "visits": visits})
        walk = None
        if last is not None:
            walk = last.model_dump(include={"route", "skipped", "blocks", "depth", "ms"})
        return {
            "at": now,
            "hosts": hosts,
            "answered": sum(requests[outcome] for outcome in _ANSWERED),
            "failed": sum(requests[outcome] for outcome in _FAILED),
            "blocks": metrics.blocks_used,
            "walk": walk,
        }
