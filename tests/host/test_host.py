"""A host beside a small gateway: numbers, refusals, returns, files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from gateway_end import SHAPE, TOKEN, Gateway, HostEnd, hosting, states, talk

import layershuffle as ls
from exported import SHIPPED
from layershuffle.core.stack import blocks_of
from layershuffle.models.onnx_models import OnnxGraph
from layershuffle_host.blocks import Block
from layershuffle_host.files import Cache, Source, is_loopback
from layershuffle_host.graph import RefusedGraph
from layershuffle_host.host import Host, delays
from layershuffle_host.wire import (
    MAX_IMAGES,
    Close,
    Dtype,
    Header,
    Kind,
    State,
    Why,
    frame,
    header_of,
)
from waiting import until

# --- numbers --------------------------------------------------------------------------------------


def test_a_host_gives_the_numbers_of_the_model(gateway: Gateway, tmp_path: Path) -> None:
    model = ls.load(SHIPPED)

    async def say(host: Host, end: HostEnd) -> None:
        assert end.hello["name"] == "pi"
        assert end.hello["held"] == []
        assert end.hello["speed"] > 0
        await end.assign(*gateway.blocks)
        ready = [await end.hear("ready") for _ in gateway.blocks]
        assert [message["slot"] for message in ready] == list(range(12))
        assert all(0 < message["seconds"] < 1 for message in ready)
        for batch in (1, 5):
            state = states(batch)
            for slot in (0, 7, 11):
                got = await end.visit(slot, state)
                block = gateway.blocks[slot]
                files = [gateway.files[block[part]["sha256"]] for part in ("graph", "weights")]
                again = OnnxGraph(*files, threads=1)(torch.from_numpy(state)).numpy()
                assert got.tobytes() == again.tobytes()
                with torch.no_grad():
                    wanted = blocks_of(model)[slot](torch.from_numpy(state)).numpy()
                assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()

    talk(gateway, tmp_path, say)


def noting(work: Callable[[State], State], sizes: list[int]) -> Callable[[State], State]:
    def run(state: State) -> State:
        sizes.append(len(state))
        return work(state)

    return run


def test_visits_that_wait_run_together_and_get_what_they_get_alone(
    gateway: Gateway, tmp_path: Path
) -> None:
    async def say(host: Host, end: HostEnd) -> None:
        await end.load(*gateway.blocks[:2])
        alone = [await end.visit(v % 2, states(1 + v % 3, seed=v)) for v in range(12)]
        sizes, (block, other) = list[int](), host.blocks.values()
        for each in (block, other):
            each.run = noting(each.run, sizes)
        # All of them arrive before the host computes anything.
        asked = [
            asyncio.create_task(end.visit(v % 2, states(1 + v % 3, seed=v), visit=v))
            for v in range(12)
        ]
        together = await asyncio.gather(*asked)
        for got, wanted in zip(together, alone, strict=True):
            assert got.tobytes() == wanted.tobytes()
        assert sum(sizes) == 24
        assert len(sizes) < 12

    talk(gateway, tmp_path, say)


# --- refused visits -------------------------------------------------------------------------------


def why_of(content: bytes) -> Why:
    header = header_of(content)
    assert header.kind == Kind.REFUSAL
    return Why(header.note)


def moody(work: Callable[[State], State]) -> Callable[[State], State]:
    """A block that fails where a state is 7 throughout."""

    def run(state: State) -> State:
        if (state == 7).all(axis=(1, 2)).any():
            raise RefusedGraph("seven")
        return work(state)

    return run


def test_visits_are_refused_with_the_reason(gateway: Gateway, tmp_path: Path) -> None:
    async def say(host: Host, end: HostEnd) -> None:
        await end.load(gateway.blocks[0])
        assert why_of(await end.ask(5, states(1), visit=1)) == Why.UNKNOWN_BLOCK
        assert why_of(await end.ask(0, states(1), visit=2, left=0)) == Why.LATE
        # The others of its batch are answered.
        (block,) = host.blocks.values()
        block.run = moody(block.run)
        bad = np.full((1, *SHAPE), 7, np.float32)
        asked = [end.ask(0, bad, visit=3), end.ask(0, states(1), visit=4)]
        failed, good = await asyncio.gather(*asked)
        assert why_of(failed) == Why.FAILED
        assert header_of(good).kind == Kind.ANSWER
        host.draining = True
        assert why_of(await end.ask(0, states(1), visit=5)) == Why.DRAINING

    talk(gateway, tmp_path, say)


def test_a_full_queue_refuses(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layershuffle_host.host._MOST_WAITING", 2)

    async def say(host: Host, end: HostEnd) -> None:
        await end.load(gateway.blocks[0])
        (block,) = host.blocks.values()
        # It computes beside the loop, so the queue fills.
        block.seconds = 1.0
        asked = [end.ask(0, states(200, seed=v), visit=v) for v in range(12)]
        frames = await asyncio.gather(*asked)
        kinds = [header_of(content).kind for content in frames]
        reasons = {why_of(c) for c, k in zip(frames, kinds, strict=True) if k == Kind.REFUSAL}
        assert reasons == {Why.FULL}
        assert kinds.count(Kind.ANSWER) >= 3
        assert host.waiting_bytes == 0

    talk(gateway, tmp_path, say)


def header(**changes: int) -> Header:
    return Header(Kind.VISIT, Dtype.FLOAT32, 0, 1, 1, 0, 10**6)._replace(**changes)


BROKEN: dict[str, str | bytes] = {
    "short": b"x",
    "kind": frame(header(kind=9)) + bytes(4096),
    "answer": frame(header(kind=Kind.ANSWER), states(1)),
    "no image": frame(header(images=0)),
    "two images": frame(header(images=2), states(1)),
    "many images": frame(header(images=MAX_IMAGES + 1)),
    "cut": frame(header(), states(1))[:-4],
    "nan": frame(header(), np.full((1, *SHAPE), np.nan, np.float32)),
    "json": "{",
    "list": "[1]",
    "ready": '{"type": "ready", "slot": 1, "seconds": 0.1}',
    "half": '{"type": "assign", "blocks": [{"slot": 0}]}',
    "deep": '{"type": ' * 4000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_gateway_that_breaks_the_protocol_is_left(
    gateway: Gateway, tmp_path: Path, name: str
) -> None:
    """And dialled again: its other connections may be right."""

    async def say(host: Host, end: HostEnd) -> None:
        await end.load(gateway.blocks[0])
        await end.socket.send(BROKEN[name])
        await asyncio.wait_for(end.closed.wait(), 20)
        assert end.socket.close_code == 1002
        again = await asyncio.wait_for(gateway.hosts.get(), 20)
        assert again.hello["instance"] == end.hello["instance"]

    talk(gateway, tmp_path, say)


# --- returns --------------------------------------------------------------------------------------


def test_a_host_comes_back_and_keeps_its_blocks_while_it_is_alone(
    gateway: Gateway, tmp_path: Path
) -> None:
    async def main() -> None:
        async with gateway.listening():
            port = gateway.port
            host = Host([gateway.url], token=TOKEN, name="pi", cache=tmp_path)
            running = asyncio.create_task(host.run())
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            await end.load(*gateway.blocks[:2])
            before = dict(host.blocks)
            wanted = await end.visit(1, states(2))
        # The gateway is gone, with its port.
        await asyncio.sleep(0.3)
        assert host.blocks == before
        async with gateway.listening(port):
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            gateway.fetched.clear()
            await end.load(*gateway.blocks[:2])
            assert host.blocks == before
            assert gateway.fetched == []
            assert (await end.visit(1, states(2))).tobytes() == wanted.tobytes()
            host.drain()
            await asyncio.wait_for(running, 20)
        assert end.hello["instance"] == host.instance

    asyncio.run(main())


def test_an_answer_goes_to_the_connection_that_asked(gateway: Gateway, tmp_path: Path) -> None:
    """A gateway cuts a host whose answer it never asked for."""

    async def main() -> None:
        async with gateway.listening(), hosting(gateway, cache=tmp_path) as host:
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            await end.load(gateway.blocks[0])
            wanted = await end.visit(0, states(1))
            (block,) = host.blocks.values()
            run, free = block.run, threading.Event()
            block.seconds, block.run = 1.0, lambda state: free.wait(20) and run(state)
            asked = asyncio.create_task(end.ask(0, states(1), visit=7))
            await until(lambda: host.busy > 0)
            await end.socket.close()
            asked.cancel()
            again = await asyncio.wait_for(gateway.hosts.get(), 20)
            await again.assign(gateway.blocks[0])
            await again.hear("ready")
            free.set()
            assert (await again.visit(0, states(1), visit=8)).tobytes() == wanted.tobytes()
            assert not again.closed.is_set()

    asyncio.run(main())


def test_a_refused_host_tries_again(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And logs what it is told on one line without escapes, once."""
    gateway.refuse = (Close.BAD_TOKEN, "another\nERROR \x1b[31mtoken")

    async def main() -> None:
        async with gateway.listening(), hosting(gateway, cache=tmp_path) as host:
            await until(lambda: bool(caplog.messages))
            await asyncio.sleep(0.3)
            told = r"closed: 4401 another\nERROR \x1b[31mtoken"
            said = [r.getMessage() for r in caplog.records if r.name == "layershuffle_host"]
            assert said == [f"{gateway.url} {told}"]
            assert gateway.hosts.empty()
            gateway.refuse = None
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            assert end.hello["name"] == host.name

    asyncio.run(main())


