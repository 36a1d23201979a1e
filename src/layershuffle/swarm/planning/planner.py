"""`plan`: decide which host holds which blocks; exactly for up to 60 hosts, else greedily."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.plan import DEFAULT_MODEL, HostPlan, SwarmPlan
from layershuffle.swarm.planning.hosts import (
    OBJECTIVES,
    HostsFile,
    ModelFacts,
    Objective,
    Placement,
    PlacementProblem,
    hosts_of,
    refuse_impossible,
    refuse_no_battery,
)
from layershuffle.swarm.planning.placement import GAP, Solution, place, solve

LARGE = 60
"""With more hosts than this the placement is found greedily."""
_LEEWAY = 2.0
"""Factor by which a host may be slower than planned before it becomes a last resort."""
_ZERO = 1e-15


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A problem and its solution; `value` and `bound` in the unit of the objective."""

    problem: PlacementProblem
    objective: Objective
    solution: Solution

    @property
    def value(self) -> float:
        """Requests per second, milliseconds, or requests until the first battery is empty."""
        return in_unit(self.solution.value, self.objective)

    @property
    def bound(self) -> float:
        """A bound of `value` over all placements."""
        return in_unit(self.solution.bound, self.objective)

    @property
    def gap(self) -> float:
        """Distance of the value from the bound, as a share of the bound; 0 is proved optimal."""
        # Both may be infinite.
        if self.value == self.bound:
            return 0.0
        return abs(self.value - self.bound) / self.bound if math.isfinite(self.bound) else math.inf


def in_unit(value: float, objective: Objective) -> float:
    """A solution's value in its unit: requests per second, milliseconds, or requests."""
    if objective == "latency":
        return value * 1000
    return math.inf if value < _ZERO else 1 / value


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
) -> tuple[SwarmPlan, Planned]:
    """The best placement found, as a plan to deploy, and its quality.

    `replicas`: copies of every block; `reach`: least probability with which every block is
    reachable; `floor`: accuracy in percent down to which requests may leave out blocks (lifetime
    only); `time_limit`: seconds for the exact solver, after which the better of its best placement
    and the greedy one is taken. Raises `UsageError` with the reason if there is no placement.
    """
    if objective not in OBJECTIVES:
        raise UsageError(
            f"There is no objective {objective!r}", hint=f"choose {', '.join(OBJECTIVES)}"
        )
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, got {replicas}", hint="give 1 or more")
    if reach is not None and not 0 < reach < 1:
        raise UsageError(
            f"reach must be between 0 and 1, got {reach:g}", hint="such as --reach 0.99"
        )
    if floor is not None and objective != "lifetime":
        raise UsageError(
            "An accuracy floor belongs to the objective lifetime", hint="leave one of them out"
        )
    demand = facts.depth if floor is None else facts.blocks_for(floor)
    problem = PlacementProblem(
        hosts=hosts_of(hosts, facts), facts=facts, replicas=replicas, reach=reach, demand=demand
    )
    if objective == "lifetime":
        refuse_no_battery(problem)
    refuse_impossible(problem)
    best = _best(problem, objective, time_limit=time_limit)
    best = replace(best, placement=_needed(problem, best))
    planned = Planned(problem=problem, objective=objective, solution=best)
    return _swarm_plan(planned, model=model, wire=wire), planned


def _best(problem: PlacementProblem, objective: Objective, *, time_limit: float) -> Solution:
    """The greedy placement where it meets the bound or the swarm is large, else the exact one."""
    greedy = refusal = exact = None
    try:
        greedy = place(problem, objective)
    except UsageError as error:  # the exact solver may find room where the greedy one did not
        refusal = error
    if greedy is not None and greedy.value <= greedy.bound * (1 + GAP):
        return greedy
    if len(problem.hosts) <= LARGE:
        exact = solve(problem, objective, time_limit=time_limit)
    if exact is None and greedy is None:
        raise refusal or AssertionError("no placement and no reason")
    if exact is None or (greedy is not None and greedy.value < exact.value):
        assert greedy is not None
        return replace(greedy, bound=greedy.bound if exact is None else exact.bound)
    return exact


def _needed(problem: PlacementProblem, solution: Solution) -> Placement:
    """The placement without copies that run nothing and that no constraint requires."""
    placement = solution.placement.copy()
    # Greedy plans for latency have no shares, and in large swarms each test takes too long.
    if len(problem.hosts) > LARGE or solution.shares.shape != placement.shape:
        return placement
    for host, block in np.argwhere(placement & (solution.shares < 1e-6))[::-1]:
        # One by one: each of two copies may be spare, but not both.
        placement[host, block] = False
        placement[host, block] = not problem.fits(placement)
    return placement


def _swarm_plan(planned: Planned, *, model: str, wire: Wire) -> SwarmPlan:
    problem, best = planned.problem, planned.solution
    used = np.flatnonzero(best.placement.any(axis=1)).tolist()
    # For other objectives the fastest host is best, which the router chooses without shares.
    work = best.shares @ problem.runs if planned.objective == "lifetime" else None
    # The router must not avoid a host for a slowness that was planned.
    block, usual = problem.column("block")[used], Limits()
    slowest = _LEEWAY * float(block.max() / np.median(block))
    return SwarmPlan(
        model=model,
        hosts={
            problem.hosts[number].name: HostPlan(
                # All places of a tied block: a host that holds it can run them all.
                blocks=tuple(
                    place
                    for block in np.flatnonzero(best.placement[number]).tolist()
                    for place in problem.facts.places[block]
                ),
                share=None if work is None else round(float(work[number]), 6),
            )
            for number in used
        },
        wire=wire,
        most_blocks=problem.demand if problem.demand < problem.depth else None,
        limits=usual if slowest <= usual.slow_factor else Limits(slow_factor=round(slowest, 1)),
    )
