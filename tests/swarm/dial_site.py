"""A gateway without HTTP for tests: connections, coordinator and router, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from websockets.asyncio.client import ClientConnection, connect

from exported import exported_without_ends
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import Cell, Rounds, Route
from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import State, Visit
from layershuffle.gateway.hosts.connections import ConnectedHosts
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.router import Router
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import background
from layershuffle.gateway.http.listening import listening
from layershuffle_host import wire
from layershuffle_host.host import Host
from layershuffle_host.wire import HOST_PATH, Header
from waiting import until

TOKEN = "a secret"
BUSY = Limits(hop_floor_ms=2000, hop_cap_ms=5000, probe_ms=5000, deadline_ms=20_000)
"""For machines on which a visit may wait for its turn, where a test is not about time."""


@cache
def digits() -> ServedModel:
    """The weights of the shipped model without its ends: hosts serve all twelve blocks."""
    return ServedModel(exported_without_ends())


class Site:
    """A gateway that listens: `url` for hosts."""

    def __init__(self, model: ServedModel, limits: Limits, *, parallel: int) -> None:
        self.model = model
        self.connected = ConnectedHosts(self.model, token=TOKEN)
        rounds = Rounds(
            {kept: Cell(kept, parallel=parallel) for kept in range(1, len(model.hosted) + 1)},
            max_age=2 * parallel,
        )
        self.router = Router(
            self.connected,
            depth=model.depth,
            fixed=model.manifest.fixed,
            limits=limits,
            rounds=rounds,
        )
        self.coordinator = Coordinator(self.model, router=self.router, connected=self.connected)
        self.app: Any = Starlette(routes=self.connected.routes())
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI app; `app` may be replaced."""
        await self.app(scope, receive, send)

    async def ask(
        self, name: str, block: int, state: State, *, limit: float = 20.0, form: Wire = "fp32"
    ) -> State:
        """The state that a host answers to one visit."""
        async with asyncio.timeout(limit):
            answer = await self.connected.visit(Visit(name, block, limit), state, form=form)
        return answer.state

    async def walk(self, state: State, *, least: int = 1) -> tuple[State, Route]:
        """One request, which waits for `least` blocks."""
        end = self.router.clock() + 20
        return await self.router.walk(state, deadline=end, min_blocks=least)

    until = staticmethod(until)

    def copies(self) -> list[int]:
        """How many usable hosts hold each block."""
        copies = self.router.swarm.copies()
        return [copies[block] for block in self.model.hosted]


@asynccontextmanager
async def gateway(
    *, limits: Limits = BUSY, parallel: int = 1, model: ServedModel | None = None
) -> AsyncIterator[Site]:
    """A gateway that listens on this machine, by default to the shipped model."""
    site = Site(model or digits(), limits, parallel=parallel)
    async with listening(site, connected=site.connected) as (listener, _):
        site.url = f"ws://127.0.0.1:{listener.port}"
        try:
            async with background(site.coordinator.run()):
                yield site
        finally:
            await site.coordinator.close()


@asynccontextmanager
async def hosting(*urls: str, cache: Path, **how: Any) -> AsyncIterator[Host]:
    """A host in this process, which drains at the end."""
    host = Host(list(urls), **{"token": TOKEN, "name": "pi", "cache": cache, **how})
    running = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        host.drain()
        await asyncio.wait_for(running, 20)


class Stranger:
    """The host's end of the wire by hand."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def hello(self, **changes: Any) -> None:
        """Say hello."""
        fields = {
            "protocol": wire.PROTOCOL, "token": TOKEN, "name": "odd", "instance": "1",
            "version": "0", "runtime": "none", "memory": 10**9, "speed": 1.0, "held": [],
            **changes,
        }  # fmt: skip
        await self.socket.send(json.dumps({"type": "hello", **fields}))

    async def assigned(self) -> list[dict[str, Any]]:
        """The blocks of the next assignment."""
        while not isinstance(content := await self.socket.recv(), str):
            pass
        blocks: list[dict[str, Any]] = json.loads(content)["blocks"]
        return blocks

    async def visit(self) -> tuple[Header, State]:
        """The next visit."""
        while not isinstance(content := await self.socket.recv(), bytes):
            pass
        header = wire.header_of(content)
        return header, wire.state_in(content, header, shape=digits().shape)


@asynccontextmanager
async def dialled(site: Site, **options: Any) -> AsyncIterator[Stranger]:
    """A connection of a host that has not said hello."""
    async with connect(
        site.url + HOST_PATH, compression=None, close_timeout=1, **options
    ) as socket:
        yield Stranger(socket)


def states(batch: int = 1, *, seed: int = 0) -> State:
    """Random states."""
    shape = (batch, *digits().shape)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


async def replayed(start: State, route: Route) -> State:
    """The state that the steps of a route give in one process."""
    versions = [start]
    for block, version in route.steps:
        before = versions[version]
        after = await digits().compute(block, before)
        newest = version == len(versions) - 1
        versions.append(after if newest else versions[-1] + (after - before))
    return versions[-1]
