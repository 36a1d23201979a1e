"""The gateway's end of the wire: hellos, visits, answers that no honest host gives, files."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dial_site import TOKEN, Site, Stranger, dialled, digits, gateway, hosting, states
from websockets.exceptions import ConnectionClosed

from layershuffle.gateway.brain.state import Outcome, VisitError
from layershuffle.gateway.hosts import connections as members_module
from layershuffle_host import wire
from layershuffle_host.wire import FILE_PATH, Close, Dtype, Header, Kind, State, Why

Said = Callable[[Site], Awaitable[None]]


def run(work: Said) -> None:
    """Run `work` beside a gateway."""

    async def main() -> None:
        async with gateway() as site:
            await work(site)

    asyncio.run(main())


# --- hellos ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token": "another"}, Close.BAD_TOKEN),
        ({"protocol": "2.0"}, Close.VERSION),
        ({"protocol": "1.9"}, Close.VERSION),
        ({"protocol": "\ud800"}, Close.BROKEN),
        ({"name": "../x"}, Close.BROKEN),
        ({"token": "\ud800"}, Close.BROKEN),
        ({"memory": -1}, Close.BROKEN),
        ({"type": "ready"}, Close.BROKEN),
    ],
)
def test_a_hello_that_is_not_taken(changes: dict[str, Any], code: Close) -> None:
    async def work(site: Site) -> None:
        async with dialled(site) as odd:
            await odd.hello(**changes)
            with pytest.raises(ConnectionClosed):
                await odd.assigned()
            assert odd.socket.close_code == code
            if code == Close.VERSION:
                assert f"protocol {changes['protocol']} does not work" in (
                    odd.socket.close_reason or ""
                )
        assert len(site.connected) == 0

    run(work)


def test_a_connection_without_a_hello_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "HELLO_SECONDS", 0.1)

    async def work(site: Site) -> None:
        async with dialled(site) as odd:
            await asyncio.wait_for(odd.socket.wait_closed(), 20)
            assert odd.socket.close_code == Close.NO_HELLO

    run(work)


def test_a_name_belongs_to_one_process() -> None:
    async def work(site: Site) -> None:
        async with dialled(site) as first, dialled(site) as other, dialled(site) as again:
            await first.hello()
            await first.assigned()
            await other.hello(instance="2")
            await asyncio.wait_for(other.socket.wait_closed(), 20)
            assert other.socket.close_code == Close.NAME_IN_USE
            # The same process on a new connection: the old one is over.
            await again.hello()
            await again.assigned()
            await asyncio.wait_for(first.socket.wait_closed(), 20)
            assert site.connected["odd"].hello["instance"] == "1"

    run(work)


# --- visits ---------------------------------------------------------------------------------------


def test_a_host_answers_with_the_numbers_of_the_files(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        async with hosting(site.url, cache=tmp_path):
            await site.until(lambda: min(site.copies()) == 1)
            for batch, block in ((1, 0), (3, 11)):
                state = states(batch)
                wanted = await digits().compute(block, state)
                got = await site.ask("pi", block, state)
                assert got.tobytes() == wanted.tobytes()
                # Narrow answers hold what the block added, so they are nearly as good.
                scale = np.abs(wanted).max()
                half = await site.ask("pi", block, state, form="fp16")
                assert np.abs(half - wanted).max() <= 4e-3 * scale
                small = await site.ask("pi", block, state, form="int8")
                assert np.abs(small - wanted).max() <= 5e-2 * scale
            assert site.connected["pi"].sent == {}

    run(work)


Answer = Callable[[Header, State], bytes]


def answer(header: Header, state: State, **changes: int) -> bytes:
    """An honest frame around `state`, but for these fields of its header."""
    fields = {"kind": Kind.ANSWER, "note": len(state), "time": 100, "waited": 0, **changes}
    return wire.frame(header._replace(**fields), state)


def refusal(header: Header, why: int) -> bytes:
    return wire.frame(header._replace(kind=Kind.REFUSAL, note=why))


ODD: dict[str, tuple[Answer, Outcome]] = {
    "not a number": (lambda h, s: answer(h, np.full_like(s, np.nan)), "wrong"),
    "another shape": (lambda h, s: answer(h, s[:, :-1]), "wrong"),
    "more images": (lambda h, s: answer(h._replace(images=2), np.repeat(s, 2, 0)), "wrong"),
    "another dtype": (lambda h, s: answer(h._replace(dtype=Dtype.FLOAT16), s), "wrong"),
    "another block": (lambda h, s: answer(h._replace(slot=7), s), "wrong"),
    "cut": (lambda h, s: answer(h, s)[:-1], "wrong"),
    "no images together": (lambda h, s: answer(h, s, note=0), "wrong"),
    "a visit": (lambda h, s: answer(h, s, kind=Kind.VISIT), "wrong"),
    "unknown block": (lambda h, _: refusal(h, Why.UNKNOWN_BLOCK), "unavailable"),
    "full": (lambda h, _: refusal(h, Why.FULL), "unavailable"),
    "late": (lambda h, _: refusal(h, Why.LATE), "late"),
    "failed": (lambda h, _: refusal(h, Why.FAILED), "failed"),
    "draining": (lambda h, _: refusal(h, Why.DRAINING), "unavailable"),
    "no reason": (lambda h, _: refusal(h, 77), "wrong"),
    # What is no frame, or answers nothing that was asked, ends the connection.
    "a foreign visit": (lambda h, s: answer(h._replace(visit=h.visit + 9), s), "lost"),
    "no frame": (lambda _, __: b"\x09" * 30, "lost"),
    "a short frame": (lambda _, __: b"\x02", "lost"),
}


@pytest.mark.parametrize("name", ODD)
def test_answers_that_are_not_believed(name: str) -> None:
    reply, outcome = ODD[name]

    async def work(site: Site) -> None:
        async with odd_host(site) as odd:
            asked = asyncio.create_task(site.ask("odd", 3, states()))
            header, state = await odd.visit()
            await odd.socket.send(reply(header, state))
            with pytest.raises(VisitError) as refused:
                await asked
            assert refused.value.outcome == outcome
            if outcome == "lost":
                await asyncio.wait_for(odd.socket.wait_closed(), 20)
                assert odd.socket.close_code == Close.BROKEN
                assert "odd" not in site.connected
            else:
                assert site.connected["odd"].sent == {}

    run(work)


def outcomes(errors: Iterable[object]) -> list[str]:
    """Those of failed visits, and the classes of other errors."""
    return [getattr(error, "outcome", type(error).__name__) for error in errors]


@asynccontextmanager
async def odd_host(site: Site) -> AsyncIterator[Stranger]:
    """A host that is connected, and that no request and no canary visits."""
    async with dialled(site) as odd:
        await odd.hello()
        await odd.assigned()
        yield odd


def test_a_late_answer_is_dropped_and_harms_nobody() -> None:
    async def work(site: Site) -> None:
        async with odd_host(site) as odd:
            asked = asyncio.create_task(site.ask("odd", 3, states(), limit=0.05, form="fp16"))
            header, state = await odd.visit()
            with pytest.raises(TimeoutError):
                await asked
            assert header.time <= 50_000
            # Thousands may be owed: they keep no states.
            assert [sent.before for sent in site.connected["odd"].sent.values()] == [None]
            await odd.socket.send(answer(header, state))
            again = asyncio.create_task(site.ask("odd", 3, states(seed=1)))
            header, state = await odd.visit()
            await odd.socket.send(answer(header, state))
            assert (await again).tobytes() == state.tobytes()
            assert site.connected["odd"].sent == {}
            # An answer twice is one that nobody asked for.
            await odd.socket.send(answer(header, state))
            await asyncio.wait_for(odd.socket.wait_closed(), 20)
            assert odd.socket.close_code == Close.BROKEN

    run(work)


def test_the_end_of_a_connection_fails_its_visits_at_once() -> None:
    async def work(site: Site) -> None:
        async with odd_host(site) as odd:
            asked = [asyncio.create_task(site.ask("odd", 3, states())) for _ in range(5)]
            await odd.visit()
            assert odd.socket.transport is not None
            odd.socket.transport.abort()
            # Without waiting for their limits of twenty seconds.
            done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
            assert outcomes(done) == ["lost"] * 5
            assert site.router.swarm["odd"].condition == "gone"
            with pytest.raises(VisitError) as refused:
                await site.ask("odd", 3, states())
            assert refused.value.outcome == "lost"

    run(work)


def test_a_host_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "STALLED_SECONDS", 0.2)

    async def work(site: Site) -> None:
        async with odd_host(site) as odd:
            assert odd.socket.transport is not None
            odd.socket.transport.pause_reading()
            large, asked = states(256), list[asyncio.Task[State]]()
            while "odd" in site.connected:
                asked.append(asyncio.create_task(site.ask("odd", 3, large, limit=0.3)))
                await asyncio.sleep(0.02)
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert "lost" in outcomes(done)
            assert {*outcomes(done)} <= {"lost", "TimeoutError"}
            odd.socket.transport.abort()

    run(work)


def test_a_gateway_that_stood_still_blames_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an import of torch beside the loop; a host that is silent for as long is dropped."""
    monkeypatch.setattr(wire, "PING_SECONDS", 0.2)
    monkeypatch.setattr(wire, "PONG_SECONDS", 0.4)

    async def work(site: Site) -> None:
        async with odd_host(site) as odd:
            first = site.connected["odd"]
            await asyncio.sleep(0.1)
            time.sleep(1)
            await asyncio.sleep(0.1)
            assert site.connected["odd"] is first
            assert odd.socket.transport is not None
            odd.socket.transport.pause_reading()
            await site.until(lambda: "odd" not in site.connected)
            odd.socket.transport.abort()

    run(work)


