"""Claim: a request costs little more processor time than its model, over any number of processes.

Processor time of every process of the swarm per request: gateway, hosts, and what Ray runs beside
them. The client is a process of its own and not counted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim
from layershuffle.swarm.ray_session import local_ray
from swarm_hops import Swarms
from torch import nn

from layershuffle.models import image_view, load
from layershuffle.swarm.load_client import labelled_images
from layershuffle.swarm.plan import DEFAULT_MODEL, even_plan
from layershuffle.swarm.remote_model import served_host
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.run import GatewaySocket, server_of
from layershuffle.swarm.service import Service, swarm_on

DEPTH, DATA, CLIENTS, PLENTY = 12, "digit-pairs", 2, 100_000.0
BOUNDS = {4: Bound("at_most", 12), 1: Bound("at_most", 6)}
TICK = 1000 / os.sysconf("SC_CLK_TCK")
# Standard library alone, so that it starts at once and takes little of the machine. It asks for all
# blocks, because answers in part would cost less.
CLIENT = """
import http.client, sys, threading
port, count, clients = map(int, sys.argv[1:])
body = sys.stdin.buffer.read()
path = "/v1/classify?min_blocks=12&deadline_ms=30000"
wrong = []
def ask(count):
    gateway = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(count):
        gateway.request("POST", path, body)
        answer = gateway.getresponse()
        text = answer.read()
        if answer.status != 200 or b'"degraded":false' not in text:
            wrong.append(text)
asking = [threading.Thread(target=ask, args=(count // clients,)) for _ in range(clients)]
for thread in asking: thread.start()
for thread in asking: thread.join()
print(len(wrong), wrong[:1])
"""


def processor_ms(pids: Iterator[int]) -> float:
    """Processor time of these processes so far, those that have ended left out."""
    spent = 0.0
    for pid in pids:
        if fields := stat_of(pid):
            spent += TICK * (int(fields[11]) + int(fields[12]))
    return spent


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def below(pid: int) -> Iterator[int]:
    """The processes that descend from `pid`."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    children = [child for child in pids if (stat := stat_of(child)) and int(stat[1]) == pid]
    for child in children:
        yield child
        yield from below(child)


@asynccontextmanager
async def gateway_of(service: Service) -> Any:
    """The port of a gateway to `service`, which listens inside."""
    limits = GatewayLimits(rate=PLENTY, burst=PLENTY)
    app = create_app(
        service.remote_model,
        calibration=service.calibration,
        limits=limits,
        foreign_blocks=lambda: service.coordinator.foreign_blocks,
    )
    with GatewaySocket("127.0.0.1", port=0, limits=limits) as listener:
        server = server_of(app, listener)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def cost(swarms: Swarms, hosts: int, *, effort: Effort) -> ClaimRow:
    """Requests through the gateway, `CLIENTS` at a time; the model alone in turn with them."""
    count, turns = (4, 1) if effort is SMOKE else (200, 5)
    model = served_host(load(DEFAULT_MODEL)).eval()
    body = labelled_images(model, DATA, count=1)[0].image
    totals, parts, alone = [], [], []
    async with swarms(even_plan(DEPTH, hosts)) as service, gateway_of(service) as port:
        await asked(port, body, count=count)  # warms it up
        calls = [service.coordinator.backend.call(name, "info") for name in service.plan.hosts]
        pids = {info.pid for info in await asyncio.gather(*calls)} - {os.getpid()}
        for _ in range(turns):
            alone.append(model_ms(model, count=count))
            rest = set(below(os.getpid())) - pids
            before = [processor_ms(iter(group)) for group in ([os.getpid()], pids, rest)]
            await asked(port, body, count=count)
            after = [processor_ms(iter(group)) for group in ([os.getpid()], pids, rest)]
            spent = [(b - a) / count for a, b in zip(before, after, strict=True)]
            parts.append(spent)
            totals.append(sum(spent))
    gateway, blocks, ray = (statistics.median(part) for part in zip(*parts, strict=True))
    place = f"{hosts} process{'es' if hosts > 1 else ''}" if pids else "the gateway"
    return ClaimRow(
        name=f"a request, blocks in {place}",
        what="processor time of all processes,",
        values=tuple(totals),
        unit="ms",
        bound=BOUNDS.get(hosts) if pids else None,
        settings={"model": DEFAULT_MODEL, "clients": CLIENTS, "processes": bool(pids)},
        facts={
            "gateway_ms": gateway,
            "hosts_ms": blocks,
            "ray_ms": ray,
            "model_ms": statistics.median(alone),
            "load": os.getloadavg()[0],
        },
    )


async def asked(port: int, body: bytes, *, count: int) -> None:
    """So many requests from a process of its own. Raises `AssertionError` for one not whole."""
    words = [sys.executable, "-c", CLIENT, str(port), str(count), str(CLIENTS)]
    client = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await client.communicate(body)
    assert output.startswith(b"0 "), output


@torch.inference_mode()
def model_ms(model: nn.Module, *, count: int) -> float:
    """Processor time of the whole model on one image, in this process."""
    view = image_view(model)
    image = torch.zeros(1, view.channels, view.height, view.width)
    begun = time.thread_time()
    for _ in range(count):
        model(image)
    return (time.thread_time() - begun) * 1000 / count


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Hosts in the gateway's process first, then over Ray."""
    within = asyncio.run(cost(partial(swarm_on, None), 1, effort=effort))
    yield within
    if effort is SMOKE:
        return
    names = [f"host-{number + 1}" for number in range(DEPTH)]
    with local_ray(names) as ray:
        for hosts in (1, 4):
            yield asyncio.run(cost(partial(swarm_on, ray), hosts, effort=effort))


CLAIM = Claim(theme="swarm-cost", text=__doc__.split("\n")[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
