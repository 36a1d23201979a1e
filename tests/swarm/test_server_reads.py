"""What a gateway reads in a turn of its loop: little of what may be dear, the rest as it comes."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
from gateway_site import certify

from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.listening import GatewaySocket, listening
from layershuffle.gateway.http.secrets import client_context, server_context

PATIENCE = 60  # seconds that a test waits for what takes a fraction of one
LONG = GatewayLimits(head_ms=1000 * PATIENCE)  # a test tells the listener when they are over


@pytest.mark.parametrize("count", [1, 8, 100])
def test_what_all_connections_read_in_one_turn_is_bounded(count):
    """Each has as much waiting as asyncio reads at once; a host's reads all of it."""

    async def go():
        with (
            ExitStack() as stack,
            GatewaySocket("127.0.0.1", port=0, limits=LONG) as listener,
        ):
            accepted = []
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
                client.setblocking(False)
                client.send(bytes(1 << 15))
                await asyncio.sleep(0)  # some are accepted in each turn
                await asyncio.sleep(0)
                accepted.append(stack.enter_context(listener.accept()[0]))
                accepted[-1].setblocking(False)
            turns = []
            for _ in range(3):
                turns.append([len(connection.recv(1 << 18)) for connection in accepted])
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            listener.keep(accepted[0].address)
            return turns, accepted[0].recv_into(bytearray(1 << 18))

    turns, rest = asyncio.run(go())
    # How many will read in the first turn nobody knows.
    assert turns[0] == [1 << 13, *[128] * (count - 1)]
    for turn in turns[1:]:
        assert turn == [max(128, 8192 // count)] * count
    assert rest == (1 << 15) - sum(turn[0] for turn in turns)


def noting(sizes):
    """An app that notes the sizes of what it receives, a list for each request."""

    async def reading(scope, receive, send):
        if scope["type"] == "http":
            sizes.append([])
            more = True
            while more:
                message = await receive()
                sizes[-1].append(len(message["body"]))
                more = message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    return reading


def test_a_body_of_known_length_is_read_as_it_comes():
    """Such bodies cost little, and many uploads at a time would else take minutes."""
    sizes = []

    async def go():
        async with listening(noting(sizes), limits=LONG) as (listener, _):
            with socket.create_connection(("127.0.0.1", listener.port)) as client:
                for way, body in (
                    (b"Content-Length: 65536", bytes(1 << 16)),
                    (b"Transfer-Encoding: chunked", b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"),
                ):
                    client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + way + b"\r\n\r\n" + body)
                    async with asyncio.timeout(PATIENCE):
                        assert await asyncio.to_thread(client.recv, 15) == b"HTTP/1.1 200 OK"
                        await asyncio.to_thread(client.recv, 1 << 12)

    asyncio.run(go())
    first, second = sizes
    assert (sum(first), sum(second)) == (1 << 16, 5000)
    assert max(first) > (1 << 16) - 2 * (1 << 13), "but for what came with the head"
    assert max(second) <= (1 << 13) / 6 + 1, "the next request has announced nothing"


@pytest.mark.parametrize("tls", [False, True])
def test_a_body_in_chunks_of_a_byte_is_taken_in_many_turns(tmp_path, tls):
    """asyncio reads 256 KiB at once, which took h11 0.7 s."""
    certify(tmp_path)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    sizes = []

    def dial(port):
        client = socket.create_connection(("127.0.0.1", port))
        if tls:
            trusted = client_context(tmp_path / "ca.pem")
            client = trusted.wrap_socket(client, server_hostname="127.0.0.1")
        client.sendall(head)
        return client

    async def go():
        serving = server_context(tmp_path / "cert.pem", tmp_path / "key.pem") if tls else None
        async with listening(noting(sizes), limits=LONG, tls=serving) as (listener, _):
            with await asyncio.to_thread(dial, listener.port) as client:
                # All at once, because the loop stands meanwhile.
                client.sendall(b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
                async with asyncio.timeout(PATIENCE):
                    return await asyncio.to_thread(client.recv, 15)

    assert asyncio.run(go()) == b"HTTP/1.1 200 OK"
    assert sum(sizes[0]) == 20_000
    # At most two records of TLS, of 16 KiB, between two steps of the request.
    assert max(sizes[0]) <= 2 * (1 << 14) / 6
