"""Connections: how many one address holds, and when those that wait for their client are cut."""

import asyncio
import json
import select
import socket
import ssl
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
from dial_site import BUSY, Site, dialled, digits
from gateway_site import certify
from websockets.exceptions import ConnectionClosed

from layershuffle.cli.serving import UpCommand
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.listening import GatewaySocket, in_turns, listening
from layershuffle.gateway.http.secrets import client_context, server_context
from layershuffle.gateway.http.start import Serving, read_tokens, serve_swarm
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle_host.wire import Close
from refusals import refuses
from waiting import until

HEAD = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
QUICK = GatewayLimits(head_ms=200)
PATIENCE = 60  # seconds that a test waits for what takes a fraction of one
LONG = GatewayLimits(head_ms=1000 * PATIENCE)  # a test tells the listener when they are over


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


def test_the_listener():
    """It names its protocol, or asyncio leaves Nagle's algorithm on: 40 ms per answer. What it
    accepts inherits the kernel's bound on data that nobody takes."""

    async def go():
        with GatewaySocket("127.0.0.1", port=0, limits=GatewayLimits()) as listener:
            taken = listener.port
            with socket.create_connection(("127.0.0.1", taken)):
                accepted, _ = listener.accept()
            with accepted:
                assert listener.proto == accepted.proto == socket.IPPROTO_TCP
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            with pytest.raises(LayerShuffleError, match=f"cannot listen on 127.0.0.1:{taken}"):
                GatewaySocket("127.0.0.1", port=taken, limits=GatewayLimits())

    asyncio.run(go())


def test_when_a_connection_waits_for_its_client():
    """Until its first request, after each answer, and while an answer is not taken; never while its
    request runs, however long."""
    begun, free = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        if scope["type"] == "http":
            begun.set()
            await free.wait()
        await plain(scope, receive, send)

    async def go():
        limits = GatewayLimits(head_ms=1000 * PATIENCE)
        async with (
            listening(slow, limits=limits) as (listener, _),
            connected(listener.port) as (reader, writer),
        ):
            await until(lambda: listener.open)
            (connection,) = listener.open.values()
            start = connection.silence_start
            listener.cut(start + PATIENCE - 1)
            writer.write(HEAD)
            await begun.wait()
            assert connection.silence_start is None
            listener.cut(start + 1000 * PATIENCE)
            free.set()
            await reader.readuntil(b"\r\n\r\n\0\0")
            await until(lambda: connection.silence_start is not None)
            assert connection.silence_start > start
            listener.cut(connection.silence_start + PATIENCE)
            await closed(reader)
            await until(lambda: not listener.open)

    asyncio.run(go())


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
        async with listening(plain, limits=QUICK) as (listener, _):
            port = listener.port
            unread = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n"
            await asyncio.gather(
                waits(port, b""),
                waits(port, b"GET /", b"x"),
                waits(port, HEAD + b"GET /", b"x"),
                waits(port, unread, b"x"),
                waits(port, unread + b"x"),
            )

    asyncio.run(go())


@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_reads_nothing_loses_its_place(requests):
    """Neither one answer nor requests pipelined behind it hold a connection."""
    limits = GatewayLimits(head_ms=200, client_connections=1)
    paths = []

    async def noting(scope, receive, send):
        paths.append(scope.get("path"))
        return await plain(scope, receive, send)

    async def go():
        async with listening(noting, limits=limits) as (listener, _):
            with socket.create_connection(("127.0.0.1", listener.port)) as client:
                client.setblocking(False)
                client.send(HEAD.replace(b"/healthz", b"/large") * requests)
                # The connection itself may be opened and closed between two looks.
                await until(lambda: "/large" in paths)
                await until(lambda: not listener.open)
                async with connected(listener.port) as other:
                    return await answered(*other)

    assert asyncio.run(go())


