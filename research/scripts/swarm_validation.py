# Ran at commit 8550626.
"""Claim: the simulation tells how a real swarm of processes answers under the same failures."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.models import load
from layershuffle.swarm.chaos import Fault, check_faults, crashes, one_of_each_fault
from layershuffle.swarm.drill import Drill, run_drill
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.load_client import client_inside, labelled_images, load_client
from layershuffle.swarm.plan import DEFAULT_MODEL, SwarmPlan, even_plan
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.ray_session import local_ray
from layershuffle.swarm.rounds import Rounds
from layershuffle.swarm.service import Service, swarm_on
from layershuffle.swarm.simulation.outcome import SimulationOutcome
from layershuffle.swarm.simulation.run import simulate
from layershuffle.swarm.simulation.scenario import Arrivals, HostTimes, Profile

DEPTH, HOSTS, CLIENTS, SEED, DATA = 12, 6, 4, 0, "digit-pairs"
REQUESTS, FEW = 1000, 24
POINTS = 5.0
LIMITS = Limits(suspect_max_ms=250, slow_margin_ms=1, deadline_ms=1000)
"""Away from thresholds, at which a millisecond decides over hundreds of requests, real ones as
simulated ones: pauses of five seconds between probes; blocks of 0.5 ms, of which ten times as much
may or may not be slow."""
ENDS = ("answered", "degraded", "failed", "late")
CASES: tuple[tuple[Routing, int], ...] = (
    ("order-free", 1),
    ("order-free", 2),
    ("sequential", 1),
    ("replicated-sequential", 2),
)


def failures(plan: SwarmPlan, requests: int) -> tuple[Fault, ...]:
    """One host dies for good; others freeze and become slow for a while. Drawn from the seed."""
    hosts = list(plan.hosts)
    dead = crashes(hosts, share=1 / HOSTS, requests=requests, seed=SEED)
    others = [host for host in hosts if host != dead[0].host]
    passing = one_of_each_fault(
        others, requests=requests, seed=SEED, kinds=("freeze", "slow", "rejoin")
    )
    return check_faults([*dead, *passing], hosts)


async def real(
    session: Any, plan: SwarmPlan, requests: int
) -> tuple[Drill, Profile, float, Rounds]:
    """The drill through the gateway; how fast the hosts were before, a request beside them, and
    what ran side by side."""
    async with swarm_on(session, plan) as service, client_inside(service) as client:
        images = labelled_images(load(DEFAULT_MODEL), DATA, count=min(requests, 100))
        ask = load_client(client, images, deadline_ms=plan.limits.deadline_ms)
        await run_drill(ask, requests // 6, concurrency=CLIENTS)
        began = time.perf_counter()
        await run_drill(ask, requests // 3, concurrency=CLIENTS)
        each = CLIENTS * (time.perf_counter() - began) / (requests // 3)
        speeds = profile(service)
        drill = await run_drill(
            ask, requests, faults=failures(plan, requests), engine=service.faults,
            concurrency=CLIENTS,
        )  # fmt: skip
    return drill, speeds, each, service.router.rounds


def profile(service: Service) -> Profile:
    """What the router has measured of its hosts."""
    views = service.router.swarm.values()
    return Profile(
        hosts={
            view.name: HostTimes(block_ms=1000 * view.compute, link_ms=1000 * view.link)
            for view in views
            if view.compute and view.link
        }
    )


def simulated(
    plan: SwarmPlan, speeds: Profile, *, each: float, requests: int, rounds: Rounds
) -> SimulationOutcome:
    """The same in virtual time. A client's pause makes its pace that of the real ones: `each`."""
    clients = Arrivals(clients=CLIENTS)
    quiet = simulate(plan, profile=speeds, requests=requests // 3, arrivals=clients, rounds=rounds)
    pause = max(0.0, 1000 * each - statistics.fmean(quiet.ms))
    return simulate(
        plan,
        profile=speeds,
        requests=requests,
        seed=SEED,
        arrivals=Arrivals(clients=CLIENTS, think_ms=pause),
        faults=failures(plan, requests),
        rounds=rounds,
    )


def case(session: Any, routing: Routing, replicas: int, *, requests: int) -> ClaimRow:
    """How far the shares of the simulation are from those of the real swarm, in points."""
    plan = even_plan(DEPTH, HOSTS, replicas=replicas)
    plan = plan.model_copy(update={"routing": routing, "limits": LIMITS})
    drill, speeds, each, rounds = asyncio.run(real(session, plan, requests))
    outcome = simulated(plan, speeds, each=each, requests=requests, rounds=rounds)
    shares = {
        end: {"real": round(drill.share(end), 2), "simulated": round(outcome.share(end), 2)}
        for end in ENDS
    }
    return ClaimRow(
        name=f"{routing}, {replicas} of each block",
        what="largest difference of a share (answered, degraded, failed, late)",
        values=(max(abs(share["real"] - share["simulated"]) for share in shares.values()),),
        unit="points",
        bound=Bound("at_most", POINTS),
        settings={
            "model": DEFAULT_MODEL, "hosts": HOSTS, "requests": requests, "clients": CLIENTS,
            "seed": SEED, "limits": LIMITS.model_dump(exclude_defaults=True),
            "faults": [f"{fault.kind} {fault.host} before request {fault.at}"
                       for fault in failures(plan, requests)],
        },
        facts={
            **shares,
            "p50_ms": {"real": drill.quantile(0.5), "simulated": outcome.quantile(0.5)},
            "p99_ms": {"real": drill.quantile(0.99), "simulated": outcome.quantile(0.99)},
        },
    )  # fmt: skip


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Every case once, on processes of this machine; a smoke within this process."""
    smoke = effort is SMOKE
    names = [f"host-{number + 1}" for number in range(HOSTS)]
    with nullcontext() if smoke else local_ray(names) as session:
        for routing, replicas in CASES[:1] if smoke else CASES:
            yield case(session, routing, replicas, requests=FEW if smoke else REQUESTS)


CLAIM = Claim(theme="swarm-validation", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
