"""Claim: what a hop costs beyond its compute, what hosts bring, and how soon failures are felt."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any, get_args

import torch
from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim
from layershuffle.swarm.ray_session import local_ray
from torch import Tensor, nn

from layershuffle.core.stack import blocks_of, depth_of
from layershuffle.models import load
from layershuffle.swarm.chaos import Fault, FaultKind
from layershuffle.swarm.drill import run_drill
from layershuffle.swarm.load_client import client_inside, labelled_images, load_client
from layershuffle.swarm.messages import Route, Wire
from layershuffle.swarm.plan import DEFAULT_MODEL, HostPlan, SwarmPlan, even_plan
from layershuffle.swarm.remote_model import served_host
from layershuffle.swarm.service import Service, swarm_on

DEPTH, DATA, SECONDS = 12, "digit-pairs", 10.0
WIDE = "timm:vit_base_patch16_224?pretrained=false&depth=2"
"""Two blocks of a ViT-B/16: its states are 148 KiB on an int8 wire."""
NARROW = "timm:vit_tiny_patch16_224?pretrained=false&depth=2&embed_dim=16&num_heads=2&img_size=32"
"""For smokes."""
HEAVY = WIDE.replace("depth=2", "depth=6&num_classes=100")
SIZES = {DEFAULT_MODEL: (1, 2, 6, 12), HEAVY: (1, 2, 3, 6)}
CLIENTS = 8
SLOW = {DEFAULT_MODEL: 1.0, HEAVY: 4.0}
"""The hosts of the heavy model sleep three times as long as they compute: all of them share the
cores of this machine, and so each takes a quarter of one."""
ECHOED, PAUSE = 197 * (768 + 4), 0.04
HOP_MS, NOTICED_MS = 1.0, 500.0

Swarms = Callable[[SwarmPlan], AbstractAsyncContextManager[Service]]


# --- what a hop costs -----------------------------------------------------------------------------


async def hop(swarms: Swarms, wire: Wire, *, model: str, count: int) -> ClaimRow:
    """Visits of one block after another, one at a time: time beyond the block's own compute."""
    plan = SwarmPlan(model=model, wire=wire, hosts={"host-1": HostPlan(blocks=(0, 1))})
    async with swarms(plan) as service:
        start = service.coordinator.bundle.sample
        routes = [await walked(service, start) for _ in range(count // 2 + 2)][2:]
    hops = [visit for route in routes for visit in route.hops]
    kib = round(start.nbytes / {"fp32": 1, "fp16": 2, "int8": 4}[wire] / 1024)
    return ClaimRow(
        name=f"a hop, {kib} KiB ({wire})",
        what="visit of one block less its compute,",
        values=tuple(visit.ms - visit.compute_ms for visit in hops),
        unit="ms",
        bound=Bound("at_most", HOP_MS) if wire == "int8" else None,
        settings={"model": plan.model, "state": list(start.shape), "wire": wire},
        facts={"compute_ms": statistics.median(visit.compute_ms for visit in hops)},
    )


async def walked(service: Service, start: Any, **asked: Any) -> Route:
    """One state through the swarm."""
    _, route = await service.router.walk(start, deadline=service.router.clock() + SECONDS, **asked)
    return route


class Echo:
    """An actor that answers with what it got."""

    async def say(self, word: bytes) -> bytes:
        """`word` again."""
        return word


async def bare(ray: Any, *, count: int) -> ClaimRow:
    """What Ray alone takes for as many bytes there and back: no hop over it can take less."""
    actor = ray.remote(Echo).options(num_cpus=0, max_concurrency=8).remote()
    times, word = [], bytes(ECHOED)
    for _ in range(count + 3):
        await asyncio.sleep(PAUSE)  # as long as the hosts above compute
        began = time.perf_counter()
        await actor.say.remote(word)
        times.append((time.perf_counter() - began) * 1000)
    ray.kill(actor)
    return ClaimRow(
        name="Ray alone, 148 KiB",
        what="an actor that returns what it got,",
        values=tuple(times[3:]),
        unit="ms",
        settings={"bytes": ECHOED, "ray": version("ray")},
    )


async def against_one_process(swarms: Swarms, *, count: int) -> ClaimRow:
    """The digits model over six hosts, against the same order here."""
    blocks = blocks_of(served_host(load(DEFAULT_MODEL)).eval())
    there, here = [], []
    async with swarms(even_plan(DEPTH, 6)) as service:
        start = service.coordinator.bundle.sample
        for number in range(count + 5):
            route = await walked(service, start)
            began = time.perf_counter()
            in_process(blocks, torch.from_numpy(start), order=route.order)
            if number >= 5:
                here.append((time.perf_counter() - began) * 1000)
                there.append((route.ms, len(route.hops)))
    return ClaimRow(
        name="a hop, 12 blocks on 6 hosts",
        what="route less the same order in one process, per hop,",
        values=tuple((ms - base) / hops for (ms, hops), base in zip(there, here, strict=True)),
        unit="ms",
        settings={"model": DEFAULT_MODEL, "wire": "fp32", "blocks_per_hop": 2},
        facts={
            "route_ms": statistics.median(ms for ms, _ in there),
            "in_process_ms": statistics.median(here),
        },
    )


@torch.inference_mode()
def in_process(blocks: Sequence[nn.Module], state: Tensor, *, order: Sequence[int]) -> None:
    """`order` through `blocks`."""
    for block in order:
        state = blocks[block](state)


# --- throughput -----------------------------------------------------------------------------------


async def throughput(swarms: Swarms, model: str, hosts: int, *, count: int) -> ClaimRow:
    """Answers per second of the gateway under a few clients."""
    host = served_host(load(model))
    images = labelled_images(host, DATA, count=min(count, 100))
    plan = even_plan(depth_of(host), hosts, model=model)
    async with swarms(plan) as service, client_inside(service) as client:
        ask = load_client(client, images, deadline_ms=30_000)
        for name in plan.hosts:
            service.faults.backend.transport.break_host(name, "slow", factor=SLOW[model])
        await run_drill(ask, count, concurrency=CLIENTS)
        runs = [await speed(ask, count) for _ in range(1 if count < CLIENTS else 3)]
    short = "ViT-B, 6 blocks" if model == HEAVY else "digits, 12 blocks"
    return ClaimRow(
        name=f"{short}, {hosts} host{'s' if hosts > 1 else ''}",
        what="answers in full per second,",
        values=tuple(rate for rate, _ in runs),
        unit="1/s",
        settings={"model": model, "clients": CLIENTS, "slowed": SLOW[model]},
        facts={"degraded": [share for _, share in runs]},
    )


async def speed(ask: Callable[[int], Awaitable[Any]], count: int) -> tuple[float, float]:
    """Answers with all blocks per second over `count` requests; percent that missed blocks."""
    began = time.perf_counter()
    drill = await run_drill(ask, count, concurrency=CLIENTS)
    took = time.perf_counter() - began
    assert drill.share("failed", "late") == 0, drill.replies
    return count * drill.share("answered") / 100 / took, drill.share("degraded")


# --- how soon a failure is felt -------------------------------------------------------------------


async def noticed(swarms: Swarms, kind: FaultKind, *, count: int) -> ClaimRow:
    """From the failure of a host to the end of the first request that does without its blocks."""
    plan = even_plan(DEPTH, 6)
    times = []
    async with swarms(plan) as service:
        start = service.coordinator.bundle.sample
        for number in range(count):
            name = f"host-{number % 6 + 1}"
            for _ in range(5):
                await walked(service, start)
            began = time.perf_counter()
            await service.faults.inject(Fault(0, name, kind))
            while not set(plan.hosts[name].blocks) <= set((await walked(service, start)).skipped):
                assert time.perf_counter() - began < SECONDS
            times.append((time.perf_counter() - began) * 1000)
            await service.faults.inject(Fault(0, name, "rejoin"))
            await asyncio.wait_for(whole(service), timeout=60)
    return ClaimRow(
        name={"crash": "a host is killed (SIGKILL)", "freeze": "a host freezes (SIGSTOP)"}[kind],
        what="until the first answer without its blocks,",
        values=tuple(times),
        unit="ms",
        bound=Bound("at_most", NOTICED_MS),
        settings={"model": DEFAULT_MODEL, "hosts": 6, "clients": 1},
    )


async def whole(service: Service) -> None:
    """Return when all hosts are usable."""
    while not all(host.usable for host in service.router.swarm.values()):
        await asyncio.sleep(0.02)


# --- all of it ------------------------------------------------------------------------------------


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Every part on one cluster of this machine; a smoke runs it within this process."""
    smoke = effort is SMOKE
    few, some = (1, 1) if smoke else (9, 40)
    names = [f"host-{number + 1}" for number in range(DEPTH)]
    with nullcontext() if smoke else local_ray(names) as session:
        swarms = partial(swarm_on, session)
        for wire in get_args(Wire):
            yield asyncio.run(hop(swarms, wire, model=NARROW if smoke else WIDE, count=some))
        if not smoke:
            yield asyncio.run(bare(session.ray, count=some))
        yield asyncio.run(against_one_process(swarms, count=some))
        for model, sizes in [*SIZES.items()][: 1 if smoke else None]:
            count = 2 if smoke else 100 if model == DEFAULT_MODEL else 16
            for hosts in sizes[: 1 if smoke else None]:
                yield asyncio.run(throughput(swarms, model, hosts, count=count))
        for kind in ("crash", "freeze"):
            yield asyncio.run(noticed(swarms, kind, count=few))


CLAIM = Claim(theme="swarm-hops", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
