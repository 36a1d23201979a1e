"""Run the gateway: one process, beside router and coordinator, on their event loop.

uvicorn speaks HTTP. Three things that it leaves open to a hostile client are closed here: how many
connections one address holds, how long a connection may take for a request's head, and how long an
answer may wait to be fetched. docs/decisions/015-server.md says why no other server is used.
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

    `port` 0 takes a free one. With `tls` (`tls.server_context`) the gateway speaks https alone.
    Raises `UsageError` for an address that other machines reach if the app takes no API key, unless
    it is to be `public`; `LayerShuffleError` for a port in use.
    """
    check_address(host, keyed=app.state.keyed, public=public)
    # They log every broken form and head: a client could fill the disk.
    for name in ("python_multipart", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    limits = GatewayLimits()
    with ListeningSocket(host, port=port, limits=limits) as listener:
        name, number = listener.getsockname()[:2]
        if ready is not None:
            scheme = "http" if tls is None else "https"
            ready(f"{scheme}://{f'[{name}]' if ':' in name else name}:{number}")
        await Server(app, limits=limits, tls=tls).serve(sockets=[listener])


# It relies on uvicorn's internals, so that pyproject.toml allows no later minor version untested.
class Server(uvicorn.Server):
    """uvicorn that ends TLS handshakes and connections which make no progress.

    uvicorn sets no timer before the first request, every byte that comes in ends the one that it
    sets after an answer, and it waits for ever for a client that does not fetch its answers.
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
            # The limits per client go by the address of the connection: anybody may write
            # X-Forwarded-For. Behind a proxy that is the proxy's address.
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
        """End what is streamed to clients, which has no end of its own; then as uvicorn does."""
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

        The server waits for the client until the head of a request is there, and while an answer
        is not fetched, even if further requests have come in behind it. Single bytes of a head
        change nothing, and of an answer only steps of `_PROGRESS` bytes count.
        """
        before, self._waiting = self._waiting, {}
        for connection in cast("set[H11Protocol]", self.server_state.connections):
            cycle, transport = connection.cycle, connection.transport
            closing = transport.is_closing()
            # The transport of TLS forgets its buffer when it is closed twice, and raises if it is
            # asked for it: that would end the server.
            asked = self._tls is None or not closing
            unsent = transport.get_write_buffer_size() if asked else 0
            running = cycle is not None and not cycle.response_complete
            if running and unsent == 0 and not closing:
                continue  # the client waits for the server
            state = (cycle, unsent // _PROGRESS, closing)
            past_state, since = before.get(connection, (None, now))
            since = since if past_state == state else now
            self._waiting[connection] = state, since
            if now - since >= self._patience:
                # One that closes waits for its client as well: for its goodbye in TLS, or until it
                # has fetched what is left below TLS.
                transport.abort() if unsent or closing else transport.close()


class ListeningSocket(socket.socket):
    """A listening socket that holds as many connections as the limits allow, per client and in all.

    It counts where connections are accepted, so that handshakes of TLS count as well. Those beyond
    are closed at once. Raises `LayerShuffleError` for an address that cannot be listened on.
    """

    def __init__(self, host: str, *, port: int, limits: GatewayLimits) -> None:
        # With the protocol named, or asyncio leaves Nagle's algorithm on, and every answer, which
        # goes out as head and body, waits 40 ms for the client's delayed acknowledgement.
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
        """The next connection. Raises `ConnectionAbortedError` for one that was closed at once,
        after which asyncio asks again."""
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
        """Close it, and call back, once."""
        super().close()
        callback, self._closed_callback = self._closed_callback, None
        if callback is not None:
            callback()
