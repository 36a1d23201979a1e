"""A swarm of hosts that dial in: requests, hosts that come and go, liars, children, the log."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
import pytest
from dial_site import (
    BUSY,
    TOKEN,
    Site,
    dialled,
    digits,
    gateway,
    hosting,
    replayed,
    states,
)
from gateway_site import Site as GatewaySite
from gateway_site import picture, run

from layershuffle.cli.serving import JsonLines
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import Route
from layershuffle.gateway.brain.state import Outcome, Swarm, Visited
from layershuffle.gateway.hosts import connections as members_module
from layershuffle.gateway.hosts import coordinator as coordinator_module
from layershuffle.gateway.hosts.children import Children
from layershuffle.gateway.hosts.service import background, running_service
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle_host import wire
from layershuffle_host.blocks import Block
from layershuffle_host.host import Host
from layershuffle_host.wire import State
from pictures import file_of
from refusals import refuses
from simulation.chaos import FaultInjector
from waiting import until


@asynccontextmanager
async def swarm(
    cache: Path, hosts: int, *, limits: Limits = BUSY, parallel: int = 1
) -> AsyncIterator[tuple[Site, dict[str, Host]]]:
    """A gateway and hosts in this process, once each block is held twice (by a lone host, once)."""
    async with gateway(limits=limits, parallel=parallel) as site, AsyncExitStack() as stack:
        names = [f"host-{number + 1}" for number in range(hosts)]
        running = {
            name: await stack.enter_async_context(hosting(site.url, cache=cache, name=name))
            for name in names
        }
        await site.until(lambda: min(site.copies()) >= min(2, hosts))
        yield site, running


def is_up(site: Site, name: str) -> bool:
    return name in site.connected and site.coordinator.is_up(site.connected[name])


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 3])
def test_answers_are_those_of_one_process_bit_for_bit(tmp_path: Path, parallel: int) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3, parallel=parallel) as (site, _):
            starts = [states(seed=n) for n in range(12)]
            done = await asyncio.gather(*map(site.walk, starts))
            for start, (state, route) in zip(starts, done, strict=True):
                assert route.kept == 12
                assert state.tobytes() == (await replayed(start, route)).tobytes()
            # Under load the third may have no block yet: two hold all blocks twice.
            assert len({hop.host for _, route in done for hop in route.hops}) >= 2

    asyncio.run(main())


def test_hosts_that_vanish_lose_no_request(tmp_path: Path) -> None:
    """A connection ends up to five times a second while eight clients ask."""

    async def main() -> None:
        async with swarm(tmp_path, 4, parallel=3) as (site, _):
            routes: list[tuple[State, State, Route]] = []
            failed = 0

            async def client(number: int) -> None:
                nonlocal failed
                turn = 0
                while turn < 38 or not failed:  # a fast machine is done before the first fault
                    start = states(seed=1000 * number + turn)
                    state, route = await site.walk(start, least=12)
                    routes.append((start, state, route))
                    failed += sum(hop.outcome != "answered" for hop in route.hops)
                    turn += 1

            async def breaker() -> None:
                for turn in itertools.count():
                    await asyncio.sleep(0.2)
                    name = f"host-{1 + turn % 4}"
                    if is_up(site, name):  # on a busy machine it takes longer to be back
                        site.connected.cut(name)

            breaking = asyncio.create_task(breaker())
            await asyncio.gather(*map(client, range(8)))
            breaking.cancel()
            assert len(routes) >= 304
            assert [
                (route.ending, route.ms, route.skipped) for *_, route in routes if route.kept < 12
            ] == []
            for start, state, route in routes:
                assert state.tobytes() == (await replayed(start, route)).tobytes()

    asyncio.run(main())


# --- who holds what -------------------------------------------------------------------------------


def test_a_departed_host_is_replaced_within_a_second_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as (site, _), AsyncExitStack() as stack:
            other = await stack.enter_async_context(hosting(site.url, cache=tmp_path, name="late"))
            await site.until(lambda: is_up(site, "late"))
            other.drain()
            begin = time.monotonic()
            await site.until(lambda: "late" not in site.connected)
            await site.until(lambda: min(site.copies()) >= 2)
            assert time.monotonic() - begin < 5  # 0.4 s on a quiet machine
            assert site.router.swarm["late"].condition == "gone"

    asyncio.run(main())


def test_a_short_break_moves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as (site, _):
            await asyncio.sleep(0.3)
            before = {name: host.assigned for name, host in site.connected.items()}
            connection = site.connected["host-2"]
            site.connected.cut("host-2")
            await site.until(lambda: site.connected.get("host-2", connection) is not connection)
            await site.until(lambda: site.coordinator.is_up(site.connected["host-2"]))
            assert {name: host.assigned for name, host in site.connected.items()} == before
            assert min(site.copies()) >= 2

    asyncio.run(main())


def test_drained_hosts_finish_and_stay_away_until_they_are_readmitted(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as (site, _):
            assert await site.coordinator.drain("host-1")
            await site.until(lambda: min(site.copies()) >= 2)
            assert not site.router.swarm["host-1"].usable
            # Also on a new connection.
            site.connected.cut("host-1")
            await site.until(lambda: "host-1" in site.connected)
            assert site.router.swarm["host-1"].condition == "draining"
            site.coordinator.readmit("host-1")
            await site.until(lambda: site.router.swarm["host-1"].usable)
            await site.until(lambda: bool(site.router.swarm["host-1"].blocks))
            with refuses(UsageError):
                site.coordinator.readmit("nobody")

    asyncio.run(main())


def test_a_watch_that_breaks_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running_service(digits(), token=TOKEN) as (coordinator, _):
            await until(lambda: coordinator.watching)
            with monkeypatch.context() as patch:
                patch.setattr(coordinator.health, "due", lambda now: 1 / 0)
                await until(lambda: not coordinator.watching)
            await until(lambda: coordinator.watching)

    asyncio.run(main())


# --- liars ----------------------------------------------------------------------------------------


def test_a_block_that_was_away_during_its_test_is_tested_again() -> None:
    """Whatever the answer to that test: here it is wrong."""

    async def main() -> None:
        async with gateway() as site, dialled(site) as stranger:
            await stranger.hello()
            (first, *_) = await stranger.assigned()
            ready = {"type": "ready", "slot": first["slot"], "seconds": 0.001}
            await stranger.socket.send(json.dumps(ready))
            header, state = await stranger.visit()
            for blocks in (frozenset[int](), frozenset(range(12))):
                site.coordinator._give("odd", blocks)
            answer = header._replace(kind=wire.Kind.ANSWER, note=1, time=0)
            await stranger.socket.send(wire.frame(answer, state))
            await site.until(lambda: not site.coordinator._tests)
            assert not site.router.swarm["odd"].blocks

    asyncio.run(main())


def test_a_host_with_other_weights_never_serves_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Block.run

    async def main() -> None:
        async with swarm(tmp_path, 2) as (site, _):

            def lying(self: Block, state: State) -> State:
                return honest(self, state) + np.float32(0.1)

            async with hosting(site.url, cache=tmp_path, name="liar") as liar:
                await site.until(lambda: "liar" in site.connected)
                for _ in range(400):
                    for block in liar.blocks.values():
                        block.run = lying.__get__(block)  # type: ignore[method-assign]
                    if site.router.swarm["liar"].condition == "shut-out":
                        break
                    await asyncio.sleep(0.005)
                assert site.router.swarm["liar"].condition == "shut-out"
                # A new connection is no proof of honesty.
                site.connected.cut("liar")
                await site.until(lambda: "liar" in site.connected)
                assert site.router.swarm["liar"].condition == "shut-out"
                state, route = await site.walk(states())
                assert "liar" not in {hop.host for hop in route.hops}
                assert state.tobytes() == (await replayed(states(), route)).tobytes()

    asyncio.run(main())


# --- child processes ------------------------------------------------------------------------------


@asynccontextmanager
async def family(site: Site, *, hosts: int) -> AsyncIterator[Children]:
    """Hosts as child processes, all of them up."""
    names, limits = tuple(f"host-{number + 1}" for number in range(hosts)), Limits(restart_ms=50)
    children = Children(names, url=site.url, token=TOKEN, memory=10**8, limits=limits)
    site.coordinator.children = children
    async with background(children.run()):
        assert await site.coordinator.ready(hosts, within=60) == []
        yield children


def test_killed_processes_are_felt_lose_no_request_and_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(parallel=3) as site, family(site, hosts=3) as children:
            before = dict(children.pids)
            asked = [asyncio.create_task(site.walk(states(seed=n), least=12)) for n in range(60)]
            await asyncio.sleep(0.02)
            children.signal("host-1", signal.SIGKILL)
            children.signal("host-2", signal.SIGKILL)
            await site.until(lambda: not {"host-1", "host-2"} & site.connected.keys())
            done = await asyncio.gather(*asked)
            assert [route.kept for _, route in done] == [12] * 60
            await site.until(lambda: len(site.connected) == 3)
            assert children.pids["host-1"] != before["host-1"]
            assert children.pids["host-3"] == before["host-3"]

    asyncio.run(main())


def test_drilled_faults_happen_and_rejoin_ends_them(tmp_path: Path) -> None:
    """On real processes; the others answer all requests meanwhile."""
    becomes = {"crash": "gone", "freeze": "suspect", "cut": "suspect", "wrong": "shut-out"}

    async def main() -> None:
        limits = Limits(deadline_ms=20_000, canary_every_ms=100)
        async with gateway(limits=limits) as site, family(site, hosts=3):
            injector = FaultInjector(site.coordinator)
            for kind, condition in becomes.items():
                await injector.inject("host-1", kind)
                await site.until(lambda c=condition: site.router.swarm["host-1"].condition == c)
                start = states(seed=5)
                state, route = await site.walk(start, least=12)
                assert state.tobytes() == (await replayed(start, route)).tobytes()
                begin = time.monotonic()
                await injector.inject("host-1", "rejoin")
                await site.until(lambda: site.router.swarm["host-1"].usable)
                # A killed process starts again; the others return without one.
                assert kind == "crash" or time.monotonic() - begin < 5
                await site.until(lambda: is_up(site, "host-1"))
            connections = set()
            await injector.inject("host-1", "restless")
            while len(connections) < 3:  # it comes back after each end
                state, route = await site.walk(start, least=12)
                assert state.tobytes() == (await replayed(start, route)).tobytes()
                connections |= {m for n, m in site.connected.items() if n == "host-1"}
            await injector.inject("host-1", "rejoin")
            await site.until(lambda: is_up(site, "host-1"))
            await injector.inject("host-1", "leave")
            await site.until(lambda: "host-1" not in site.connected)
            with refuses(UsageError):
                await injector.inject("q", "slow")

    asyncio.run(main())


@pytest.mark.parametrize(("room", "held"), [(3.0, 3), (0.5, 0)])
def test_a_start_waits_for_no_room_and_no_host_without_blocks(room: float, held: int) -> None:
    async def main() -> None:
        async with gateway() as site:
            memory = int(room * site.model.weights[0].size)
            children = Children(("a", "b"), url=site.url, token=TOKEN, memory=memory, limits=BUSY)
            async with background(children.run()), asyncio.timeout(60):
                lacking = await site.coordinator.ready(2, within=1000)
            assert len(lacking) == 12 - 2 * held

    asyncio.run(main())


def test_a_host_that_says_too_much_or_cannot_be_started_is_tried_again_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first process ends after a line of 100,000 characters, its second cannot be started."""
    begin, begun = asyncio.create_subprocess_exec, list[str]()

    async def started(*words: str, **how: object) -> asyncio.subprocess.Process:
        begun.append(words[-1])
        if begun[-1] == "a" and begun.count("a") == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        first = begun[-1] == "a" and begun.count("a") == 1
        return await begin(
            "sh", "-c", f"{'printf %0100000d 0 >&2; exit 3;' * first} exec sleep 60", **how
        )

    async def main() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        children = Children(("a", "b"), limits=Limits(restart_ms=1))
        async with background(children.run()):
            await until(lambda: begun.count("a") == 3 and len(children.pids) == 2)
            assert begun.count("b") == 1
        await until(lambda: not children.pids)

    asyncio.run(main())
    ended, refused = caplog.messages
    assert ended == f"The process of host a has ended (3): {'0' * 1000}"
    assert refused == (
        "The process of host a cannot be started: [Errno 11] Resource temporarily unavailable"
    )


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        ("echo 2026-01-01 10:00:00,0 INFO assigns 12 blocks >&2; exit 0", []),
        (
            "echo MemoryError: no room >&2; echo 2026-01-01 10:00:00,0 INFO assigns 12 >&2; exit 4",
            ["The process of host a has ended (4): MemoryError: no room"],
        ),
        (
            "echo MemoryError: no room >&2; echo 2026-01-01 10:00:00,0 WARNING a block failed >&2; "
            "printf '\\033[0;93m2026-01-01 10:00:00.0 [W:onnxruntime:Default] no ID\\033[m' >&2; "
            "exit 4",
            ["The process of host a has ended (4): MemoryError: no room"],
        ),
        (
            "echo 2026-01-01 10:00:00,0 WARNING a block failed >&2; kill -SEGV $$",
            ["The process of host a has ended (-11)"],
        ),
    ],
)
def test_the_end_of_a_process_quotes_its_error(
    script: str,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And not the last line of its log; a process that was asked to end is no fault."""
    begin, begun = asyncio.create_subprocess_exec, list[str]()

    async def started(*words: str, **how: object) -> asyncio.subprocess.Process:
        begun.append(words[-1])
        return await begin("sh", "-c", script if len(begun) == 1 else "exec sleep 60", **how)

    async def main() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        children = Children(("a",), limits=Limits(restart_ms=1))
        async with background(children.run()):
            await until(lambda: len(begun) == 2)

    asyncio.run(main())
    assert caplog.messages == messages


def test_a_killed_host_stays_away_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(coordinator_module, "_QUIET", 0.0)

    async def main() -> None:
        async with gateway() as site, family(site, hosts=2) as children:
            site.coordinator.kill("host-1")
            await site.until(lambda: "host-1" not in children.pids)
            await site.until(lambda: "Host host-1 has gone" in caplog.text)
            await site.until(lambda: "host-1 has ended, as it was asked to" in caplog.text)
            assert not [record for record in caplog.records if record.levelno > logging.INFO]
            with refuses(LayerShuffleError):
                children.signal("host-1", signal.SIGKILL)
            await asyncio.sleep(0.3)
            assert "host-1" not in children.pids
            site.coordinator.readmit("host-1")
            await site.until(lambda: "host-1" in site.connected)

    asyncio.run(main())


PARENT = """
import asyncio
import itertools
from layershuffle.gateway.hosts.children import Children
from layershuffle.gateway.brain.limits import Limits
children = Children(("a",), url="ws://127.0.0.1:1", token="t", memory=1, limits=Limits())
async def main():
    asyncio.create_task(children.run())
    while not children.pids:
        await asyncio.sleep(0.01)
    print(children.pids["a"], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_hosts_die_with_a_gateway_that_is_killed() -> None:
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < end, "the host outlives its gateway"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there; one that only waits to be collected is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the log --------------------------------------------------------------------------------------

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines on hosts so far."""
    caplog.set_level(logging.INFO, "layershuffle.gateway")
    places = ("layershuffle.gateway.hosts.coordinator", "layershuffle.gateway.hosts.connections")
    return lambda: [record.getMessage() for record in caplog.records if record.name in places]


def hop(name: str, outcome: Outcome, why: str) -> Visited:
    return Visited(name, 0, outcome, 1.0, why=why, lag_ms=0.0)


def test_what_becomes_of_a_host_is_a_line_each(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "_QUIET", 0.0)

    async def main() -> None:
        async with gateway() as site, hosting(site.url, cache=tmp_path, name="pi"):
            await site.until(lambda: min(site.copies()) == 1)
            # Longer than the time between two looks, or nobody might see the suspicion.
            site.router.limits = site.router.limits.model_copy(update={"suspect_ms": 1000.0})
            site.router.report(hop("pi", "late", "no answer in time"))
            await site.until(lambda: "Host pi is back" in lines())  # its probe was answered
            site.connected.cut("pi")
            await site.until(lambda: lines().count("Host pi is back") == 2)
            site.router.report(hop("pi", "wrong", "it lied"))
            await site.until(lambda: "Host pi is shut out: it lied" in lines())

    asyncio.run(main())
    assert lines()[:6] == [
        "Host pi has joined",
        "Host pi is suspected: no answer in time",
        "Host pi is back",
        "Host pi has gone: the gateway has cut its connection",
        "Host pi is back",
        "Host pi is shut out: it lied",
    ]


def test_a_host_that_comes_and_goes_is_a_line_now_and_then(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred changes within a second add nothing to the line of its arrival; the last word is
    said all the same, if later."""
    monkeypatch.setattr(coordinator_module, "_QUIET", 2.0)

    async def main() -> None:
        async with gateway() as site, hosting(site.url, cache=tmp_path, name="pi"):
            await site.until(lambda: "Host pi has joined" in lines())
            for _ in range(50):
                site.router.report(hop("pi", "late", "no answer in time"))
                await asyncio.sleep(0.01)
                site.router.update("pi", lambda host: host._replace(condition="healthy"))
                await asyncio.sleep(0.01)
            site.router.report(hop("pi", "wrong", "it lied"))
            await site.until(lambda: "Host pi is shut out: it lied" in lines())

    asyncio.run(main())
    assert lines()[0] == "Host pi has joined"
    assert len(lines()) <= 3


def test_hosts_that_are_refused_are_said_now_and_then(lines: Lines) -> None:
    async def main() -> None:
        async with gateway() as site:
            for _ in range(20):
                async with dialled(site) as stranger:
                    await stranger.hello(token="another")
                    await stranger.socket.wait_closed()

    asyncio.run(main())
    assert members_module._QUIET == 10
    assert lines() == [
        "A host at 127.0.0.1 is refused: another token: copy the host-token of this gateway"
    ]


def test_a_host_without_room_for_a_block_is_told(lines: Lines) -> None:
    async def main() -> None:
        async with gateway() as site, dialled(site) as stranger:
            await stranger.hello(memory=100_000)
            await site.until(lambda: len(lines()) > 0)

    asyncio.run(main())
    assert lines()[0] == "Host odd has joined: its --memory is for no block: one takes 135KB"


def test_a_block_that_cannot_be_loaded_is_said_once(lines: Lines) -> None:
    async def main() -> None:
        async with gateway() as site, dialled(site) as stranger:
            await stranger.hello()
            (first, *_) = await stranger.assigned()
            for _ in range(20):
                text = {"type": "failed", "slot": first["slot"], "why": "the disk is full"}
                await stranger.socket.send(json.dumps(text))
            await site.until(lambda: len(lines()) > 1)
            await asyncio.sleep(0.2)

    asyncio.run(main())
    loads = [line for line in lines() if "load" in line]
    assert len(loads) == 1
    assert loads[0].startswith("Host odd cannot load block ")
    assert loads[0].endswith("the disk is full")


def test_what_a_host_says_is_one_line_of_the_log_without_escapes(lines: Lines) -> None:
    """New lines, colours and marks of direction, in a reason and in a version."""
    bad = "a\nb\r\x1b[31mc\u2028\u202ed"

    async def main() -> None:
        async with gateway() as site, dialled(site) as stranger, dialled(site) as old:
            await stranger.hello()
            (first, *_) = await stranger.assigned()
            text = {"type": "failed", "slot": first["slot"], "why": bad}
            await stranger.socket.send(json.dumps(text))
            await site.until(lambda: any("cannot load" in line for line in lines()))
            assert "\n" not in site.router.swarm["odd"].why
            await old.hello(protocol=bad)
            await site.until(lambda: any("is refused" in line for line in lines()))

    asyncio.run(main())
    quoted = [line for line in lines() if "a\\nb\\r\\x1b[31mc\\u2028\\u202ed" in line]
    assert len(quoted) == 2
    assert all(line.isprintable() for line in lines())


def test_a_request_without_an_answer_has_an_id_and_floods_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go(place: GatewaySite) -> list[httpx.Response]:
        place.router.swarm = Swarm()
        return [await place.classify(file_of(picture()), deadline_ms=100) for _ in range(14)]

    answers = run(go)
    assert {answer.status_code for answer in answers} == {503}
    ids = [answer.json()["error"]["id"] for answer in answers]
    assert len(set(ids)) == 14
    said = [r for r in caplog.records if "was not answered" in r.getMessage()]
    assert 10 <= len(said) <= 12, "ten at once, and one in ten seconds"
    assert [record.request for record in said][:10] == ids[:10]


def test_lines_of_json() -> None:
    record = logging.LogRecord(
        "layershuffle", logging.WARNING, __file__, 1, "Host %s has gone", ("pi",), None
    )
    record.host, record.created = "pi", 1_790_000_000.25
    fields = json.loads(JsonLines().format(record))
    time = datetime.fromisoformat(fields.pop("time"))
    assert time == datetime.fromtimestamp(1_790_000_000.25, UTC)
    assert fields == {"level": "warning", "message": "Host pi has gone", "host": "pi"}
    try:
        raise OSError("it raised")
    except OSError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "it raised" in json.loads(JsonLines().format(record))["traceback"]
