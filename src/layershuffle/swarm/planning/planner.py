"""`plan`: which host holds which blocks, and what to expect of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.plan import DEFAULT_MODEL, HostPlan, SwarmPlan
from layershuffle.swarm.planning.exact import Solution, solve
from layershuffle.swarm.planning.greedy import place
from layershuffle.swarm.planning.hosts import HostsFile, ModelFacts, hosts_of
from layershuffle.swarm.planning.prediction import Prediction, Solver, predict, small
from layershuffle.swarm.planning.problem import (
    OBJECTIVES,
    Numbers,
    Objective,
    Placement,
    Problem,
    refuse_impossible,
    refuse_no_battery,
)

LARGE = 60
"""With more hosts than this the placement is found greedily."""
_PROVED = 1e-6
_LEEWAY = 2.0
"""A host may be so many times slower than planned before it is a last resort."""


def plan(
    hosts: HostsFile,
    facts: ModelFacts,
    *,
    objective: Objective,
    replicas: int = 1,
    reach: float | None = None,
    floor: float | None = None,
    time_limit: float = 20.0,
    model: str = DEFAULT_MODEL,
    wire: Wire = "fp32",
) -> tuple[SwarmPlan, Prediction]:
    """The best placement found, as a plan to deploy, and its figures.

    `replicas`: copies of every block; `reach`: probability with which any block is to be reachable;
    `floor`: accuracy in percent under which requests may leave out blocks (lifetime only);
    `time_limit`: seconds for the exact solver, after which the better of its best placement and the
    greedy one is taken. Raises `UsageError` naming what makes it impossible.
    """
    _check(objective, replicas=replicas, reach=reach, floor=floor)
    demand = facts.depth if floor is None else facts.blocks_for(floor)
    problem = Problem(
        hosts=hosts_of(hosts, facts), facts=facts, replicas=replicas, reach=reach, demand=demand
    )
    if objective == "lifetime":
        refuse_no_battery(problem)
    refuse_impossible(problem)
    best, solver = _best(problem, objective, time_limit=time_limit)
    best = replace(best, placement=_needed(problem, best))
    prediction = predict(problem, best, objective=objective, solver=solver, time_limit=time_limit)
    return _swarm_plan(problem, best, objective=objective, model=model, wire=wire), prediction


def _check(
    objective: Objective, *, replicas: int, reach: float | None, floor: float | None
) -> None:
    if objective not in OBJECTIVES:
        raise UsageError(
            f"There is no objective {objective!r}", hint=f"choose {', '.join(OBJECTIVES)}"
        )
    if replicas < 1:
        raise UsageError(f"{replicas} replicas are none", hint="ask for 1 or more")
    if reach is not None and not 0 < reach < 1:
        raise UsageError(f"A reach of {reach:g} is not between 0 and 1")
    if floor is not None and objective != "lifetime":
        raise UsageError(
            "An accuracy floor belongs to the objective lifetime", hint="leave one of them out"
        )


def _best(problem: Problem, objective: Objective, *, time_limit: float) -> tuple[Solution, Solver]:
    """The greedy placement where it meets the bound or the swarm is large, else the exact one."""
    greedy = refusal = None
    try:
        greedy = place(problem, objective)
    except UsageError as error:
        refusal = error
    if greedy is not None and greedy.value <= greedy.bound * (1 + _PROVED):
        return greedy, "greedy"
    exact = None
    if len(problem.hosts) <= LARGE:
        exact = solve(problem, objective, time_limit=time_limit)
    if exact is None and greedy is None:
        raise refusal or AssertionError("no placement and no reason")
    if exact is None or (greedy is not None and greedy.value < exact.value):
        assert greedy is not None
        bound = greedy.bound if exact is None else max(exact.bound, greedy.bound)
        return replace(greedy, bound=bound), "greedy"
    return exact, "exact"


def _needed(problem: Problem, solution: Solution) -> Placement:
    """The placement without copies that run nothing and that no constraint asks for."""
    placement = solution.placement.copy()
    if solution.shares.shape != placement.shape or not small(placement):
        return placement
    idle = np.argwhere(placement & (solution.shares < 1e-6))
    for host, block in idle[::-1]:
        placement[host, block] = False
        if not problem.fits(placement):
            placement[host, block] = True
    return placement


def _swarm_plan(
    problem: Problem, best: Solution, *, objective: Objective, model: str, wire: Wire
) -> SwarmPlan:
    used = np.flatnonzero(best.placement.any(axis=1)).tolist()
    work = best.shares.sum(axis=1) if objective == "lifetime" else None
    held = {
        host.name: HostPlan(
            blocks=tuple(int(block) for block in np.flatnonzero(best.placement[number])),
            share=None if work is None else round(float(work[number]), 6),
        )
        for number, host in enumerate(problem.hosts)
        if number in used
    }
    return SwarmPlan(
        model=model,
        hosts=held,
        wire=wire,
        most_blocks=problem.demand if problem.demand < problem.depth else None,
        limits=_limits(problem.column("block")[used]),
    )


def _limits(block: Numbers) -> Limits:
    """Limits under which no host is left out for a slowness that the plan knows of."""
    usual = Limits()
    known = float(block.max() / np.median(block))
    if known * _LEEWAY <= usual.slow_factor:
        return usual
    return Limits(slow_factor=round(known * _LEEWAY, 1))
