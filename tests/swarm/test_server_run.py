"""Connections: how many one address holds, and when those that wait for their client are cut."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from gateway_site import certify, listening

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.run import ListeningSocket, Server
from layershuffle.swarm.server.tls import client_context, server_context
from waiting import until

HEAD = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
QUICK = GatewayLimits(head_ms=200)
PATIENCE = 60  # seconds that a test waits for what takes a fraction of one
LONG = GatewayLimits(head_ms=1000 * PATIENCE)  # a test tells the server when they are over


# --- in virtual time ------------------------------------------------------------------------------


@dataclass(eq=False)
class Connection:
    """What the server sees of a connection; `ended` says how it was cut."""

    cycle: object = None
    unsent: int = 0
    closing: bool = False
    ended: list = field(default_factory=list)

    @property
    def transport(self):
        return SimpleNamespace(
            get_write_buffer_size=lambda: self.unsent,
            is_closing=lambda: self.closing,
            close=lambda: self.ended.append("closed"),
            abort=lambda: self.ended.append("aborted"),
        )


@dataclass(eq=False)
class Request:
    """What the server sees of a request and its answer."""

    response_complete: bool


def cut_at(steps, *, until_time=60):
    """The second at which a connection is cut, and how; `steps` by second change it."""
    server, connection = Server(plain, limits=GatewayLimits()), Connection()
    server.server_state.connections.add(connection)
    for now in range(until_time):
        for name, value in steps.get(now, {}).items():
            setattr(connection, name, value)
        server.cut_waiting(float(now))
        if connection.ended:
            return now, *connection.ended
    return None


def test_a_connection_without_a_request_is_closed_after_ten_seconds():
    """The bytes of a head change nothing until the head is complete."""
    assert cut_at({}) == (10, "closed")
    answered = Request(response_complete=True)
    assert cut_at({5: {"cycle": answered}}) == (15, "closed")
    # Further requests, one whole every 8 seconds, keep it open.
    again = {second: {"cycle": Request(response_complete=True)} for second in range(0, 60, 8)}
    assert cut_at(again) is None


def test_a_request_may_take_its_time():
    running, done = Request(response_complete=False), Request(response_complete=True)
    assert cut_at({3: {"cycle": running}}) is None
    assert cut_at({3: {"cycle": running}, 33: {"cycle": done}}) == (43, "closed")


def test_answers_that_are_not_fetched_are_cut():
    """Those of complete requests, and those behind which a pipelined request waits to answer."""
    large = 1_000_000
    assert cut_at({1: {"cycle": Request(response_complete=True), "unsent": large}}) == (
        11,
        "aborted",
    )
    assert cut_at({1: {"cycle": Request(response_complete=False), "unsent": large}}) == (
        11,
        "aborted",
    )
    # A client that reads a few bytes now and then makes no progress, one that reads more does.
    unread = {"cycle": Request(response_complete=False)}
    trickling = {second: unread | {"unsent": large - second} for second in range(60)}
    assert cut_at(trickling) == (10, "aborted")
    fetching = {second: unread | {"unsent": large - 4000 * second} for second in range(60)}
    assert cut_at(fetching) is None
    # To close is not enough: below TLS an answer may be left that keeps the socket open.
    done = Request(response_complete=True)
    assert cut_at({1: {"cycle": done}, 5: {"closing": True}}) == (15, "aborted")


# --- over sockets ---------------------------------------------------------------------------------


def test_the_listener():
    """It names its protocol, or asyncio leaves Nagle's algorithm on: 40 ms per answer."""
    limits = GatewayLimits()
    with ListeningSocket("127.0.0.1", port=0, limits=limits) as listener:
        taken = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", taken)):
            accepted, _ = listener.accept()
        with accepted:
            assert listener.proto == accepted.proto == socket.IPPROTO_TCP
        with pytest.raises(LayerShuffleError, match=f"cannot listen on 127.0.0.1:{taken}"):
            ListeningSocket("127.0.0.1", port=taken, limits=limits)


def test_the_server_believes_no_forwarded_address():
    config = Server(plain, limits=GatewayLimits()).config
    assert not config.proxy_headers
    assert not config.server_header


async def plain(scope, receive, send):
    """Answers "/large" with 20 MB, all else with two bytes."""
    if scope["type"] == "lifespan":
        return
    body = bytes(20_000_000 if scope["path"] == "/large" else 2)
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def closed(reader):
    """Wait until the other side closes."""
    async with asyncio.timeout(PATIENCE):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


