"""How `swarm drill --scenarios` breaks the running swarm of this user, from outside."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layershuffle.errors import LayerShuffleError, UsageError

if TYPE_CHECKING:
    from layershuffle.swarm.chaos import FaultKind
    from layershuffle.swarm.client import AsyncSwarmClient
    from layershuffle.swarm.server.admin import Operator

_SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 6))  # clients count by address
_CONNECTIONS = 32
_QUESTION = b"GET /v1/swarm HTTP/1.1\r\nHost: drill\r\n\r\n" * 100


class RunningSwarm:
    """The swarm of `operator`, on this machine (`scenarios.Breakable`)."""

    def __init__(self, operator: Operator, client: AsyncSwarmClient, *, address: str) -> None:
        self._operator, self._client, self._address = operator, client, address
        self._unread: list[socket.socket] = []

    async def fault(self, host: str, kind: FaultKind) -> None:
        """Let one host fail."""
        # The operator's client blocks, and the requests must go on meanwhile.
        await asyncio.to_thread(self._operator.command, "fault", host=host, kind=kind)

    async def pipeline(self) -> Callable[[], bool]:
        """Ask from four addresses on 32 connections each, and read none of the answers."""
        parts = urlsplit(self._address)
        if parts.scheme != "http" or parts.hostname != "127.0.0.1":
            raise UsageError(
                "Unread answers are drilled at http://127.0.0.1 alone: other addresses of one "
                "client are needed",
                hint="leave the scenario `unread` out",
            )
        loop = asyncio.get_running_loop()
        for source in _SOURCES:
            for _ in range(_CONNECTIONS):
                connection = socket.socket()
                self._unread.append(connection)
                connection.setblocking(False)
                connection.bind((source, 0))
                await loop.sock_connect(connection, (parts.hostname, parts.port or 80))
                # As much as the kernel takes; the rest would only wait here.
                with suppress(BlockingIOError, ConnectionError):
                    connection.send(_QUESTION)
        return self._all_closed

    def _all_closed(self) -> bool:
        poll = select.poll()
        for connection in self._unread:
            # A closed end cannot signal it behind unread answers, but it resets senders.
            with suppress(BlockingIOError, ConnectionError):
                connection.send(b"G")
            poll.register(connection, select.POLLERR | select.POLLHUP)
        return len(poll.poll(0)) == len(self._unread)

    def close(self) -> None:
        """Close what was opened."""
        for connection in self._unread:
            connection.close()
        self._unread = []

    async def healthy(self) -> frozenset[str]:
        """The hosts that take visits now; none while the gateway does not answer."""
        try:
            swarm = await self._client.swarm()
        except LayerShuffleError:
            return frozenset()
        return frozenset(host.name for host in swarm.hosts if host.condition == "healthy")
