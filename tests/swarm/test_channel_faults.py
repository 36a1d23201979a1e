"""Visits over data channels that are cut, truncated or stalled, or whose peer lies."""

import asyncio
import struct
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from channel_site import CREDENTIALS, HASTY, LIMITS, STATE, DoublingHost, run, served, visit

from layershuffle.swarm.channel import (
    ChannelLink,
    ChannelLost,
    ChannelServer,
    Credentials,
    proof_of,
)
from layershuffle.swarm.frames import (
    FRAME_BYTES,
    HEAD_BYTES,
    FrameKind,
    answer_frame,
    visit_frame,
    word_frame,
)
from layershuffle.swarm.messages import (
    Answer,
    pack,
    unpack,
)
from waiting import until


def test_a_cut_channel_is_noticed_at_once_and_reopened(caplog):
    async def check():
        async with served() as (server, host, link):
            for _ in range(3):
                begun = host.begun
                task = visit(link, 9)
                await until(partial(lambda begun: host.begun > begun, begun))
                (connection,) = server.connections
                connection.stream.abort("a test cuts it")
                with pytest.raises(ChannelLost, match="channel to host a"):
                    await task
                assert not link.open
                assert "was lost" in link.why
                link.bypassed()
                link.bypassed()
                await until(lambda: link.open)
                assert link.why == ""
                await visit(link, 1)

    run(check)
    assert len([line for line in caplog.messages if "go over Ray" in line]) == 3
    assert len([line for line in caplog.messages if "is open again" in line]) == 3


def test_a_channel_is_opened_when_its_host_starts_and_logged_once(caplog):
    async def check():
        async with served() as (_, _, before):
            address = before.address
        link = ChannelLink("a", address, credentials=CREDENTIALS, limits=LIMITS)
        await link.tried()
        assert f"{address} cannot be used" in link.why
        assert caplog.messages == []  # no visit went over Ray
        link.bypassed()
        with pytest.raises(ChannelLost, match="cannot be used"):
            await visit(link, 1)
        server = ChannelServer(DoublingHost(), credentials=CREDENTIALS, limits=LIMITS)
        await server.open("127.0.0.1", ports=(int(address.rpartition(":")[2]),))
        await until(lambda: link.open)
        await visit(link, 1)
        await link.close()
        server.close()

    run(check)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[1] == "The data channel to host a is open again"


@pytest.mark.parametrize("token", [b"", b"other", b"token "])
def test_a_wrong_token_gets_nothing(token, caplog):
    async def check():
        async with served(credentials=CREDENTIALS) as (server, host, good):
            link = ChannelLink("a", good.address, credentials=Credentials(token), limits=LIMITS)
            await link.tried()
            assert not link.open
            await until(lambda: server.refused)
            assert host.begun == 0
            assert good.open
            await link.close()

    run(check)
    refusals = [line for line in caplog.messages if "refused" in line]
    assert refusals == ["A connection to the data channel was refused: it sent a wrong token"]


def test_a_proof_for_one_host_is_none_for_another():
    async def check():
        async with served() as (server, _, good):
            link = ChannelLink("b", good.address, credentials=CREDENTIALS, limits=LIMITS)
            await link.tried()
            assert not link.open
            await until(lambda: server.refused)
            await link.close()

    run(check)


async def raw(server_address):
    host, _, port = server_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


