"""The data channel between a server and a link on the loopback network: what it carries, and what
becomes of visits when it is cut, half, stalled, wrong or garbage. No Ray takes part."""

import asyncio
import logging
import struct
import subprocess
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.channel import ChannelLink, ChannelLost, ChannelServer
from layershuffle.swarm.frames import (
    FRAME_BYTES,
    HEAD_BYTES,
    BrokenFrame,
    Kind,
    answer_frame,
    failure_frame,
    read_answer,
    read_head,
    read_visit,
    split,
    visit_frame,
    word_frame,
)
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostUnavailable,
    Packet,
    WorkExpired,
    pack,
    unpack,
)
from layershuffle.swarm.stream import Credentials, credentials_in, proof_of
from waiting import HANGS, until

LIMITS = Limits(channel_ms=300, suspect_ms=20, suspect_max_ms=40)
CREDENTIALS = Credentials(b"token")
STATE = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
WIRES = ("fp32", "fp16", "int8")


# --- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_visit_and_its_answer_come_out_as_they_went_in(wire):
    packet = pack(STATE, wire)
    whole = b"".join(visit_frame(7, (3, 0, 2), packet=packet, budget_ms=12.5))
    head, tail = split(whole)
    assert (head.kind, head.id, len(whole)) == (Kind.VISIT, 7, HEAD_BYTES + 12 + packet.nbytes)
    blocks, again, budget_ms = read_visit(head, tail)
    assert (blocks, budget_ms) == ((3, 0, 2), 12.5)
    sealed = b"".join(answer_frame(7, Answer(packet, 1.5, 0.25, 3.0)))
    answer = read_answer(*split(sealed))
    assert (answer.compute_ms, answer.queue_ms, answer.batch) == (1.5, 0.25, 3.0)
    for got in (again, answer.packet):
        assert got.wire == wire
        for mine, theirs in ((packet.values, got.values), (packet.scales, got.scales)):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert mine.dtype == theirs.dtype
                assert np.array_equal(mine, theirs)
                assert theirs.flags.writeable
                assert theirs.flags.aligned


@pytest.mark.parametrize("kind", [HostFailed, HostUnavailable, WorkExpired])
def test_a_failure_comes_out_as_it_went_in(kind):
    with pytest.raises(kind, match="no time for Zoë") as told:
        read_answer(*split(b"".join(failure_frame(1, kind("no time for Zoë")))))
    assert type(told.value) is kind


@pytest.mark.parametrize("blocks", [(), (1, 2)])
@pytest.mark.parametrize("wire", WIRES)
def test_a_visit_that_is_cut_or_longer_than_it_says_is_broken(wire, blocks):
    whole = b"".join(visit_frame(1, blocks, packet=pack(STATE, wire), budget_ms=1.0))
    for length in (*range(len(whole)), len(whole) + 1):
        part = (whole + b"x")[:length]
        with pytest.raises(BrokenFrame):
            read_visit(*split(part))


def test_what_no_frame_may_say():
    whole = b"".join(visit_frame(1, (1,), packet=pack(STATE, "fp32"), budget_ms=1.0))
    for place, value in (
        (0, b"\x00\x00"),  # the mark
        (2, b"\x63"),  # the kind
        (3, b"\x09"),  # the wire
        (4, struct.pack("<I", 2)),  # blocks
        (12, struct.pack("<I", 2**32 - 1)),  # images: their bytes are no 32 bits
        (32, struct.pack("<d", float("nan"))),  # the budget
    ):
        with pytest.raises(BrokenFrame):
            read_visit(*split(whole[:place] + value + whole[place + len(value) :]))
    long = bytearray(whole[:HEAD_BYTES])
    long[8:12] = struct.pack("<I", FRAME_BYTES + 1)
    with pytest.raises(BrokenFrame, match=f"of {FRAME_BYTES} at most"):
        read_head(bytes(long))
    with pytest.raises(BrokenFrame, match="unknown failure 9"):
        read_answer(*split(b"".join(word_frame(Kind.FAILURE, code=9))))
    with pytest.raises(BrokenFrame, match="kind VISIT"):
        read_answer(*split(whole))
    for other in (None, "text", 5):
        with pytest.raises(BrokenFrame, match="in the place of a frame"):
            split(other)


