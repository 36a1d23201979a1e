"""Claim: hosts fail in twelve ways, and no request is lost or late while a host is left.

Besides the claim it writes docs/results/tables/swarm-drill.csv, a line for each way.

A gateway and its hosts, each a real process. Test images with known classes are sent while hosts
fail in one way after the other; each answer is compared with what the calibration lets expect.
Where the swarm has to recover by itself (killed processes are started again, liars are shut out),
the time until it is whole counts from the failure; where the failure lasts until it is mended, from
then.
"""

from __future__ import annotations

import asyncio
import csv
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.gateway.brain.settings import DEFAULT_MODEL
from layershuffle.gateway.client.client import AsyncSwarmClient
from layershuffle.gateway.client.judging import COLUMNS, Ask, Reply, asking, cells, judged, sent
from layershuffle.gateway.client.labelled import labelled_images
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.served_model import ServedModel, served_directory
from layershuffle.gateway.hosts.service import running_service
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.requests import Gateway
from layershuffle.gateway.http.start import local_hosts
from layershuffle.models import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # where the faults are

from simulation.chaos import FaultInjector
from simulation.faults import SCENARIOS, ScenarioName

TABLE = Path(__file__).resolve().parent.parent / "docs" / "results" / "tables" / "swarm-drill.csv"
SHOWN: dict[ScenarioName, str] = {
    "third": "a third killed, for good",
    "all-but-one": "all but one killed",
    "all": "all killed",
    "frozen": "one frozen",
    "slow": "one ten times slower",
    "cut": "one cut off",
    "lossy": "one behind a link of 200 ms that loses a fifth",
    "restless": "one comes back every second",
    "leaving": "one leaves, and comes back",
    "liar": "one always lies",
    "rare-liar": "one lies in 1 % of its answers",
    "canary-liar": "one lies, but not to canaries",
}
"""What the table calls the scenarios."""
HOSTS, REQUESTS = 4, 300
DEADLINE_MS = 2000.0
LOOK = 0.05  # seconds between looks at the hosts
RECOVERY = 60.0  # seconds after which a recovery is no longer waited for
BACK = 180.0  # seconds for all hosts to come back, on a slow machine


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Breaks the hosts of `coordinator` by `injector`, while `ask` sends `requests` requests."""

    coordinator: Coordinator
    injector: FaultInjector
    ask: Ask
    requests: int

    async def play(self, name: ScenarioName) -> tuple[list[Reply], float | None]:
        """The replies, and the seconds until the swarm was whole again, `None` if it was not seen.

        Everything is mended at the end.
        """
        scenario = SCENARIOS[name]
        hosts = self.coordinator.children.names
        victims = scenario.victims(hosts)
        watches: list[asyncio.Task[float | None]] = []

        async def break_hosts() -> None:
            begun = time.perf_counter()
            for host in victims:
                await self.injector.inject(host, scenario.kind)
            if not scenario.lasts:
                killed = scenario.kind == "kill"
                watches.append(asyncio.create_task(self._recovery(victims, begun, killed=killed)))

        async def mend_hosts() -> None:
            watches.append(asyncio.create_task(self._mended(victims)))

        events: dict[int, Callable[[], Awaitable[None]]] = {self.requests // 4: break_hosts}
        if scenario.lasts:
            events[3 * self.requests // 4] = mend_hosts
        try:
            replies = await sent(self.ask, self.requests, events=events)
            (watch,) = watches
            # A host that lies now and then is found only while requests go on.
            while not watch.done():
                replies.append(await self.ask(len(replies)))
            whole = watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            await self._mended(victims)
        return replies, whole

    async def _recovery(
        self, victims: Sequence[str], begun: float, *, killed: bool
    ) -> float | None:
        """Seconds since `begun` until killed hosts are back, or liars are shut out."""
        children = {*self.coordinator.children.names}
        if killed:
            # A killed host may still count as healthy for a moment.
            await self._until(lambda: self._healthy() != children, within=1.0)
            recovered = await self._until(lambda: self._healthy() >= children, within=RECOVERY)
        else:
            gone = {*victims}
            recovered = await self._until(lambda: not self._healthy() & gone, within=RECOVERY)
        return time.perf_counter() - begun if recovered else None

    async def _mended(self, victims: Sequence[str]) -> float | None:
        """Bring the victims back; the seconds that it took."""
        begun = time.perf_counter()
        for host in victims:
            await self.injector.inject(host, "rejoin")
        back = await self._until(lambda: self._healthy() >= {*victims}, within=BACK)
        return time.perf_counter() - begun if back else None

    def _healthy(self) -> set[str]:
        return {host.name for host in self.coordinator.router.swarm.values() if host.usable}

    async def _until(self, holds: Callable[[], bool], *, within: float) -> bool:
        """Whether `holds` comes to be true within so many seconds."""
        end = time.perf_counter() + within
        while time.perf_counter() <= end:
            if holds():
                return True
            await asyncio.sleep(LOOK)
        return False


async def measure(scenarios: Sequence[ScenarioName], requests: int) -> list[ClaimRow]:
    """A row for each scenario, all on one swarm."""
    model = ServedModel(served_directory(DEFAULT_MODEL))
    calibration = model.calibration
    assert calibration is not None
    images = labelled_images(load(DEFAULT_MODEL), calibration.data, count=requests)
    rows = []
    async with (
        running_service(model, token=secrets.token_hex()) as (coordinator, remote_model),
        local_hosts(coordinator, HOSTS),
    ):
        await coordinator.ready(HOSTS, within=60)
        gateway = Gateway(remote_model, coordinator, model=DEFAULT_MODEL)
        transport = httpx.ASGITransport(app=create_app(gateway))
        async with AsyncSwarmClient("http://127.0.0.1", patience=0, transport=transport) as client:
            ask = asking(client, images, deadline_ms=DEADLINE_MS, patient=True)
            injector = FaultInjector(coordinator)
            drill = Drill(coordinator=coordinator, injector=injector, ask=ask, requests=requests)
            for name in scenarios:
                replies, whole = await drill.play(name)
                rows.append(row_of(name, replies, whole))
    return rows


def row_of(name: ScenarioName, replies: Sequence[Reply], whole: float | None) -> ClaimRow:
    """The requests of a scenario that were lost or late, and what became of the others."""
    lost = sum(reply.ended in ("failed", "late") for reply in replies)
    shown = cells(replies, judged(replies))
    return ClaimRow(
        name=name,
        what="requests lost or late",
        values=(float(lost),),
        # Without any host no request can be answered for a while.
        bound=None if name == "all" else Bound("equal", 0),
        settings={"hosts": HOSTS, "requests": len(replies), "deadline_ms": DEADLINE_MS},
        facts={**dict(zip(COLUMNS, shown, strict=True)), "whole_s": whole},
    )


def write_table(measured: Sequence[ClaimRow]) -> None:
    """Write the CSV file of the page."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        columns = ("scenario", "requests", *COLUMNS, "whole_s")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in measured:
            requests = row.settings["requests"]
            writer.writerow({"scenario": SHOWN[row.name], "requests": requests, **row.facts})


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """All scenarios; in little the first alone, with few requests."""
    if effort is SMOKE:
        yield from asyncio.run(measure([*SCENARIOS][:1], 24))
    else:
        measured = asyncio.run(measure([*SCENARIOS], REQUESTS))
        write_table(measured)
        yield from measured


CLAIM = Claim(theme="swarm-drill", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