BIG = bytearray(b"".join(word_frame(FrameKind.PROOF, words=b"x" * 64)))
BIG[8:12] = struct.pack("<I", 65)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: swarm.example.org\r\nAccept: */*\r\n\r\n", "no frame"),
        (bytes(HEAD_BYTES), "no frame"),
        (bytes(BIG), "65 bytes, of 64 at most"),
        (b"".join(word_frame(FrameKind.PROOF)), "wrong token"),
        (b"".join(word_frame(FrameKind.PROOF, words=bytes(64))), "wrong token"),
        (b"".join(word_frame(FrameKind.CANCEL, number=1)), "wrong token"),
        (b"".join(word_frame(FrameKind.VISIT)), "wrong token"),
        (b"".join(word_frame(FrameKind.PROOF, words=bytes(64)))[:-1], "no proof in time"),
        (b"", "no proof in time"),
    ],
)
def test_a_stranger_is_cut_off(sent, says, caplog):
    """Garbage, a tail that is too long for a proof, half a frame, silence."""

    async def check():
        async with served() as (server, host, good):
            if says == "no proof in time":
                server.limits = HASTY
            reader, writer = await raw(good.address)
            writer.write(sent)
            with pytest.raises(asyncio.IncompleteReadError) as cut:
                await reader.readexactly(1000)  # the challenge, and not a byte more
            assert len(cut.value.partial) == HEAD_BYTES + 32
            await until(lambda: server.refused == 1)
            writer.close()
            assert host.begun == 0
            await visit(good, 1)

    async def connection_reset_or_not():
        try:
            await check()
        except ConnectionResetError:  # what it had sent lay unread
            assert says

    run(connection_reset_or_not)
    assert any(says in line for line in caplog.messages)


@asynccontextmanager
async def liar(reply):
    """A link to a server that has the token, and does `reply(reader, writer)` after a visit."""

    async def talk(reader, writer):
        nonce = bytes(32)
        writer.writelines(word_frame(FrameKind.CHALLENGE, words=nonce))
        proof = (await reader.readexactly(HEAD_BYTES + 64))[HEAD_BYTES:]
        words = proof_of(CREDENTIALS.token, b"host ", host="a", nonces=nonce + proof[:32])
        writer.writelines(word_frame(FrameKind.WELCOME, words=words))
        await reader.readexactly(HEAD_BYTES)
        await reply(reader, writer)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        link = ChannelLink("a", f"127.0.0.1:{port}", credentials=CREDENTIALS, limits=LIMITS)
        await link.tried()
        assert link.open, link.why
        try:
            yield link
        finally:
            await link.close()


def saying(*frames):
    """A reply of these bytes, and then nothing until the gateway disconnects."""

    async def reply(reader, writer):
        writer.writelines(frames)
        await reader.read()

    return reply


ANSWER = b"".join(answer_frame(1, Answer(pack(STATE, "fp32"), 1.0, 0.0)))
LONG = bytearray(ANSWER)
LONG[8:12] = struct.pack("<I", FRAME_BYTES + 1)
WIDER = bytearray(ANSWER)
WIDER[20:24] = struct.pack("<I", 5)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"\xff" * HEAD_BYTES, "bytes that are no frame"),
        (bytes(LONG), f"of {FRAME_BYTES} at most"),
        (bytes(WIDER), "bytes for 0 blocks and a state"),
        (b"".join(visit_frame(1, (1,), packet=pack(STATE, "fp32"), budget_ms=1.0)), "kind VISIT"),
        (b"".join(word_frame(FrameKind.FAILURE, number=1, code=7)), "unknown failure 7"),
    ],
)
def test_garbage_from_a_host_ends_the_channel(frame, says):
    async def check():
        async with liar(saying(frame)) as link:
            with pytest.raises(ChannelLost, match=says):
                await visit(link, 1)

    run(check)


def test_half_an_answer_and_then_an_end():
    async def reply(reader, writer):
        await reader.readexactly(4 + STATE.nbytes)  # else its end would be a reset
        writer.write(ANSWER[:-5])

    async def check():
        async with liar(reply) as link:
            with pytest.raises(ChannelLost, match="it closed the connection"):
                await visit(link, 1)

    run(check)


def test_an_answer_to_no_visit_is_ignored():
    other = b"".join(answer_frame(99, Answer(pack(STATE, "fp32"), 1.0, 0.0)))

    async def check():
        async with liar(saying(other, ANSWER)) as link:
            answer = await visit(link, 1)
            assert np.array_equal(unpack(answer.packet), STATE)

    run(check)


def test_a_stalled_host_is_cut_off_before_it_fills_the_memory(monkeypatch):
    """It reads nothing, like a stopped process, so its data wait here, up to a bound.

    The visits themselves end by the router's limits.
    """
    # Or the kernel ends the connection first, where so many bytes take three seconds.
    monkeypatch.setattr("layershuffle.swarm.frames._SILENCE_S", 100)
    over = asyncio.Event()

    async def stalled(reader, writer):
        del (
            writer,
            reader,
        )  # a reader takes 128 kB off its socket, and no more until somebody reads it
        await over.wait()

    async def check():
        large = pack(np.zeros((16, 197, 768), np.float32), "fp32")
        async with liar(stalled) as link:
            tasks = []
            while link.open:
                tasks.append(asyncio.ensure_future(link.visit((1,), large, budget_ms=1e6)))
                await asyncio.sleep(0)
                # The buffers of the kernel are not included in the bound.
                assert len(tasks) * large.nbytes < 2 * FRAME_BYTES
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, ChannelLost)
                assert "does not read" in error.cause
            over.set()

    run(check)
