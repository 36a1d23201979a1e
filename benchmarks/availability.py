"""Claim: while hosts and gateways are killed, every request to a model on six hosts is answered.

    python benchmarks/availability.py [--minutes 60]

Two gateways and six hosts, each a process that its command starts. Four clients know both gateways
and ask four times a second, or without a pause while they lag behind that. Every ten seconds a host
is killed, and each gateway once; what was killed is started again after a second, as systemd does
it. A request has failed if neither gateway answers it, and nobody asks a third time.

In an hour it also writes docs/results/tables/availability.csv, a line for each minute, for ten
minutes each and for all of them, and draws docs/availability.svg from the minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.gateway.brain.settings import DEFAULT_MODEL
from layershuffle.gateway.client.client import AsyncSwarmClient, SwarmError
from layershuffle.gateway.client.judging import Ended, Labelled, ends_and_times
from layershuffle.gateway.client.labelled import labelled_images
from layershuffle.ground.plotting import (
    INK,
    STYLES,
    draw_legend,
    figure_bytes,
    new_figure,
    style_axes,
)
from layershuffle.ground.stats import mean
from layershuffle.models import load

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE = DOCS / "results" / "tables" / "availability.csv"
FIGURE = DOCS / "availability.svg"
CLIENTS = 4
GATEWAYS = 2
PER_SECOND = 4.0  # requests of each client
DEADLINE_MS = 2000.0
COPIES = 2  # of each block, as `swarm up` has them
AWAY = 1.0  # seconds after which a killed process is started again
STARTS = 180.0  # seconds for a swarm to be whole, on a busy machine
LOOK = 0.1  # seconds between looks at a swarm that starts
TEN = 10  # minutes that a line of the page sums up
PAGE_MINUTES = 60  # what the page's table and figure are of; a shorter run does not replace them
SHARES = ("failed", "late", "in_part", "right")
COLUMNS = ("minute", "requests", *SHARES, "half_ms", "most_ms", "killed", "load")


@dataclass(frozen=True, kw_only=True)
class Churn:
    """How long requests are sent, to how many hosts, and after how many seconds one is killed."""

    seconds: float
    hosts: int = 6
    every: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a request ended that was sent at `at` seconds, and the milliseconds that it took.

    `why` is the client's error if nobody answered.
    """

    at: float
    ended: Ended
    right: bool
    ms: float
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was killed, at `at` seconds, and what a gateway took to have all blocks again."""

    name: str
    at: float
    back: float | None = None


class Program:
    """A process of a command, whose output goes to a file. It is ended when the context is."""

    def __init__(self, name: str, words: Sequence[str], *, log: Path) -> None:
        self.name = name
        self.log = log
        self._words = words
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def kill(self) -> None:
        """Send it SIGKILL, and start it again after `AWAY` seconds."""
        assert self._process is not None
        assert self._process.returncode is None, f"{self.name} ended by itself:\n{self.said()}"
        self._process.kill()
        await self._process.wait()
        await asyncio.sleep(AWAY)
        await self.start()

    async def end(self) -> None:
        """End it by SIGTERM."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    def said(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-2000:]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The programs of a swarm, and the addresses of its gateways."""

    gateways: Sequence[Program]
    hosts: Sequence[Program]
    urls: Sequence[str]


@asynccontextmanager
async def swarm_of(hosts: int) -> AsyncIterator[Started]:
    """Two gateways with the same hosts, all of them up, by the commands of docs/pis.md."""
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(GATEWAYS)]
    layershuffle = [sys.executable, "-m", "layershuffle"]
    host = [sys.executable, "-m", "layershuffle_host"]
    dialled = [url.replace("http", "ws", 1) for url in urls]
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token = place / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        gateways: list[Program] = []
        for number, url in enumerate(urls, start=1):
            words = [*layershuffle, "swarm", "up", "--hosts", "0", "--token-file", str(token)]
            words += ["--port", url.rpartition(":")[2], "--state", str(place / f"state-{number}")]
            name = f"gateway {number}"
            gateways.append(Program(name, words, log=place / f"gateway-{number}.log"))
        programs: list[Program] = []
        for number in range(1, hosts + 1):
            name = f"host-{number}"
            words = [*host, *dialled, "--token-file", str(token), "--name", name]
            words += ["--cache", str(place / "cache")]
            programs.append(Program(name, words, log=place / f"{name}.log"))
        for program in [*gateways, *programs]:
            stack.push_async_callback(program.end)
            await program.start()
        for url, gateway in zip(urls, gateways, strict=True):
            whole = await until_whole(url, hosts=hosts)
            assert whole is not None, f"{gateway.name} has not all blocks:\n{gateway.said()}"
        yield Started(gateways=gateways, hosts=programs, urls=urls)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in taken]
    for server in taken:
        server.close()
    return ports