class Later:
    """Lets a server look at its connections again, each time as if its patience had passed."""

    def __init__(self, server):
        self.server, self.now = server, asyncio.get_running_loop().time()

    def look(self):
        self.now += PATIENCE
        self.server.cut_waiting(self.now)


async def answered(reader, writer, path="/"):
    writer.write(HEAD.replace(b"/healthz", path.encode()))
    async with asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
    return head.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def connected(port, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()


def test_silent_connections_are_closed():
    """Never a request, never a whole head, nothing after an answer, or the rest of a body."""

    async def trickle(writer, byte):
        with suppress(ConnectionError):
            while True:  # until the test ends it: only the server can make it stop earlier
                writer.write(byte)
                await writer.drain()
                await asyncio.sleep(0.05)

    async def waits(port, first, byte=b""):
        async with connected(port) as (reader, writer):
            writer.write(first)
            trickling = asyncio.ensure_future(trickle(writer, byte))
            await closed(reader)
            trickling.cancel()

    async def go():
        async with listening(plain, QUICK) as (_, port):
            unread = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n"
            await asyncio.gather(
                waits(port, b""),
                waits(port, b"GET /", b"x"),
                waits(port, HEAD + b"GET /", b"x"),
                waits(port, unread, b"x"),
                waits(port, unread + b"x"),
            )

    asyncio.run(go())


def test_connections_in_use_stay():
    """A request may take longer than its head, and several may come at once."""

    begun, free = asyncio.Event(), asyncio.Event()

    async def waits(scope, receive, send):
        if scope["type"] == "http":
            begun.set()
            await free.wait()
        await plain(scope, receive, send)

    async def go():
        async with listening(waits, LONG) as (server, port), connected(port) as (reader, writer):
            writer.write(HEAD * 3)
            await begun.wait()
            later = Later(server)
            for _ in range(3):
                later.look()
            free.set()
            for _ in range(3):
                await reader.readuntil(b"\r\n\r\n\0\0")

    asyncio.run(go())


@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_reads_nothing_loses_its_place(requests):
    """Neither one answer nor requests pipelined behind it hold a connection."""
    limits = GatewayLimits(head_ms=200, client_connections=1)

    async def go():
        async with listening(plain, limits) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                client.send(HEAD.replace(b"/healthz", b"/large") * requests)
                await until(lambda: server.server_state.total_requests)
                await until(lambda: not server.server_state.connections)
                await until(lambda: not server.server_state.tasks)
                async with connected(port) as other:
                    return await answered(*other)

    assert asyncio.run(go())


def test_one_address_leaves_connections_for_others():
    """Those beyond are closed at once; one that closes makes room; others are let in, up to all."""
    limits = GatewayLimits(head_ms=600_000, client_connections=2, connections=3)

    async def go():
        async with AsyncExitStack() as stack, listening(plain, limits) as (server, port):

            async def connect(address):
                return await stack.enter_async_context(connected(port, local_addr=(address, 0)))

            first = await connect("127.0.0.1")
            assert await answered(*await connect("127.0.0.1"))
            await closed((await connect("127.0.0.1"))[0])
            assert await answered(*await connect("127.0.0.2"))
            await closed((await connect("127.0.0.3"))[0])
            assert await answered(*first)
            first[1].close()
            await until(lambda: len(server.server_state.connections) <= 2)
            return await answered(*await connect("127.0.0.1"))

    assert asyncio.run(go())


def mute_client(port, authority):
    """A client of TLS that has shaken hands and reads nothing from then on."""
    client = socket.create_connection(("127.0.0.1", port))
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(authority).wrap_bio(received, to_send, server_hostname="127.0.0.1")
    while True:
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            client.sendall(to_send.read())
            return client
        client.sendall(to_send.read())
        received.write(client.recv(1 << 16))


def test_a_client_that_never_says_goodbye_ends_neither_the_server_nor_its_place(tmp_path):
    """Asyncio's transport of TLS raises when it is asked for its buffer after two closes."""
    certify(tmp_path)
    tls = server_context(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def go():
        async with listening(plain, LONG, tls=tls) as (server, port):
            with await asyncio.to_thread(mute_client, port, tmp_path / "ca.pem"):
                await until(lambda: server.server_state.connections)
                later = Later(server)
                later.look()
                later.look()  # it says goodbye
                for _ in range(3):  # nothing has come back yet
                    server.cut_waiting(later.now)
                later.look()
                await until(lambda: not server.server_state.connections)
                trusted = client_context(tmp_path / "ca.pem")
                async with connected(port, ssl=trusted, server_hostname="127.0.0.1") as other:
                    return await answered(*other)

    assert asyncio.run(go())
