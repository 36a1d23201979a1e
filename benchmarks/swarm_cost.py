"""Claim: a request costs little more than its model, and a swarm is there in seconds.

Processor time of the gateway and of its hosts per request; the client is a process of its own and
not counted. Answers a second and the time of a request, what a hop takes beyond its compute, how
soon a killed host is felt, and how soon four hosts are up. What a host of four blocks takes:
memory, processor time, and time where it gets a quarter of a core, as a small ARM computer has.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.export import export_model
from layershuffle.gateway.brain.settings import DEFAULT_MODEL
from layershuffle.gateway.brain.state import Visit
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.served_model import RemoteModel, ServedModel, served_directory
from layershuffle.gateway.hosts.service import running_service
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.requests import Gateway
from layershuffle.gateway.http.start import local_hosts
from layershuffle.ground.bundled import asset

CLIENTS = 2
BOUNDS = {4: Bound("at_most", 6.5), 1: Bound("at_most", 4.8)}
ANSWERS = {1: Bound("at_least", 250), 4: Bound("at_least", 220), 6: Bound("at_least", 200)}
WIDE = "timm:vit_base_patch16_224?pretrained=false&depth=2"
"""Two blocks of a ViT-B/16: its states are 148 KiB in int8."""
VIT = "timm:vit_base_patch16_224?pretrained=false&depth=4&num_classes=100"
HELD = {
    ("digits", "fp32"): Bound("at_most", 75),
    ("ViT-B/16", "int8"): Bound("at_most", 160),
    ("ViT-B/16", "fp32"): None,
}
"""Megabytes of a host that holds four blocks."""
RUNS, STANDS = 0.025, 0.075  # seconds
TICK = 1000 / os.sysconf("SC_CLK_TCK")
# Standard library alone, so that it starts at once and takes little of the machine. It asks for all
# blocks, because answers in part would cost less.
CLIENT = """
import http.client, statistics, sys, threading, time
port, count, clients = map(int, sys.argv[1:])
body = sys.stdin.buffer.read()
path = "/v1/classify?confidence=off&deadline_ms=30000"
wrong, times = [], []
def ask(count):
    gateway = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(count):
        begun = time.perf_counter()
        gateway.request("POST", path, body)
        answer = gateway.getresponse()
        text = answer.read()
        times.append(1000 * (time.perf_counter() - begun))
        if answer.status != 200 or b'"degraded":false' not in text:
            wrong.append(text)