def test_waits_grow_to_three_seconds_and_never_agree() -> None:
    waits = [list(islice(delays(random.Random(seed)), 12)) for seed in range(50)]
    for wait in waits:
        assert 0.05 <= wait[0] <= 0.1
        assert all(1.5 <= seconds <= 3.0 for seconds in wait[5:])
        assert all(later <= 4 * sooner for sooner, later in pairwise(wait))
    assert len({wait[0] for wait in waits}) == 50


def test_two_gateways(digits: Path, tmp_path: Path) -> None:
    """A block that either wants stays; the death of one is not felt by the other."""
    one, other = Gateway(digits), Gateway(digits)

    async def main() -> None:
        async with other.listening():
            async with one.listening():
                host = Host([one.url, other.url], token=TOKEN, name="pi", cache=tmp_path)
                running = asyncio.create_task(host.run())
                ends = [await asyncio.wait_for(g.hosts.get(), 20) for g in (one, other)]
                await ends[0].load(*one.blocks[:2])
                await ends[1].load(*other.blocks[1:3])
                assert len(host.blocks) == 3
                await ends[0].load(one.blocks[2])
                assert len(host.blocks) == 2
                got = [await end.visit(2, states(1)) for end in ends]
                assert got[0].tobytes() == got[1].tobytes()
            assert (await ends[1].visit(2, states(1))).tobytes() == got[0].tobytes()
            host.drain()
            await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_draining_answers_what_waits(gateway: Gateway, tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway.listening():
            host = Host([gateway.url], token=TOKEN, name="pi", cache=tmp_path)
            running = asyncio.create_task(host.run())
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            await end.load(gateway.blocks[0])
            (block,) = host.blocks.values()
            work, go = block.run, threading.Event()
            block.seconds, block.run = 1.0, lambda state: go.wait(20) and work(state)
            asked = [asyncio.create_task(end.ask(0, states(2), visit=v)) for v in range(5)]
            await until(lambda: len(host.waiting) + host.busy == 5)
            host.drain()
            go.set()
            frames = await asyncio.gather(*asked)
            assert {header_of(content).kind for content in frames} == {Kind.ANSWER}
            await end.hear("drain")
            await asyncio.wait_for(running, 20)
            await asyncio.wait_for(end.closed.wait(), 20)
            assert end.socket.close_code == 1001

    asyncio.run(main())


def test_tls_with_a_private_authority(gateway: Gateway, tmp_path: Path) -> None:
    """Frames and files; a host that does not know the authority stays away."""
    key, ca = tmp_path / "key.pem", tmp_path / "ca.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    words += ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    words += ["-keyout", str(key), "-out", str(ca)]
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(ca, key)

    async def main() -> None:
        async with gateway.listening(tls=tls):
            async with hosting(gateway, cache=tmp_path / "a", name="stranger"):
                await asyncio.sleep(0.3)
                assert gateway.hosts.empty()
            async with hosting(gateway, cache=tmp_path / "b", ca=ca):
                end = await asyncio.wait_for(gateway.hosts.get(), 20)
                await end.load(gateway.blocks[0])
                assert (await end.visit(0, states(1))).shape == (1, *SHAPE)

    asyncio.run(main())


def test_proxies_of_the_environment(
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames go by CONNECT, files by GET; a proxy that cannot be used is said, and does not end
    the host."""
    asked = list[str]()
    gateway.name = "gateway.example"  # which the proxy alone can find

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(1 << 16):
            writer.write(content)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.decode().split()[0])
        back, there = await asyncio.open_connection("127.0.0.1", gateway.port)
        if asked[-1] == "CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            there.write(re.sub(rb"http://[^/]+", b"", head, count=1))
        await asyncio.gather(copied(reader, there), copied(back, writer))

    async def main() -> None:
        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", "gopher://127.0.0.1")
        async with proxy, gateway.listening(), hosting(gateway, cache=tmp_path):
            await until(lambda: "isn't a valid proxy" in caplog.text)
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:port")
            await until(lambda: "Port could not be cast" in caplog.text)
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
            end = await asyncio.wait_for(gateway.hosts.get(), 20)
            await end.load(gateway.blocks[0])
            assert (await end.visit(0, states(1))).shape == (1, *SHAPE)
        assert asked == ["CONNECT", "GET", "GET"]

    asyncio.run(main())


def test_no_proxy_is_asked_for_a_gateway_of_this_machine(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy cannot reach the loopback network of this machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.invalid:9")
    monkeypatch.setenv("no_proxy", "")

    async def say(host: Host, end: HostEnd) -> None:
        await end.load(gateway.blocks[0])
        assert (await end.visit(0, states(1))).shape == (1, *SHAPE)

    for gateway.name in ("127.0.0.1", "localhost"):
        talk(gateway, tmp_path, say)
    assert is_loopback("::1")
    assert is_loopback("127.9.9.9")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("pi.local")


def test_a_host_without_a_place_for_files_works_without_a_cache(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a service whose home directory is read-only, or is not there."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))

    async def say(host: Host, end: HostEnd) -> None:
        gateway.cut.append(1000)
        await end.assign(gateway.blocks[0])
        message = await end.hear("failed")
        assert "ended after 1000" in message["why"]
        assert (await end.hear("ready"))["slot"] == 0
        assert (await end.visit(0, states(1))).shape == (1, *SHAPE)

    talk(gateway, None, say)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match="file"):  # a place that was named has to be there
        Host([], token=TOKEN, cache=tmp_path / "file" / "cache")


def test_redirects_are_not_followed(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to files nor to hello: the token is for the gateway that was named."""
    digest = gateway.blocks[0]["graph"]["sha256"]

    async def main() -> None:
        async def point(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            path = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
            head = f"HTTP/1.1 302 Found\r\nLocation: //127.0.0.1:{port}{path}\r\n\r\n"
            writer.write(head.encode())
            writer.close()

        pointing = await asyncio.start_server(point, "127.0.0.1", 0)
        async with pointing, gateway.listening():
            port, gateway.port = gateway.port, pointing.sockets[0].getsockname()[1]
            source = Source(f"http://127.0.0.1:{gateway.port}", TOKEN, None)
            with pytest.raises(HTTPError, match="302"):
                await asyncio.to_thread(source.open, digest, start=0)
            async with hosting(gateway, cache=tmp_path):
                await until(lambda: "HTTP 302" in caplog.text or not gateway.hosts.empty())
            assert gateway.hosts.empty()

    asyncio.run(main())


# --- files ----------------------------------------------------------------------------------------


def test_a_cut_transfer_is_taken_up_where_it_ended(gateway: Gateway, tmp_path: Path) -> None:
    block = gateway.blocks[4]
    graph, weights = block["graph"]["sha256"], block["weights"]["sha256"]
    gateway.cut = [2000, 10**9, 60_000, 60_000]

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(block)
        for _ in range(3):
            assert "ended after" in (await end.hear("failed"))["why"]
        await end.hear("ready")
        assert gateway.fetched == [
            (graph, 0, 200), (graph, 2000, 206),
            (weights, 0, 200), (weights, 60_000, 206), (weights, 120_000, 206),
        ]  # fmt: skip
        assert {path.name for path in tmp_path.iterdir()} == {graph, weights}
        assert (tmp_path / weights).read_bytes() == gateway.files[weights]

    talk(gateway, tmp_path, say)


def test_a_server_without_ranges_sends_all_again(gateway: Gateway, tmp_path: Path) -> None:
    gateway.cut, gateway.knows_ranges = [2000], False

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(gateway.blocks[0])
        await end.hear("failed")
        await end.hear("ready")
        assert [start for _, start, _ in gateway.fetched] == [0, 0, 0]

    talk(gateway, tmp_path, say)


def test_a_file_with_another_digest_never_reaches_a_reader(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[bytes]()
    monkeypatch.setattr(
        "layershuffle_host.host.Block",
        lambda graph, weights, **how: read.append(weights) or Block(graph, weights, **how),
    )
    digest = gateway.blocks[0]["weights"]["sha256"]
    right = gateway.files[digest]
    gateway.files[digest] = right[:-1] + bytes([right[-1] ^ 1])

    async def say(host: Host, end: HostEnd) -> None:
        await end.assign(gateway.blocks[0])
        assert "other SHA-256" in (await end.hear("failed"))["why"]
        assert read == []
        gateway.files[digest] = right + b"longer"
        while "longer" not in (await end.hear("failed"))["why"]:
            pass
        gateway.files[digest] = right
        while (message := await asyncio.wait_for(end.messages.get(), 20))["type"] == "failed":
            pass
        assert message["type"] == "ready"
        assert read == [right]

    talk(gateway, tmp_path, say)


def test_files_stay_on_disk_and_damaged_ones_come_again(gateway: Gateway, tmp_path: Path) -> None:
    first, second = gateway.blocks[:2]
    weights = tmp_path / second["weights"]["sha256"]

    async def fetch(host: Host, end: HostEnd) -> None:
        await end.load(first, second)

    talk(gateway, tmp_path, fetch)
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    gateway.fetched.clear()

    async def again(host: Host, end: HostEnd) -> None:
        held = {block[part]["sha256"] for block in (first, second) for part in ("graph", "weights")}
        assert set(end.hello["held"]) == held
        await end.load(first, second)
        assert gateway.fetched == [(weights.name, 0, 200)]

    talk(gateway, tmp_path, again)


def test_two_hosts_share_a_cache(gateway: Gateway, tmp_path: Path) -> None:
    """Each file is fetched once, by whoever comes first."""

    async def main() -> None:
        async with (
            gateway.listening(),
            hosting(gateway, cache=tmp_path),
            hosting(gateway, cache=tmp_path, name="pi-2"),
        ):
            ends = [await asyncio.wait_for(gateway.hosts.get(), 20) for _ in range(2)]
            await asyncio.gather(*(end.load(*gateway.blocks[:4]) for end in ends))
            digests = [digest for digest, _, _ in gateway.fetched]
            assert sorted(digests) == sorted(set(digests))
            assert len(digests) == 5

    asyncio.run(main())


@pytest.mark.parametrize(("left", "fetched"), [(slice(2000), (2000, 206)), (slice(None), (0, 200))])
def test_a_host_goes_on_where_another_one_of_its_cache_stopped(
    gateway: Gateway, tmp_path: Path, left: slice, fetched: tuple[int, int]
) -> None:
    """It has opened the file by then. What is longer than the file is fetched anew."""
    digest = gateway.blocks[0]["weights"]["sha256"]
    content = gateway.files[digest]
    other = (tmp_path / f"{digest}.part").open("ab", buffering=0)
    fcntl.flock(other, fcntl.LOCK_EX)

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            other.write((content + b"longer")[left])
            other.close()
            return False

    async def main() -> None:
        async with gateway.listening():
            source = Source(f"http://127.0.0.1:{gateway.port}", TOKEN, None)
            cache = Cache(tmp_path, limit=1 << 30)
            got = await asyncio.to_thread(
                cache.content, digest, len(content), source=source, stopped=Stopping()
            )
            assert got == content
        assert gateway.fetched == [(digest, *fetched)]

    asyncio.run(main())


def test_two_gateways_assign_a_block_at_once(
    digits: Path, gateway: Gateway, tmp_path: Path
) -> None:
    """It is kept once, and fits: its own bytes are not in its way."""
    other = Gateway(digits)
    block = gateway.blocks[0]

    async def main() -> None:
        async with (
            gateway.listening(),
            other.listening(),
            hosting(gateway, other, cache=tmp_path, memory=block["weights"]["bytes"] + 16) as host,
        ):
            ends = [await asyncio.wait_for(each.hosts.get(), 20) for each in (gateway, other)]
            for end in ends:
                await end.assign(block)
            for end in ends:
                assert (await end.hear("ready"))["slot"] == block["slot"]
            assert len(host.blocks) == 1

    asyncio.run(main())


def test_transfers_that_nobody_continues_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / f"{'a' * 64}.part", tmp_path / f"{'b' * 64}.part"
    for part in (old, new):
        part.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    Cache(tmp_path, limit=1 << 30)
    assert list(tmp_path.iterdir()) == [new]


def test_disk_and_memory_are_bounded(gateway: Gateway, tmp_path: Path) -> None:
    size = gateway.blocks[0]["weights"]["bytes"]

    async def say(host: Host, end: HostEnd) -> None:
        for block in gateway.blocks:
            await end.load(block)
        assert len(host.blocks) == 1
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * host.memory
        assert (tmp_path / gateway.blocks[11]["weights"]["sha256"]).exists()
        await end.assign(*gateway.blocks[:3])
        assert [(await end.hear("ready"))["slot"] for _ in range(2)] == [0, 1]
        message = await end.hear("failed")
        assert (message["slot"], message["why"][:11]) == (2, "MemoryError")
        # It makes room as soon as one is not wanted any more.
        await end.load(*gateway.blocks[1:3])

    talk(gateway, tmp_path, say, memory=2 * size)