def test_a_state_that_cannot_travel_is_refused():
    with pytest.raises(UsageError, match="float64"):
        visit_frame(1, (0,), packet=Packet("fp32", STATE.astype(np.float64)), budget_ms=1.0)
    large = np.broadcast_to(np.float32(0), (2, FRAME_BYTES // 4, 1))
    with pytest.raises(UsageError, match="too large"):
        visit_frame(1, (0,), packet=Packet("fp32", large), budget_ms=1.0)


# --- a host that answers --------------------------------------------------------------------------


class DoublingHost:
    """Doubles states; block 9 waits until it is let go, block 8 fails, block 7 is a defect."""

    name = "a"

    def __init__(self):
        self.gate, self.begun, self.dropped = asyncio.Event(), 0, 0
        self.budgets = []

    async def visit(self, blocks, packet, *, budget_ms):
        self.begun += 1
        self.budgets.append(budget_ms)
        try:
            if 9 in blocks:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        if 8 in blocks:
            raise HostUnavailable("Host a does not hold block 8")
        if 7 in blocks:
            raise KeyError("oops")
        if 6 in blocks:
            raise UsageError("odd")
        return Answer(pack(2 * unpack(packet), packet.wire), 1.0, 0.0)


@asynccontextmanager
async def served(credentials=CREDENTIALS, limits=LIMITS, **asked):
    """A server with its host, and a link to it."""
    host = DoublingHost()
    server = ChannelServer(host, credentials=credentials, limits=limits)
    address = await server.open("127.0.0.1")
    link = ChannelLink("a", address, **{"credentials": credentials, "limits": limits, **asked})
    try:
        await link.tried()
        yield server, host, link
    finally:
        await link.close()
        server.close()


def visit(link, *blocks, wire="fp32", budget_ms=1e6):
    return asyncio.ensure_future(link.visit(blocks, pack(STATE, wire), budget_ms=budget_ms))


def run(check):
    async def bounded():
        async with asyncio.timeout(HANGS):
            await check()

    asyncio.run(bounded())


def test_visits_go_side_by_side_over_one_connection():
    async def check():
        async with served() as (server, host, link):
            assert link.open
            assert link.why == ""
            waiting = [visit(link, 9) for _ in range(3)]
            await until(lambda: host.begun == 3)
            for wire in WIRES:
                answer = await visit(link, 1, wire=wire, budget_ms=77.0)
                wanted = pack(2 * unpack(pack(STATE, wire)), wire)
                assert np.array_equal(unpack(answer.packet), unpack(wanted))
            assert host.budgets[-1] == 77.0
            assert not any(task.done() for task in waiting)
            host.gate.set()
            for answer in await asyncio.gather(*waiting):
                assert np.array_equal(unpack(answer.packet), 2 * STATE)
            assert len(server.connections) == 1

    run(check)


def test_a_visit_fails_as_its_host_says():
    async def check():
        async with served() as (_, _, link):
            with pytest.raises(HostUnavailable, match="does not hold block 8"):
                await visit(link, 8)
            with pytest.raises(HostFailed, match="odd"):
                await visit(link, 6)
            with pytest.raises(HostFailed, match="oops"):
                await visit(link, 7)
            assert link.open

    run(check)


def test_a_state_of_many_packets_comes_whole():
    async def check():
        large = np.random.default_rng(0).standard_normal((16, 197, 768)).astype(np.float32)
        async with served() as (_, _, link):
            answers = await asyncio.gather(
                *(link.visit((1,), pack(large, "fp32"), budget_ms=1e6) for _ in range(3))
            )
            assert all(np.array_equal(unpack(answer.packet), 2 * large) for answer in answers)

    run(check)


def test_a_cancelled_visit_is_dropped_at_the_host():
    async def check():
        async with served() as (_, host, link):
            task = visit(link, 9)
            await until(lambda: host.begun == 1)
            task.cancel()
            await until(lambda: host.dropped == 1)
            assert (await visit(link, 1)).compute_ms == 1.0

    run(check)


def test_a_gateway_that_goes_takes_its_visits_with_it():
    async def check():
        async with served() as (server, host, link):
            task = visit(link, 9)
            await until(lambda: host.begun == 1)
            await link.close()
            await until(lambda: host.dropped == 1 and not server.connections)
            with pytest.raises(ChannelLost, match="the gateway has closed it"):
                await task

    run(check)


# --- what may go wrong ----------------------------------------------------------------------------


def test_a_cut_channel_is_felt_at_once_and_opened_again(caplog):
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
                await until(lambda: link.open)
                assert link.why == ""
                await visit(link, 1)

    caplog.set_level(logging.INFO)
    run(check)
    assert len([line for line in caplog.messages if "go over Ray" in line]) == 3
    assert len([line for line in caplog.messages if "is open again" in line]) == 3


def test_a_channel_is_opened_when_its_host_comes_and_the_log_is_told_once(caplog):
    async def check():
        async with served() as (_, _, before):
            address = before.address
        link = ChannelLink("a", address, credentials=CREDENTIALS, limits=LIMITS)
        await link.tried()
        assert f"{address} cannot be used" in link.why
        with pytest.raises(ChannelLost, match="cannot be used"):
            await visit(link, 1)
        server = ChannelServer(DoublingHost(), credentials=CREDENTIALS, limits=LIMITS)
        await server.open("127.0.0.1", ports=(int(address.rpartition(":")[2]),))
        await until(lambda: link.open)
        await visit(link, 1)
        await link.close()
        server.close()

    run(check)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


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


BIG = bytearray(b"".join(word_frame(Kind.PROOF, words=b"x" * 64)))
BIG[8:12] = struct.pack("<I", 65)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: swarm.example.org\r\nAccept: */*\r\n\r\n", "no frame"),
        (bytes(HEAD_BYTES), "no frame"),
        (bytes(BIG), "65 bytes, of 64 at most"),
        (b"".join(word_frame(Kind.PROOF)), "wrong token"),
        (b"".join(word_frame(Kind.PROOF, words=bytes(64))), "wrong token"),
        (b"".join(word_frame(Kind.CANCEL, number=1)), "wrong token"),
        (b"".join(word_frame(Kind.VISIT)), "wrong token"),
        (b"".join(word_frame(Kind.PROOF, words=bytes(64)))[:-1], "no proof in time"),
        (b"", "no proof in time"),
    ],
)
def test_a_stranger_is_cut_off(sent, says, caplog):
    """Garbage, a tail that is too long for a proof, half a frame, silence."""

    async def check():
        async with served() as (server, host, good):
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
        writer.writelines(word_frame(Kind.CHALLENGE, words=nonce))
        proof = (await reader.readexactly(HEAD_BYTES + 64))[HEAD_BYTES:]
        words = proof_of(CREDENTIALS.token, b"host ", host="a", nonces=nonce + proof[:32])
        writer.writelines(word_frame(Kind.WELCOME, words=words))
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
    """A reply of these bytes, and then nothing until the gateway goes."""

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
        (b"".join(word_frame(Kind.FAILURE, number=1, code=7)), "unknown failure 7"),
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


def test_a_stalled_host_is_cut_off_before_it_fills_the_memory():
    """It reads nothing, as a process that is stopped: what it is to get waits here, up to a bound.

    The visits themselves end by the router's limits.
    """
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
                # What the kernel takes comes on top of the bound.
                assert len(tasks) * large.nbytes < 2 * FRAME_BYTES
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, ChannelLost)
                assert "does not read" in error.cause
            over.set()

    run(check)


# --- credentials ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files of an authority, and of a member whose certificate it signed, for 127.0.0.1."""
    place = tmp_path_factory.mktemp("tls")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=place, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
                f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    (place / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("ca", "other"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=member",
                "-keyout", f"{name}-member.key", "-out", "member.csr")  # fmt: skip
        openssl("x509", "-req", "-in", "member.csr", "-CA", f"{name}.pem", "-CAkey", f"{name}.key",
                "-CAcreateserial", "-days", "2", "-extfile", "names",
                "-out", f"{name}-member.pem")  # fmt: skip
    (place / "token").write_bytes(b"token\n")
    return place


def tls_of(place, signer="ca", trusts="ca"):
    return credentials_in(
        {
            "RAY_AUTH_TOKEN_PATH": str(place / "token"),
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(place / f"{signer}-member.pem"),
            "RAY_TLS_SERVER_KEY": str(place / f"{signer}-member.key"),
            "RAY_TLS_CA_CERT": str(place / f"{trusts}.pem"),
        }
    )


def test_with_certificates_the_channel_is_encrypted(certificates):
    async def check():
        async with served(credentials=tls_of(certificates)) as (_, _, link):
            assert link.open, link.why
            answer = await visit(link, 1)
            assert np.array_equal(unpack(answer.packet), 2 * STATE)
            plain = ChannelLink("a", link.address, credentials=CREDENTIALS, limits=LIMITS)
            await plain.tried()
            assert not plain.open
            await plain.close()

    run(check)


@pytest.mark.parametrize(("signer", "trusts"), [("other", "ca"), ("ca", "other")])
def test_a_member_of_another_authority_gets_nothing(certificates, signer, trusts):
    async def check():
        strange = tls_of(certificates, signer=signer, trusts=trusts)
        async with served(credentials=tls_of(certificates)) as (_, host, good):
            link = ChannelLink("a", good.address, credentials=strange, limits=LIMITS)
            await link.tried()
            assert not link.open
            assert host.begun == 0
            await link.close()

    run(check)


def test_credentials_that_are_not_there(tmp_path):
    with pytest.raises(LayerShuffleError, match="RAY_AUTH_TOKEN_PATH"):
        credentials_in({})
    with pytest.raises(LayerShuffleError, match="cannot be read"):
        credentials_in({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


def test_no_free_port_is_an_error():
    async def check():
        async with served() as (_, _, link):
            port = int(link.address.rpartition(":")[2])
            second = ChannelServer(DoublingHost(), credentials=CREDENTIALS, limits=LIMITS)
            with pytest.raises(LayerShuffleError, match=r"No data channel .* 127\.0\.0\.1"):
                await second.open("127.0.0.1", ports=(port,))
            address = await second.open("127.0.0.1", ports=(port, 0))
            assert address != link.address
            second.close()

    run(check)
