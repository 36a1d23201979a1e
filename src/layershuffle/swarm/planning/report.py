"""A plan and its figures as text. The figures are simulated.

Times and rates are simulated with patient limits, so that they say what the hosts can do and not
where a deadline cuts requests off. What hosts that are away at times cost is drawn from their
availabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from shlex import quote

import numpy as np

from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.planning.planner import LARGE, Planned
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.simulation.outcome import SimulationOutcome
from layershuffle.swarm.simulation.run import simulate
from layershuffle.swarm.simulation.scenario import Arrivals, profile_of
from layershuffle.text import listing, table

_SHOWN = 20
"""Most hosts that are listed by name."""
_UNITS = {"throughput": "requests/s", "latency": "ms", "lifetime": "requests"}
_PATIENT = {
    "deadline_ms": 1e9,
    "hop_floor_ms": 1e9,
    "hop_cap_ms": 1e9,
    "canary_every_ms": 1e12,
    # The gain of a host from batches is unknown, and without one visits only wait for each other.
    "max_batch": 1,
}
_ALONE = 12
"""Requests one after the other; the later ones go to hosts that have been measured."""
_BUSY = 600
"""Requests of many clients; at least five of each."""
_DRAWS = 20_000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What to expect of a plan under one routing.

    `throughput`: requests per second with all hosts up and busy. `life`: requests until the first
    battery is empty (infinite on mains). Both are `None` for more than 60 hosts, where so many
    requests take minutes to simulate. `latency_ms`: of a request alone, all hosts up, without stem
    and head. `answered`: share of requests that get an answer when hosts are away as often as their
    availability says; `blocks`: mean number of blocks of an answer; `accuracy`: percent right of
    all requests, those without an answer counted as wrong (`None` without a calibration).
    """

    throughput: float | None
    latency_ms: float
    life: float | None
    answered: float
    blocks: float
    accuracy: float | None


def figures_of(plan: SwarmPlan, planned: Planned, *, routing: Routing) -> Figures:
    """The figures of `plan`, the plan of `planned`, under `routing`."""
    problem = planned.problem
    patient = plan.model_copy(update={"limits": plan.limits.model_copy(update=_PATIENT)})

    def play(requests: int, clients: int) -> SimulationOutcome:
        return simulate(
            patient,
            profile=profile_of(problem.hosts),
            requests=requests,
            routing=routing,
            arrivals=Arrivals(clients=clients),
            rounds=problem.facts.rounds,
        )

    alone, busy = play(_ALONE, 1), None
    if len(plan.hosts) <= LARGE:
        # Enough to keep every host busy.
        clients = 4 * len(plan.hosts)
        busy = play(max(_BUSY, 5 * clients), clients)
    reachable = _reachable(plan, planned)
    run = np.minimum(reachable, problem.demand)
    if routing != "order-free":  # a block that is missing ends the request
        run = np.where(reachable == problem.depth, problem.depth, 0)
    accuracy = None
    if problem.facts.accuracy:
        percent = [problem.facts.accuracy_at(k) if k else 0.0 for k in range(problem.depth + 1)]
        accuracy = float(np.array(percent)[run].mean())
    return Figures(
        throughput=None if busy is None else busy.per_second,
        latency_ms=alone.quantile(0.5),
        life=None if busy is None else _life(planned, busy),
        answered=float((run > 0).mean()),
        blocks=float(run[run > 0].mean()) if run.any() else 0.0,
        accuracy=accuracy,
    )


