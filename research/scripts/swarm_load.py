# Ran at commit 8550626.
"""A swarm under load, while its hosts die: 12 blocks on six processes, over Ray.

python benchmarks/swarm_load.py [--requests 1000] [--memory-requests 5000] [--busy N] [--out FILE]
                                [--smoke]

1. order-free: requests of labelled digits through the gateway, a third of the hosts SIGKILLed at
   seeded moments. None may fail or be late, and the accuracy must be what the calibration lets
   expect.
2. sequential: the same requests and kills; the share that fails.
3. one host ten times slower: what it adds to the 99th percentile.
4. many requests while no host fails: how many are answered in part all the same, and the memory
   of every process, those of Ray among them.

`--busy` starts so many other programs that want a core each beside the last part, as on a busy
machine.

Writes a JSON file with versions and hardware; exit code 1 if a promise is broken. `--smoke` runs it
in seconds, within one process, and judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layershuffle.machine import hardware, versions
from layershuffle.models import load
from layershuffle.swarm.chaos import Fault, crashes
from layershuffle.swarm.client import AsyncSwarmClient
from layershuffle.swarm.drill import Drill, foreseen, judged, run_drill
from layershuffle.swarm.load_client import client_inside, labelled_images, load_client
from layershuffle.swarm.plan import DEFAULT_MODEL, SwarmPlan, even_plan
from layershuffle.swarm.ray_local import processes_of
from layershuffle.swarm.ray_session import local_ray
from layershuffle.swarm.service import Service, swarm_on

HOSTS, DEPTH, CONCURRENCY, DEADLINE_MS, SEED = 6, 12, 4, 2000.0, 0
SLOW_ADDS, MEMORY_GROWS = 0.5, 0.02
IN_PART = 1.0  # percent
BUSY = (sys.executable, "-c", "while True: pass")
SMOKES = 24, 20  # requests, and those for memory


class LoadedSwarm:
    """A service, a client of its gateway, and what was measured."""

    def __init__(self, service: Service, client: AsyncSwarmClient, images: Any) -> None:
        self.service, self.client, self.images = service, client, images
        self.ask = load_client(client, images, deadline_ms=DEADLINE_MS)

    async def drill(self, requests: int, faults: tuple[Fault, ...] = ()) -> Drill:
        return await run_drill(
            self.ask, requests, faults=faults, engine=self.service.faults,
            concurrency=CONCURRENCY,
        )  # fmt: skip

    async def mend(self, faults: tuple[Fault, ...]) -> None:
        """All hosts back, their averages fresh."""
        for name in sorted({fault.host for fault in faults}):
            await self.service.faults.inject(Fault(0, name, "rejoin"))
        async with asyncio.timeout(120):
            while any(not host.usable for host in self.service.router.swarm.values()):
                await asyncio.sleep(0.05)
        await self.drill(40)

    async def killed(self, routing: str, requests: int) -> dict[str, Any]:
        """Requests while a third of the hosts dies."""
        self.service.router.routing = routing  # type: ignore[assignment]
        faults = crashes(list(self.service.plan.hosts), share=1 / 3, requests=requests, seed=SEED)
        drill = await self.drill(requests, faults)
        replies = list(drill.replies.values())
        forecast = foreseen(self.service.plan, faults, requests=requests, routing=routing)  # type: ignore[arg-type]
        assert self.service.calibration is not None
        results = {
            "requests": requests,
            "kills": [f"{fault.host} before request {fault.at}" for fault in faults],
            **{name: drill.share(name) for name in ("answered", "degraded", "failed", "late")},  # type: ignore[arg-type]
            "foreseen": asdict(forecast),
            "p50_ms": drill.quantile(0.5),
            "p99_ms": drill.quantile(0.99),
            "accuracy": asdict(judged(replies, self.service.calibration)),
        }
        self.service.router.routing = "order-free"
        await self.mend(faults)
        return results

    async def slow(self, requests: int) -> dict[str, Any]:
        """The 99th percentile with one host ten times slower, against before and after."""
        name = next(iter(self.service.plan.hosts))
        faults = (Fault(0, name, "slow"),)
        before = await self.drill(requests // 2)
        during = await self.drill(requests, faults)
        await self.mend(faults)
        after = await self.drill(requests // 2)
        usual = (before.quantile(0.99) + after.quantile(0.99)) / 2
        return {
            "requests": requests,
            "p99_ms": usual,
            "p99_slow_ms": during.quantile(0.99),
            "adds": during.quantile(0.99) / usual - 1,
            "failed": during.share("failed", "late"),
            "degraded": during.share("degraded"),
        }

    async def memory(self, requests: int) -> dict[str, Any]:
        """Requests without a fault; memory of every process at a fifth of them and at the end."""
        first = await self.drill(requests // 5)
        early = await self._resident()
        rest = await self.drill(requests - requests // 5)
        late = await self._resident()
        parts = ("answered", "degraded", "failed", "late")
        replies = len(first.replies) + len(rest.replies)
        return {
            "requests": requests,
            "load": os.getloadavg()[0],
            **{
                part: sum(drill.share(part) * len(drill.replies) for drill in (first, rest))  # type: ignore[arg-type]
                / replies
                for part in parts
            },
            "p99_ms": rest.quantile(0.99),
            **{f"{kind}_mb": [early[kind] / 1e6, late[kind] / 1e6] for kind in early},
            "grows": max(late[kind] / early[kind] - 1 for kind in early),
        }

    async def _resident(self) -> dict[str, int]:
        """Resident bytes of every process of the swarm, by what it is."""
        backend = self.service.coordinator.backend
        infos = [await backend.call(name, "info") for name in self.service.plan.hosts]
        kinds = {info.pid: "hosts" for info in infos} | {os.getpid(): "gateway"}
        if token := os.environ.get("RAY_AUTH_TOKEN_PATH"):
            for pid in processes_of(Path(token).parent):
                kinds.setdefault(pid, Path(f"/proc/{pid}/comm").read_text().strip())
        page, sizes = os.sysconf("SC_PAGE_SIZE"), Counter[str]()
        for pid, kind in kinds.items():
            sizes[kind] += page * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return dict(sizes)


async def measured(plan: SwarmPlan, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one running swarm."""
    images = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=1000)
    results: dict[str, Any] = {}
    with nullcontext() if options.smoke else local_ray(list(plan.hosts)) as session:
        async with swarm_on(session, plan) as service, client_inside(service) as client:
            load_ = LoadedSwarm(service, client, images)
            await load_.drill(40)
            results["order-free"] = await load_.killed("order-free", options.requests)
            results["sequential"] = await load_.killed("sequential", options.requests)
            results["slow"] = await load_.slow(options.requests)
            with busy(options.busy):
                results["memory"] = await load_.memory(options.memory_requests)
    return results


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many other programs that want a core each."""
    programs = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def broken(results: dict[str, Any]) -> list[str]:
    """Promises that were not kept."""
    free, accuracy = results["order-free"], results["order-free"]["accuracy"]
    rules = {
        "order-free: a request failed": free["failed"] > 0,
        "order-free: a request was late": free["late"] > 0,
        "order-free: accuracy outside of the calibration": not (
            accuracy["low"] <= accuracy["top1"] <= accuracy["high"]
        ),
        "a slow host adds half to the 99th percentile": results["slow"]["adds"] >= SLOW_ADDS,
        "memory grows": results["memory"]["grows"] > MEMORY_GROWS,
        "no host failed: a request failed or was late": (
            results["memory"]["failed"] + results["memory"]["late"] > 0
        ),
        "no host failed: answers in part": results["memory"]["degraded"] >= IN_PART,
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


def main() -> int:
    """Measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--memory-requests", type=int, default=5000)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.requests, options.memory_requests = SMOKES
    results = asyncio.run(measured(even_plan(DEPTH, HOSTS), options))
    results |= {
        "busy": options.busy,
        "hosts": HOSTS, "concurrency": CONCURRENCY, "deadline_ms": DEADLINE_MS,
        "broken": [] if options.smoke else broken(results),
        "versions": versions(), "hardware": hardware("fp32"),
    }  # fmt: skip
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if results["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
