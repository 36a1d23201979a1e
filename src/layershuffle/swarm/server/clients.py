"""What each client has under way, so that none takes the places or the decoders of all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from layershuffle.swarm.server.auth import client_of
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.limits import GatewayLimits

_Result = TypeVar("_Result")


class Client:
    """The requests of one client, and its share of the decoders: half of them, at least one.

    `idle` is called when nothing of it is under way any more.
    """

    def __init__(self, decoders: int, *, idle: Callable[[], object]) -> None:
        self.requests = self._decodes = 0
        self._idle = idle
        self._turns = asyncio.Semaphore(max(1, decoders // 2))

    async def decode(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, done in a thread of `pool` when it is this client's turn.

        Being cancelled takes it out of the queue. A thread that has begun goes on, and counts until
        it ends: clients that give up early get no more of the decoders than others.
        """
        await self._turns.acquire()
        running = pool.submit(work)
        self._decodes += 1
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it all that is counted
                loop.call_soon_threadsafe(self._decoded)

        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def _decoded(self) -> None:
        self._decodes -= 1
        self._turns.release()
        self.check()

    def check(self) -> None:
        """Tell whether it is idle."""
        if not self.requests and not self._decodes:
            self._idle()


class Clients:
    """The clients that have something under way. One event loop."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._known: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._known)

    @contextmanager
    def request_of(self, address: str) -> Iterator[Client]:
        """Count a request of `address`; raises `Refused` (429) if its client has too many."""
        name = client_of(address)
        client = self._known.get(name)
        if client is None:
            client = Client(self._limits.decoders, idle=partial(self._known.pop, name, None))
            self._known[name] = client
        if client.requests >= self._limits.client_requests:
            raise busy("Too many requests from your address are under way")
        client.requests += 1
        try:
            yield client
        finally:
            client.requests -= 1
            client.check()