def test_messages_that_no_host_sends_end_the_connection() -> None:
    async def work(site: Site) -> None:
        odd_type = r'{"type": "\ud800"}'
        # What a host says stands in answers and logs, which cannot hold half a surrogate pair.
        odd_why = r'{"type": "failed", "slot": 0, "why": "no file /\udcff"}'
        assigning = '{"type": "assign", "blocks": []}'
        for text in (assigning, "[]", '{"type": "ready"}', odd_type, odd_why):
            async with odd_host(site) as odd:
                await odd.socket.send(text)
                await asyncio.wait_for(odd.socket.wait_closed(), 20)
                assert odd.socket.close_code == Close.BROKEN

    run(work)


EMPTY = b"\x80\0\0\0\0"  # the rest of a client's frame without data
PING, PONG, BEGIN, CONTINUE = b"\x89" + EMPTY, b"\x8a" + EMPTY, b"\2" + EMPTY, b"\0" + EMPTY


@pytest.mark.parametrize("flood", [[PING], [PONG], [BEGIN, CONTINUE]], ids=str)
@pytest.mark.parametrize("is_host", [False, True])
def test_a_host_that_sends_frames_without_end_that_say_nothing_is_ended(
    flood: list[bytes], is_host: bool
) -> None:
    async def work(site: Site) -> None:
        async with dialled(site) as odd:
            transport = odd.socket.transport
            assert transport is not None
            transport.write(12 * PONG)
            await odd.hello()
            await odd.assigned()
            assert "odd" in site.connected
        await site.until(lambda: "odd" not in site.connected)
        async with dialled(site) as odd:
            if is_host:
                await odd.hello()
                await odd.assigned()
            transport = odd.socket.transport
            assert transport is not None
            transport.write(flood[0] + 40 * flood[-1])
            await asyncio.wait_for(odd.socket.wait_closed(), 20)
            assert odd.socket.close_code == Close.BROKEN
            assert "odd" not in site.connected

    run(work)


# --- files ----------------------------------------------------------------------------------------


def test_files_need_the_token_and_come_in_parts() -> None:
    async def work(site: Site) -> None:
        address = site.url.replace("ws", "http", 1)
        digest = digits().weights[5].digest
        content = digits().files[digest].read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        async with httpx.AsyncClient(base_url=address) as client:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            for bad in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer"}):
                assert (await client.get(FILE_PATH + digest, headers=bad)).status_code == 401
            for path in ("0" * 64, "stem.onnx", "..%2Fmanifest.json"):
                assert (await client.get(FILE_PATH + path, headers=headers)).status_code == 404
            whole = await client.get(FILE_PATH + digest, headers=headers)
            assert (whole.status_code, whole.content) == (200, content)
            part = await client.get(FILE_PATH + digest, headers={**headers, "Range": "bytes=99-"})
            assert (part.status_code, part.content) == (206, content[99:])

    run(work)
