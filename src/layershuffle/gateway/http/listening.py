"""Run the gateway, in the process of router and coordinator and on their event loop.

uvicorn implements HTTP, by its public options alone. What it lacks against hostile clients is done
below it, at the socket, and above it, as an app around the app. These are bounds on the connections
of one address, on the time until a request is there, and on the time until an answer is read; and
turns, in which the addresses have their requests begun.

Its own `limit_concurrency` answers everybody with 503 once silent connections reach it. Its
`timeout_keep_alive` counts from the first request on, so that 200 clients which send a byte of
their heads now and then stay for ever. docs/deploy.md says what no server holds.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import math
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import uvicorn
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from layershuffle.gateway.hosts.connections import ConnectedHosts, HostConnection
from layershuffle.gateway.hosts.places import Places
from layershuffle.gateway.http.admission import GatewayLimits, announced_length, client_name
from layershuffle.ground.errors import LayerShuffleError, UsageError

_KEEP = 10  # seconds; longer than the 5 s after which httpx drops an idle connection itself
_GRACE = 5  # seconds that running requests get when the server is told to end
_HEADER_BYTES = 1 << 14
_BACKLOG = 128
_LOOK = 0.25  # seconds between two looks at the connections
_QUIET = 1.0  # seconds between two lines of the log on descriptors that are used up
_PAUSE = 0.005  # seconds
_PROXY = "a proxy"  # the name of all that are trusted
_AT_ONCE = 16  # connections that are accepted before what others sent is read
# Bytes that all connections read in one turn of the loop, and each of them at least, but for bodies
# whose length is known. asyncio reads 256 KiB at once, which took h11 0.7 s where each chunk of a
# body had one byte.
_READ = 1 << 13
_LEAST_READ = 1 << 7
_AMBIGUOUS = json.dumps(
    {
        "error": {
            "cause": "The request has both a Content-Length and a Transfer-Encoding",
            "hint": "send one of them: a proxy may read another body than this gateway",
            "id": None,
        }
    }
).encode()
_log = logging.getLogger(__name__)


@asynccontextmanager
async def listening(
    app: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: GatewayLimits | None = None,
    tls: ssl.SSLContext | None = None,
    trusted: Sequence[str] = (),
    connected: ConnectedHosts | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[GatewaySocket, asyncio.Task[None]]]:
    """A context that serves `app`; it gives the listening socket and the task of the server.

    The task ends at SIGINT or SIGTERM. `port` 0 takes a free one. With `tls` only https is
    accepted. `trusted` are addresses or networks of proxies, whose X-Forwarded-For is believed.
    `connected` are the hosts that dial in there, if any. `on_end` is called when the server has
    been told to end, some seconds before running requests are dropped. Raises the errors of
    `GatewaySocket`.

        async with listening(app) as (listener, _):
            httpx.get(f"http://127.0.0.1:{listener.port}/livez")
    """
    # It logs every broken head: a client could fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    inner: Any = in_turns(app)
    if trusted:
        # Anybody may write X-Forwarded-For; without a proxy that is trusted it is not read.
        inner = ProxyHeadersMiddleware(inner, list(trusted))

    def connection(**_: Any) -> asyncio.Protocol:
        assert connected is not None
        return HostConnection(connected, accepted=listener.keep)

    limits = limits or GatewayLimits()
    with GatewaySocket(host, port=port, limits=limits, trusted=trusted) as listener:
        listener.scheme = "http" if tls is None else "https"
        config = uvicorn.Config(
            listener.note_requests(inner),
            http="h11",
            ws="none" if connected is None else cast("type[asyncio.Protocol]", connection),
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
        watching = asyncio.create_task(_watch(listener, server, on_end=on_end))
        try:
            yield listener, serving
        finally:
            server.should_exit = True
            # It raises the signal that ended it once more, which whoever waits for it gets.
            await asyncio.gather(serving, return_exceptions=True)
            watching.cancel()


async def _watch(
    listener: GatewaySocket, server: uvicorn.Server, *, on_end: Callable[[], None]
) -> None:
    """Cut the connections that have waited too long for their client, until cancelled."""
    ending = False
    while True:
        await asyncio.sleep(_LOOK)
        listener.cut(asyncio.get_running_loop().time())
        if server.should_exit and not ending:
            ending = True
            on_end()


def in_turns(app: Any) -> Any:
    """`app`, whose requests begin one at a time: of the addresses that ask, each in its turn.

    Most answers are made in one step of the event loop. Without turns, each of 480 connections that
    send one request after the other has one answered every time the loop goes round, and every step
    of a request of another address waits for 480 answers.
    """
    turns = Places(1)

    async def begun(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = scope.get("client") or ("", 0)
            turn = await turns.take(client_name(client[0]))
            # It ends with this step: what waits, and what a client does not read, holds no turn.
            asyncio.get_running_loop().call_soon(turn.leave)
        await app(scope, receive, send)

    return begun


class GatewaySocket(socket.socket):
    """A listening socket that bounds the number of its connections and the time of their silence.

    The number is bounded in total and for each client. A connection is silent while it waits for
    its client: until a whole request is there, and while an answer is not read. Where there are too
    many, a silent one makes room for a new one, also where the process has no file descriptor left:
    of the client that has the most connections the one that has been silent the longest. No client
    takes the place of one that has fewer. Connections count from their acceptance, so TLS
    handshakes do as well. Those of `trusted` proxies count in the total alone.

    What the connections read in one turn of the event loop is bounded, too, because a stranger's
    bytes may be dear: each byte of a body can be a chunk of its own. Bodies with a Content-Length
    are cheap, and are read as they come.

    Raises `UsageError` for a proxy that is no address or network, and `LayerShuffleError` if it
    cannot listen on the address.
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
        self._limits = limits
        self._patience = limits.head_ms / 1000
        self.scheme = "http"
        self.open: dict[tuple[str, int], Accepted] = {}
        self._connections: Counter[str] = Counter()
        self._accepted_at_once = 0
        self._reads = 0
        self._reads_before = 0
        self._left = _READ
        self._spare: int | None = None
        self._last_complaint = -math.inf
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
        """The next connection and its address.

        Raises `ConnectionAbortedError` for a connection beyond the limits. Raises `BlockingIOError`
        after some at once: asyncio calls again after it has read what the others sent.
        """
        self._note_turn()
        if self._accepted_at_once >= _AT_ONCE:
            raise BlockingIOError
        self._accepted_at_once += 1
        connection, address = self._next()
        client = client_name(address[0])
        proxied = self._is_trusted(address[0])
        if proxied:
            client = _PROXY
        held = self._connections[client]
        crowded = held >= self._limits.client_connections and not proxied
        full = len(self.open) >= self._limits.connections
        least = 0 if proxied else held  # a proxy stands for many, who may have fewer
        if (crowded or full) and not self._make_room(client if crowded else None, least=least):
            connection.close()
            raise ConnectionAbortedError(f"{client} has too many connections")
        accepted = Accepted(
            connection,
            address=address[:2],
            client=client,
            share=self._share,
            closed=self._forget,
        )
        self.open[accepted.address] = accepted
        self._connections[client] += 1
        return accepted, address

    def _note_turn(self) -> None:
        """Begin to count anew in the next turn of the event loop."""
        if self._accepted_at_once == self._reads == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._accepted_at_once = 0
        self._reads_before = self._reads
        self._reads = 0
        self._left = _READ

    def _share(self) -> int:
        """The bytes that one more connection may read in this turn of the event loop."""
        self._note_turn()
        self._reads += 1
        # As many will read as did before.
        even = _READ // max(self._reads, self._reads_before)
        share = max(_LEAST_READ, min(even, self._left))
        self._left -= share
        return share

    def _is_trusted(self, address: str) -> bool:
        """Whether this is a proxy, whose connections are those of many clients."""
        parsed = ipaddress.ip_address(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return any((mapped or parsed) in network for network in self._trusted)

    def _forget(self, accepted: Accepted) -> None:
        """Stop counting a connection that is closed or makes room."""
        if self.open.get(accepted.address) is not accepted:
            return
        del self.open[accepted.address]
        self._count_less(accepted)

    def _count_less(self, accepted: Accepted) -> None:
        """Count a connection no longer among those of its client."""
        if accepted.client is None:
            return
        self._connections[accepted.client] -= 1
        if not self._connections[accepted.client]:
            del self._connections[accepted.client]
        accepted.client = None

    def _next(self) -> tuple[socket.socket, Any]:
        """The next connection, also if this process has no file descriptor left for it.

        A spare descriptor is closed for it, and a silent connection, which gives the next spare.
        """
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        # asyncio would log each of some thousand tries with its traceback, and then pause.
        now = time.monotonic()
        if now - self._last_complaint >= _QUIET:
            self._last_complaint = now
            _log.error("No file descriptor is left for connections: raise the limit (ulimit -n)")
        if not self._make_room(None, least=0) and self._spare is None:
            time.sleep(_PAUSE)  # this would be called again at once
        if self._spare is None:
            raise ConnectionAbortedError("no file descriptor is left")
        os.close(self._spare)
        self._spare = None
        return super().accept()

    def _make_room(self, client: str | None, *, least: int) -> bool:
        """Cut the connection of a client that has been silent the longest.

        Without a `client` it is the one that has the most connections, if it has `least` or more.
        Returns false if none of these is silent.
        """
        longest: Accepted | None = None
        most = (least, -math.inf)
        for accepted in self.open.values():
            if accepted.silence_start is None or accepted.client is None:
                continue
            if client not in (None, accepted.client):
                continue
            rank = (self._connections[accepted.client], -accepted.silence_start)
            if rank > most:
                longest = accepted
                most = rank
        if longest is None:
            return False
        longest.cut()
        self._forget(longest)
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def note_requests(self, app: Any) -> Any:
        """`app`, with its requests noted at their connections, and HEAD answered as GET is."""

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") == "HEAD":  # the server keeps its own, and sends no body
                scope = {**scope, "method": "GET"}
            if scope["type"] == "http" and _is_ambiguous(scope):
                await _refuse_ambiguous(send)
                return
            connection = self.open.get(tuple(scope.get("client") or ()))
            if connection is None:  # the lifespan of the app
                await app(scope, receive, send)
                return

            async def send_noted(message: Message) -> None:
                connection.silence_start = asyncio.get_running_loop().time()
                await send(message)
                connection.silence_start = None

            whole = False

            async def receive_noted() -> Message:
                nonlocal whole
                if not whole:  # later nobody waits for more than its end
                    connection.silence_start = asyncio.get_running_loop().time()
                message = await receive()
                if not message.get("more_body"):
                    whole = True
                    connection.silence_start = None
                return message

            connection.silence_start = None
            connection.announced = announced_length(Headers(scope=scope))
            try:
                await app(scope, receive_noted, send_noted)
            finally:
                connection.announced = 0
                connection.silence_start = asyncio.get_running_loop().time()

        return noted

    def cut(self, now: float) -> None:
        """Cut the connections that have waited too long for their client at `now`."""
        for connection in list(self.open.values()):
            if (
                connection.silence_start is not None
                and now - connection.silence_start >= self._patience
            ):
                connection.cut()

    def keep(self, address: Any) -> None:
        """Let the connection of a host wait for any time, because it has time-outs of its own.

        Many hosts may share an address, and each has shown the token, so it counts in the total
        alone.
        """
        if (connection := self.open.get(tuple(address[:2]))) is not None:
            connection.silence_start = None
            connection.kept = True
            self._count_less(connection)


class Accepted(socket.socket):
    """An accepted connection of a client at an address.

    While it waits for its client to ask or to take an answer, `silence_start` is the time of the
    event loop, in seconds, at which the wait began; otherwise it is `None`. `client` is `None` once
    it counts among those of its client no longer. `share()` are the bytes that it may read now,
    but for those that its request has `announced`, and until it is `kept`, as that of a host.
    `closed` is called once the connection is closed.
    """

    def __init__(
        self,
        plain: socket.socket,
        *,
        address: tuple[str, int],
        client: str,
        share: Callable[[], int],
        closed: Callable[[Accepted], None],
    ) -> None:
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.address = address
        self.client: str | None = client
        self.silence_start: float | None = asyncio.get_running_loop().time()
        self.announced = 0
        self.kept = False
        self._share = share
        self._when_closed = closed

    def recv(self, bufsize: int, *flags: int) -> bytes:
        """What has come, and of a stranger at most the share of this turn."""
        content = super().recv(self._most(bufsize), *flags)
        self.announced = max(0, self.announced - len(content))
        return content

    def recv_into(self, buffer: Any, nbytes: int = 0, *flags: int) -> int:
        """The same, as asyncio reads with TLS."""
        count = super().recv_into(buffer, self._most(nbytes or len(buffer)), *flags)
        self.announced = max(0, self.announced - count)
        return count

    def _most(self, size: int) -> int:
        return size if self.kept else min(size, self.announced or self._share())

    def close(self) -> None:
        """Close it for the server, and report that."""
        super().close()
        self._when_closed(self)

    def cut(self) -> None:
        """End it below the server, which sees its client leave; an unread answer is lost."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


def _is_ambiguous(scope: Scope) -> bool:
    """Whether two headers say differently where the body of a request ends (RFC 9112, 6.1)."""
    names = {name.lower() for name, _ in scope["headers"]}
    return {b"content-length", b"transfer-encoding"} <= names


async def _refuse_ambiguous(send: Send) -> None:
    """Answer a request whose body could end in two places, and close its connection."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_AMBIGUOUS)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": _AMBIGUOUS})
