"""What runs on the head of `test_netns.py`: `python netns_head.py DIRECTORY IP`.

Starts a Ray head with our command, coordinator and router, and sends requests all the time, until
there is a file "stop". Every line of "log.jsonl" is one thing that happened, with the time of the
system's monotonic clock, which is the same outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.ray_config import HEAD_PORT, Tls, environment, head_command
from layershuffle.swarm.ray_hosts import RayHosts
from layershuffle.swarm.ray_session import check_answers, joined_ray
from layershuffle.swarm.router import Router
from waiting import HANGS

CLIENTS = 2
PAUSE = 0.01
KEPT_STATES = 6


class Log:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, what: str, **facts: Any) -> None:
        self._file.write(json.dumps({"t": time.monotonic(), "what": what, **facts}) + "\n")


def main(directory: Path, ip: str) -> None:
    if (directory / "stop").exists():
        return time.sleep(60)  # its supervisor started it once more
    log, token = Log(directory / "log.jsonl"), directory / "token"
    tls = Tls(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")
    begun = time.monotonic()
    head = subprocess.Popen(
        head_command(directory / "ray", ip=ip),
        env={**os.environ, **environment(token, tls=tls, store=directory / "store")},
    )
    address = f"{ip}:{HEAD_PORT}"
    wait_for(address, head)
    log("head", seconds=time.monotonic() - begun)
    with joined_ray(address, token=token, tls=tls) as session:
        log("joined", seconds=time.monotonic() - begun)
        asyncio.run(serve(session.ray, directory, log))
    head.terminate()


def wait_for(address: str, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANGS
    while True:
        try:
            return check_answers(address)
        except UsageError:
            if time.monotonic() > deadline or head.poll() is not None:
                raise
            time.sleep(0.2)


async def serve(ray: Any, directory: Path, log: Log) -> None:
    plan = SwarmPlan(**json.loads((directory / "plan.json").read_text()))
    bundle = pickle.loads((directory / "bundle.pickle").read_bytes())
    hosts = RayHosts(ray, limits=plan.limits)
    router = Router(hosts.transport, depth=bundle.depth, limits=plan.limits)
    coordinator = Coordinator(plan, router=router, backend=hosts, bundle=bundle)
    router.observers.append(
        lambda hop, before, after: log("hop", host=hop.host, outcome=hop.outcome, ms=hop.ms)
    )
    watch = asyncio.create_task(coordinator.run())
    missing = await coordinator.ready(within=2 * HANGS)
    up = [name for name in plan.hosts if name not in missing]
    pids = {name: (await hosts.call(name, "info")).pid for name in up}
    carriers = {name: (way.kind, way.why) for name, way in hosts.carriers().items()}
    log("ready", missing=missing, pids=pids, carriers=carriers)
    clients = [asyncio.create_task(ask(router, bundle, directory, log)) for _ in range(CLIENTS)]
    conditions: dict[str, str] = {}
    while not (directory / "stop").exists() and not watch.done():
        now = {name: host.condition for name, host in router.swarm.items()}
        if now != conditions:
            log("conditions", **now)
            conditions = now
        await asyncio.sleep(0.01)
    for task in (watch, *clients):
        task.cancel()
    ends = await asyncio.gather(watch, *clients, return_exceptions=True)
    log(
        "stopped", errors=[repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)]
    )


async def ask(router: Router, bundle: Any, directory: Path, log: Log) -> None:
    """One client, which sends its next request after every answer."""
    for number in range(1_000_000):
        begun = router.clock()
        deadline = begun + router.limits.deadline_ms / 1000
        after, route = await router.walk(bundle.sample, deadline=deadline)
        log("request", begun=begun, ms=route.ms, order=route.order, skipped=route.skipped)
        if number < KEPT_STATES:
            name = "-".join(map(str, route.order))
            np.save(directory / f"state-{os.urandom(4).hex()}-{name}.npy", after)
        await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