@pytest.mark.parametrize("trusted", [(), ("127.0.0.1",), ("fd00::/8", "127.0.0.0/8")], ids=str)
def test_the_word_of_a_proxy_on_the_client(trusted):
    """Of a trusted proxy alone, whose connections are bounded in total only; what a client behind
    it writes into the header before is not believed."""
    limits = GatewayLimits(client_connections=1)
    clients = []

    async def noting(scope, receive, send):
        if scope["type"] == "http":
            clients.append(scope["client"][0])
        await plain(scope, receive, send)

    async def ask(port, forwarded):
        async with connected(port) as (reader, writer):
            writer.write(HEAD[:-2] + b"X-Forwarded-For: " + forwarded + b"\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                await reader.readuntil(b"\r\n\r\n")

    async def go():
        async with (
            listening(noting, limits=limits, trusted=trusted) as (listener, _),
            AsyncExitStack() as stack,
        ):
            port = listener.port
            for forwarded in (b"10.0.0.1", b"10.0.0.2", b"10.9.9.9, 10.0.0.2"):
                await ask(port, forwarded)
                await until(lambda: not listener.open)
            if trusted:  # two at one time, of one address
                for _ in range(2):
                    await stack.enter_async_context(connected(port))
                await until(lambda: len(listener.open) == 2)

    asyncio.run(go())
    believed = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert clients == (believed if trusted else ["127.0.0.1"] * 3)


@pytest.mark.parametrize(
    ("address", "is_trusted"),
    [
        ("2001:db8::1", True),
        ("2001:db8::bad", False),  # a neighbour in its network
        ("10.0.0.1", True),
        ("::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.2", False),
    ],
)
def test_only_the_proxy_itself_is_trusted(address, is_trusted, monkeypatch):
    """Its connections count in the total alone, those of all others by their client."""
    limits = LONG.model_copy(update={"client_connections": 1})

    async def go():
        proxies = ["2001:db8::1", "10.0.0.1"]
        with (
            ExitStack() as stack,
            GatewaySocket("127.0.0.1", port=0, limits=limits, trusted=proxies) as listener,
        ):
            ports = iter(range(1, 9))

            def comes():
                return stack.enter_context(socket.socket()), (address, next(ports))

            monkeypatch.setattr(listener, "_next", comes)
            for _ in range(2):
                stack.enter_context(listener.accept()[0])
            return len(listener.open)

    assert asyncio.run(go()) == (2 if is_trusted else 1)


def test_a_proxy_that_is_none_is_refused():
    with refuses(UsageError, "--trusted-proxy"):
        GatewaySocket("127.0.0.1", port=0, limits=LONG, trusted=["10.0.0.1/8"])


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
    certify(tmp_path)
    tls = server_context(tmp_path / "cert.pem", tmp_path / "key.pem")
    limits = LONG.model_copy(update={"client_connections": 1})

    async def go():
        async with listening(plain, limits=limits, tls=tls) as (listener, _):
            port = listener.port
            with await asyncio.to_thread(mute_client, port, tmp_path / "ca.pem"):
                await until(lambda: listener.open)
                listener.cut(asyncio.get_running_loop().time() + PATIENCE)
                await until(lambda: not listener.open)
                trusted = client_context(tmp_path / "ca.pem")
                async with connected(port, ssl=trusted, server_hostname="127.0.0.1") as other:
                    return await answered(*other)

    assert asyncio.run(go())


def test_four_addresses_that_never_read_keep_nobody_else_out():
    """32 connections each, with a hundred requests in every one; another address is served
    meanwhile, and all of them are closed after a few seconds."""
    limits, question = GatewayLimits(head_ms=500), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100

    async def large(scope, receive, send):
        """Answers of 300 kB: the kernel takes some, then the server waits for the client."""
        if scope.get("client", ["127.0.0.1"])[0] == "127.0.0.1":
            return await plain(scope, receive, send)
        head = [(b"content-length", b"300000")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        return await send({"type": "http.response.body", "body": bytes(300_000)})

    def all_closed(unread):
        poll = select.poll()
        for connection in unread:
            # A closed end cannot signal it behind unread answers, but it resets senders.
            with suppress(BlockingIOError, ConnectionError):
                connection.send(b"G")
            poll.register(connection, select.POLLERR | select.POLLHUP)
        return len(poll.poll(0)) == len(unread)

    async def go():
        async with AsyncExitStack() as stack:
            listener, _ = await stack.enter_async_context(listening(large, limits=limits))
            port = listener.port
            unread, served = [], 0
            for source in ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5") * 32:
                unread.append(stack.enter_context(socket.socket()))
                unread[-1].setblocking(False)
                unread[-1].bind((source, 0))
                await asyncio.get_running_loop().sock_connect(unread[-1], ("127.0.0.1", port))
                # As much as the kernel takes; the rest would only wait here.
                with suppress(BlockingIOError, ConnectionError):
                    unread[-1].send(question)
            async with asyncio.timeout(PATIENCE):
                while not all_closed(unread):
                    async with connected(port) as other:
                        served += await answered(*other)
            # Those of the other address go when the server sees that they were ended.
            await until(lambda: not listener.open, seconds=PATIENCE)
            return served

    assert asyncio.run(go()) > 0


# --- connections that do nothing ------------------------------------------------------------------


def test_requests_in_a_row_leave_every_address_its_turn():
    """A hundred connections of one address, which send one request after the other. Another address
    begins soon, and at most one of theirs is answered in each step of its request. A request that
    waits holds no turn."""
    steps = 20
    begun = []
    forever = asyncio.Event()

    async def app(scope, receive, send):
        address = scope["client"][0]
        begun.append(address)
        if address == "10.0.0.2":
            for _ in range(steps):
                await asyncio.sleep(0)
        elif address == "10.0.0.3":
            await forever.wait()

    async def go():
        turned = in_turns(app)

        async def ask(address):
            await turned({"type": "http", "client": (address, 1)}, None, None)

        async def ask_in_a_row():
            for _ in range(20):
                await ask("10.0.0.1")

        waiting = asyncio.ensure_future(ask("10.0.0.3"))
        rows = [asyncio.ensure_future(ask_in_a_row()) for _ in range(100)]
        await until(lambda: len(begun) > 100)
        before = len(begun)
        await ask("10.0.0.2")
        after = len(begun)
        forever.set()
        await asyncio.gather(waiting, *rows)
        return before, after

    before, after = asyncio.run(go())
    # Before it: a request whose turn it is and that has not begun, and the one that waits longest.
    assert "10.0.0.2" in begun[before : before + 3]
    assert after - before <= steps + 3
    assert begun.count("10.0.0.1") == 2000
    assert begun[0] == "10.0.0.3"


def test_the_longest_silent_connection_makes_room():
    """Of its address, or of all; never one whose request runs, and never a host's."""
    limits = GatewayLimits(head_ms=600_000, client_connections=2, connections=3)
    begun, free = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        if scope.get("path") == "/slow":
            begun.set()
            await free.wait()
        await plain(scope, receive, send)

    async def go():
        async with AsyncExitStack() as stack, listening(slow, limits=limits) as (listener, _):

            async def connect(address):
                way = connected(listener.port, local_addr=(address, 0))
                return await stack.enter_async_context(way)

            busy = await connect("127.0.0.1")
            busy[1].write(HEAD.replace(b"/healthz", b"/slow"))
            await begun.wait()
            first = await connect("127.0.0.1")
            await until(lambda: len(listener.open) == 2)
            second = await connect("127.0.0.1")
            await closed(first[0])
            third = await connect("127.0.0.2")
            await until(lambda: len(listener.open) == 3)
            fourth = await connect("127.0.0.3")
            await closed(second[0])
            assert await answered(*third)
            listener.keep(fourth[1].get_extra_info("sockname"))
            fifth = await connect("127.0.0.4")
            await closed(third[0])
            listener.keep(fifth[1].get_extra_info("sockname"))
            await closed((await connect("127.0.0.5"))[0])
            free.set()
            async with asyncio.timeout(PATIENCE):
                assert (await busy[0].readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(go())


def test_five_addresses_of_silent_connections_shut_nobody_out():
    """They open a new one for each that is closed; a client gets through, and a host, which stays;
    strangers who dial in as hosts do and say nothing hold no place either."""
    limits = GatewayLimits(head_ms=600_000, client_connections=16, connections=64)

    async def go():
        place = Site(digits(), BUSY, parallel=1)
        async with (
            listening(place, limits=limits, connected=place.connected) as (listener, _),
            AsyncExitStack() as stack,
        ):
            place.url = f"ws://127.0.0.1:{listener.port}"
            opened = 0

            async def crowd(address):
                nonlocal opened
                mine = []
                upgrade = b"GET /v1/host HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n"
                upgrade += b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                upgrade += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                while True:
                    way = connected(listener.port, local_addr=(address, 0))
                    mine.append(await stack.enter_async_context(way))
                    opened += 1
                    if opened % 2:
                        mine[-1][1].write(upgrade)
                    while len(mine) > 15:
                        mine.pop(0)[1].close()

            crowding = [asyncio.ensure_future(crowd(f"127.0.4.{n}")) for n in range(1, 6)]
            await until(lambda: opened > 200)
            async with dialled(place) as host:
                await host.hello()
                await until(lambda: "odd" in place.connected)
                before = opened
                for _ in range(20):
                    local = {"local_addr": ("127.0.0.200", 0)}
                    async with connected(listener.port, **local) as (reader, writer):
                        writer.write(HEAD)
                        async with asyncio.timeout(PATIENCE):
                            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
                await until(lambda: opened > before + 200)
                assert "odd" in place.connected
            for task in crowding:
                task.cancel()
            await asyncio.gather(*crowding, return_exceptions=True)

    asyncio.run(go())


def test_many_hosts_of_one_address_join_where_strangers_hold_all_places():
    """Each of eight addresses has one silent connection. The hosts of a ninth take their places,
    one after the other, because hosts do not count among the connections of their address."""
    limits = GatewayLimits(head_ms=600_000, client_connections=4, connections=8)

    async def go():
        async with listening(plain, limits=limits) as (listener, _), AsyncExitStack() as stack:
            for number in range(1, 9):
                way = connected(listener.port, local_addr=(f"127.0.4.{number}", 0))
                await stack.enter_async_context(way)
            await until(lambda: len(listener.open) == 8)
            for count in range(1, 9):
                way = connected(listener.port, local_addr=("127.0.0.200", 0))
                _, writer = await stack.enter_async_context(way)
                address = writer.get_extra_info("sockname")
                await until(lambda address=address: address in listener.open)
                listener.keep(address)
                kept = [one for one in listener.open.values() if one.client is None]
                assert len(kept) == count
            assert len(listener.open) == 8

    asyncio.run(go())


def test_bodies_that_do_not_come_hold_no_place_from_others():
    """Five addresses fill all places with requests whose bodies are cut off, and open a new one for
    each that is closed. Another address gets through, and one that has been silent the longest of
    all keeps its connection, because nobody has fewer."""
    limits = GatewayLimits(head_ms=600_000, client_connections=16, connections=64)
    cut_off = b"POST / HTTP/1.1\r\nHost: gateway\r\nContent-Length: 9\r\n\r\nx"

    async def reading(scope, receive, send):
        if scope["type"] == "http":
            while (await receive()).get("more_body"):
                pass
        await plain(scope, receive, send)

    async def crowd(port, address):
        while True:
            with suppress(OSError):
                async with connected(port, local_addr=(address, 0)) as (reader, writer):
                    writer.write(cut_off)
                    await closed(reader)

    async def go():
        async with listening(reading, limits=limits) as (listener, _):
            port = listener.port
            async with connected(port, local_addr=("127.0.0.201", 0)) as idle:
                await until(lambda: listener.open)
                crowding = []
                for number in range(1, 6):
                    for _ in range(16):
                        work = crowd(port, f"127.0.4.{number}")
                        crowding.append(asyncio.ensure_future(work))
                await until(lambda: len(listener.open) == 64)
                for _ in range(20):
                    async with connected(port, local_addr=("127.0.0.200", 0)) as (reader, writer):
                        assert await answered(reader, writer)
                assert await answered(*idle)
                for task in crowding:
                    task.cancel()
                await asyncio.gather(*crowding, return_exceptions=True)

    asyncio.run(go())


def test_a_request_whose_body_could_end_in_two_places_is_refused_and_its_connection_closed():
    asked = []

    async def noting(scope, receive, send):
        if scope["type"] == "http":
            asked.append(scope["path"])
        await plain(scope, receive, send)

    async def go():
        async with (
            listening(noting) as (listener, _),
            connected(listener.port) as (reader, writer),
        ):
            writer.write(
                b"POST /one HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /two HTTP/1.1\r\nHost: a\r\n\r\n"
            )
            async with asyncio.timeout(PATIENCE):
                return await reader.read()

    answer = asyncio.run(go())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in head.lower()
    assert "Transfer-Encoding" in json.loads(body)["error"]["cause"]
    assert asked == []


WITHOUT_DESCRIPTORS = """
import asyncio, logging, os, resource, socket, sys
from layershuffle.gateway.http.listening import listening

logging.basicConfig(format="LOG %(message)s", level=logging.WARNING)

async def plain(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

async def main():
    async with listening(plain) as (listener, _):
        print(listener.port, flush=True)
        await asyncio.sleep(0.5)  # the spare descriptor
        most = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        print("limited", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the descriptors in /proc")
def test_without_file_descriptors_it_answers_and_complains_once_a_second():
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process, ExitStack() as stack:  # fmt: skip
        port = int(process.stdout.readline())
        assert process.stdout.readline() == "limited\n"
        begun = time.monotonic()
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        statuses = []
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
                client.sendall(HEAD)
                statuses.append(client.recv(12))
        seconds = time.monotonic() - begun
        _, log = process.communicate("\n", timeout=PATIENCE)
    assert statuses == [b"HTTP/1.1 200"] * 5
    lines = log.splitlines()
    assert 1 <= len(lines) <= 1 + seconds
    assert set(lines) == {
        "LOG No file descriptor is left for connections: raise the limit (ulimit -n)"
    }


def test_hosts_have_a_port_of_their_own(tmp_path):
    """There is nothing on it but hosts and their files; tabs dial at the page's own address."""
    settings = SwarmSettings(state=str(tmp_path / "s"), hosts=0, port=0, hosts_port=0, page=False)
    serving = Serving(settings)

    async def go():
        opened = asyncio.get_running_loop().create_future()
        told = {"say": lambda _: None, "ready": lambda *facts: opened.set_result(facts)}
        task = asyncio.create_task(serve_swarm(serving, digits(), **told))
        coordinator, url, _ = await asyncio.wait_for(opened, PATIENCE)
        try:
            token = coordinator.connected.token
            assert serving.hosts_url != url
            text = UpCommand(settings=settings).described(coordinator, url, serving=serving)
            assert f"layershuffle-host {serving.hosts_url.replace('http', 'ws')} " in text
            for number, address in enumerate((serving.hosts_url, url)):
                place = SimpleNamespace(url=address.replace("http", "ws"))
                async with dialled(place) as host:
                    await host.hello(token=token, name=f"h{number}", instance=str(number))
                    await until(lambda name=f"h{number}": name in coordinator.connected)
            async with httpx.AsyncClient(base_url=serving.hosts_url) as client:
                for path in ("/v1/swarm", "/livez", "/", "/operator/drain"):
                    assert (await client.get(path)).status_code == 404
                digest = next(iter(digits().files))
                headers = {"Authorization": f"Bearer {token}"}
                assert (await client.get(f"/v1/files/{digest}", headers=headers)).status_code == 200
        finally:
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(go())


def test_a_token_that_no_host_can_send_or_that_is_short_is_refused(tmp_path):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    for token in ("x" * 401, "bell\a, and sixteen signs", "x" * 15):
        file.write_text(token)
        with refuses(UsageError, file):
            read_tokens(file)


def test_the_token_of_hosts_rotates(tmp_path, caplog):
    """Two count at a time, and the new one is handed out; one that is gone is refused."""
    settings = SwarmSettings(state=str(tmp_path / "s"), hosts=0, port=0, page=False)
    serving = Serving(settings)
    file = serving.token_file

    async def enters(url, token):
        """Whether a host gets in, by its code of closing."""
        place = SimpleNamespace(url=url.replace("http", "ws"))
        async with dialled(place) as host:
            await host.hello(token=token, name=token[:3], instance=token)
            try:
                await host.assigned()
            except ConnectionClosed as error:
                return error.rcvd.code
        return None

    async def go():
        opened = asyncio.get_running_loop().create_future()
        told = {"say": lambda _: None, "ready": lambda *facts: opened.set_result(facts)}
        task = asyncio.create_task(serve_swarm(serving, digits(), **told))
        coordinator, url, _ = await asyncio.wait_for(opened, PATIENCE)
        try:
            old = coordinator.connected.token
            new = "new-token-of-this-test"
            entered = [(await enters(url, old), await enters(url, new))]
            for tokens in ([new, old], [new], [new, old, "third-token-of-this-test"]):
                file.write_text("\n".join(tokens))
                serving.reload()
                assert coordinator.connected.token == new
                entered.append((await enters(url, old), await enters(url, new)))
        finally:
            task.cancel()
            await asyncio.wait({task})
        return entered

    refused = Close.BAD_TOKEN
    assert asyncio.run(go()) == [(None, refused), (None, None), (refused, None), (refused, None)]
    assert "Of host tokens those of before stay in use. The file holds 3 tokens" in caplog.text