async def until_whole(url: str, *, hosts: int) -> float | None:
    """Seconds until so many hosts of a gateway are healthy, with two copies of each block.

    `None` if that takes longer than `STARTS`.
    """
    begun = time.monotonic()
    async with AsyncSwarmClient(url, patience=0) as client:
        while time.monotonic() - begun < STARTS:
            await asyncio.sleep(LOOK)
            try:
                swarm = await client.swarm()
            except SwarmError:
                continue
            healthy = [host for host in swarm.hosts if host.condition == "healthy"]
            first, last = swarm.fixed  # which the gateway runs itself
            hosted = range(first, swarm.depth - last)
            copies = [sum(block in h.blocks for h in healthy) for block in hosted]
            if len(healthy) >= hosts and min(copies) >= COPIES:
                return time.monotonic() - begun
    return None


async def ask(client: AsyncSwarmClient, labelled: Labelled, *, at: float) -> Request:
    """Send one image, for which all blocks are to run."""
    begun = time.monotonic()
    try:
        answer = await client.classify(
            labelled.image, deadline_ms=DEADLINE_MS, confidence="off", top=1
        )
    except SwarmError as error:
        ms = 1000 * (time.monotonic() - begun)
        return Request(at=at, ended="failed", right=False, ms=ms, why=str(error))
    ms = 1000 * (time.monotonic() - begun)
    ended: Ended = "degraded" if answer.degraded else "answered"
    if ms > DEADLINE_MS:
        ended = "late"
    return Request(at=at, ended=ended, right=answer.top[0].index == labelled.label, ms=ms)


async def measure(churn: Churn) -> tuple[list[Request], list[Kill], list[tuple[float, float]]]:
    """All requests, what was killed, and the load of the machine at times in seconds."""
    images = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=1000)
    requests: list[Request] = []
    kills: list[Kill] = []
    loads: list[tuple[float, float]] = []
    async with swarm_of(churn.hosts) as swarm:
        begun = time.monotonic()

        async def until(at: float) -> float:
            """Sleep until `at` seconds; returns the seconds that it is."""
            await asyncio.sleep(begun + at - time.monotonic())
            return time.monotonic() - begun

        async def send(number: int) -> None:
            """Requests of one client. Half of the clients ask the second gateway first."""
            first = number % GATEWAYS
            urls = [*swarm.urls[first:], *swarm.urls[:first]]
            # Without patience every gateway is asked once.
            async with AsyncSwarmClient(*urls, patience=0) as client:
                for turn in range(round(churn.seconds * PER_SECOND)):
                    at = await until((turn + number / CLIENTS) / PER_SECOND)
                    if at >= churn.seconds:  # a client that was held up asks no longer than others
                        break
                    image = images[(turn * CLIENTS + number) % len(images)]
                    requests.append(await ask(client, image, at=at))

        async def kill_hosts() -> None:
            """One after the other; the next one dies whether or not the last one is back."""
            async with asyncio.TaskGroup() as restarts:
                for turn in range(int((churn.seconds - 1) / churn.every)):
                    at = await until((turn + 1) * churn.every)
                    host = swarm.hosts[turn % churn.hosts]
                    kills.append(Kill(name=host.name, at=at))
                    restarts.create_task(host.kill())

        async def kill_gateways() -> None:
            """Each once, after a third and after two thirds of the time."""
            for number, gateway in enumerate(swarm.gateways):
                at = await until(churn.seconds * (number + 1) / (GATEWAYS + 1))
                await gateway.kill()
                # A host may be away at that moment.
                whole = await until_whole(swarm.urls[number], hosts=churn.hosts - 1)
                back = None if whole is None else AWAY + whole
                kills.append(Kill(name=gateway.name, at=at, back=back))

        async def look() -> None:
            """Note the load, six times a minute."""
            for turn in range(math.ceil(churn.seconds / 10)):
                at = await until(10.0 * turn)
                loads.append((at, os.getloadavg()[0]))

        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(send(number))
            tasks.create_task(kill_hosts())
            tasks.create_task(kill_gateways())
            tasks.create_task(look())
    return requests, kills, loads


def line_of(
    minute: str,
    requests: Sequence[Request],
    kills: Sequence[Kill],
    loads: Sequence[tuple[float, float]],
) -> dict[str, str]:
    """A line of the table; shares in percent of the requests."""
    figures = ends_and_times([(request.ended, request.ms) for request in requests])
    hosts = sum(kill.name.startswith("host") for kill in kills)
    killed = [f"{hosts} hosts", *(k.name for k in kills if k.name.startswith("gateway"))]
    return {
        "minute": minute,
        "requests": str(len(requests)),
        "failed": f"{figures['failed']:.6g}",
        "late": f"{figures['late']:.6g}",
        "in_part": f"{figures['degraded']:.6g}",
        "right": f"{100 * mean([request.right for request in requests]):.6g}",
        "half_ms": f"{figures['ms_median']:.6g}",
        "most_ms": f"{figures['ms_p99']:.6g}",
        "killed": ", ".join(killed),
        "load": f"{mean([load for _, load in loads]):.6g}",
    }