asking = [threading.Thread(target=ask, args=(count // clients,)) for _ in range(clients)]
begun = time.perf_counter()
for thread in asking: thread.start()
for thread in asking: thread.join()
seconds = time.perf_counter() - begun
print(len(wrong), len(times) / seconds, statistics.median(times), wrong[:1])
"""
# Asks until its standard input is closed. A line for each request: when it was sent, its
# milliseconds and its status.
STEADY = """
import http.client, sys, threading, time
port, size, clients = map(int, sys.argv[1:])
body = sys.stdin.buffer.read(size)
path = "/v1/classify?confidence=off&deadline_ms=2000"
over = threading.Event()
def ask():
    gateway = http.client.HTTPConnection("127.0.0.1", port)
    while not over.is_set():
        sent = time.monotonic()
        gateway.request("POST", path, body)
        answer = gateway.getresponse()
        answer.read()
        lines.append(f"{sent} {1000 * (time.monotonic() - sent)} {answer.status}")
        time.sleep(0.02)
lines = []
failed = []
threading.excepthook = failed.append
asking = [threading.Thread(target=ask) for _ in range(clients)]
for thread in asking: thread.start()
sys.stdin.buffer.read()
over.set()
for thread in asking: thread.join()
print("\\n".join(lines))
sys.exit(len(failed))
"""


def processor_ms(pids: Iterable[int]) -> float:
    """Processor time of these processes so far."""
    spent = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += TICK * (int(fields[11]) + int(fields[12]))
    return spent


def megabytes(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@asynccontextmanager
async def swarm_of(
    model: str, hosts: int, *, blocks: int = 64
) -> AsyncIterator[tuple[Coordinator, RemoteModel]]:
    """A swarm of processes of this machine, all of them up, with room for so many blocks."""
    served = ServedModel(served_directory(model))
    async with (
        running_service(served, token="of a benchmark") as (coordinator, remote_model),
        local_hosts(coordinator, hosts, memory=blocks * served.weights[0].size),
    ):
        missing = await coordinator.ready(hosts, within=120, say=lambda _: None)
        assert not missing, missing
        yield coordinator, remote_model


@asynccontextmanager
async def gateway_of(coordinator: Coordinator, remote_model: RemoteModel) -> AsyncIterator[int]:
    """The port of a gateway to a swarm, which listens inside."""
    limits = GatewayLimits()
    gateway = Gateway(remote_model, coordinator, limits=limits)
    async with listening(create_app(gateway), limits=limits) as (listener, _):
        gc.collect()
        gc.freeze()  # as `swarm up` does
        yield listener.port


async def cost(hosts: int, *, effort: Effort) -> ClaimRow:
    """Requests through the gateway, `CLIENTS` at a time."""
    count, turns = (4, 1) if effort is SMOKE else (200, 5)
    body = asset("digit-pair.png").read_bytes()
    totals, parts = [], []
    async with swarm_of(DEFAULT_MODEL, hosts) as swarm, gateway_of(*swarm) as port:
        await asked(port, body, count=count)  # warms it up
        groups = [os.getpid()], [*swarm[0].children.pids.values()]
        for _ in range(turns):
            before = [processor_ms(group) for group in groups]
            await asked(port, body, count=count)
            after = [processor_ms(group) for group in groups]
            parts.append([(b - a) / count for a, b in zip(before, after, strict=True)])
            totals.append(sum(parts[-1]))
        memory = statistics.median(map(megabytes, groups[1]))
    gateway, blocks = (statistics.median(part) for part in zip(*parts, strict=True))
    return ClaimRow(
        name=f"a request, blocks in {hosts} process{'es' if hosts > 1 else ''}",
        what="processor time of all processes,",
        values=tuple(totals),
        unit="ms",
        bound=None if effort is SMOKE else BOUNDS[hosts],
        settings={"model": DEFAULT_MODEL, "clients": CLIENTS},
        facts={
            "gateway_ms": gateway,
            "hosts_ms": blocks,
            "host_mb": memory,
            "load": os.getloadavg()[0],
        },
    )


async def asked(
    port: int, body: bytes, *, count: int, clients: int = CLIENTS
) -> tuple[float, float]:
    """So many requests from a process of its own: answers a second, median milliseconds of one.

    Raises `AssertionError` for one not whole.
    """
    words = [sys.executable, "-c", CLIENT, str(port), str(count), str(clients)]
    client = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await client.communicate(body)
    wrong, rate, median, _ = output.split(maxsplit=3)
    assert wrong == b"0", output
    return float(rate), float(median)


async def answers(hosts: int, *, clients: int) -> ClaimRow:
    """Requests as fast as they are answered: how many a second, or of one client how long each."""
    body, alone = asset("digit-pair.png").read_bytes(), clients == 1
    async with swarm_of(DEFAULT_MODEL, hosts) as swarm, gateway_of(*swarm) as port:
        await asked(port, body, count=80, clients=clients)  # warms it up
        turns = [await asked(port, body, count=160, clients=clients) for _ in range(5)]
    return ClaimRow(
        name=f"{clients} client{'' if alone else 's'}, {hosts} host{'s' if hosts > 1 else ''}",
        what="time of a request, all blocks," if alone else "answers with all blocks,",
        values=tuple(median if alone else rate for rate, median in turns),
        unit="ms" if alone else "a second",
        bound=Bound("at_most", 6) if alone else ANSWERS[hosts],
        facts={"load": os.getloadavg()[0]},
    )


async def hop(*, count: int) -> ClaimRow:
    """Visits of one block after another, one at a time: time beyond the block's own compute."""
    async with swarm_of(WIDE, 1) as (coordinator, _):
        state, times = coordinator.model.sample, []
        for number in range(count + 3):
            begun = time.perf_counter()
            visit = Visit("host-1", number % 2, 30.0)
            answer = await coordinator.connected.visit(visit, state, form="int8")
            times.append(1000 * (time.perf_counter() - begun) - answer.compute_ms)
    return ClaimRow(
        name="a hop, 148 KiB (int8)",
        what="visit of one block less its compute,",
        values=tuple(times[3:]),
        unit="ms",
        bound=Bound("at_most", 1.2),
        settings={"model": WIDE, "state": list(np.shape(state))},
        facts={"load": os.getloadavg()[0]},
    )


async def felt(*, count: int) -> ClaimRow:
    """A host is killed: until its connection has ended, and with it its visits."""
    times = []
    async with swarm_of(DEFAULT_MODEL, 2) as (coordinator, _):
        for _ in range(count):
            begun = time.perf_counter()
            coordinator.children.signal("host-1", signal.SIGKILL)
            while "host-1" in coordinator.connected:
                await asyncio.sleep(0)
            times.append(1000 * (time.perf_counter() - begun))
            while not coordinator.router.swarm["host-1"].usable:
                await asyncio.sleep(0.05)
    return ClaimRow(
        name="a host is killed (SIGKILL)",
        what="until its visits have failed,",
        values=tuple(times),
        unit="ms",
        bound=Bound("at_most", 20),
        facts={"load": os.getloadavg()[0]},
    )


async def dying() -> ClaimRow:
    """Two of six hosts are killed at once: requests of the second after it, against the one before.

    They are started again after that second, since on one machine their start takes the processor
    from the others. A host that dies again and again is started later each time, so all take turns.
    """
    body = asset("digit-pair.png").read_bytes()
    calm: list[float] = []
    killed: list[float] = []
    turns: list[float] = []
    async with swarm_of(DEFAULT_MODEL, 6) as swarm, gateway_of(*swarm) as port:
        coordinator = swarm[0]
        names = coordinator.children.names
        await asked(port, body, count=80)  # warms it up
        for _ in range(5):
            words = [sys.executable, "-c", STEADY, str(port), str(len(body)), str(CLIENTS)]
            client = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert client.stdin is not None
            client.stdin.write(body)
            kills: list[float] = []
            for victims in (names[:2], names[2:4], names[4:]):
                await asyncio.sleep(1.5)
                kills.append(time.monotonic())
                for victim in victims:
                    coordinator.children.hold(victim)
                    coordinator.children.signal(victim, signal.SIGKILL)
                await asyncio.sleep(1.0)
                for victim in victims:
                    coordinator.children.release(victim)
                missing = await coordinator.ready(6, within=60, say=lambda _: None)
                assert not missing, missing
                assert coordinator.router.swarm.usable_hosts == 6
            client.stdin.close()
            output, _ = await client.communicate()
            assert client.returncode == 0, "a request failed"
            before, after = requests_of(output.decode(), kills)
            calm += before
            killed += after
            turns.append(most_ms(after) / most_ms(before))
    return ClaimRow(
        name="two of six hosts are killed (SIGKILL)",
        what="99 % of the requests sent in the next second: time / of calm ones,",
        # Of all turns together: the two slowest of a turn's requests would decide on it.
        values=(most_ms(killed) / most_ms(calm),),
        bound=Bound("at_most", 1.5),
        facts={
            "turns": turns,
            "calm_p99_ms": most_ms(calm),
            "killed_p99_ms": most_ms(killed),
            "calm_requests": len(calm),
            "killed_requests": len(killed),
            "load": os.getloadavg()[0],
        },
    )


def requests_of(output: str, kills: Iterable[float]) -> tuple[list[float], list[float]]:
    """The milliseconds of requests sent in the second before each kill, and in the one after it.

    `output` is that of `STEADY`. Raises `AssertionError` for a request that was not answered.
    """
    calm: list[float] = []
    killed: list[float] = []
    for line in output.splitlines():
        sent, ms, status = line.split()
        assert status == "200", line
        for kill in kills:
            if kill - 1 <= float(sent) < kill:
                calm.append(float(ms))
            if kill <= float(sent) < kill + 1:
                killed.append(float(ms))
    return calm, killed


def most_ms(times: list[float]) -> float:
    """The time within which 99 % of the requests were answered."""
    return statistics.quantiles(times, n=100)[98]


async def up() -> ClaimRow:
    """Four hosts, once this process has imported what it needs."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        async with swarm_of(DEFAULT_MODEL, 4):
            times.append(time.perf_counter() - begun)
    return ClaimRow(
        name="four hosts of this machine",
        what="until all hold their blocks,",
        values=tuple(times),
        unit="s",
        bound=Bound("at_most", 3),
        facts={"load": os.getloadavg()[0]},
    )


async def taken(model: str, precision: str, *, visits: int) -> list[ClaimRow]:
    """What a host takes that holds four blocks, visited one after the other."""
    with tempfile.TemporaryDirectory() as place:
        spec, hosts = DEFAULT_MODEL, 3  # of four blocks each
        if model != "digits":
            spec, hosts = f"{place}/model", 1
            export_model(VIT, Path(spec), precision=precision, data="digit-pairs?test=20")
        async with swarm_of(spec, hosts, blocks=4) as (coordinator, _):
            pid = coordinator.children.pids["host-1"]
            held = sorted(coordinator.router.swarm["host-1"].blocks)
            assert len(held) == 4

            async def visited(number: int) -> float:
                visit = Visit("host-1", held[number % 4], 30.0)
                begun = time.perf_counter()
                await coordinator.connected.visit(visit, coordinator.model.sample, form="int8")
                return 1000 * (time.perf_counter() - begun)

            memory, spent = [], []
            for _ in range(5):
                before = processor_ms([pid])
                for number in range(visits):
                    await visited(number)
                spent.append((processor_ms([pid]) - before) / visits)
                memory.append(megabytes(pid))
            throttle = asyncio.create_task(throttled(pid))
            slow = [await visited(number) for number in range(40)]
            throttle.cancel()
    name = f"host of 4 blocks: {model}, {precision}"
    facts = {"load": os.getloadavg()[0]}
    bound = HELD[model, precision]
    return [
        ClaimRow(
            name=name, what=what, values=tuple(values), unit=unit, bound=limit, facts=facts,
            settings={"model": spec if model == "digits" else VIT},
        )
        for what, values, unit, limit in (
            ("memory,", memory, "MB", bound),
            ("processor time per visit,", spent, "ms", None),
            ("visit, a quarter of a core,", slow, "ms", None),
        )
    ]  # fmt: skip


async def throttled(pid: int) -> None:
    """Let a process run a quarter of the time, until cancelled."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STANDS)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(RUNS)
    finally:
        os.kill(pid, signal.SIGCONT)


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """One host first."""
    yield asyncio.run(cost(1, effort=effort))
    if effort is SMOKE:
        return
    yield asyncio.run(cost(4, effort=effort))
    for hosts in ANSWERS:
        yield asyncio.run(answers(hosts, clients=8))
    yield asyncio.run(answers(6, clients=1))
    yield asyncio.run(hop(count=40))
    yield asyncio.run(felt(count=5))
    yield asyncio.run(dying())
    yield asyncio.run(up())
    for model, precision in HELD:
        visits = 200 if model == "digits" else 12
        yield from asyncio.run(taken(model, precision, visits=visits))


CLAIM = Claim(theme="swarm-cost", text=__doc__.split("\n")[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
