"""What a placement is expected to do: in free order, in order, and against the best pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layershuffle.swarm.planning.exact import Solution, solve
from layershuffle.swarm.planning.pipeline import Pipeline, best_pipeline
from layershuffle.swarm.planning.problem import Numbers, Objective, Placement, Problem
from layershuffle.swarm.planning.reach import reachable
from layershuffle.swarm.planning.shares import (
    balanced,
    free_time,
    fullest,
    in_order_load,
    in_order_time,
)

Solver = Literal["exact", "greedy"]
_EXACT_PAIRS = 1500
_ZERO = 1e-15


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What to expect of a swarm, by calculation.

    `throughput`: requests per second with all hosts up and busy evenly. `latency_ms`: of a request
    alone, all hosts up, without stem and head. `life`: requests until the first battery is empty
    (infinite on mains). `answered`: share of requests that get an answer when hosts are away as
    often as their availability says; `blocks`: mean number of blocks of an answer; `accuracy`:
    percent right of all requests, those without an answer counted as wrong (`None` without a
    calibration).
    """

    throughput: float
    latency_ms: float
    life: float
    answered: float
    blocks: float
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Figures of a plan, beside what the same hosts do without a free order.

    `order_free`, `in_order`: the plan, its blocks in any order or each in its place on any replica.
    `pipeline`: the best classical pipeline for the same objective, one host per block, each host
    one interval; `None` where the memory does not allow one. `value`, `bound`: of the objective, in
    its unit (requests per second, milliseconds, requests); no placement goes beyond the bound.
    `demand`: blocks that a request runs, of `depth` (all but under an accuracy floor).
    """

    objective: Objective
    solver: Solver
    value: float
    bound: float
    demand: int
    depth: int
    order_free: Figures
    in_order: Figures
    pipeline: Figures | None

    @property
    def gap(self) -> float:
        """Distance of the value from the bound, as a share of the bound; 0 is proved best."""
        if self.value == self.bound:
            return 0.0
        return abs(self.value - self.bound) / self.bound if math.isfinite(self.bound) else math.inf


def predict(
    problem: Problem,
    solution: Solution,
    *,
    objective: Objective,
    solver: Solver,
    time_limit: float,
) -> Prediction:
    """Figures of a solution. Large placements are balanced by a heuristic, small ones exactly."""
    route = best_pipeline(problem, objective)
    return Prediction(
        objective=objective,
        solver=solver,
        value=in_unit(solution.value, objective),
        bound=in_unit(solution.bound, objective),
        demand=problem.demand,
        depth=problem.depth,
        order_free=_free_figures(problem, solution.placement, time_limit=time_limit),
        in_order=_ordered_figures(problem, solution.placement),
        pipeline=None if route is None else _pipeline_figures(problem, route),
    )


def in_unit(value: float, objective: Objective) -> float:
    """A solution's value as people read it: requests per second, milliseconds, requests."""
    if objective == "latency":
        return value * 1000
    return math.inf if value < _ZERO else 1 / value


def small(placement: Placement) -> bool:
    """Whether a placement's figures are found by linear programmes."""
    return int(placement.sum()) <= _EXACT_PAIRS and placement.size <= 4 * _EXACT_PAIRS


def _free_figures(problem: Problem, placement: Placement, *, time_limit: float) -> Figures:
    def load(objective: Objective) -> float:
        if small(placement):
            best = solve(problem, objective, fixed=placement, time_limit=time_limit)
            if best is not None:
                return best.value
        if objective == "latency":
            return free_time(problem, placement)
        shares = balanced(problem, placement, objective=objective)
        return fullest(problem, shares, objective=objective, inorder=False)

    likely = reachable(placement, problem.column("availability"))
    run = np.minimum(np.arange(problem.depth + 1), problem.demand)
    return _figures(load, problem, likely=likely, run=run)


def _ordered_figures(problem: Problem, placement: Placement) -> Figures:
    def load(objective: Objective) -> float:
        if objective == "latency":
            return in_order_time(problem, placement)
        if small(placement):
            return in_order_load(problem, placement, objective=objective)
        shares = balanced(problem, placement, objective=objective)
        return fullest(problem, shares, objective=objective, inorder=True)

    whole = reachable(placement, problem.column("availability"))[-1]
    return _figures(load, problem, likely=_all_or_none(problem, whole), run=_in_place(problem))


def _pipeline_figures(problem: Problem, route: Pipeline) -> Figures:
    whole = float(np.prod(problem.column("availability")[route.counts > 0]))
    return _figures(
        lambda objective: route.load(problem, objective),
        problem,
        likely=_all_or_none(problem, whole),
        run=_in_place(problem),
    )


def _in_place(problem: Problem) -> NDArray[np.int64]:
    """Blocks that a request runs by the number that can be reached: all of them, or no answer."""
    return np.where(np.arange(problem.depth + 1) == problem.depth, problem.depth, 0)


def _all_or_none(problem: Problem, whole: float) -> Numbers:
    """Probability of every number of blocks where one that is missing ends the service."""
    likely = np.zeros(problem.depth + 1)
    likely[0], likely[-1] = 1 - whole, whole
    return likely


def _figures(
    load: Callable[[Objective], float],
    problem: Problem,
    *,
    likely: Numbers,
    run: NDArray[np.int64],
) -> Figures:
    """`likely`: probability of every number of reachable blocks; `run`: how many then run."""
    answered = float(likely[run > 0].sum())
    accuracy = None
    if problem.facts.accuracy:
        percent = [problem.facts.accuracy_at(int(blocks)) if blocks else 0.0 for blocks in run]
        accuracy = float(likely @ percent)
    return Figures(
        throughput=in_unit(load("throughput"), "throughput"),
        latency_ms=in_unit(load("latency"), "latency"),
        life=in_unit(load("lifetime"), "lifetime"),
        answered=answered,
        blocks=float(likely @ run) / answered if answered else 0.0,
        accuracy=accuracy,
    )
