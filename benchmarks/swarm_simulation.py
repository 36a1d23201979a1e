"""Claim: a swarm of 10,000 hosts can be simulated, and a step of its router costs little more."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from _clocks import SMOKE, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim

from layershuffle.swarm import state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visit, Visited
from layershuffle.swarm.policy import RequestProgress, decide
from layershuffle.swarm.rounds import QUEUE
from layershuffle.swarm.settings import ROUTINGS, Routing
from layershuffle.swarm.state import HostView, Swarm

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # where the simulation is

from simulation.hosts import SimulatedDevice
from simulation.outcome import SimulationOutcome
from simulation.run import simulate

DEPTH, SEED, REPEATS = 12, 0, 3
REQUESTS = 1000
RATES = {10: 2.0, 100: 10.0, 1000: 50.0, 10_000: 200.0}  # fewer hosts are watched for longer
CHURN = 20.0, 10.0  # mean seconds up and down
STEP_COSTS_AT_MOST = 3.0


def play(
    devices: Mapping[str, SimulatedDevice], requests: int, routing: Routing
) -> SimulationOutcome:
    """Requests under churn: a third of the hosts is away at any time."""
    return simulate(
        devices,
        requests=requests,
        seed=SEED,
        routing=routing,
        rate=RATES[len(devices)],
        churn=CHURN,
    )


def size_row(hosts: int, requests: int, repeats: int) -> ClaimRow:
    """Visits per second of processor time, and what came of the requests under every routing."""
    # Ten devices in turn (host-1 ... host-10, host-1~2 ...).
    devices = {
        f"host-{h % 10 + 1}" + (f"~{h // 10 + 1}" if h >= 10 else ""): SimulatedDevice(
            frozenset(range(h % 10, DEPTH, 10))
        )
        for h in range(hosts)
    }
    speeds, walls = [], []
    for _ in range(repeats):
        began, wall = time.process_time(), time.perf_counter()
        outcome = play(devices, requests, "order-free")
        speeds.append(outcome.visits / (time.process_time() - began))
        walls.append(time.perf_counter() - wall)
    others = {routing: play(devices, requests, routing) for routing in ROUTINGS[1:]}
    return ClaimRow(
        name=f"{hosts:,} hosts",
        what="visits per second of processor time",
        values=tuple(speeds),
        unit="1/s",
        settings={
            "hosts": hosts, "requests": requests, "up_s": CHURN[0], "down_s": CHURN[1],
            "requests_per_s": RATES[hosts], "seed": SEED,
        },
        facts={
            "wall_s": [round(wall, 2) for wall in walls],
            "visits": outcome.visits,
            "simulated_s": outcome.figures["seconds"],
            **summary(outcome),
            **{routing: summary(other) for routing, other in others.items()},
        },
    )  # fmt: skip


def summary(outcome: SimulationOutcome) -> dict[str, Any]:
    """The shares in percent and the latencies in milliseconds."""
    named = ("answered", "degraded", "failed", "mean_blocks", "ms_median", "ms_p99")
    return {name: outcome.figures[name] for name in named}


def stepping(hosts: int) -> Callable[[], object]:
    """One visit as the router makes it: a decision and three changes of what it knows."""
    limits = Limits()
    swarm = Swarm(
        HostView(f"host-{i}", frozenset({i % DEPTH}), compute=0.004 + 1e-6 * (i % 997), link=0.002)
        for i in range(hosts)
    )
    numbers = count()

    def step() -> None:
        number = next(numbers)
        done = list(range(number % DEPTH))
        asked = RequestProgress(DEPTH, 1e9, done=done, seed=number)
        action = decide(asked, swarm, now=0.0, limits=limits, rounds=QUEUE)
        assert isinstance(action, Visit)
        hop = Visited(action.host, action.block, "answered", 6.0 + number % 7 / 10, 4.0)
        swarm.put(state.sent(swarm[hop.host], 1))
        swarm.put(state.sent(swarm[hop.host], -1))
        swarm.put(state.answered(swarm[hop.host], hop, limits=limits))

    return step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """The cost of a step, then the scaling curve."""
    smoke = effort is SMOKE
    yield compare(
        "a decision and its three changes",
        "10,000 hosts / 100 hosts",
        a=cpu_timed(stepping(200 if smoke else 10_000)),
        b=cpu_timed(stepping(100)),
        effort=effort,
        bound=Bound("at_most", STEP_COSTS_AT_MOST),
    )
    for hosts in [*RATES][:2] if smoke else RATES:
        yield size_row(hosts, 20 if smoke else REQUESTS, 1 if smoke else REPEATS)


CLAIM = Claim(theme="swarm-simulation", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
