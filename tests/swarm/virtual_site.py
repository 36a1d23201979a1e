"""A gateway and the other ends of its connections in virtual time, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from itertools import count

from dial_site import TOKEN, digits

from clock import loop_time
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.hosts.connections import ConnectedHosts
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.router import Router
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import background
from layershuffle_host import wire
from layershuffle_host.wire import Header, Kind, State

LOAD = 0.05
VISIT = 0.002
_instances = count()
Lie = Callable[[State], State]
"""What a host answers to a visit in place of the state after the block."""


class VirtualSite:
    """A coordinator of a model, by default that of `digits`, its connected and its router."""

    def __init__(
        self, limits: Limits, *, model: ServedModel | None = None, **options: object
    ) -> None:
        self.model = model or digits()
        self.connected = ConnectedHosts(self.model, token=TOKEN)
        self.router = Router(
            self.connected,
            depth=self.model.depth,
            fixed=self.model.manifest.fixed,
            limits=limits,
            clock=loop_time,
        )
        self.coordinator = Coordinator(
            self.model,
            router=self.router,
            connected=self.connected,
            **options,  # type: ignore[arg-type]
        )

    def copies(self) -> list[int]:
        """How many usable hosts hold each block."""
        copies = self.router.swarm.copies()
        return [copies[block] for block in self.model.hosted]


class VirtualHost:
    """A host that dials in at once: `capacity` is what it can load, whatever memory it claims.

    `mute`: it says nothing of what it cannot load. `lie`: its answers to the visits of requests;
    `leaves`: with the first of them.
    """

    unread_since: float | None = None
    address = "192.0.2.1"

    def __init__(
        self,
        site: VirtualSite,
        name: str,
        *,
        memory: int = 10**9,
        speed: float = 1.0,
        capacity: int = 100,
        mute: bool = False,
        lie: Lie | None = None,
        leaves: bool = False,
        why: str = "OSError: no space left on device",
    ) -> None:
        self._site = site
        self._capacity = capacity
        self._mute = mute
        self._lie = lie
        self._leaves = leaves
        self._why = why
        self._loop = asyncio.get_running_loop()
        self.loaded = set[int]()
        self.assigned: Collection[int] = ()
        self.closed = ""
        self.visits = 0
        site.connected.opened(self)  # type: ignore[arg-type]
        self.say(
            "hello",
            protocol=wire.PROTOCOL,
            token=TOKEN,
            name=name,
            instance=str(next(_instances)),
            version="0",
            runtime="none",
            memory=memory,
            speed=speed,
            held=[],
        )

    def say(self, kind: str, **fields: object) -> None:
        """Send a message to the gateway."""
        if not self.closed:
            text = json.dumps({"type": kind, **fields})
            self._site.connected.received(self, text)  # type: ignore[arg-type]

    def keep(self) -> None:
        """It is taken."""

    def close(self, code: int, why: str) -> None:
        """The gateway, or the host, ends the connection."""
        del code
        if not self.closed:
            self.closed = why
            self._site.connected.ended(self, why)  # type: ignore[arg-type]

    def send(self, content: str | bytes) -> None:
        """Take what the gateway sends."""
        if isinstance(content, bytes):
            self._loop.create_task(self._visited(content))
            return
        self.assigned = [block["slot"] for block in json.loads(content)["blocks"]]
        self.loaded &= set(self.assigned)
        self._loop.call_later(LOAD, self._load)

    def _load(self) -> None:
        for slot in self.assigned:
            if slot in self.loaded or len(self.loaded) < self._capacity:
                self.loaded.add(slot)
                self.say("ready", slot=slot, seconds=VISIT)
            elif not self._mute:
                self.say("failed", slot=slot, why=self._why)

    async def _visited(self, content: bytes) -> None:
        header = wire.header_of(content)
        before = wire.state_in(content, header, shape=self._site.model.shape)
        after = await self._site.model.compute(header.slot, before)
        # A canary has half a second in these tests, and a request has more.
        asked = header.time > 1e6
        if asked:
            self.visits += 1
            if self._lie is not None:
                after = self._lie(after)
        await asyncio.sleep(VISIT)
        if not self.closed:
            answer = Header(Kind.ANSWER, *header[1:5], header.images, int(1e6 * VISIT), 0)
            self._site.connected.received(self, wire.frame(answer, after))  # type: ignore[arg-type]
            if asked and self._leaves:
                self.close(1001, "bye")


@asynccontextmanager
async def virtual_gateway(
    limits: Limits, *, model: ServedModel | None = None, **options: object
) -> AsyncIterator[VirtualSite]:
    """A gateway whose coordinator runs."""
    site = VirtualSite(limits, model=model, **options)
    try:
        async with background(site.coordinator.run()):
            yield site
    finally:
        await site.coordinator.close()
