"""Run the gateway, in the process of router and coordinator and on their event loop.

uvicorn implements HTTP, by its public options alone. What it lacks against hostile clients is done
below it, at the socket, and above it, as an app around the app: bounds on the connections of one
address, on the time until a request is there, and on the time until an answer is read. Decision 040
says what other servers hold, and docs/deploy.md what none does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.swarm.members import HostConnection, Members
from layershuffle.swarm.server.admission import GatewayLimits, client_of

_KEEP = 10  # seconds; longer than the 5 s after which httpx drops an idle connection itself
_GRACE = 5  # seconds that requests under way get when the server is told to end
_HEADER_BYTES = 1 << 14
_BACKLOG = 128
_LOOK = 0.25  # seconds between two looks at the connections


@asynccontextmanager
async def listening(
    app: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: GatewayLimits | None = None,
    tls: ssl.SSLContext | None = None,
    trusted: Sequence[str] = (),
    members: Members | None = None,
) -> AsyncIterator[tuple[GatewaySocket, asyncio.Task[None]]]:
    """Serve `app` within; gives the listening socket, and the task of the server, which ends at
    SIGINT or SIGTERM.

    `port` 0 takes a free one. With `tls` (`doors.Https.context`) it accepts only https. `trusted`:
    addresses or networks of proxies, whose X-Forwarded-For is believed; `members`: the hosts that
    dial in there, if any. Raises what `GatewaySocket` raises.

        async with listening(app) as (listener, _):
            httpx.get(f"http://127.0.0.1:{listener.port}/livez")
    """
    # It logs every broken head: a client could fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Anybody may write X-Forwarded-For; without a proxy that is trusted it is not read.
    inner: Any = ProxyHeadersMiddleware(app, list(trusted)) if trusted else app

    def connection(**_: Any) -> asyncio.Protocol:
        assert members is not None
        return HostConnection(members, accepted=listener.keep)

    limits = limits or GatewayLimits()
    with GatewaySocket(host, port=port, limits=limits, trusted=trusted) as listener:
        listener.scheme = "http" if tls is None else "https"
        config = uvicorn.Config(
            listener.around(inner),
            http="h11",
            ws="none" if members is None else cast("type[asyncio.Protocol]", connection),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=_KEEP,
            timeout_graceful_shutdown=_GRACE,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        watching = asyncio.create_task(listener.watch())
        try:
            yield listener, serving
        finally:
            server.should_exit = True
            # It raises the signal that ended it once more, which whoever waits for it gets.
            await asyncio.gather(serving, return_exceptions=True)
            watching.cancel()


class GatewaySocket(socket.socket):
    """A listening socket that bounds its connections: their number, in total and for each client,
    and the time that they take for nothing.

    A connection waits for its client until a whole request is there, and while an answer is not
    read. Connections count from their acceptance, so TLS handshakes do as well. Those of `trusted`
    proxies count in the total alone. Raises `UsageError` for a proxy that is no address or network,
    and `LayerShuffleError` if it cannot listen on the address.
    """

    def __init__(
        self, host: str, *, port: int, limits: GatewayLimits, trusted: Sequence[str] = ()
    ) -> None:
        try:
            self._trusted = [ipaddress.ip_network(proxy) for proxy in trusted]
        except ValueError as error:
            raise UsageError(
                f"A trusted proxy is no address or network ({error})",
                place="--trusted-proxy",
                hint="write for example 127.0.0.1 or 10.0.0.0/8",
            ) from error
        # Without the protocol asyncio leaves Nagle's algorithm on, and every answer, which is sent
        # as head and body, waits 40 ms for the client's delayed acknowledgement.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._limits, self._patience, self.scheme = limits, limits.head_ms / 1000, "http"
        self._accepted: dict[tuple[str, int], Accepted] = {}
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit it: the kernel drops a connection whose client takes nothing
            # of what is to be sent for so long.
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limits.head_ms))
            self.bind((host.strip("[]"), port))
            self.listen(_BACKLOG)
        except (OSError, OverflowError) as error:  # the second one: no port has this number
            self.close()
            why = getattr(error, "strerror", None) or error
            raise LayerShuffleError(
                f"The gateway cannot listen on {host}:{port} ({why})",
                hint="end what listens there, or name another --port (0: a free one) or address",
            ) from error

    @property
    def open(self) -> dict[tuple[str, int], Accepted]:
        """The connections that the server has not closed, by the address of their client."""
        accepted = self._accepted.items()
        self._accepted = {address: way for address, way in accepted if way.fileno() >= 0}
        return self._accepted

    @property
    def port(self) -> int:
        """The port that it listens on."""
        number: int = self.getsockname()[1]
        return number

    @property
    def url(self) -> str:
        """The address for clients."""
        name = self.getsockname()[0]
        return f"{self.scheme}://{f'[{name}]' if ':' in name else name}:{self.port}"

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address. Raises `ConnectionAbortedError` for a connection
        beyond the limits, after which asyncio calls again."""
        connection, address = super().accept()
        client, others = client_of(address[0]), self.open
        same = sum(client_of(other) == client for other, _ in others)
        network = ipaddress.ip_network(client)  # of one address, or of IPv6 a /64
        trusted = any(map(network.overlaps, self._trusted))
        many = same >= self._limits.client_connections and not trusted
        if many or len(others) >= self._limits.connections:
            connection.close()
            raise ConnectionAbortedError(f"{client} has too many connections")
        self._accepted[address[:2]] = accepted = Accepted(connection)
        return accepted, address

    def around(self, app: Any) -> Any:
        """`app`, with its requests noted at their connections, and HEAD answered as GET is."""

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") == "HEAD":  # the server keeps its own, and sends no body
                scope = {**scope, "method": "GET"}
            connection = self._accepted.get(tuple(scope.get("client") or ()))
            if connection is None:  # the lifespan of the app
                await app(scope, receive, send)
                return

            async def sent(message: Message) -> None:
                connection.since = asyncio.get_running_loop().time()
                await send(message)
                connection.since = None

            connection.since = None
            try:
                await app(scope, receive, sent)
            finally:
                connection.since = asyncio.get_running_loop().time()

        return noted

    async def watch(self) -> None:
        """Cut the connections that have waited too long for their client, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            self.cut(asyncio.get_running_loop().time())

    def cut(self, now: float) -> None:
        """Cut the connections that have waited too long for their client at `now`."""
        for connection in list(self.open.values()):
            if connection.since is not None and now - connection.since >= self._patience:
                # Below the server, which sees its client leave. An answer that is not read is lost.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def keep(self, address: Any) -> None:
        """Let the connection of a host, which has time-outs of its own, wait for any time."""
        if (connection := self._accepted.get(tuple(address[:2]))) is not None:
            connection.since = None


class Accepted(socket.socket):
    """An accepted connection. `since`: the time of the event loop, in seconds, since when it waits
    for its client, who shall ask or take an answer; `None` while it does not."""

    def __init__(self, plain: socket.socket) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.since: float | None = asyncio.get_running_loop().time()
