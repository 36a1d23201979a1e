"""How connections come in: how many of each client, and how long they may be silent."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from layershuffle.swarm.server.auth import client_of
from layershuffle.swarm.server.limits import GatewayLimits


class Door(socket.socket):
    """A listening socket that holds as many connections as the limits allow, and per client.

    It counts where connections are accepted, so that handshakes of TLS count as well. Those beyond
    are closed at once, without a word.
    """

    def __init__(self, family: socket.AddressFamily, *, limits: GatewayLimits) -> None:
        # With the protocol named, or asyncio leaves Nagle's algorithm on, and every answer, which
        # goes out as head and body, waits 40 ms for the client's delayed acknowledgement.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._limits = limits
        self._inside: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises `ConnectionAbortedError` for one that was closed at once,
        after which asyncio asks again."""
        connection, address = super().accept()
        client = client_of(address[0])
        full = self._inside.total() >= self._limits.connections
        if full or self._inside[client] >= self._limits.client_connections:
            connection.close()
            raise ConnectionAbortedError(f"{client} has too many connections")
        self._inside[client] += 1
        return _Counted(connection, partial(self._left, client)), address

    def _left(self, client: str) -> None:
        self._inside[client] -= 1
        if not self._inside[client]:
            del self._inside[client]


class _Counted(socket.socket):
    """A connection that says when it is closed."""

    def __init__(self, plain: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._when_closed: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close it, and say so, once."""
        super().close()
        told, self._when_closed = self._when_closed, None
        if told is not None:
            told()


class Punctual(H11Protocol):
    """uvicorn's HTTP/1.1, which waits `patience` seconds for the head of a request, not for ever.

    uvicorn itself sets no timer before the first request, and every byte that comes in ends the one
    it sets after an answer. A connection whose last answer is not fetched is cut as well.
    """

    def __init__(self, *, patience: float, **known: Any) -> None:
        super().__init__(**known)
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._head_came()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Look at what has come in: it may complete a head."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._head_came()

    def on_response_complete(self) -> None:
        """The next head is awaited; if it is there already, uvicorn takes it up in here."""
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        self._head_came()
        self._timer = self.loop.call_later(self._patience, self._late)

    def _head_came(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        # Closing waits until what was written has been fetched; that may never be.
        self._timer = self.loop.call_later(self._patience, self.transport.abort)
        self.transport.close()