def lines_of(
    requests: Sequence[Request], kills: Sequence[Kill], loads: Sequence[tuple[float, float]]
) -> list[dict[str, str]]:
    """A line for each minute, by when requests were sent, for ten minutes each, and for all."""
    minutes = 1 + int(max(request.at for request in requests) / 60)
    spans = {str(minute + 1): range(60 * minute, 60 * (minute + 1)) for minute in range(minutes)}
    for first in range(0, minutes, TEN):
        spans[f"{first + 1} to {min(first + TEN, minutes)}"] = range(60 * first, 60 * (first + TEN))
    lines: list[dict[str, str]] = []
    for name, inside in spans.items():
        line = line_of(
            name,
            [request for request in requests if int(request.at) in inside],
            [kill for kill in kills if int(kill.at) in inside],
            [(at, load) for at, load in loads if int(at) in inside],
        )
        lines.append(line)
    lines.append(line_of("all", requests, kills, loads))
    return lines


def write_table(lines: Sequence[dict[str, str]]) -> None:
    """Write the CSV file of the page."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def draw(lines: Sequence[dict[str, str]]) -> None:
    """Draw the figure: on the left shares of the requests, on the right times, minute by minute."""
    minutes = [line for line in lines if line["minute"].isdecimal()]
    numbers = [int(line["minute"]) for line in minutes]
    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    entries: list[tuple[Any, str]] = []
    for axes, names in (
        (left, {"failed": "failed", "late": "late", "in_part": "in part"}),
        (right, {"half_ms": "half within", "most_ms": "99 % within"}),
    ):
        for column, name in names.items():
            values = [float(line[column]) for line in minutes]
            colour, marker, dash = STYLES[1 + len(entries)]
            (drawn,) = axes.plot(
                numbers, values, color=colour, marker=marker, linestyle=dash, markersize=3
            )
            entries.append((drawn, name))
        axes.set(xlabel="minute", ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        for line in minutes:
            if "gateway" in line["killed"]:
                mark = axes.axvline(int(line["minute"]), color=INK, linewidth=1, linestyle=":")
    entries.append((mark, "a gateway is killed"))
    left.set(ylabel="of all requests, %", ylim=(-0.2, max(2.0, left.get_ylim()[1])))
    right.set(ylabel="ms")
    style_axes(left, "Requests that did not get a whole answer in time")
    style_axes(right, "Time of a request")
    draw_legend(figure, entries)
    FIGURE.write_bytes(figure_bytes(figure, "svg"))


def row_of(churn: Churn, requests: Sequence[Request], kills: Sequence[Kill]) -> ClaimRow:
    """The requests that nobody answered."""
    failed = [request for request in requests if request.ended == "failed"]
    figures = ends_and_times([(request.ended, request.ms) for request in requests])
    return ClaimRow(
        name=f"{churn.seconds / 60:g} minutes, {len(requests)} requests",
        what="of which nobody answered",
        values=(float(len(failed)),),
        bound=Bound("equal", 0),
        settings={
            "clients": CLIENTS, "gateways": GATEWAYS, "hosts": churn.hosts, "copies": COPIES,
            "requests_per_s": PER_SECOND * CLIENTS, "deadline_ms": DEADLINE_MS,
            "killed_every_s": churn.every, "seconds": churn.seconds,
        },
        facts={
            **figures,
            "right": 100 * mean([request.right for request in requests]),
            "hosts_killed": sum(kill.name.startswith("host") for kill in kills),
            "gateways_back_s": [kill.back for kill in kills if kill.name.startswith("gateway")],
            "reasons": sorted({request.why for request in failed}),
            "late_at_s": [round(r.at, 1) for r in requests if r.ended == "late"],
            "killed_at_s": {k.name: round(k.at, 1) for k in kills if k.name.startswith("gateway")},
            "load": os.getloadavg()[0],
        },
    )  # fmt: skip


def rows(effort: Effort, *, minutes: float) -> Iterator[ClaimRow]:
    """One row; in little for some seconds with three hosts. An hour or more writes table and figure
    of the page."""
    churn = Churn(seconds=60 * minutes)
    if effort is SMOKE:
        churn = Churn(seconds=6.0, hosts=3, every=2.0)
    requests, kills, loads = asyncio.run(measure(churn))
    if churn.seconds >= 60 * PAGE_MINUTES:
        lines = lines_of(requests, kills, loads)
        write_table(lines)
        draw(lines)
    yield row_of(churn, requests, kills)


def main() -> int:
    """Measure the claim for as long as the command line says."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--minutes", type=float, default=2.0)
    options, rest = parser.parse_known_args()
    claim = Claim(
        theme="availability",
        text=__doc__.splitlines()[0].removeprefix("Claim: "),
        rows=lambda effort: rows(effort, minutes=options.minutes),
    )
    return run_claim(claim, __file__, tell=print, argv=rest)


if __name__ == "__main__":
    sys.exit(main())
