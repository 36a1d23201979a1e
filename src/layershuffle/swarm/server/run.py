"""Run the gateway, in the process of router and coordinator and on their event loop.

uvicorn implements HTTP. This module adds three limits that it lacks against hostile clients: on the
connections of one address, on the time until a request's head is complete, and on the time until an
answer is read. research/decisions says why no other server is used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.server.limits import GatewayLimits, client_of
from layershuffle.swarm.server.tls import check_address

PORT = 8000
_GRACE = 5  # seconds that requests under way get when the server is told to end
_HEADER_BYTES = 1 << 14
_BACKLOG = 128
_PROGRESS = 1 << 14  # bytes of an answer


async def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    public: bool = False,
    tls: ssl.SSLContext | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is called with the address once it is open.

    `port` 0 takes a free one. With `tls` (`tls.server_context`) the gateway accepts only https.
    Raises `UsageError` for an address that other machines reach if the app takes no API key, unless
    it is to be `public`; `LayerShuffleError` for a port in use.
    """
    check_address(host, keyed=app.state.keyed, public=public)
    # These log every broken form and head: a client could fill the disk.
    for name in ("python_multipart", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    limits = GatewayLimits()
    with ListeningSocket(host, port=port, limits=limits) as listener:
        name, number = listener.getsockname()[:2]
        if ready is not None:
            scheme = "http" if tls is None else "https"
            ready(f"{scheme}://{f'[{name}]' if ':' in name else name}:{number}")
        await Server(app, limits=limits, tls=tls).serve(sockets=[listener])


# It relies on uvicorn's internals, so pyproject.toml allows no untested minor version.
class Server(uvicorn.Server):
    """A uvicorn server that closes TLS handshakes and connections without progress.

    uvicorn sets no timer before the first request, stops the timer after an answer at the next
    byte, and waits forever for a client that does not read its answers.
    """

    def __init__(
        self, app: Any, *, limits: GatewayLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            # The limits per client use the address of the connection, behind a proxy the proxy's:
            # anybody may write X-Forwarded-For.
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=_GRACE,
        )
        super().__init__(config)
        self._patience, self._tls = limits.head_ms / 1000, tls
        self._waiting: dict[H11Protocol, tuple[tuple[Any, int, bool], float]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept connections: uvicorn has no option for TLS time-outs."""
        await super().startup(sockets=[])
        handshake = None if self._tls is None else self._patience
        for listener in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                partial(
                    H11Protocol,
                    config=self.config,
                    server_state=self.server_state,
                    app_state=self.lifespan.state,
                ),
                sock=listener,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=handshake,
            )
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams to clients, which never end by themselves; then shut down as uvicorn."""
        # Any ASGI app may be served; only those with a page have streams.
        ending = getattr(getattr(self.config.app, "state", None), "ending", None)
        if ending is not None:
            ending.set()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self.cut_waiting(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def cut_waiting(self, now: float) -> None:
        """Close the connections that have waited too long for their client.

        The server waits for the client until the head of a request is complete, and while an answer
        is not read, even if further requests have arrived behind it. Single bytes of a head do not
        count as progress, and of an answer only steps of `_PROGRESS` bytes do.
        """
        before, self._waiting = self._waiting, {}
        for connection in cast("set[H11Protocol]", self.server_state.connections):
            cycle, transport = connection.cycle, connection.transport
            closing = transport.is_closing()
            # A TLS transport that was closed twice has no buffer and raises when asked for its
            # size, which would end the server.
            has_buffer = self._tls is None or not closing
            unsent = transport.get_write_buffer_size() if has_buffer else 0
            running = cycle is not None and not cycle.response_complete
            if running and unsent == 0 and not closing:
                continue  # the client waits for the server
            state = (cycle, unsent // _PROGRESS, closing)
            past_state, since = before.get(connection, (None, now))
            since = since if past_state == state else now
            self._waiting[connection] = state, since
            if now - since >= self._patience:
                # A closing connection waits for its client too: for the end of TLS, or until it has
                # read the data left below TLS.
                transport.abort() if unsent or closing else transport.close()


class ListeningSocket(socket.socket):
    """A listening socket that accepts as many connections as allowed, per client and in total.

    Connections count from their acceptance, so TLS handshakes count as well. Further ones are
    closed at once. Raises `LayerShuffleError` if it cannot listen on the address.
    """

    def __init__(self, host: str, *, port: int, limits: GatewayLimits) -> None:
        # Without the protocol asyncio leaves Nagle's algorithm on, and every answer, which is sent
        # as head and body, waits 40 ms for the client's delayed acknowledgement.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._limits = limits
        self._connections: Counter[str] = Counter()
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind((host.strip("[]"), port))
            self.listen(_BACKLOG)
        except OSError as error:
            self.close()
            raise LayerShuffleError(
                f"The gateway cannot listen on {host}:{port} ({error.strerror or error})",
                hint="end what listens there, or name another --port (0: a free one) or address",
            ) from error

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address. Raises `ConnectionAbortedError` for a connection
        beyond the limits, after which asyncio calls again."""
        connection, address = super().accept()
        client = client_of(address[0])
        full = self._connections.total() >= self._limits.connections
        if full or self._connections[client] >= self._limits.client_connections:
            connection.close()
            raise ConnectionAbortedError(f"{client} has too many connections")
        self._connections[client] += 1
        return _AcceptedConnection(connection, closed=partial(self._leave, client)), address

    def _leave(self, client: str) -> None:
        self._connections[client] -= 1
        if not self._connections[client]:
            del self._connections[client]  # a Counter keeps zeros, one per address ever seen


class _AcceptedConnection(socket.socket):
    """An accepted connection that calls `closed` when it is closed."""

    def __init__(self, plain: socket.socket, *, closed: Callable[[], None]) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._closed_callback: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close the connection, and call `closed` the first time."""
        super().close()
        callback, self._closed_callback = self._closed_callback, None
        if callback is not None:
            callback()
