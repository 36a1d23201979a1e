"""The data channel on the loopback network, without Ray: visits, and credentials."""

import asyncio
import subprocess

import numpy as np
import pytest
from channel_site import (
    CREDENTIALS,
    HASTY,
    LIMITS,
    STATE,
    WIRES,
    DoublingHost,
    run,
    served,
    visit,
)

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.channel import ChannelLink, ChannelLost, ChannelServer, credentials_in
from layershuffle.swarm.messages import (
    HostFailed,
    HostUnavailable,
    pack,
    unpack,
)
from waiting import until


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
            host.let_go()
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
            plain = ChannelLink("a", link.address, credentials=CREDENTIALS, limits=HASTY)
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
