# Ran at commit 8550626.
"""Claim: blocks side by side make a request quicker, survivors that run again make it right."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from _harness import Bound, Claim, ClaimRow, run_claim
from swarm_hops import DATA, HEAVY, Swarms, whole

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.core.stack import depth_of
from layershuffle.models import load
from layershuffle.swarm.chaos import Fault
from layershuffle.swarm.drill import Drill, Reply, run_drill
from layershuffle.swarm.load_client import client_inside, labelled_images, load_client
from layershuffle.swarm.plan import DEFAULT_MODEL, SwarmPlan, even_plan
from layershuffle.swarm.policy import FREE
from layershuffle.swarm.ray_session import local_ray
from layershuffle.swarm.remote_model import served_host
from layershuffle.swarm.service import swarm_on
from layershuffle.text import counted

HOSTS, QUARTER, TEN = 6, 4.0, 10.0
"""Hosts that share the cores of this machine and sleep three times as long as they compute have a
quarter of a core each."""
TIME, TOP1 = 0.45, 82.0
Drills = dict[str, list[Drill]]


async def drilled(
    swarms: Swarms,
    plan: SwarmPlan,
    *,
    slow: dict[str, float],
    dead: Sequence[str] = (),
    requests: int,
    repeats: int,
    clients: int = 1,
) -> Drills:
    """Requests with both routings in turn, on hosts that are slower and hosts that are dead."""
    host = served_host(load(plan.model))
    images = labelled_images(host, DATA, count=min(1000, requests * repeats))
    drills: Drills = {routing: [] for routing in FREE}
    async with swarms(plan) as service, client_inside(service) as client:
        ask = load_client(client, images, deadline_ms=30_000)
        for name, factor in slow.items():
            service.faults.backend.transport.break_host(name, "slow", factor=factor)
        for name in dead:
            await service.faults.inject(Fault(0, name, "crash"))
        await run_drill(ask, max(4, requests // 4), concurrency=clients)
        for repeat in range(repeats):
            # Each goes first as often, because a busy machine does not stay as busy as it is.
            for routing in FREE if repeat % 2 else reversed(FREE):
                service.router.routing = routing
                first = repeat * requests

                def ask_next(number: int, first: int = first) -> Awaitable[Reply]:
                    return ask(first + number)

                drills[routing].append(await run_drill(ask_next, requests, concurrency=clients))
        if not dead:
            await asyncio.wait_for(whole(service), timeout=60)
    return drills


def figures(drills: Sequence[Drill]) -> dict[str, float]:
    """Times and shares over all of them."""
    whole_drill = Drill(dict(enumerate(r for drill in drills for r in drill.replies.values())))
    replies = list(whole_drill.replies.values())
    return {
        "p50_ms": whole_drill.quantile(0.5),
        "p99_ms": whole_drill.quantile(0.99),
        "right": 100 * sum(reply.right for reply in replies) / len(replies),
        **{end: whole_drill.share(end) for end in ("answered", "degraded", "failed", "late")},
    }


def facts(drills: Drills) -> dict[str, dict[str, float]]:
    """The figures of both routings."""
    return {routing: figures(of_routing) for routing, of_routing in drills.items()}


def quicker(
    swarms: Swarms, model: str, *, parallel: int | None, requests: int, repeats: int
) -> ClaimRow:
    """One client, six hosts with a quarter of a core each: time against one visit at a time."""
    plan = even_plan(depth_of(served_host(load(model))), HOSTS, model=model)
    plan = plan.model_copy(update={"parallel": parallel})
    slow = dict.fromkeys(plan.hosts, QUARTER)
    drills = asyncio.run(drilled(swarms, plan, slow=slow, requests=requests, repeats=repeats))
    pairs = zip(*(drills[routing] for routing in FREE), strict=True)
    short = "ViT-B, 6 blocks" if model == HEAVY else "digits, 12 blocks"
    under_way = "as calibrated" if parallel is None else f"{parallel} side by side"
    return ClaimRow(
        name=f"{short}, {under_way}",
        what="median of a request, order-free over order-free-serial,",
        values=tuple(new.quantile(0.5) / old.quantile(0.5) for new, old in pairs),
        unit="",
        bound=None if parallel is None else Bound("at_most", TIME),
        settings={"model": model, "hosts": HOSTS, "slowed": QUARTER, "parallel": parallel or 0},
        facts=facts(drills),
    )


def survivors(swarms: Swarms, *, requests: int) -> ClaimRow:
    """Nine of twelve blocks dead; each quarter of the blocks is left once."""
    plan = even_plan(12, 4)
    drills: Drills = {routing: [] for routing in FREE}
    for left in plan.hosts:
        dead = [name for name in plan.hosts if name != left]
        of_routings = asyncio.run(
            drilled(swarms, plan, slow={}, dead=dead, requests=requests, repeats=1)
        )
        for routing in FREE:
            drills[routing] += of_routings[routing]
    return ClaimRow(
        name="9 of 12 blocks dead",
        what="right answers, order-free,",
        values=(figures(drills["order-free"])["right"],),
        unit="%",
        bound=Bound("at_least", TOP1),
        settings={"model": DEFAULT_MODEL, "hosts": 4, "requests": 4 * requests},
        facts=facts(drills),
    )


def beside_a_slow_host(swarms: Swarms, *, clients: int, requests: int, repeats: int) -> ClaimRow:
    """Six hosts, one of them ten times slower, some clients: against one visit at a time."""
    plan = even_plan(12, HOSTS)
    slow = {next(iter(plan.hosts)): TEN}
    drills = asyncio.run(
        drilled(swarms, plan, slow=slow, requests=requests, repeats=repeats, clients=clients)
    )
    pairs = zip(*(drills[routing] for routing in FREE), strict=True)
    return ClaimRow(
        name=f"one host ten times slower, {counted(clients, 'client')}",
        what="99 % within, order-free over order-free-serial,",
        values=tuple(new.quantile(0.99) / old.quantile(0.99) for new, old in pairs),
        unit="",
        bound=Bound("at_most", 1.0),
        settings={"model": DEFAULT_MODEL, "hosts": HOSTS, "slowed": TEN, "clients": clients},
        facts=facts(drills),
    )


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Every part on one cluster of this machine; a smoke runs it within this process."""
    smoke = effort is SMOKE
    names = [f"host-{number + 1}" for number in range(HOSTS)]
    few, many, repeats = (4, 4, 1) if smoke else (100, 250, 8)
    with nullcontext() if smoke else local_ray(names) as session:
        swarms = partial(swarm_on, session)
        for parallel in (None, 3):
            yield quicker(swarms, DEFAULT_MODEL, parallel=parallel, requests=few, repeats=repeats)
        if not smoke:
            yield quicker(swarms, HEAVY, parallel=3, requests=12, repeats=repeats)
        yield survivors(swarms, requests=many)
        for clients in (1, 4):
            yield beside_a_slow_host(swarms, clients=clients, requests=few, repeats=repeats)


CLAIM = Claim(theme="swarm-rounds", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