def _reachable(plan: SwarmPlan, planned: Planned) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Numbers of blocks with a reachable holder, in draws of the hosts that are up, [draws]."""
    hosts = [host for host in planned.problem.hosts if host.name in plan.hosts]
    holdings = np.zeros((len(hosts), planned.problem.depth), dtype=np.float32)
    for row, host in zip(holdings, hosts, strict=True):
        row[list(plan.hosts[host.name].blocks)] = 1
    # Fewer draws for larger swarms, which bounds the table to the size for 60 hosts.
    draws = max(100, _DRAWS * LARGE // max(LARGE, len(hosts)))
    # A fixed seed, so that one plan always has the same figures.
    up = np.random.default_rng(0).random((draws, len(hosts)))
    there = up < np.array([host.availability for host in hosts])
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]] = (there @ holdings > 0).sum(axis=1)
    return blocks


def _life(planned: Planned, outcome: SimulationOutcome) -> float:
    """Requests until the first battery is empty, from the blocks and visits of every host."""
    lives = [
        host.battery * outcome.requests / energy
        for host in planned.problem.hosts
        if (
            energy := host.block_energy * outcome.served.get(host.name, 0)
            + host.visit_energy * outcome.visited.get(host.name, 0)
        )
    ]
    return min(lives, default=math.inf)


def plan_report(plan: SwarmPlan, planned: Planned) -> str:
    """The blocks of every host, simulated figures in free and in fixed order, and the quality."""
    names = list(plan.hosts)
    shown = [(name, ", ".join(map(str, plan.hosts[name].blocks))) for name in names[:_SHOWN]]
    holders = [listing(shown)]
    if len(names) > _SHOWN:
        holders.append(f"  and {len(names) - _SHOWN} more hosts")
    copies = sum(len(host.blocks) for host in plan.hosts.values())
    columns = {
        "free order": figures_of(plan, planned, routing="order-free"),
        # The pipeline at its best: one that may choose among replicas.
        "in order": figures_of(plan, planned, routing="replicated-sequential"),
    }
    figures = list(columns.values())
    rows = [
        ("requests per second, all busy", *(_cell(f.throughput, ",.1f") for f in figures)),
        ("milliseconds of a request alone", *(_cell(f.latency_ms, ",.1f") for f in figures)),
        ("requests until a battery is empty", *(_cell(f.life, ",.0f") for f in figures)),
        ("% answered, hosts away at times", *(_cell(100 * f.answered, ".2f") for f in figures)),
        ("blocks of an answer, mean", *(_cell(f.blocks, ".2f") for f in figures)),
        ("% right of all requests", *(_cell(f.accuracy, ".1f") for f in figures)),
    ]
    return "\n".join(
        [
            f"{len(names)} host{'s hold' if len(names) > 1 else ' holds'} {copies} blocks:",
            *holders,
            "",
            table(("simulated", *columns), rows),
            "",
            *_notes(plan, planned, columns["free order"]),
        ]
    )


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "no limit" if math.isinf(value) else format(value, form)


def _notes(plan: SwarmPlan, planned: Planned, free: Figures) -> list[str]:
    problem, unit = planned.problem, _UNITS[planned.objective]
    exact = planned.solution.solver == "exact"
    how = "a mixed-integer linear program" if exact else "greedy placement"
    value, bound = (f"{_cell(n, ',.2f')} {unit}" for n in (planned.value, planned.bound))
    quality = "which no placement can beat"
    if planned.gap >= 1e-4:
        quality = f"within {100 * planned.gap:.1f} % of what no placement can beat ({bound})"
    lines = [f"{planned.objective}, by {how}: {value}, {quality}."]
    away = np.ones(problem.depth)
    copies = np.zeros(problem.depth, dtype=int)
    for host in problem.hosts:
        if host.name in plan.hosts:
            blocks = list(plan.hosts[host.name].blocks)
            # Hosts fail independently of each other (`HostSpec.availability`).
            away[blocks] *= 1 - host.availability
            copies[blocks] += 1
    hardest = int(away.argmax())
    there = f"{100 * (1 - away[hardest]):.2f} % of the time"
    lines.append(
        f"Every block is on {copies.min()} host{'s' if copies.min() > 1 else ''} or more. "
        f"The hardest to reach is block {hardest}: it can be reached {there}."
    )
    second = "--replicas 2 gives every block a second host."
    if len(plan.hosts) == 1:
        lines.append(
            f"Warning: one host holds all blocks: while it is away, nothing is answered. {second}"
        )
    elif copies.min() == 1:
        lines.append(
            f"Warning: blocks with a single holder: {(copies == 1).sum()}. While it is away, free "
            f"order leaves them out, and a fixed order answers nothing. {second}"
        )
    if len(problem.sizes) < problem.depth:
        lines.append(
            f"{problem.depth} places share the weights of {len(problem.sizes)} blocks: a host "
            "stores those of a block once and runs all of its places."
        )
    if problem.demand < problem.depth:
        lines.append(
            f"A request runs {problem.demand} of {problem.depth} blocks in free order; "
            "a fixed order needs all."
        )
    if free.latency_ms > plan.limits.deadline_ms:
        lines.append(
            f"A request alone takes longer than its deadline of {plan.limits.deadline_ms:g} ms and "
            "will be answered without some blocks: raise limits.deadline_ms in the plan."
        )
    if free.throughput is None:
        lines.append(
            f"Requests per second and battery life are not simulated for more than {LARGE} hosts: "
            "the requests that keep so many busy would take minutes."
        )
    if free.accuracy is None:
        lines.append(
            "Accuracy has not been measured: layershuffle swarm calibrate "
            f"{quote(plan.model)} --data SPEC does it."
        )
    return lines
